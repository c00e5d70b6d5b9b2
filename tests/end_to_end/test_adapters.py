"""Adapters from files to tokens: in any slot, whatever shares the batch, and what is wrong with one is its own trouble.

The adapters have PEFT's files of a golden, with other numbers in them. What their logits must be, tests/worker says.
"""

import json
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, LoRARequest, SamplingParams
from jaxpaged.errors import CheckpointError
from tests.models.adapted import GOLDEN, write_base

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + j) % 200 for j in range(5 + 3 * i)]} for i in range(4)]
WEIGHTS = "adapter_model.safetensors"


def write_adapter(folder, seed, scale=0.3):
    """The golden's, with numbers that follow from `seed`; with `scale` 0 it does nothing."""
    shutil.copytree(GOLDEN / "plain", folder, dirs_exist_ok=True)
    draw = np.random.default_rng(seed)
    tensors = load_file(GOLDEN / "plain" / WEIGHTS)
    save_file({k: (scale * draw.normal(size=v.shape)).astype(v.dtype) for k, v in tensors.items()}, folder / WEIGHTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The base, and adapters 1 to 5."""
    folder = tmp_path_factory.mktemp("adapters")
    write_base(json.loads((GOLDEN / "plain" / "logits.json").read_text())["checkpoint"], folder / "base")
    for i in range(1, 6):
        write_adapter(folder / f"a{i}", seed=i)
    return folder


OPTIONS = {
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 48,
    "block_size": 4,
    "num_gpu_blocks_override": 14,
    "num_scheduler_steps": 1,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def llm(folder):
    llm = LLM(str(folder / "base"), **OPTIONS, kv_offload="host=4M")
    yield llm
    assert llm.llm_engine.executor_stats()["recompiles"] == 0
    llm.shutdown()


@pytest.fixture
def adapters(folder):
    return [None, *(LoRARequest(f"a{i}", i, str(folder / f"a{i}")) for i in range(1, 6))]


def tokens(llm, prompts, lora_request, params=GREEDY):
    outputs = llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def alone(llm, adapters):
    """The tokens of each prompt with each adapter, by their numbers."""
    found = {}
    for i, adapter in enumerate(adapters):
        for j, prompt in enumerate(PROMPTS):
            llm.reset_prefix_cache()
            (found[i, j],) = tokens(llm, [prompt], adapter)
    return found


def test_every_request_has_its_adapter_whatever_shares_the_batch(llm, adapters):
    expected = alone(llm, adapters)
    for j in range(len(PROMPTS)):
        assert len({tuple(expected[i, j]) for i in range(6)}) == 6, "two adapters give the same"
    draw = random.Random(1)
    before = llm.llm_engine.metrics.stats
    for _ in range(3):
        wanted = draw.choices(sorted(expected), k=24)
        given = [PROMPTS[j] for _, j in wanted]
        assert tokens(llm, given, [adapters[i] for i, _ in wanted]) == [expected[each] for each in wanted]
    stats = llm.llm_engine.metrics.stats
    assert llm.llm_engine.executor_stats()["kv_offload_pages_loaded"]
    assert stats.num_preemptions > before.num_preemptions and stats.prefix_cache_hits > before.prefix_cache_hits
    assert stats.lora.num_loads > before.lora.num_loads + 6 and stats.lora.num_host_misses > 3
    llm.sleep(1)
    llm.wake_up()
    wanted = sorted(expected)
    assert tokens(llm, [PROMPTS[j] for _, j in wanted], [adapters[i] for i, _ in wanted]) == list(expected.values())


def test_an_adapter_that_is_written_anew_serves_no_old_tokens(llm, folder):
    write_adapter(folder / "anew", seed=1)
    adapter = LoRARequest("anew", 6, str(folder / "anew"))
    old = tokens(llm, PROMPTS, adapter)
    engine = llm.llm_engine
    engine.add_request("old", PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), None, adapter)
    for _ in range(4):
        engine.step()
    write_adapter(folder / "anew", seed=9)
    new = tokens(llm, PROMPTS[:3], LoRARequest("anew", 6, str(folder / "anew"), load_inplace=True))
    assert all(one != other for one, other in zip(old, new))
    llm.reset_prefix_cache()
    assert tokens(llm, PROMPTS[:3], adapter) == new
    assert engine.remove_lora(6) and not engine.remove_lora(6)


def test_what_is_wrong_with_an_adapter_harms_no_other_request(llm, folder, adapters):
    (expected,) = tokens(llm, PROMPTS[:1], adapters[1])
    write_adapter(folder / "nothing", seed=1, scale=0.0)
    with pytest.raises(CheckpointError, match="the adapter does nothing"):
        tokens(llm, [PROMPTS[0]] * 2, [adapters[1], LoRARequest("nothing", 7, str(folder / "nothing"))])
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        tokens(llm, PROMPTS[:1], LoRARequest("none", 8, str(folder)))
    for adapter in adapters[2:5]:  # the first one leaves host memory
        tokens(llm, PROMPTS[:1], adapter)
    shutil.move(folder / "a1", folder / "moved")
    (broken, good) = llm.generate(PROMPTS[:1] * 2, GREEDY, lora_request=[adapters[1], adapters[4]], use_tqdm=False)
    assert "'a1' cannot be read" in broken.error and broken.outputs[0].finish_reason == "error" and not good.error
    shutil.move(folder / "moved", folder / "a1")
    assert tokens(llm, PROMPTS[:1], adapters[1]) == [expected]


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def compile_lighter(worker):
    """The programs of steps without adapters."""
    for key in worker.programs.builders:
        if key.kind in ("forward_base", "decode_base"):
            worker.programs[key]


@pytest.mark.parametrize("options", [{"num_scheduler_steps": 4}, {"speculative_config": NGRAM}], ids=["runs", "drafts"])
def test_runs_of_decode_steps_and_drafts_give_the_same(folder, llm, adapters, options):
    wanted = [(prompt, adapter) for adapter in adapters[:3] for prompt in PROMPTS]
    prompts, requests = map(list, zip(*wanted, strict=True))
    expected = tokens(llm, prompts, requests)
    other = LLM(str(folder / "base"), **{**OPTIONS, **options})
    try:
        for _ in range(2):  # then lighter programs are there
            assert tokens(other, prompts, requests) == expected
            assert tokens(other, PROMPTS, None) == expected[: len(PROMPTS)]
            other.collective_rpc(compile_lighter)
        assert other.llm_engine.executor_stats()["recompiles"] == 0
    finally:
        other.shutdown()


@pytest.mark.slow
def test_a_beginning_in_a_file_is_that_of_its_adapter(llm, folder, adapters, tmp_path):
    expected = tokens(llm, [PROMPTS[3]] * 3, adapters[:3])
    info = llm.save_prefix(PROMPTS[3], tmp_path / "beginning", adapters[1])
    with LLM(str(folder / "base"), **OPTIONS, kv_offload="host=4M") as other:
        other.load_prefix(tmp_path / "beginning")
        outputs = other.generate([PROMPTS[3]] * 3, GREEDY, lora_request=adapters[:3], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, info.num_tokens, 0] and info.num_tokens
