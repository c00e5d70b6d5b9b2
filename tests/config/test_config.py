"""Options: what is accepted, what is refused and with which words, and what model and platform decide."""

import dataclasses
import re
from pathlib import Path

import pytest

from jaxpaged.config import EngineConfig, ModelFacts, all_options
from jaxpaged.errors import ConfigError

FACTS = ModelFacts(max_position_embeddings=4096, dtype="bfloat16", num_heads=8, vocab_size=1000)


def resolved(platform="cpu", facts=FACTS, **options):
    return EngineConfig.from_options(**options).resolve(facts, platform)


def refusal(**options):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    return str(caught.value)


def conflict(**options):
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    return str(caught.value)


# ---- declarations


def test_option_names_are_unique_and_have_help():
    names = [option.name for _, option in all_options()]
    assert len(names) == len(set(names))
    assert all(option.metadata["help"] for _, option in all_options())


def test_every_default_is_a_value_that_would_be_accepted():
    config = EngineConfig()
    defaults = {option.name: getattr(getattr(config, section), option.name) for section, option in all_options()}
    assert EngineConfig.from_options(**defaults) == config


def test_every_option_is_read_by_some_code():
    package = Path(__file__).parents[2] / "jaxpaged"
    declaring = [
        package / "config" / name
        for name in ("sections.py", "multimodal.py", "lora.py", "engine_config.py", "resolution.py")
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path not in declaring)
    unread = [option.name for _, option in all_options() if not re.search(rf"\.{option.name}\b", code)]
    by_their_section = ("limit_mm_per_prompt", "media_io_kwargs", "ec_transfer_config", "max_cpu_loras")
    unread = [name for name in unread if name not in by_their_section]  # its properties read them, or it refuses them
    assert not unread, f"nobody reads {', '.join(unread)}: an option that does nothing is worse than none"


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().model.dtype = "float32"


# ---- values


def test_options_reach_their_section():
    config = EngineConfig.from_options(model="x", block_size=16, max_num_seqs=4, tensor_parallel_size=2)
    values = config.model.model, config.cache.block_size, config.scheduler.max_num_seqs, config.parallel
    assert values == ("x", 16, 4, dataclasses.replace(EngineConfig().parallel, tensor_parallel_size=2))


def test_paths_become_texts_lists_become_tuples_and_none_means_the_default():
    config = EngineConfig.from_options(model=Path("/a/b"), token_buckets=[16, 32], block_size=None)
    assert (config.model.model, config.compile.token_buckets, config.cache.block_size) == ("/a/b", (16, 32), None)


@pytest.mark.parametrize("name", [f.name for _, f in all_options()])
def test_none_means_that_an_option_was_not_given(name):
    assert EngineConfig.from_options(**{name: None}) == EngineConfig()


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_have_vllms_other_spellings(given, meant):
    assert EngineConfig.from_options(dtype=given).model.dtype == meant


@pytest.mark.parametrize("given", ["auto", -1, None])
def test_the_longest_context_may_be_left_to_the_model(given):
    assert resolved(max_model_len=given).model.max_model_len == 4096


@pytest.mark.parametrize("given", [-2, 0, True, "all"])
def test_other_words_and_numbers_are_no_length(given):
    assert "max_model_len is" in refusal(max_model_len=given)


def test_an_unknown_option_names_the_nearest_known_one():
    assert refusal(max_num_seq=4) == "unknown option 'max_num_seq'. Did you mean 'max_num_seqs'?"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1."),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4'; it must be a whole number."),
        ({"max_num_seqs": 4.0}, "max_num_seqs is 4.0; it must be a whole number."),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be a whole number."),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; it must be more than 0.0."),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; it must be at most 1.0."),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan; it must be finite."),
        ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization is 'all'; it must be a number."),
        ({"quantization": "int3"}, "quantization is 'int3'; it must be one of int8, int4, fp8_per_channel, "),
        ({"dtype": "float23"}, "dtype is 'float23'; it must be one of auto, bfloat16, float16, float32. Did you mean"),
        ({"dtype": 16}, "dtype is 16; it must be a text."),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no'; it must be true or false."),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be true or false."),
        ({"override_generation_config": [1]}, "override_generation_config is [1]; it must be a mapping."),
        ({"token_buckets": 16}, "token_buckets is 16; it must be a list."),
        ({"token_buckets": ()}, "token_buckets is empty; leave it out for the default."),
        ({"token_buckets": (16, 0)}, "token_buckets is 0; it must be at least 1."),
        ({"token_buckets": (16, 2.5)}, "token_buckets is (16, 2.5); it must hold whole numbers only."),
        ({"seed": -1}, "seed is -1; it must be at least 0."),
        ({"model": 7}, "model is 7; it must be a text."),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_remedy(options, said):
    assert said in refusal(**options)


