"""Caches of 8 bits in an engine: answers are those of attention over what the cache means, to the last bit of what is
cached, whether tokens were computed here, found in the prefix cache, or computed again."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config.cache_types import CACHE_TYPES
from jaxpaged.errors import ConfigError
from jaxpaged.layers import attention
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.quantized import quantize_new
from tests.models.checkpoints import prompt_of, write_checkpoint

# Layers with a window and without one share tensors.
MODEL = "gemma2"
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 24,
    "num_scheduler_steps": 1,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(MODEL, tmp_path_factory.mktemp("model")))


def prompts(count=3):
    text = prompt_of(MODEL)
    return [{"prompt_token_ids": [*text[i : 20 + i], *text[: 8 * i]]} for i in range(count)]


def answers(llm, given):
    """Tokens and log probabilities of every answer, and tokens that were found in the prefix cache."""
    results = llm.generate(given, PARAMS, use_tqdm=False)
    tokens = [[*result.outputs[0].token_ids] for result in results]
    values = [
        [[line[token].logprob for token in sorted(line)] for line in result.outputs[0].logprobs] for result in results
    ]
    return tokens, values, sum(result.num_cached_tokens for result in results)


def meaning(cache_type):
    """`ragged_paged_attention` over a cache of float32, of keys and values as they are once they were 8 bits."""
    attend, dtype = rpa.ragged_paged_attention, jnp.dtype(cache_type.dtype)

    def attend_meant(q_TNH, k_TKH, v_TKH, kv, metadata, **settings):
        scale = None if cache_type.scales == "head" else jnp.zeros((1, 1, 1))
        stored = [quantize_new(x, scale, dtype) for x in (k_TKH, v_TKH)]
        meant = [x.astype(jnp.float32) * scale_TK[..., None] for x, scale_TK in stored]
        return attend(q_TNH, *meant, kv, metadata, **settings)

    return attend_meant


SLOW = ("fp8_e5m2", "fp8_per_token_head")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name, each in CACHE_TYPES.items()
        if each.is_scaled and name != "int8"
    ],
)
def test_answers_are_those_of_attention_over_what_the_cache_means(folder, name, monkeypatch):
    given = prompts()
    with LLM(folder, kv_cache_dtype=name, **OPTIONS) as llm:
        tokens, values, _ = answers(llm, given)
        assert llm.get_metrics() and llm.llm_engine._core.executor.worker.stats()["recompiles"] == 0
    with LLM(folder, **OPTIONS) as llm:
        _, exact, _ = answers(llm, given)
    monkeypatch.setattr(attention.rpa, "ragged_paged_attention", meaning(CACHE_TYPES[name]))
    with LLM(folder, attention_backend="reference", compilation_cache_dir="off", **OPTIONS) as llm:
        expected, near, _ = answers(llm, given)
    assert tokens == expected
    np.testing.assert_allclose(values, near, atol=2e-5)
    assert np.abs(np.subtract(values[0][0], exact[0][0])).max() > 1e-4, "nothing was rounded"


def test_what_is_cached_preempted_and_asleep_changes_no_bit(folder):
    """An engine that promises bits. So few blocks that requests together are preempted."""
    given = prompts(4)
    with LLM(folder, kv_cache_dtype="int8_per_token_head", deterministic=True, **OPTIONS) as llm:
        worker = llm.llm_engine._core.executor.worker
        both = [(answers(llm, [each]), answers(llm, [each])) for each in given]
        assert all(first[:2] == again[:2] and first[2] == 0 for first, again in both)
        assert sum(again[2] for _, again in both) > 40
        assert llm.reset_prefix_cache()
        tokens, values, _ = answers(llm, given * 3)
        assert tokens == [first[0][0] for first, _ in both] * 3
        assert values == [first[1][0] for first, _ in both] * 3
        told = {each.name: each for each in llm.get_metrics()}
        assert told["vllm:num_preemptions"].value > 0
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm, given[:1])[:2] == both[0][0][:2]
        assert worker.stats()["recompiles"] == 0


def test_a_type_is_part_of_what_blocks_are_known_by(folder):
    roots = set()
    for options in (
        {},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_per_token_head"},
        {"kv_cache_dtype": "fp8_per_token_head", "kv_cache_dtype_skip_layers": ["sliding_window"]},
    ):
        with LLM(folder, load_format="dummy", **OPTIONS, **options) as llm:
            core = llm.llm_engine._core
            roots.add((core._scheduler.ranks[0].kv_cache_manager.hasher.root, core.executor.kv_cache_config.content))
    assert len({root for root, _ in roots}) == len({content for _, content in roots}) == 4


def test_names_of_layers_that_there_are_not_are_refused(folder):
    accepted = "accepted are numbers of layers, 0 to"
    with pytest.raises(ConfigError, match=f"kv_cache_dtype_skip_layers names 99, all; {accepted}"):
        LLM(folder, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["all", "99"], **OPTIONS)
