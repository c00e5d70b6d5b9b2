"""Weights that change while an engine runs: what it says afterwards is what an engine of these weights says."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, EngineArgs, LLMEngine, SamplingParams, WeightOffer
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CapacityError, CheckpointError, ConflictError, ServerError, UsageError
from jaxpaged.params import offered
from jaxpaged.params.expected import expected_of
from jaxpaged.params.framework_trees import Named, tree_of
from jaxpaged.params.offered import host_device
from tests.models.checkpoints import CONFIGS, make_tensors
from tests.models.quantised_checkpoints import BLOCKS, MODELS, float8, is_linear, read, write
from tests.models.tensor_shapes import tensor_shapes

SIZES = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": True,
    "token_buckets": (4, 16),
    "num_scheduler_steps": 1,
}
PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6, 5]}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
NORM = "model.norm.weight"


def random_tensors(shapes, seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model."""
    shapes = {name: tensor.shape for name, tensor in make_tensors("llama").items()}
    found = []
    for seed in range(2):
        found.append(folder := tmp_path_factory.mktemp(f"weights{seed}"))
        (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
        save_file(random_tensors(shapes, seed), folder / "model.safetensors")
    return found


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def said(llm, prompt=PROMPT):
    """Tokens and their log probabilities."""
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    return answer_of(output)


def answer_of(output):
    [answer] = output.outputs
    assert output.error is None
    return answer.token_ids, [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids)]


@pytest.fixture(scope="module")
def answers(folders):
    """What an engine of each checkpoint says."""
    found = []
    for folder in folders:
        llm = LLM(str(folder), **SIZES)
        found.append(said(llm))
        llm.shutdown()
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def shared(folders):
    llm = LLM(str(folders[0]), **SIZES)
    yield llm
    llm.shutdown()


@pytest.fixture
def llm(shared, folders):
    """An engine of the first checkpoint."""
    shared.update_weights(folders[0], "first")
    return shared


