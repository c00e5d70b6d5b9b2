"""Caches of 8 bits in an engine: answers are those of attention over what the cache means, to the last bit of what is
cached, whether tokens were computed here, found in the prefix cache, or computed again."""

import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged import LLM, SamplingParams
from jaxpaged.config.cache_types import CACHE_TYPES
from jaxpaged.errors import ConfigError
from jaxpaged.layers import attention
from jaxpaged.params.hub import EMBEDDED_FOLDER
from jaxpaged.params.kv_scales import scales_file
from pallas_kernels import mla_paged_attention as mla
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


def answers(llm, given, params=PARAMS):
    """Tokens and log probabilities of every answer, and tokens that were found in the prefix cache."""
    results = llm.generate(given, params, use_tqdm=False)
    tokens = [[*result.outputs[0].token_ids] for result in results]
    values = [
        [[line[token].logprob for token in sorted(line)] for line in result.outputs[0].logprobs] for result in results
    ]
    return tokens, values, sum(result.num_cached_tokens for result in results)


def meaning(cache_type, scales=None):
    """`ragged_paged_attention` over a cache of float32, of keys and values as they are once they were 8 bits. `scales`:
    those of each layer, which is called in its turn."""
    attend, dtype = rpa.ragged_paged_attention, jnp.dtype(cache_type.dtype)
    turns = itertools.cycle(scales or [None])

    def attend_meant(q_TNH, k_TKH, v_TKH, kv, metadata, **settings):
        if settings["backend"] != "reference":  # of the engine that tests share, which may be compiling meanwhile
            return attend(q_TNH, k_TKH, v_TKH, kv, metadata, **settings)
        of_layer = next(turns) or [None if cache_type.scales == "head" else jnp.zeros((1, 1, 1))] * 2
        stored = [quantize_new(x, scale, dtype) for x, scale in zip((k_TKH, v_TKH), of_layer)]
        meant = [x.astype(jnp.float32) * scale_TK[..., None] for x, scale_TK in stored]
        return attend(q_TNH, *meant, kv, metadata, **settings)

    return attend_meant


@pytest.fixture(scope="module")
def exact(folder):
    """Log probabilities of a cache that rounds nothing."""
    with LLM(folder, **OPTIONS) as llm:
        return answers(llm, prompts())[1]


@pytest.fixture(scope="module")
def scales(folder):
    """(file, scales of every layer): no two heads have the same."""
    rng = np.random.default_rng(0)
    of_layers = {i: tuple(rng.uniform(0.5, 1, 2).astype(np.float32) / 32 for _ in "kv") for i in range(2)}
    file = Path(folder, "scales.json")
    file.write_text(scales_file("gemma2", "int8", of_layers))
    return str(file), [of_layers[i] for i in range(2)]


# They differ from others as a number is rounded: each way to scale has one here.
ALIKE = ("int8", "fp8_e5m2", "fp8_per_token_head")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in ALIKE else name
        for name, each in CACHE_TYPES.items()
        if each.is_scaled
    ],
)
def test_answers_are_those_of_attention_over_what_the_cache_means(folder, scales, exact, name, monkeypatch):
    given, of_layers, options = prompts(), None, {"kv_cache_dtype": name}
    if name == "int8":
        options["kv_cache_scales"], of_layers = scales
    with LLM(folder, **options, **OPTIONS) as llm:
        tokens, values, _ = answers(llm, given)
        assert llm.llm_engine._core.executor.worker.stats()["recompiles"] == 0
    monkeypatch.setattr(attention.rpa, "ragged_paged_attention", meaning(CACHE_TYPES[name], of_layers))
    with LLM(folder, attention_backend="reference", compilation_cache_dir="off", **OPTIONS) as llm:
        expected, near, _ = answers(llm, given)
    assert tokens == expected
    np.testing.assert_allclose(values, near, atol=2e-5)
    assert np.abs(np.subtract(values[0][0], exact[0][0])).max() > 1e-4, "nothing was rounded"


DEVICES = {
    "two devices": {"tensor_parallel_size": 2},
    "copies of heads": {"tensor_parallel_size": 4},
    "stages": {"pipeline_parallel_size": 2},
    "parts of contexts": {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
}


# Scales of heads lie where heads do, and those of tokens where contexts do.
SPLIT = {
    ("two devices", "int8"): (),
    ("two devices", "int8_per_token_head"): (),
    ("parts of contexts", "int8_per_token_head"): pytest.mark.slow,
}


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        pytest.param(*case, marks=SPLIT.get(case, pytest.mark.exhaustive))
        for case in itertools.product(DEVICES, ("int8", "int8_per_token_head"))
    ],
)
def test_scales_lie_on_devices_as_heads_and_tokens_do(folder, scales, devices, name):
    options = {"kv_cache_dtype": name, **({"kv_cache_scales": scales[0]} if name == "int8" else {}), **OPTIONS}
    with LLM(folder, **options) as llm:
        tokens, values, _ = answers(llm, prompts())
    with LLM(folder, **options, **DEVICES[devices]) as llm:
        found, near, _ = answers(llm, prompts())
    assert found == tokens
    np.testing.assert_allclose(near, values, atol=2e-3)  # a number may be rounded to the neighbour