# ---- what model and platform decide


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float16"), ("gpu", "float16"), ("tpu", "bfloat16")])
def test_a_checkpoint_in_float16_is_computed_in_a_type_that_the_device_has(platform, dtype):
    facts = dataclasses.replace(FACTS, dtype="float16")
    config = EngineConfig().resolve(facts, platform)
    assert (config.model.dtype, config.cache.kv_cache_dtype) == (dtype, dtype)
    assert EngineConfig.from_options(dtype="float16").resolve(facts, platform).model.dtype == "float16"


def test_nothing_is_left_for_later():
    config = resolved()
    assert config.model.tokenizer == config.model.model
    assert (config.model.dtype, config.cache.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert config.model.max_model_len == 4096
    assert config.cache.block_size == 32
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (512, 64)


def test_platforms_have_defaults_of_their_own_and_unknown_ones_those_of_a_gpu():
    assert resolved("tpu").cache.block_size == 128
    assert resolved("gpu").scheduler == resolved("cuda").scheduler


def test_what_is_given_is_kept():
    config = resolved(
        dtype="float32",
        kv_cache_dtype="bfloat16",
        block_size=8,
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        tokenizer="other",
    )
    assert (config.model.dtype, config.cache.kv_cache_dtype, config.cache.block_size) == ("float32", "bfloat16", 8)
    assert (config.model.max_model_len, config.model.tokenizer) == (100, "other")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 20)


def test_resolving_twice_changes_nothing():
    config = resolved()
    assert config.resolve(FACTS, "cpu") == config


@pytest.mark.parametrize(
    ("options", "batched_tokens", "num_seqs"),
    [
        ({"max_num_batched_tokens": 16}, 16, 16),  # no more requests than tokens
        ({"max_num_seqs": 1000}, 1000, 1000),  # a token for every request
        ({"enable_chunked_prefill": False}, 4096, 64),  # the longest prompt in one step
        ({"token_buckets": [8, 32]}, 32, 32),  # the largest program is the largest step
        ({"token_buckets": [8, 32], "max_num_batched_tokens": 20}, 20, 20),
    ],
)
def test_step_sizes_follow_the_options_that_bind_them(options, batched_tokens, num_seqs):
    scheduler = resolved(**options).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (batched_tokens, num_seqs)


def test_minus_one_log_probabilities_are_the_vocabulary():
    assert resolved(max_logprobs=-1).model.max_logprobs == 1000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 5000}, "max_model_len is 5000, but the model was made for 4096 positions"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens (32) is less than max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "without chunked prefill a whole prompt"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the model's 8 attention heads"),
        ({"token_buckets": [16], "max_num_batched_tokens": 64}, "the largest of token_buckets is 16"),
        ({"token_buckets": [16], "max_num_seqs": 64}, "the largest of token_buckets is 16"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_both_values(options, said):
    assert said in conflict(**options)


ENCODER = dataclasses.replace(FACTS, task="embed", num_encoder_caches=2, text_len=512, pooler={"pooling_type": "CLS"})


def test_prompts_of_an_encoder_take_one_step_each_and_nothing_is_kept():
    config = resolved(facts=ENCODER, max_num_seqs=8)
    assert (config.model.runner, config.max_model_len) == ("pooling", 512)
    assert not (config.scheduler.enable_chunked_prefill or config.cache.enable_prefix_caching)
    assert config.cache.num_gpu_blocks_override == 2 * 2 * (512 // 32 + 8) + 1
    long = resolved(facts=ENCODER, max_model_len=2048)
    assert long.scheduler.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runner": "generate"}, "the checkpoint is made to embed: it has no table of logits. Use runner='pooling'"),
        ({"max_num_batched_tokens": 64}, "Raise it, or lower the second."),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8_e4m3', and no keys and values are kept"),
        ({"deterministic": True}, "deterministic was asked for, but encoders"),
        ({"kv_offload": "host=1G"}, "runner is 'pooling'"),
    ],
)
def test_an_encoder_refuses_what_it_cannot_honour(options, said):
    with pytest.raises(ConfigError) as error:
        resolved(facts=ENCODER, **options)
    assert said in str(error.value)