def on_four_devices(arrays):
    """As a trainer has them that splits what it can."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spec_of = lambda array: PartitionSpec("x") if len(array) % 4 == 0 else PartitionSpec()
    return {name: jax.device_put(array, NamedSharding(mesh, spec_of(array))) for name, array in arrays.items()}


def named(llm):
    [stage] = llm.collective_rpc(lambda worker: worker.stages)[0]
    return Named.of(stage.decoder, jax.tree.leaves(stage.specs))


def params_of(llm):
    return llm.apply_model(lambda params: params)[0]


@pytest.mark.parametrize("way", ["arrays", "arrays on four devices", "file", "folder", "parts", "tree", "host's tree"])
def test_afterwards_it_is_an_engine_of_these_weights(llm, folders, answers, way):
    assert said(llm) == answers[0]
    recompiles = llm.llm_engine.executor_stats()["recompiles"]
    if way == "parts":
        llm.start_weight_update()
        for name, tensor in tensors_of(folders[1]).items():
            llm.update_weights({name: tensor})
            assert llm.get_weight_version() == "first"
        assert said(llm) == answers[0], "until it is finished"
        llm.finish_weight_update("second")
    elif way.endswith("tree"):
        llm.update_weights(folders[1], "second")
        tree = jax.tree.map(np.asarray if "host" in way else (lambda array: array.copy()), params_of(llm))
        llm.update_weights(folders[0])
        assert said(llm) == answers[0]
        llm.update_weights(tree, "second")
    else:
        arrays = tensors_of(folders[1])
        made = {"arrays": arrays, "arrays on four devices": on_four_devices(arrays)}
        made |= {"file": folders[1] / "model.safetensors", "folder": str(folders[1])}
        llm.update_weights(made[way], "second")
    assert said(llm) == answers[1] == said(llm), "cached or not"
    assert llm.get_weight_version() == "second"
    assert way != "parts" or llm.llm_engine.executor_stats()["recompiles"] == recompiles


@pytest.mark.parametrize("mapping", ["tunix", "maxtext", "nnx"])
def test_trees_of_frameworks_are_taken_by_a_mapping(llm, folders, answers, mapping):
    tree = tree_of(tensors_of(folders[1]), mapping, named(llm))
    llm.update_weights(tree, "second", mapping=mapping)
    tokens, logprobs = said(llm)
    assert tokens == answers[1][0] and logprobs == pytest.approx(answers[1][1], abs=1e-4)
    if mapping == "maxtext":
        with WeightOffer({"params": tree}) as offer:
            llm.update_weights(folders[0])
            for other, words in (("tunix", "the tree has token_embedder"), (None, "has no weight params.")):
                with pytest.raises(CheckpointError, match=words):
                    llm.update_weights(offer.address, mapping=other)
            with pytest.raises(UsageError, match="mapping is 'maxtxt'.* Did you mean 'maxtext'"):
                llm.update_weights(offer.address, mapping="maxtxt")
            with pytest.raises(UsageError, match="2 paths or addresses came with the mapping maxtext"):
                llm.update_weights([offer.address, offer.address], mapping=mapping)
            assert said(llm) == answers[0]
            llm.update_weights(offer.address, "pulled", mapping=mapping)
        assert said(llm) == (tokens, logprobs) and llm.get_weight_version() == "pulled"
    if mapping == "tunix":
        with pytest.raises(CheckpointError, match="the tree lacks embedder.input_embedding"):
            llm.update_weights({"final_norm": tree["final_norm"]}, mapping=mapping)
        llm.start_weight_update(is_partial=True)
        llm.update_weights({"final_norm": {"w": tensors_of(folders[0])[NORM]}}, mapping=mapping)
        llm.finish_weight_update()
        assert said(llm) != answers[1]


def test_weights_come_from_orbax(llm, folders, answers, tmp_path):
    import orbax.checkpoint as ocp

    converted = tmp_path / "converted"
    assert main(["convert", "--model", str(folders[1]), "--output", str(converted)]) == 0
    llm.update_weights(converted, "second")
    assert said(llm) == answers[1] and llm.get_weight_version() == "second"
    llm.update_weights(folders[0])
    tree = tree_of(tensors_of(folders[1]), "tunix", named(llm))
    state = {"params": jax.tree.map(lambda array: {"value": array}, tree), "step": np.ones(())}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "7" / "items", state)
    llm.update_weights(str(tmp_path / "7"), "third", mapping="tunix")
    assert said(llm) == answers[1]
    with pytest.raises(CheckpointError, match="is no checkpoint of orbax. Name the folder of one step"):
        llm.update_weights(tmp_path, mapping="tunix")
    with pytest.raises(CheckpointError, match=r"lacks decoder.|the tree has embedder"):
        llm.update_weights(tmp_path / "7", mapping="maxtext")
    (next((converted / "orbax").glob("_METADATA"))).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        llm.update_weights(converted)
    assert said(llm) == answers[1] and llm.get_weight_version() == "third"


TRAINER = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxpaged import WeightOffer
from safetensors.numpy import load_file
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
arrays = load_file(sys.argv[1])
for name, array in arrays.items():
    if array.ndim == 2:
        divided = PartitionSpec("x" if len(array) % 2 == 0 else None, "y")
        arrays[name] = jax.device_put(array, NamedSharding(mesh, divided))
good, bad = WeightOffer(arrays), WeightOffer({**arrays, "model.norm.weight": np.ones(3, np.float32)})
print(json.dumps([good.address, bad.address]), flush=True)
sys.stdin.read()
"""


def test_weights_are_pulled_from_another_process_shard_by_shard(llm, folders, answers, monkeypatch):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", TRAINER, str(folders[1] / "model.safetensors")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        good, bad = json.loads(trainer.stdout.readline())
        for version in ("second", "third"):
            llm.update_weights(good, version)
            assert said(llm) == answers[1] and llm.get_weight_version() == version
        with pytest.raises(CheckpointError, match=r"the trainer at 127.0.0.1:\d+: .*norm.weight has shape \(3,\)"):
            llm.update_weights(bad)
        llm.start_weight_update(is_partial=True)
        monkeypatch.setattr(offered, "host_device", lambda: (trainer.kill(), trainer.wait(), host_device())[2])
        with pytest.raises(ServerError, match="closed the connection|recv|reset"):  # which dies when it is to send them
            llm.update_weights(good)
        monkeypatch.undo()
        with pytest.raises(ServerError, match="no weights came from the trainer at .*Connection refused"):
            llm.update_weights(good)
        llm.abandon_weight_update()
    assert said(llm) == answers[1] and llm.get_weight_version() == "third"


