"""Every type that `dtype` offers generates with every kernel, kind of weights and way to draft that an option offers:
in pairs, since one fault lies where two of them meet."""

import itertools
from contextlib import nullcontext

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config.sections import CacheConfig, CompileConfig, ModelConfig
from jaxpaged.errors import ConfigError
from pallas_kernels.ragged_paged_attention import backends
from tests.end_to_end.test_architectures import NAMES, OTHERS
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.draft_heads import write_eagle3
from tests.params.test_quantized import WIDE

choices = lambda section, name: section.__dataclass_fields__[name].metadata["choices"]
DTYPES = [name for name in choices(ModelConfig, "dtype") if name != "auto"]
# Nearly all other tests are in float32.
ONE_TYPE = [name if name == "bfloat16" else pytest.param(name, marks=pytest.mark.exhaustive) for name in DTYPES]
BACKENDS = [name for name in choices(CompileConfig, "attention_backend") if backends("cpu").get(name) is None]
QUICK = [name for name in BACKENDS if not name.endswith("-interpret") and name != "auto"]
# One forward program of one size: that a type is taken is seen in any.
OPTIONS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 16,
    "num_gpu_blocks_override": 40,
    "num_scheduler_steps": 1,
    "skip_tokenizer_init": True,
    "async_scheduling": False,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
# Of the ways to round weights when they are loaded, one of each form that they have then.
ROUNDINGS = ("int8", "int4", "fp8_per_channel", "fp8_per_block")
BESIDE = {"pages fp8": {"kv_offload": "host=4M,pages=fp8"}, "head": {"speculative_config": {"method": "eagle3"}}}

# Model, options and drafts; heads of "wide" are of the sizes that kernels take, and those of "llama" are not, so the
# reference attends there. What has nothing to do with each other shares an engine.
KINDS = {
    "small heads": ("llama", {}),
    **{
        f"{method} {backend}, {beside}": (
            "wide",
            {"attention_backend": backend, "quantization": method} | BESIDE[beside],
        )
        for backend, method, beside in zip(itertools.cycle(QUICK), ROUNDINGS, itertools.cycle(BESIDE))
    },
    "cpu, runs of steps, pages int8": (
        "wide",
        {"attention_backend": "cpu", "num_scheduler_steps": 2, "kv_offload": "host=4M,pages=int8"},
    ),
    "deterministic": ("wide", {"deterministic": True}),
    **{
        f"cache of {kv}": ("wide", {"kv_cache_dtype": kv})
        for kv in choices(CacheConfig, "kv_cache_dtype")
        if kv in ("bfloat16", "float16", "float32", "fp8_e4m3", "int8_per_token_head")
    },
    "experts int8, ngram": ("mixtral", {"quantization": "int8", "speculative_config": NGRAM}),
    "latents": ("deepseek_v3", {}),
    "sinks int4": ("gpt_oss", {"quantization": "int4"}),
    "draft model int4": ("wide", {"speculative_config": {"method": "draft_model", "quantization": "int4"}}),
}
OF_DEVICES = {
    "two": ("wide", {"tensor_parallel_size": 2}),
    "two, int8": ("wide", {"tensor_parallel_size": 2, "quantization": "int8"}),
    "two, int4": ("wide", {"tensor_parallel_size": 2, "quantization": "int4"}),
    "stages": ("wide", {"pipeline_parallel_size": 2}),
    "parts of contexts": ("llama", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    "spread experts": ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "attention ranks": ("mixtral", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "latents": ("deepseek_v3", {"tensor_parallel_size": 2, "quantization": "int8"}),
}

APART = ("two", "attention ranks", "latents")
"""Kinds that cut what the others do not."""

PLAIN = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
# All that the sampler can, and the log probabilities of prompts: programs of their own.
FULL = SamplingParams(
    seed=1, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=2, prompt_logprobs=1, max_tokens=3, ignore_eos=True
)


def options_of(model, options, folder):
    """With the folder of what drafts, if a model does."""
    speculation = options.get("speculative_config", {})
    if speculation.get("method") not in ("draft_model", "eagle3"):
        return options
    drafts = folder / "draft"
    drafts.mkdir()
    (write_eagle3 if speculation["method"] == "eagle3" else lambda at, name: write_checkpoint(name, at))(drafts, model)
    return options | {"speculative_config": speculation | {"model": str(drafts), "num_speculative_tokens": 1}}


def check_generates(name, folder, params=PLAIN, **options):
    """The programs that are waited for are those that `params` need."""
    model = folder / "model"
    model.mkdir()
    write_checkpoint(name, model)
    with LLM(str(model), **OPTIONS | options_of(name, options, folder)) as llm:
        [output] = llm.generate([{"prompt_token_ids": prompt_of(name)[:20]}], params, use_tqdm=False)
        programs = llm.llm_engine._core.executor.worker.programs
        if params is FULL:
            programs.wait_all()
    assert output.error is None and len(output.outputs[0].token_ids) == 3
    assert not [state for *_, state in programs.states if state == "failed"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setitem(CONFIGS, "wide", WIDE)


# One type of 16 bits shows what the other does, but for kernels of a CPU and what has two types in one program.
UNLIKE_IN_16_BITS = ("int4 cpu, head", "cache of bfloat16", "cache of float16")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=pytest.mark.exhaustive if is_left_out else ())
        for kind, dtype in itertools.product(KINDS, DTYPES)
        for is_left_out in [dtype == "float32" or (dtype == "float16" and kind not in UNLIKE_IN_16_BITS)]
    ],
)
def test_every_type_generates_with_everything_that_options_offer(kind, dtype, tmp_path):
    name, options = KINDS[kind]
    check_generates(name, tmp_path, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ONE_TYPE)
@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param({}, id="plain", marks=pytest.mark.exhaustive),
        pytest.param({"speculative_config": NGRAM}, id="drafts"),
    ],
)
def test_every_program_of_a_sampler_is_compiled_in_every_type(drafts, dtype, tmp_path):
    check_generates("wide", tmp_path, FULL, dtype=dtype, **drafts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ONE_TYPE)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in APART else pytest.mark.exhaustive) for kind in OF_DEVICES]
)
def test_every_type_generates_on_several_devices(kind, dtype, tmp_path):
    name, options = OF_DEVICES[kind]
    check_generates(name, tmp_path, dtype=dtype, **options)


# Models with layers, constants or states of their own; some are among the kinds above.
UNLIKE = ("gemma4", "gpt_oss", "lfm2_moe")


# Goldens are of float32.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [each for name, each in zip(DTYPES, ONE_TYPE) if name != "float32"])
@pytest.mark.parametrize(
    "name",
    [
        *UNLIKE,
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in (*NAMES, *OTHERS) if name not in UNLIKE),
    ],
)
def test_every_architecture_generates_in_every_type(name, dtype, tmp_path):
    check_generates(name, tmp_path, dtype=dtype, block_size=8)


# `test_attention_backends.py` has such an engine in float32, and the kernels' own tests have all types.
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name.endswith("-interpret")])
def test_a_simulated_kernel_generates_in_every_type_that_it_does_not_refuse_at_the_start(backend, dtype, tmp_path):
    refused = dtype == "float16" and backend.startswith("tpu")
    with pytest.raises(ConfigError, match=f"{dtype}; accepted are") if refused else nullcontext():
        check_generates("wide", tmp_path, dtype=dtype, attention_backend=backend)