def test_a_divisor_is_suggested_for_the_number_of_devices():
    assert "Choose one of [1, 2, 4, 8]." in conflict(tensor_parallel_size=5)


@pytest.mark.parametrize(
    ("platform", "options", "reason"),
    [
        ("gpu", {}, "on 'cpu' only"),
        ("cpu", {"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
        ("cpu", {"attention_backend": "reference"}, "attention_backend is 'reference'"),
    ],
)
def test_deterministic_is_refused_where_nobody_has_shown_it(platform, options, reason):
    config = EngineConfig.from_options(deterministic=True, **options)
    with pytest.raises(ConfigError, match=reason):
        config.resolve(FACTS, platform)
    assert EngineConfig.from_options(deterministic=True).resolve(FACTS, "cpu").compile.deterministic
    with pytest.raises(ConfigError, match="experts"):
        EngineConfig.from_options(deterministic=True).resolve(dataclasses.replace(FACTS, has_experts=True), "cpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_scheduler_steps": 4}, "num_scheduler_steps is 4"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "drafts 3 tokens"),
        ({"kv_offload": "host=1G"}, "kv_offload"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend is 'mp'"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes 2"),
        ({"bundle": "b"}, "bundle is b"),
        ({"deterministic": True}, "deterministic"),
        ({"load_format": "orbax"}, "load_format is 'orbax'"),
    ],
)
def test_what_stages_do_not_go_with_is_refused_by_name(options, reason):
    with pytest.raises(ConfigError, match=f"^pipeline_parallel_size is 2, but .*{reason}.*Leave one of them"):
        resolved(pipeline_parallel_size=2, **options)
    assert resolved(**options) and resolved(pipeline_parallel_size=2, data_parallel_size=2)


def test_experts_are_spread_only_where_there_are_some():
    config = EngineConfig.from_options(enable_expert_parallel=True, tensor_parallel_size=2)
    assert config.resolve(dataclasses.replace(FACTS, has_experts=True), "cpu").parallel.devices == (2, True)
    with pytest.raises(ConfigError, match="enable_expert_parallel was asked for, but the model has no experts"):
        config.resolve(FACTS, "cpu")


@pytest.mark.parametrize(
    ("platform", "options", "words"),
    [
        ("cpu", {"node_rank": 1}, "ranks go from 0 to 0"),
        ("cpu", {"nnodes": 2, "tensor_parallel_size": 1}, "does not split evenly over 2 hosts"),
        ("gpu", {"nnodes": 2, "tensor_parallel_size": 8, "distributed_executor_backend": "mp"}, "nnodes is 2"),
        ("tpu", {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}, "one process must have all TPU"),
        ("cpu", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "bundle": "b"}, "is for one process"),
        ("cpu", {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "Let Ray start them"),
    ],
)
def test_processes_that_cannot_compute_as_one_are_refused(platform, options, words):
    with pytest.raises(ConfigError, match=words):
        resolved(platform, **options)


def test_a_process_alone_is_no_group():
    assert EngineConfig.from_options(distributed_executor_backend="mp").parallel.num_processes == 1
    assert resolved(tensor_parallel_size=4, distributed_executor_backend="mp").parallel.num_processes == 4
    assert resolved(tensor_parallel_size=4, nnodes=2).parallel.num_processes == 2