def test_scales_of_a_checkpoint_are_taken_and_name_the_type(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme, "format": "dense"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))
    more = {"self_attn.k_scale": np.float32(0.125), "self_attn.v_scale": np.array([0.5, 0.25], np.float32)}
    save_file({**load_file(file), **{f"model.layers.1.{name}": np.asarray(x) for name, x in more.items()}}, file)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        worker = llm.llm_engine._core.executor.worker
        assert llm.llm_engine.config.cache.kv_cache_dtype == "fp8_e4m3"
        (kv,) = worker.device.state.kv
        rows = [np.asarray(each).tolist() for each in kv.scales]
    places = [group.layer_idxs for group in worker.kv_cache_config.groups]
    assert [rows[0][places.index((1,))], rows[1][places.index((1,))]] == [[0.125, 0.125], [0.5, 0.25]]
    assert [rows[0][places.index((0,))], rows[1][places.index((0,))]] == [[1, 1], [1, 1]]


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


def test_layers_of_which_none_would_have_8_bits_are_refused(folder):
    skipped = ["full_attention", "sliding_window"]
    with pytest.raises(ConfigError, match="asks for 8 bits, but no layer is cached so: .* full_attention, sliding_w"):
        LLM(folder, kv_cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=skipped, **OPTIONS)


@pytest.mark.parametrize("name", ["int8_per_token_head", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_latents_have_a_scale_of_their_own_and_one_of_their_rope_key(name, tmp_path, monkeypatch):
    """Answers are those of a cache of what 8 bits mean; what a disk keeps comes back as it was, and on two devices."""
    (tmp_path / "model").mkdir()
    folder = str(write_checkpoint("deepseek_v3", tmp_path / "model"))
    options = {**OPTIONS, "kv_cache_dtype": name, "kv_offload": f"host=16M,disk={tmp_path}/pages:64M,page_tokens=8"}
    given = [{"prompt_token_ids": prompt_of("deepseek_v3")[i : 30 + i]} for i in range(2)]
    with LLM(folder, **options) as llm:
        tokens, values, _ = answers(llm, given)
        assert llm.reset_prefix_cache()
        again = answers(llm, given)
        assert again[0] == tokens and again[2] >= 40
        np.testing.assert_allclose(again[1], values, atol=1e-5)
        spec = llm.llm_engine._core.executor.kv_cache_config.groups[0].spec
        arrays = jax.tree.leaves(llm.llm_engine._core.executor.worker.device.state.kv)
        assert sum(each.nbytes for each in arrays) == 24 * len(arrays) // 2 * spec.block_bytes
    with LLM(folder, **options, tensor_parallel_size=2) as llm:
        found, near, cached = answers(llm, given)
        assert found == tokens and cached >= 40
        np.testing.assert_allclose(near, values, atol=1e-3)
    attend, dtype = mla.mla_paged_attention, jnp.dtype(CACHE_TYPES.get(name, CACHE_TYPES["fp8_e4m3"]).dtype)

    def attend_meant(q_TNC, q_rope_TNP, latent_TC, rope_TP, *rest, **settings):
        stored = [quantize_new(x[:, None], jnp.zeros((1, 1, 1)), dtype) for x in (latent_TC, rope_TP)]
        meant = [(x.astype(jnp.float32) * scale[..., None])[:, 0] for x, scale in stored]
        return attend(q_TNC, q_rope_TNP, *meant, *rest, **settings)

    monkeypatch.setattr(mla, "mla_paged_attention", attend_meant)
    with LLM(folder, compilation_cache_dir="off", **OPTIONS) as llm:
        expected, near, _ = answers(llm, given)
    assert expected == tokens
    np.testing.assert_allclose(near, values, atol=2e-5)


@pytest.mark.exhaustive
def test_drafts_change_no_bit_where_a_head_that_drafts_caches_in_8_bits_too():
    options = {"max_num_seqs": 4, "max_model_len": 256, "token_buckets": (16,), "num_gpu_blocks_override": 60}
    options |= {"kv_cache_dtype": "fp8", "deterministic": True, "max_num_batched_tokens": 16, "num_scheduler_steps": 1}
    given = ["Spell the word water.", "Tell me a story about a cat."]
    drafts = {"method": "eagle3", "model": str(EMBEDDED_FOLDER.parent / "demo-eagle3"), "num_speculative_tokens": 3}
    with LLM("demo", **options) as llm:
        tokens, values, _ = answers(llm, given)
    with LLM("demo", speculative_config=drafts, **options) as llm:
        assert answers(llm, given)[:2] == (tokens, values)
        told = {each.name: each for each in llm.get_metrics()}
        assert told["vllm:spec_decode_num_draft_tokens"].value > 5
