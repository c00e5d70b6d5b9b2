"""Requests with adapters get what a model with the adapter merged into it gives, whatever shares their steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, ConflictError
from jaxpaged.messages import LoRAInfo, LoRARequest, SchedulerOutput
from jaxpaged.models import joined
from jaxpaged.worker.adapter_slots import check_targets
from tests.models.adapted import GOLDEN, read
from tests.models.checkpoints import write_checkpoint
from tests.worker.adapted_engine import Adapters, Steps, adapted_executor, merged

PROMPTS = [[5, 9, 17, 4, 33], [7, 7, 101], [5, 9, 17, 4, 33], [150, 3, 88]]
REFERENCE = "one device"
TABLES = ("all-linear", "embed_tokens", "lm_head")
ENGINES: dict[str, dict[str, Any]] = {
    "four devices, key heads twice, and tables": {"tensor_parallel_size": 4, "modules": TABLES},
    "weights in 8 bits": {"quantization": "int8", "modules": TABLES},
    "weights side by side": {"joins_weights": True},
    "two stages": {"pipeline_parallel_size": 2},
}


class Engine:
    """`number` of an adapter -> its slot is its own number, unless a test loads others."""

    def __init__(self, executor: Any):
        self.executor, self.adapters, self.steps = executor, Adapters(executor), Steps(executor)

    def read(self, number: int, **of_adapter: Any) -> LoRAInfo:
        self.adapters.make(number, **of_adapter)
        return self.executor.worker.read_lora(LoRARequest(f"a{number}", number, f"/nowhere/{number}"))


def started(folder: Path, joins_weights: bool = False, **options: Any) -> Iterator[Engine]:
    """`joins_weights`: those that lie side by side on some platforms do here; without it none do anywhere, as
    `answer_of_merged` needs them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joined, "PLATFORMS", (jax.default_backend(),) if joins_weights else ())
        executor = adapted_executor(folder, **options)
        yield Engine(executor)
        executor.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder):
    """On one device, with plain weights, and with the programs of steps that have small adapters alone, or none."""
    for engine in started(folder, max_lora_rank=32):
        engine.executor.worker.programs.wait_all(on_demand=True)
        yield engine


@pytest.fixture(
    scope="module",
    params=[
        REFERENCE,
        *(pytest.param(name, marks=pytest.mark.exhaustive) if name == "two stages" else name for name in ENGINES),
    ],
)
def engine(request, folder, reference):
    if request.param == REFERENCE:
        yield reference
        return
    yield from started(folder, max_lora_rank=32, **ENGINES[request.param])


def answer_of_merged(reference: Engine, engine: Engine, number: int, prompt: list[int]) -> Any:
    """What the model gives once the adapter is part of its weights."""
    device, source = reference.executor.worker.device, engine.executor.worker.device.params
    plain, weights = device.params, engine.adapters.made[number].weights
    is_rounded = engine.executor.worker.engine_spec.has_quantized
    whole = merged(source if is_rounded else plain, weights)
    device.head, head = reference.executor.worker._head(whole), device.head
    device.params = whole.replace(lm_head=None) if plain.lm_head is None else whole
    try:
        return reference.steps.answers([prompt], [0])[0]
    finally:
        device.params, device.head = plain, head


def test_each_row_gets_what_it_gets_alone_and_what_its_merged_model_gives(engine, reference):
    ranks, slots, of_slot = {1: 2, 2: 4, 3: 20}, [2, 3, 0, 1], {1: 3, 2: 1, 3: 2}
    infos = [engine.read(number, rank=rank, dora=number == 2) for number, rank in ranks.items()]
    assert [info.rank for info in infos] == list(ranks.values())
    mixed = engine.steps.answers(PROMPTS, slots, loads=[*of_slot.items()])
    assert len({tuple(lines[0]) for _, lines in mixed}) == len(PROMPTS), "the same prompt twice, and no adapter acts"
    for prompt, slot, (tokens, lines) in zip(PROMPTS, slots, mixed):
        alone_tokens, alone_lines = engine.steps.answers([prompt], [slot])[0]
        assert tokens == alone_tokens
        np.testing.assert_allclose(lines, alone_lines, atol=1e-4)
        if slot:
            merged_tokens, merged_lines = answer_of_merged(reference, engine, of_slot[slot], prompt)
            assert tokens == merged_tokens
            np.testing.assert_allclose(lines, merged_lines, atol=5e-3)


def test_an_adapter_that_left_its_slot_comes_back_to_any(engine):
    for number in (11, 12):
        engine.read(number)
    ((tokens, lines),) = engine.steps.answers(PROMPTS[:1], [1], loads=[(1, 11)])
    other = engine.steps.answers(PROMPTS[:1], [1], loads=[(1, 12)])[0][1]
    assert np.abs(other - lines).max() > 1e-2
    for slot in (3, 1):
        again_tokens, again = engine.steps.answers(PROMPTS[:1], [slot], loads=[(slot, 11)])[0]
        assert again_tokens == tokens
        np.testing.assert_allclose(again, lines, atol=1e-4)
    assert engine.executor.worker.drop_lora(11) and not engine.executor.worker.drop_lora(11)
    np.testing.assert_allclose(engine.steps.answers(PROMPTS[:1], [1])[0][1], lines, atol=1e-4)
    assert engine.executor.worker.stats()["recompiles"] == 0