def test_a_trainer_who_is_silent_or_none_is_given_up(llm, answers, monkeypatch):
    monkeypatch.setattr(offered, "SILENT_SECONDS", 0.2)
    tensor = offered.Offered(NORM, "F32", (48,), (1,))
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as listener:
        port = silent.getsockname()[1]
        manifest = lambda tensors: msgspec.msgpack.encode(offered.Manifest(port, tensors))
        fine, torn = manifest([tensor]), manifest([msgspec.structs.replace(tensor, parts=(5,))])
        hello = lambda said: offered.HEAD.pack(offered.MAGIC, len(said)) + said
        for sent, words in (
            (b"", "said nothing for 0.2 s"),
            (b"HTTP/1.1 400 Bad Request", "begins with b'HTTP', so it offers no weights"),
            (hello(fine), "said nothing for 0.2 s"),
            (hello(torn), r"parts \(5,\) cannot be"),
            (hello(b"nothing"), "Expected `object`"),
        ):
            answered = []

            def answer(sent=sent, answered=answered):
                answered.append(listener.accept()[0])
                answered[0].sendall(sent)

            thread = threading.Thread(target=answer)
            thread.start()
            llm.start_weight_update(is_partial=True)
            with pytest.raises(ServerError, match=words):
                llm.update_weights(f"transfer://127.0.0.1:{listener.getsockname()[1]}")
            thread.join()
            answered[0].close()
            llm.abandon_weight_update()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"JPW1")
        with pytest.raises(TimeoutError):  # however many drops came before
            offered.heard(ours, offered.HEAD.size, time.monotonic() - 1)
    with pytest.raises(CheckpointError, match="is no address"):
        llm.update_weights("transfer://nowhere")
    with pytest.raises(UsageError, match="has type float64"):
        WeightOffer({NORM: np.ones(48)})
    assert said(llm) == answers[0] and llm.get_weight_version() == "first"


def expected_tensors(llm):
    [stage] = llm.collective_rpc(lambda worker: worker.stages)[0]
    leaves = jax.tree.leaves(stage.specs)
    return [(spec, each) for spec in leaves for each in expected_of(spec, stage.decoder.dim_sizes())]


