"""vLLM's engine options that this engine does not have, and the values at which they ask for nothing.

A script or a command line written for vLLM names many of them at their defaults. `without_neutral` lets those through
and refuses every other value by the option's name, with the reason: the only place that decides it, for Python, YAML
files and flags alike. Some options change only how vLLM works, never what it answers; they are let through with a word.

This module knows none of our own options.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForeignOption:
    """One option. `accepts` tells values that ask for nothing; for others, `why` is the second half of a sentence.

    `word` is said, once an engine is made, of an accepted value that is not the default: what it means here.
    """

    name: str
    default: Any
    accepts: Callable[[Any], bool]
    why: str = ""
    word: str = ""


def absent(name: str, *neutral: Any, why: str) -> ForeignOption:
    """An option for something that is not there: only `neutral` values, of which the first is the default, pass."""
    return ForeignOption(name, neutral[0], lambda value: any(same(value, each) for each in neutral), why)


def pointless(name: str, default: Any, kind: type | tuple[type, ...], word: str = "") -> ForeignOption:
    """An option that changes nothing here: every value of its kind passes, with a word if there is one to say."""
    kinds = kind if isinstance(kind, tuple) else (kind,)

    def accepts(value: Any) -> bool:
        return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))

    return ForeignOption(name, default, accepts, f"it must be {' or '.join(each.__name__ for each in kinds)}", word)


def same(value: Any, neutral: Any) -> bool:
    """Equal, where True is not 1; empty collections of any kind are, and a list is equal to a tuple."""
    if isinstance(neutral, dict | list | tuple):
        return isinstance(value, Mapping | list | tuple | set) and list(value) == list(neutral)
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def asks_for_no_media(value: Any) -> bool:
    return isinstance(value, Mapping) and all(same(count, 0) for count in value.values())


def asks_for_llguidance(value: Any) -> bool:
    """Whether structured outputs are left to the library that is used here."""
    backends = ("auto", "guidance")
    return isinstance(value, Mapping) and all(
        (key == "backend" and each in backends) or each in (None, "", False) for key, each in value.items()
    )


OWN_WORKERS = "workers are the engine's own: see tensor_parallel_size, distributed_executor_backend and nnodes"
NO_MEDIA = "models take text only"
NO_CODE = "code from a model's repository is never run"
NO_LORA = "there are no LoRA adapters"
NO_GRAPHS = "there are no CUDA graphs: XLA compiles a program for every step size (option token_buckets)"
NO_OFFLOAD = "weights stay on the devices"
NO_DETAILED_TRACES = "a trace shows queue, prefill and decode; what the devices do in them is recorded by start_profile"

FOREIGN_OPTIONS: dict[str, ForeignOption] = {each.name: each for each in (
    # ---- model and tokenizer
    absent("trust_remote_code", False, why=NO_CODE),
    absent("task", "auto", why="its place is taken by runner and convert"),
    absent("tokenizer_mode", "auto", "hf", "fast", why="tokenizers are read from tokenizer.json or converted to it"),
    absent("tokenizer_revision", None, why="a tokenizer of its own is named by a folder"),
    absent("code_revision", None, why=NO_CODE),
    absent("config_format", "auto", "hf", why="models are read in Hugging Face format"),
    absent("hf_config_path", None, why="config.json is read from the model's folder"),
    absent("hf_overrides", {}, why="config.json is taken as it is; edit a copy of it"),
    absent("hf_token", None, False, True, why="the hub's login or HF_TOKEN is used, so that no option holds a secret"),
    absent("model_impl", "auto", why="every model is implemented here"),
    absent("override_attention_dtype", None, why="scores and softmax are float32 always"),
    absent("disable_sliding_window", False, why="a model attends as its config.json says"),
    absent("model_loader_extra_config", {}, why="loading has the options load_format and download_dir only"),
    absent("safetensors_load_strategy", None, "lazy", why="files are mapped and read as they are needed"),
    absent("ignore_patterns", [], "original/**/*", why="only the files that a model needs are downloaded"),
    absent("override_pooler_config", {}, why="its place is taken by pooler_config"),
    absent("served_model_name", None, why="names for requests are an option of `jaxpaged serve`"),
    absent("enable_prompt_embeds", False, why="prompts are text or token ids"),
    absent("enable_return_routed_experts", False, why="experts are not reported"),
    absent("quantization_config", {}, why="quantization 'int8' and 'int4' are what there is"),
    # ---- media
    ForeignOption("limit_mm_per_prompt", {}, asks_for_no_media, NO_MEDIA),
    absent("mm_processor_kwargs", {}, why=NO_MEDIA),
    absent("media_io_kwargs", {}, why=NO_MEDIA),
    absent("allowed_local_media_path", "", why=NO_MEDIA),
    absent("allowed_media_domains", [], why=NO_MEDIA),
    absent("enable_mm_embeds", False, why=NO_MEDIA),
    absent("interleave_mm_strings", False, why=NO_MEDIA),
    pointless("language_model_only", False, bool),
    pointless("skip_mm_profiling", False, bool),
    pointless("disable_mm_preprocessor_cache", False, bool),
    pointless("mm_processor_cache_gb", 4, (int, float)),
    # ---- many devices
    absent("data_parallel_size_local", None, why="all of data_parallel_size engine cores are on this host"),
    absent("data_parallel_rank", None, 0, why="one server has all cores, and a request may name one"),
    absent("data_parallel_backend", "mp", why="cores are processes of this host"),
    absent("data_parallel_hybrid_lb", False, why="one server has all cores"),
    absent("data_parallel_external_lb", False, why="one server has all cores"),
    absent("prefill_context_parallel_size", 1, why="the tokens of a prompt are not split over devices"),
    absent("worker_cls", "auto", why=OWN_WORKERS),
    absent("worker_extension_cls", "", why=OWN_WORKERS),
    absent("max_parallel_loading_workers", None, why=OWN_WORKERS),
    absent("ray_workers_use_nsight", False, why=OWN_WORKERS),
    pointless("disable_custom_all_reduce", False, bool),  # a reduction is always the compiler's own
    # ---- memory and scheduling
    absent("cpu_offload_gb", 0, why=NO_OFFLOAD),
    absent("kv_offloading_size", None, why="kv_offload names tiers and their sizes"),
    pointless("swap_space", 4, (int, float)),  # vLLM ignores it too: what is preempted is computed again
    absent("calculate_kv_scales", False, why="the KV cache has no scales"),
    absent("kv_sharing_fast_prefill", False, why="every layer has a KV cache of its own"),
    absent("prefix_caching_hash_algo", "sha256", "sha256_cbor", why="blocks are known by SHA-256 over canonical CBOR"),
    absent("enable_kv_cache_events", False, why="it is a key of kv_events_config"),
    absent("ec_transfer_config", None, why=NO_MEDIA),
    absent("disable_hybrid_kv_cache_manager", False, why="layers that cache alike always form a group"),
    absent("max_num_partial_prefills", 1, why="prompts are computed in their order"),
    absent("max_long_partial_prefills", 1, why="prompts are computed in their order"),
    absent("scheduler_cls", None, why="there is one scheduler"),
    pointless("disable_cascade_attn", False, bool),
    pointless("enable_sleep_mode", False, bool),  # sleep is always possible
    # ---- LoRA
    absent("enable_lora", False, why=NO_LORA),
    absent("default_mm_loras", None, why=NO_LORA),
    absent("lora_modules", None, why=NO_LORA),
    pointless("max_loras", 1, int),
    pointless("max_lora_rank", 16, int),
    pointless("max_cpu_loras", None, int),
    pointless("lora_dtype", "auto", str),
    pointless("fully_sharded_loras", False, bool),
    # ---- structured outputs, logging
    ForeignOption("structured_outputs_config", {}, asks_for_llguidance, "grammars are compiled by llguidance"),
    absent("guided_decoding_backend", "auto", "guidance", why="grammars are compiled by llguidance"),
    absent("logits_processor_pattern", None, why="requests bring no code"),
    absent("collect_detailed_traces", [], None, why=NO_DETAILED_TRACES),
    absent("show_hidden_metrics_for_version", None, why="there are no hidden metrics"),
    absent("profiler_config", {}, why="recordings have the option profile_dir"),
    pointless("disable_log_stats", False, bool),  # statistics are always kept, and read by get_metrics
    pointless("disable_log_requests", True, bool),  # nothing logs requests
    absent("enable_log_requests", False, why="prompts are not logged"),
    # ---- compiling
    pointless("enforce_eager", False, bool, "there is no eager mode. Every program is compiled; the first start takes "
              "longer, later ones find the programs in the compilation cache or in a bundle (`jaxpaged compile`)"),
    pointless("max_seq_len_to_capture", 8192, int, NO_GRAPHS),
    pointless("cudagraph_capture_sizes", None, (list, tuple), NO_GRAPHS),
    pointless("max_cudagraph_capture_size", None, int, NO_GRAPHS),
    pointless("optimization_level", 2, int, "XLA optimises every program as far as it can"),
    absent("compilation_config", {}, why="compiling has the options token_buckets, compilation_cache_dir and bundle"),
    absent("attention_config", {}, why="its place is taken by attention_backend"),
    absent("kernel_config", {}, why="its place is taken by attention_backend"),
    absent("additional_config", {}, why="there are no platforms from outside"),
)}  # fmt: skip


ARGUMENTS = {
    "lora_request": NO_LORA,
    "prompt_adapter_request": "there are no prompt adapters",
    "mm_processor_kwargs": NO_MEDIA,
    "data_parallel_rank": "one engine core computes, in this process; AsyncLLM has several with data_parallel_size",
    "concurrency_limit": "all beams of a step are computed together",
    "chat_template_content_format": "a chat template shows by itself whether it takes parts of a content",
}
"""Arguments of vLLM's methods that are not here: why not."""


def check_arguments(**given: Any) -> None:
    """Raise RequestError for an argument of `ARGUMENTS` that asks for something: is not None, "auto", or empty."""
    for name, value in given.items():
        each = value if isinstance(value, list | tuple) else [value]
        if any(not (item is None or item in ("auto", {})) for item in each):
            raise RequestError(f"{name} is {value!r}, but {ARGUMENTS[name]}. Leave it out.", name)


def without_neutral(
    options: Mapping[str, Any], foreign_options: Mapping[str, ForeignOption] = FOREIGN_OPTIONS
) -> dict[str, Any]:
    """The options without those `foreign_options` that ask for nothing. Raises ConfigError for what asks for more.

    None means of any option, ours too, that it was not given.
    """
    kept = {}
    for name, value in options.items():
        foreign = foreign_options.get(name)
        if value is None:
            continue
        if foreign is None:
            kept[name] = value
        elif not foreign.accepts(value):
            raise ConfigError(f"{name} is {value!r}, but {foreign.why}. Leave it out.")
        elif foreign.word and not same(value, foreign.default):
            logger.warning("%s=%r changes nothing: %s.", name, value, foreign.word)
    return kept