def check_merged(engine: Engine, weights_of: dict[int, dict[str, Any]]) -> list[Any]:
    """A batch of two adapters against the model with each merged into it; the batch's answers."""
    for number, of_adapter in weights_of.items():
        engine.read(number, **of_adapter)
    mixed = engine.steps.answers(PROMPTS, [0, 1, 2, 1], loads=[(1, 1), (2, 2)])
    for number, prompt, (tokens, lines) in zip([1, 2, 1], PROMPTS[1:], mixed[1:]):
        merged_tokens, merged_lines = answer_of_merged(engine, engine, number, prompt)
        assert tokens == merged_tokens
        np.testing.assert_allclose(lines, merged_lines, atol=5e-3)
    return mixed


def test_experts_their_router_and_the_shared_ones_have_adapters(tmp_path):
    model, adapters = write_checkpoint("qwen2_moe", tmp_path), {1: {"rank": 3}, 2: {"rank": 2, "dora": True}}
    with contextmanager(started)(model) as engine:
        mixed = check_merged(engine, adapters)
        changed = {path.partition("].")[2] for path in engine.adapters.made[1].weights}
        assert {"mlp.router", "mlp.down_proj", "mlp.shared.up_proj"} <= changed
    with contextmanager(started)(model, tensor_parallel_size=2, enable_expert_parallel=True) as engine:
        for number, of_adapter in adapters.items():
            engine.read(number, **of_adapter)
        split = engine.steps.answers(PROMPTS, [0, 1, 2, 1], loads=[(1, 1), (2, 2)])
        for (_, lines), (_, expected) in zip(split, mixed):
            np.testing.assert_allclose(lines, expected, atol=5e-3)


@pytest.mark.slow
def test_adapters_go_where_their_experts_go(tmp_path):
    """Those in slots when experts move, and those that come later; of experts with several places, too."""
    balance = {"step_interval": 6, "window_size": 5, "num_redundant_experts": 4}
    spread = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": balance}
    adapters, model = {1: {"rank": 3}, 2: {"rank": 2, "dora": True}, 3: {}}, write_checkpoint("qwen2_moe", tmp_path)
    with contextmanager(started)(model, **spread) as engine:
        for number, of_adapter in adapters.items():
            engine.read(number, **of_adapter)
        worker, slots = engine.executor.worker, [0, 1, 2, 1]
        before = engine.steps.answers(PROMPTS, slots, loads=[(1, 1), (2, 2)])
        later = engine.steps.answers(PROMPTS[:1], [3], loads=[(3, 3)])
        assert worker.stats()["expert_layers_moved"] == 0
        while not worker.stats()["expert_layers_moved"]:
            engine.steps.answers(PROMPTS[:2], [0, 0])
        after = engine.steps.answers(PROMPTS, slots)
        later_again = engine.steps.answers(PROMPTS[:1], [3], loads=[(3, 1), (3, 3)])
        for (_, lines), (_, expected) in zip([*after, *later_again], [*before, *later]):
            np.testing.assert_allclose(lines, expected, atol=1e-4)
        assert worker.stats()["recompiles"] == 0


def test_what_latent_attention_absorbs_has_adapters(tmp_path):
    modules = ("kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    with contextmanager(started)(write_checkpoint("deepseek_v3", tmp_path), modules=modules) as engine:
        check_merged(engine, {1: {"dora": True}, 2: {"rank": 2}})
        assert any(path.endswith("v_up") for path in engine.adapters.made[1].weights)


def test_an_adapter_that_changes_nothing_fails_its_requests_alone(reference):
    reference.adapters.make(21, scale=0.0)
    reference.executor.worker.read_lora(LoRARequest("none", 21, "/nowhere"))
    with pytest.raises(AssertionError, match="'none' changes nothing"):
        reference.steps.answers(PROMPTS[:1], [2], loads=[(2, 21)])
    reference.executor.execute_model(SchedulerOutput(0, [], [reference.steps.last], [], [], [], [], []))
    with pytest.raises(AssertionError, match="changes nothing"):
        reference.steps.answers(PROMPTS[:1], [2])
    reference.executor.execute_model(SchedulerOutput(0, [], [reference.steps.last], [], [], [], [], []))
    worker = reference.executor.worker
    assert not worker.adapters.load(worker.device, 3, 21), "one is probed once, whoever has read back what came of it"
    assert reference.steps.answers(PROMPTS[:1], [0])[0][0]


def test_what_has_no_stacks_is_refused_by_name(reference):
    reference.adapters.make(22)
    adapter = reference.adapters.made[22]
    other = {".embed_tokens": next(iter(adapter.weights.values()))}
    reference.adapters.made[22] = replace(adapter, weights={**adapter.weights, **other})
    with pytest.raises(CheckpointError, match="embed_tokens"):
        reference.executor.worker.read_lora(LoRARequest("more", 22, "/nowhere"))


def test_what_makes_one_number_of_a_token_is_refused_by_name(tmp_path):
    adapter = read(GOLDEN / "shared_experts", write_checkpoint("qwen2_moe", tmp_path))
    stacks = SimpleNamespace(paths=frozenset(), scores={})
    with pytest.raises(CheckpointError, match=r"mlp\.shared_gate, which makes one number .* \(jaxpaged merge\)"):
        check_targets([stacks], adapter, "/a")


def test_magnitudes_and_other_weights_exclude_each_other(folder):
    for engine in started(folder):
        worker = engine.executor.worker
        engine.read(1, dora=True)
        with pytest.raises(ConflictError, match="'a1' has magnitudes"):
            worker.start_weight_update(is_partial=False)
        worker.drop_lora(1)
        engine.read(2)
        worker.start_weight_update(is_partial=False)
        worker.receive_weights([str(folder / "model.safetensors")], None)
        worker.check_weight_update()
        worker.finish_weight_update("step 1")
        with pytest.raises(CheckpointError, match="those of update 'step 1' compute"):
            engine.read(1, dora=True)
        engine.read(3)