def test_arrays_that_lie_right_are_taken_as_they_are_and_stay_the_callers(llm, folders, answers):
    tree = jax.tree.map(lambda array: array.copy(), params_of(llm))
    llm.update_weights(tree, "lent")
    assert all(a is b for a, b in zip(jax.tree.leaves(params_of(llm)), jax.tree.leaves(tree), strict=True))
    llm.sleep(1)
    llm.wake_up()
    assert said(llm) == answers[0] and llm.get_weight_version() == "lent", "kept on the host, since no file has them"
    llm.update_weights(tree, "again")
    llm.update_weights(folders[1])
    llm.update_weights(tree, "given", donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    llm.update_weights(folders[1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    assert said(llm) == answers[1]
    with pytest.raises(CheckpointError, match="embed_tokens was deleted"):
        llm.update_weights(tree)


def test_deeper_sleep_forgets_an_update_and_says_so(llm, answers, folders, caplog):
    llm.update_weights(folders[1], "second")
    llm.sleep(2)
    llm.wake_up()
    assert said(llm) == answers[0] and llm.get_weight_version() == ""
    assert "the weights of update 'second' are gone" in caplog.text


def test_a_part_leaves_the_others(llm, folders, answers):
    one, other = map(tensors_of, folders)
    llm.start_weight_update(is_partial=True)
    llm.update_weights({name: tensor for name, tensor in other.items() if name != NORM})
    llm.finish_weight_update()
    assert said(llm) != answers[1]
    llm.start_weight_update(is_partial=True)
    llm.update_weights({NORM: other[NORM]})
    llm.finish_weight_update()
    assert said(llm) == answers[1]
    assert one.keys() == other.keys()


def test_single_numbers_are_replaced(llm, folders, answers, tmp_path):
    one, other = map(tensors_of, folders)
    llm.start_weight_update(is_partial=True)
    llm.update_weights({name: tensor for name, tensor in other.items() if name not in SPARSE})
    random = np.random.default_rng(3)
    halves = {}
    for name in SPARSE:
        order = random.permutation(other[name].size)
        first, rest = np.split(order, [order.size // 2])
        halves[name] = first.astype(np.int32), rest
    patch = lambda name, indices: {
        f"{name}.sparse_indices": indices,
        f"{name}.sparse_values": other[name].reshape(-1)[indices],
    }
    for name in SPARSE:
        llm.update_weights(patch(name, halves[name][0]))
    llm.finish_weight_update()
    assert said(llm) not in answers
    parts = [patch(name, halves[name][1]) for name in SPARSE]
    save_file({key: array for part in parts for key, array in part.items()}, tmp_path / "rest.safetensors")
    llm.start_weight_update(is_partial=True)
    llm.update_weights(tmp_path / "rest.safetensors")
    llm.finish_weight_update("both")
    assert said(llm) == answers[1] and llm.get_weight_version() == "both"
    assert one.keys() == other.keys()


SPARSE = ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight", NORM)


@pytest.mark.parametrize(
    ("indices", "values", "words"),
    [
        ([0, 1], [1.0], "2 indices and 1 values"),
        ([0, 48], [1.0, 1.0], "goes from 0 to 48, but .* has 48 numbers"),
        ([-1], [1.0], "goes from -1"),
        ([3, 3], [1.0, 1.0], "names one number twice"),
        ([3], [np.inf], "sparse_values is not finite"),
        ([[3]], [1.0], "must have one axis"),
        (None, [1.0], "sparse_indices did not come"),
    ],
)
def test_single_numbers_that_cannot_be_leave_the_engine_as_it_is(llm, answers, indices, values, words):
    halves = {"sparse_indices": indices and np.array(indices), "sparse_values": np.array(values, np.float32)}
    llm.start_weight_update(is_partial=True)
    sent = {f"{NORM}.{end}": array for end, array in halves.items() if array is not None}
    finish = lambda: (llm.update_weights(sent), llm.finish_weight_update())
    with pytest.raises(CheckpointError, match=words):
        finish()
    llm.abandon_weight_update()
    assert said(llm) == answers[0]


def test_parts_of_parameters_are_for_partial_updates(llm, answers):
    patch = {f"{NORM}.sparse_indices": np.array([0]), f"{NORM}.sparse_values": np.ones(1, np.float32)}
    with pytest.raises(CheckpointError, match="begun with is_partial"):
        llm.update_weights(patch)
    llm.start_weight_update(is_partial=True)
    llm.update_weights(patch)
    with pytest.raises(CheckpointError, match="comes for the second time"):
        llm.update_weights({NORM: np.ones(48, np.float32)})
    llm.abandon_weight_update()
    assert said(llm) == answers[0]


@pytest.mark.exhaustive
def test_single_experts_are_replaced(tmp_path):
    folders = [tmp_path / str(seed) for seed in range(2)]
    shapes = {name: tensor.shape for name, tensor in make_tensors("mixtral").items()}
    tensors = [random_tensors(shapes, seed) for seed in range(2)]
    tensors[1] = {name: tensors[1][name] if ".experts." in name else array for name, array in tensors[0].items()}
    for folder, each in zip(folders, tensors):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
        save_file(each, folder / "model.safetensors")
    llm, wanted = (LLM(str(folder), **SIZES) for folder in folders)
    before, after = said(llm), said(wanted)
    wanted.shutdown()
    for numbers in ((0, 3), (1, 2), (4,)):
        assert said(llm) != after
        llm.start_weight_update(is_partial=True)
        chosen = tuple(f".experts.{number}." for number in numbers)
        llm.update_weights({name: array for name, array in tensors[1].items() if any(each in name for each in chosen)})
        llm.finish_weight_update()
    assert said(llm) == after != before
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    indices = np.arange(tensors[0][name].size)
    llm.start_weight_update(is_partial=True)
    llm.update_weights({f"{name}.sparse_indices": indices, f"{name}.sparse_values": tensors[0][name].reshape(-1)})
    llm.finish_weight_update()
    [params] = llm.apply_model(lambda params: params)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    assert any(leaf.ndim == 3 and len(leaf) == 5 and np.array_equal(leaf[2], tensors[0][name]) for leaf in leaves)
    llm.shutdown()


def broken(tensors, fault, folder):
    """What is wrong with an update -> (what is sent, what is said)."""
    name, norm = "model.layers.0.self_attn.q_proj.weight", tensors[NORM]
    if fault == "truncated":
        whole = (folder / "model.safetensors").read_bytes()
        path = folder.parent / f"{folder.name}-truncated.safetensors"
        path.write_bytes(whole[:-5])
        return path, "is truncated"
    if fault == "missing":
        return {key: tensor for key, tensor in tensors.items() if key != name}, f"1 of .* the first is {name}"
    return {
        "unknown": ({**tensors, "model.nrom.weight": norm}, "no weight model.nrom.weight.*Did you mean"),
        "shape": ({**tensors, NORM: norm[:-1]}, rf"{NORM} has shape \(\d+,\), but"),
        "type": ({**tensors, NORM: norm.astype(np.float64)}, "has type float64"),
        "NaN": ({**tensors, NORM: np.where(np.arange(len(norm)) == 3, np.nan, norm)}, rf"{NORM} is nan at \(3,\)"),
        "no file": (folder / "nothing.safetensors", "does not exist"),
        "nothing": ({}, "did not come"),
    }[fault]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "type", "NaN", "truncated", "no file", "nothing"])
def test_what_is_wrong_leaves_the_engine_as_it_is(llm, folders, answers, fault):
    weights, why = broken(tensors_of(folders[1]), fault, folders[1])
    with pytest.raises(CheckpointError, match=why):
        llm.update_weights(weights, "bad")
    assert said(llm) == answers[0] and llm.get_weight_version() == "first"
    assert not llm.get_weight_info().is_updating


@pytest.mark.parametrize("harm", ["removed", "truncated", "written anew"])
def test_a_file_that_does_not_stay_as_it_came_leaves_the_engine_as_it_is(llm, folders, answers, tmp_path, harm):
    sent = tmp_path / "sent.safetensors"
    sent.write_bytes((folders[1] / "model.safetensors").read_bytes())
    llm.start_weight_update()
    llm.update_weights(sent)
    whole = sent.read_bytes()
    sent.unlink() if harm == "removed" else sent.write_bytes(whole[: len(whole) // 2 if harm == "truncated" else None])
    with pytest.raises(CheckpointError, match=r"sent\.safetensors was changed or removed after it had come"):
        llm.finish_weight_update("second")
    assert said(llm) == answers[0] and llm.get_weight_version() == "first"
    llm.abandon_weight_update()
    llm.update_weights(folders[1])
    assert said(llm) == answers[1]


def test_too_little_memory_leaves_the_engine_as_it_is(llm, answers, folders, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax, "make_array_from_callback", full)
    with pytest.raises(CapacityError, match="no memory for the new weights: .* keeps those that it has"):
        llm.update_weights(folders[1])
    monkeypatch.undo()
    assert said(llm) == answers[0] and llm.get_weight_version() == "first"
    assert not llm.get_weight_info().is_updating
    llm.update_weights(folders[1])
    assert said(llm) == answers[1]


def test_what_breaks_in_the_middle_leaves_no_weights_until_the_engine_is_woken(llm, answers, folders, monkeypatch):
    from jaxpaged.worker.weight_update import WeightUpdate

    monkeypatch.setattr(WeightUpdate, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.update_weights(folders[1])
    assert llm.is_sleeping()
    llm.wake_up()
    assert said(llm) == answers[0] and llm.get_weight_version() == ""


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_many_updates_leak_and_compile_nothing(count, llm, folders, answers):
    """By arrays, by a tree, and of a request under way that keeps what it has."""
    engine, longer = llm.llm_engine, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True, detokenize=False)
    both = [tensors_of(folder) for folder in folders]
    tree = jax.tree.map(lambda array: array.copy(), params_of(llm))

    def update(number):
        if not engine.has_unfinished_requests():
            engine.add_request(f"{number}", PROMPT, longer)
        engine.step()
        engine.pause_generation("keep", clear_cache=number % 4 == 0)
        llm.update_weights(tree if number % 2 else both[number // 2 % 2], f"update {number}")
        engine.resume_generation()
        engine.step()

    for number in range(8):
        update(number)
    recompiles, num_arrays = engine.executor_stats()["recompiles"], len(jax.live_arrays())
    for number in range(8, 8 + count):
        update(number)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.executor_stats()["recompiles"] == recompiles
    assert len(jax.live_arrays()) <= num_arrays
    tokens, logprobs = said(llm)
    assert tokens == answers[0][0] and logprobs == pytest.approx(answers[0][1], abs=1e-5)


def test_phases_come_in_their_order(llm, folders, answers):
    with pytest.raises(ConflictError, match="start_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update()
    tensors = tensors_of(folders[1])
    llm.update_weights({NORM: tensors[NORM]})
    with pytest.raises(CheckpointError, match="comes for the second time"):
        llm.update_weights({NORM: tensors[NORM]})
    with pytest.raises(CheckpointError, match="did not come"):
        llm.finish_weight_update()
    llm.update_weights({name: tensor for name, tensor in tensors.items() if name != NORM})
    llm.finish_weight_update("late")
    assert said(llm) == answers[1]
    llm.start_weight_update()
    llm.abandon_weight_update()
    assert said(llm) == answers[1]
    llm.sleep(1)
    with pytest.raises(ConflictError, match="weights sleep"):
        llm.start_weight_update()
    llm.wake_up()


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"num_scheduler_steps": 4}], ids=repr)
def test_requests_under_way_go_on_with_the_new_weights(folders, options):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folders[0]), **SIZES | options))
    longer = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add_request("early", PROMPT, longer)
    num_tokens = 0
    while num_tokens < 5:
        [output] = engine.step() or [None]
        num_tokens = 0 if output is None else len(output.outputs[0].token_ids)
    engine.update_weights(folders[1], "second")
    engine.add_request("late", PROMPT, longer)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each.outputs[0] for each in engine.step()}
    (_, first), (start, second) = outputs["early"].weight_spans
    assert (first, second) == ("", "second") and start >= 5
    assert outputs["late"].weight_spans == [(0, "second")]
    before = outputs["early"].token_ids[:start]
    told = {"prompt_token_ids": [*PROMPT["prompt_token_ids"], *before]}
    rest = SamplingParams(max_tokens=24 - start, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add_request("again", told, rest)
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each.outputs[0] for each in engine.step()}
    assert outputs["early"].token_ids[start:] == outputs["again"].token_ids
    engine.shutdown()


def test_requests_that_are_kept_go_on_over_their_keys_and_values(llm, folders, answers):
    """Where the weights that change compute no keys and values, these are what would be computed again."""
    engine, other = llm.llm_engine, tensors_of(folders[1])
    longer = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)

    def told(weights, **pause):
        """What a request says over an update, and how many tokens were computed behind that."""
        engine.update_weights(folders[0], "first")
        engine.add_request("early", PROMPT, longer)
        while not (said := engine.step()) or len(said[0].outputs[0].token_ids) < 5:
            pass
        engine.pause_generation("keep", **pause)
        engine.start_weight_update(is_partial=True)
        engine.update_weights(weights)
        engine.finish_weight_update("second")
        engine.resume_generation()
        last = engine.step_records()[0][-1].step_id
        while engine.has_unfinished_requests():
            said = engine.step() or said
        [answer] = said[0].outputs
        computed = sum(step.num_tokens for step in engine.step_records()[0] if step.step_id > last)
        return answer, [line[token].logprob for line, token in zip(answer.logprobs, answer.token_ids)], computed

    for weights, computes_kv in (({NORM: other[NORM]}, False), (other, True)):
        kept, kept_logprobs, num_kept = told(weights, clear_cache=False)
        anew, anew_logprobs, num_anew = told(weights)
        start = kept.weight_spans[-1][0]
        assert kept.weight_spans == [(0, "first"), (start, "second")] and kept.old_kv_from == start
        assert anew.old_kv_from is None and anew.weight_spans == kept.weight_spans
        assert num_anew - num_kept == len(PROMPT["prompt_token_ids"]) + start - 1
        assert (anew_logprobs == pytest.approx(kept_logprobs, abs=1e-5)) != computes_kv
    tokens, logprobs = said(llm)
    assert tokens == answers[1][0] and logprobs == pytest.approx(answers[1][1], abs=1e-5), "nothing old is found"


