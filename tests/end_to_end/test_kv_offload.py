"""Keys and values that were kept besides the device give the same text, in this engine and in the next."""

import pytest

from jaxpaged import LLM, SamplingParams

OPTIONS = {
    "max_model_len": 512,
    "token_buckets": (8, 128),
    "num_scheduler_steps": 1,
    "max_num_seqs": 4,
    "block_size": 16,
    "num_gpu_blocks_override": 200,
}
STORY = "Once upon a time there was a small engine that could. " * 12
PROMPTS = [STORY + "Who was it?", STORY + "Where did it go, and why?", "Tell me of the sea. " * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def answers(llm, prompts=PROMPTS):
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results], [result.num_cached_tokens for result in results]


@pytest.fixture(scope="module")
def expected():
    return answers(LLM(**OPTIONS))[0]


def worker_of(llm):
    return llm.llm_engine._core.executor.worker


@pytest.mark.slow
def test_what_a_disk_keeps_is_loaded_after_a_restart(expected, tmp_path):
    options = {**OPTIONS, "kv_offload": f"host=64M,disk={tmp_path}:256M"}
    llm = LLM(**options)
    assert answers(llm)[0] == expected
    assert worker_of(llm).kv_transfer.connector.tiers.tiers[1]._around_cache, (
        "host memory keeps what the page cache would"
    )
    assert llm.reset_prefix_cache()
    again, cached = answers(llm)
    assert again == expected and min(cached) > 60
    assert worker_of(llm).stats()["recompiles"] == 0
    told = {(each.name, *each.labels.values()): each for each in llm.get_metrics()}
    assert told["vllm:prompt_tokens_cached_by_source", "host"].value > 100
    assert told[("vllm:kv_offload_load_bytes",)].value and told[("vllm:kv_offload_store_size",)].count
    assert told["jaxpaged:kv_offload_tier_pages", "disk"].value
    summary = llm.timeline().summary()
    assert summary.pages_saved and summary.pages_loaded and "blocks copied" in str(llm.timeline())
    llm.shutdown()
    files = list(tmp_path.rglob("*.safetensors"))
    for path in files[::2]:
        damaged = bytearray(path.read_bytes())
        damaged[-5] ^= 1
        path.write_bytes(damaged)
    llm = LLM(**options)
    assert answers(llm)[0] == expected, "damaged pages were used"
    assert worker_of(llm).stats()["kv_offload_pages_lost"] > 0
    llm.shutdown()
    llm = LLM(**{**options, "kv_offload": f"disk={tmp_path}:256M", "tensor_parallel_size": 2})
    again, cached = answers(llm)
    # Not all need be loaded: that ends where a slow disk is measured to be slower than computing.
    assert again == expected and max(cached) > 60, "one device wrote what two read"
    llm.shutdown()