def test_what_is_rounded_when_it_is_loaded_is_rounded_when_it_arrives(folders):
    options = SIZES | {"token_buckets": (16,), "quantization": "int8"}  # both cut prompts alike
    engines = [LLM(str(folder), **options) for folder in folders]
    engines[0].update_weights(tensors_of(folders[1]))
    assert said(engines[0]) == said(engines[1])
    name = "model.layers.0.self_attn.q_proj.weight"
    engines[0].start_weight_update(is_partial=True)
    engines[0].update_weights(
        {f"{name}.sparse_indices": np.array([0]), f"{name}.sparse_values": np.ones(1, np.float32)}
    )
    with pytest.raises(CheckpointError, match="q_proj.weight came, but its numbers are rounded together"):
        engines[0].finish_weight_update()
    engines[0].abandon_weight_update()
    for each in engines:
        each.shutdown()


def in_blocks(tensors):
    """A checkpoint in FP8 of these."""
    stored = {}
    for name, tensor in tensors.items():
        own = float8(tensor, "block", "weight_scale_inv", (128, 128))[0] if is_linear(name) else {"weight": tensor}
        stored |= {name.removesuffix("weight") + end: each for end, each in own.items()}
    return stored


def test_a_checkpoint_in_fp8_gives_way_to_another_and_to_16_bits(tmp_path):
    hf = {**MODELS["llama"], "intermediate_size": 160}
    tensors = [random_tensors(tensor_shapes(hf), seed) for seed in range(2)]
    folders = [tmp_path / str(seed) for seed in range(2)]
    for folder, each in zip(folders, tensors):
        folder.mkdir()
        write(folder, in_blocks(each), {**hf, "quantization_config": {**BLOCKS, "weight_block_size": [128, 128]}})
    llm, wanted = (LLM(str(folder), **SIZES | {"token_buckets": (16,)}) for folder in folders)
    before, after, params = said(llm), said(wanted), jax.tree.map(np.array, params_of(wanted))
    wanted.shutdown()
    stored = read(folders[1] / "model.safetensors")
    scales = {name: tensor for name, tensor in stored.items() if name.endswith("_inv")}
    zeros = {name: 0 * tensor for name, tensor in scales.items()}
    llm.start_weight_update()
    llm.update_weights({name: tensor for name, tensor in stored.items() if name not in scales})
    with pytest.raises(CheckpointError, match=r"weight_scale\[0, 0\] is 0.0"):
        llm.update_weights(zeros)
    with pytest.raises(CheckpointError, match=rf"{len(scales)} of .* did not come, the first is .*weight_scale"):
        llm.finish_weight_update()
    assert said(llm) == before, "until it is finished"
    llm.update_weights(scales)
    llm.finish_weight_update("second")
    assert said(llm) == after and llm.get_weight_version() == "second"
    tree = tree_of(tensors[1], "tunix", named(llm))
    for weights, mapping in ((folders[1], None), (tensors[1], None), (tree, "tunix")):
        llm.update_weights(folders[0])
        assert said(llm) == before
        llm.update_weights(weights, mapping=mapping)
        assert said(llm) == after
        jax.tree.map(np.testing.assert_array_equal, params_of(llm), params)
    llm.shutdown()


def test_weights_on_two_devices(folders, answers):
    llm = LLM(str(folders[0]), **SIZES, tensor_parallel_size=2)
    llm.start_weight_update(is_partial=True)
    rest = tensors_of(folders[1])
    for name in SPARSE:
        tensor = rest.pop(name).reshape(-1)
        llm.update_weights({f"{name}.sparse_indices": np.arange(tensor.size), f"{name}.sparse_values": tensor})
    llm.update_weights(on_four_devices(rest))
    llm.finish_weight_update()
    tokens, logprobs = said(llm)
    assert tokens == answers[1][0]
    np.testing.assert_allclose(logprobs, answers[1][1], atol=1e-5)
    llm.shutdown()
