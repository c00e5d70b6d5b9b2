"""vLLM's engine options that this engine does not have, and the values at which they ask for nothing.

A script or a command line written for vLLM names many of them at their defaults. `without_neutral` lets those through
and refuses every other value by the option's name, with the reason and with what to do: the only place that decides
it, for Python, YAML files and flags alike. Some options change only how vLLM works, never what it answers; they are let
through, with a word where one helps. Some have another name here; they become ours.

The list has every option of vLLM's releases from 0.6 to 0.30. This module knows none of our own options, except for
those that others become.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, RequestError, is_installed, shown_option

logger = logging.getLogger(__name__)

LEAVE_OUT = "Leave it out."


@dataclass(frozen=True)
class ForeignOption:
    """One option. `accepts` tells values that ask for nothing; for others, `why` is the second half of a sentence, and
    `do` is the sentence after it.

    `word` is said, once an engine is made, of an accepted value that is not the default: what it means here. `becomes`:
    an accepted value as options of ours, by name. `many`: the flag takes several words.
    """

    name: str
    default: Any
    accepts: Callable[[Any], bool]
    why: str = ""
    do: str = LEAVE_OUT
    word: str = ""
    becomes: Callable[[Any], dict[str, Any]] | None = None
    many: bool = False


def absent(name: str, *neutral: Any, why: str, do: str = LEAVE_OUT, many: bool = False) -> ForeignOption:
    """An option for something that is not there: only `neutral` values, of which the first is the default, pass."""
    return ForeignOption(
        name, neutral[0], lambda value: any(same(value, each) for each in neutral), why, do, many=many
    )  # fmt: skip


def pointless(
    name: str, default: Any, kind: type | tuple[type, ...], word: str = "", *, many: bool = False
) -> ForeignOption:
    """An option that changes nothing here: every value of its kind passes, with a word if there is one to say."""
    why = f"it must be {' or '.join(each.__name__ for each in kinds_of(kind))}"
    return ForeignOption(name, default, of_kind(kind), why, word=word, many=many)


def renamed(
    name: str, kind: type | tuple[type, ...], becomes: Callable[[Any], dict[str, Any]], default: Any = None
) -> ForeignOption:
    """An option that has another name here."""
    why = f"it must be {' or '.join(each.__name__ for each in kinds_of(kind))}"
    return ForeignOption(name, default, of_kind(kind), why, becomes=becomes)


def kinds_of(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def of_kind(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    """Whether a value is of a kind, where True is no number."""
    kinds = kinds_of(kind)
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def same(value: Any, neutral: Any) -> bool:
    """Equal, where True is not 1; empty collections of any kind are, and a list is equal to a tuple."""
    if isinstance(neutral, dict | list | tuple):
        return isinstance(value, Mapping | list | tuple | set) and list(value) == list(neutral)
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def asks_for_llguidance(value: Any) -> bool:
    """Whether structured outputs are left to the library that is used here."""
    backends = ("auto", "guidance")
    return isinstance(value, Mapping) and all(
        (key == "backend" and each in backends) or each in (None, "", False) for key, each in value.items()
    )


def asks_for_own_device(value: Any) -> bool:
    """Whether it is the kind of device that jax takes by itself."""
    return value == "auto" or (isinstance(value, str) and {"cuda": "gpu"}.get(value, value) == device_kind())


def device_kind() -> str:
    """The kind of device that jax takes, as far as the environment and what is installed tell."""
    first = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if first:
        return {"cuda": "gpu"}.get(first, first)
    plugins = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
    return next((kind for kind, module in plugins.items() if is_installed(module)), "cpu")


OWN_WORKERS = "workers are the engine's own"
SEE_PLUGINS = "a file says what it adds by a jaxpaged.Plugin (guides/extending.md)"
SEE_PARALLEL = "See tensor_parallel_size, distributed_executor_backend and nnodes."
NO_MEDIA = "models take text only"
NO_CODE = "code from a model's repository is never run"
NO_PROMPT_ADAPTERS = "prompt adapters are not supported"
NO_GRAPHS = "there are no CUDA graphs: XLA compiles a program for every step size (option token_buckets)"
NO_OFFLOAD = "weights stay on the devices"
SMALLER_WEIGHTS = "Give quantization 'int8' or 'int4', or more devices (tensor_parallel_size)."
NO_DETAILED_TRACES = "a trace shows queue, prefill and decode"
RECORD = "Record what the devices do with profile_dir and start_profile."
NO_SUCH_METRIC = "there is no such metric"
SEE_METRICS = "Leave it out; /metrics and get_metrics show what there is."
OWN_KERNELS = "kernels are chosen by the device (option attention_backend)"
SPECULATION = 'Give speculative_config, such as \'{"method": "ngram", "num_speculative_tokens": 3}\'.'
ONE_SERVER = "one server has all cores"
OTHER_HOSTS = "Give nnodes, node_rank and master_addr for cores on several hosts."
BIND = "Start jaxpaged with numactl or taskset."
OF_SERVER = "it is an option of `jaxpaged serve`"
TEXT, NUMBER, LIST = str, (int, float), (list, tuple, set, str)

MODEL = (
    pointless("trust_remote_code", False, bool, f"{NO_CODE}; models are implemented here"),
    absent("task", "auto", why="its place is taken by runner and convert",
           do="Give runner 'generate' or 'pooling', and convert 'embed' or 'classify'."),
    absent("tokenizer_mode", "auto", "hf", "fast", why="tokenizers are read from tokenizer.json or converted to it"),
    absent("tokenizer_revision", None, why="a tokenizer of its own is named by a folder",
           do="Download that revision, and give its folder as tokenizer."),
    absent("code_revision", None, why=NO_CODE),
    absent("config_format", "auto", "hf", why="a folder's files say their format", do="Leave it out."),
    absent("hf_config_path", None, why="config.json is read from the model's folder", do="Copy it there."),
    absent("hf_token", None, False, True, why="no option holds a secret",
           do="Log in with `hf auth login`, or set HF_TOKEN in the environment."),
    absent("model_impl", "auto", "vllm", why="every model is implemented here"),
    absent("model_weights", "", why="weights lie in the model's folder"),
    absent("model_class_overrides", {}, why="every model is implemented here"),
    absent("override_attention_dtype", None, why="scores and softmax are float32 always"),
    absent("disable_sliding_window", False, why="a model attends as its config.json says",
           do="Give hf_overrides '{\"sliding_window\": null}' where the model may attend to all tokens."),
    pointless("model_loader_extra_config", {}, dict, "files are mapped and read as they are needed"),
    absent("safetensors_load_strategy", None, "lazy", "eager", "prefetch",
           why="files are mapped and read as they are needed"),
    pointless("safetensors_prefetch_num_threads", 8, int),
    pointless("safetensors_prefetch_block_size", 16 * 2**20, int),
    absent("ignore_patterns", [], "original/**/*", ["original/**/*"], many=True,
           why="only the files that a model needs are downloaded"),
    pointless("use_tqdm_on_load", True, bool),
    absent("pt_load_map_location", "cpu", why="weights are read from safetensors files"),
    renamed("override_pooler_config", dict, lambda value: {"pooler_config": value}, {}),
    absent("served_model_name", None, why=OF_SERVER, do="Leave it out; requests of LLM name no model.", many=True),
    absent("enable_prompt_embeds", False, why="prompts are text or token ids"),
    absent("use_fp64_gumbel", False, why="noise is drawn in float32"),
    absent("quantization_config", {}, why="quantization says how weights are rounded", do="Give 'int8' or 'int4'."),
    renamed("quantization_param_path", (str, type(None)), lambda value: {"kv_cache_scales": value} if value else {}),
    pointless("allow_deprecated_quantization", False, bool),
    absent("rope_scaling", None, {}, why="it is a field of config.json", do="Give it in hf_overrides."),
    absent("rope_theta", None, why="it is a field of config.json", do="Give it in hf_overrides."),
    pointless("renderer_num_workers", 1, int),
    pointless("tokenizer_pool_size", 0, int),
    pointless("tokenizer_pool_type", "ray", str),
    pointless("tokenizer_pool_extra_config", {}, dict),
    pointless("intial_incremental_detokenization_offset", 5, int),
    ForeignOption("device", "auto", asks_for_own_device, "jax chooses the device",
                  "Set JAX_PLATFORMS to cpu, cuda or tpu in the environment."),
)  # fmt: skip
MEDIA = (
    absent("ec_manager_config", {}, why="encoder_cache_size says how many embeddings of pictures are kept"),
    absent("diffusion_config", {}, why="models make text only"),
    renamed("disable_mm_preprocessor_cache", bool, lambda off: {"mm_processor_cache_gb": 0} if off else {}, False),
    renamed("enable_multimodal_encoder_data_parallel", bool,
            lambda on: {"mm_encoder_tp_mode": "data"} if on else {}, False),
    pointless("skip_mm_profiling", False, bool),
    pointless("mm_processor_cache_type", "lru", str),
    pointless("mm_hasher_algorithm", "blake3", str),
    pointless("mm_shm_cache_max_object_size_mb", 128, int),
    pointless("mm_encoder_attn_backend", None, str),
    pointless("mm_encoder_attn_dtype", None, str),
    pointless("mm_encoder_fp8_scale_path", None, str),
    pointless("mm_encoder_fp8_scale_save_path", None, str),
    pointless("mm_encoder_fp8_scale_save_margin", 1.0, NUMBER),
    pointless("video_pruning_rate", None, NUMBER),
    pointless("video_pruning_method", "evs", str),
    pointless("mm_tensor_ipc", "direct_rpc", str),
    pointless("mm_processor_device", "auto", str),
    pointless("mm_ipc_gpu_memory_gb", 0, NUMBER),
    pointless("mm_device_do_normalize", False, bool),
    pointless("enable_mm_processor_stats", False, bool),
)  # fmt: skip
STATE_SPACES = (  # layers of Mamba and its kin: a model that has some is refused by its architecture
    pointless("mamba_config", {}, dict),
    pointless("mamba_backend", "triton", str),
    pointless("mamba_ssu_algorithm", None, str),
    pointless("mamba_cache_dtype", "auto", str),
    pointless("mamba_ssm_cache_dtype", "auto", str),
    pointless("mamba_block_size", None, int),
    pointless("mamba_cache_mode", None, str),
    pointless("mamba_cache_philox_rounds", 0, int),
    pointless("enable_mamba_cache_stochastic_rounding", False, bool),
    pointless("enable_mamba_fine_grained_prefix_cache", False, bool),
    pointless("use_replayssm", False, bool),
    pointless("replayssm_buffer_len", 16, int),
    pointless("gdn_prefill_backend", None, str),
    pointless("kda_prefill_backend", None, str),
)
DEVICES = (
    absent("data_parallel_size_local", None, why="all of data_parallel_size engine cores are on this host",
           do=OTHER_HOSTS),
    absent("data_parallel_rank", None, 0, why=f"{ONE_SERVER}, and a request may name one"),
    absent("data_parallel_backend", "mp", why="cores are processes of this host"),
    absent("data_parallel_hybrid_lb", False, why=ONE_SERVER),
    absent("data_parallel_external_lb", False, why=ONE_SERVER),
    absent("data_parallel_multi_port_external_lb", False, why=ONE_SERVER),
    absent("data_parallel_address", None, why=ONE_SERVER, do=OTHER_HOSTS),
    absent("data_parallel_rpc_port", None, why=ONE_SERVER, do=OTHER_HOSTS),
    absent("data_parallel_start_rank", None, 0, why=ONE_SERVER, do=OTHER_HOSTS),
    absent("prefill_context_parallel_size", 1, why="the tokens of a prompt are not split over devices",
           do="Give tensor_parallel_size."),
    absent("worker_cls", "auto", why=OWN_WORKERS, do=SEE_PARALLEL),
    absent("worker_use_ray", False, why=OWN_WORKERS, do="Give distributed_executor_backend 'ray'."),
    pointless("max_parallel_loading_workers", None, int),
    absent("ray_workers_use_nsight", False, why=OWN_WORKERS, do=RECORD),
    absent("device_ids", None, why="jax chooses the devices",
           do="Set CUDA_VISIBLE_DEVICES or TPU_VISIBLE_CHIPS in the environment."),
    absent("numa_bind", False, why="processes run where the system puts them", do=BIND),
    absent("numa_bind_nodes", None, [], why="processes run where the system puts them", do=BIND, many=True),
    absent("numa_bind_cpus", None, [], why="processes run where the system puts them", do=BIND, many=True),
    absent("cpu_distributed_timeout_seconds", None, why="one time-out holds for all of them",
           do="Give distributed_timeout_seconds."),
    absent("enable_elastic_ep", False, why="the number of devices is fixed at the start"),
    absent("fault_tolerance_config", {}, why="an engine core that dies is replaced as it was",
           do="Give `jaxpaged serve` max_restarts."),
    pointless("enable_fault_tolerance", False, bool, "an engine core that dies is replaced (max_restarts)"),
    pointless("disable_custom_all_reduce", False, bool),  # a reduction is always the compiler's own
    pointless("disable_nccl_for_dp_synchronization", False, bool),
    pointless("dcp_comm_backend", None, str),
    pointless("dcp_q_replicate", False, bool),
    pointless("dcp_kv_cache_interleave_size", 1, int),
    pointless("cp_kv_cache_interleave_size", 1, int),
    pointless("dp_sync_interval", 16, int),
    pointless("enable_batch_sharded_sampling", False, bool),
    pointless("enable_ep_weight_filter", False, bool),
    pointless("all2all_backend", "allgather_reducescatter", str, "what devices send each other is XLA's choice"),
    pointless("expert_placement_strategy", "linear", str, "experts are dealt in their order (see enable_eplb)"),
    pointless("enable_dbo", False, bool, "what is computed while devices talk is XLA's choice"),
    pointless("enable_microbatching", False, bool, "what is computed while devices talk is XLA's choice"),
    pointless("ubatch_size", 0, int),
    pointless("dbo_decode_token_threshold", 32, int),
    pointless("dbo_prefill_token_threshold", 512, int),
    absent("num_redundant_experts", 0, why="it is a key of eplb_config", do="Give it there."),
    absent("eplb_window_size", 1000, why="it is a key of eplb_config", do="Give window_size there."),
    absent("eplb_step_interval", 3000, why="it is a key of eplb_config", do="Give step_interval there."),
    absent("eplb_log_balancedness", False, why="it is a key of eplb_config", do="Give log_balancedness there."),
)  # fmt: skip
MEMORY = (
    absent("cpu_offload_gb", 0, why=NO_OFFLOAD, do=SMALLER_WEIGHTS),
    absent("cpu_offload_params", [], why=NO_OFFLOAD, do=SMALLER_WEIGHTS, many=True),
    absent("offload_backend", "auto", why=NO_OFFLOAD, do=SMALLER_WEIGHTS),
    absent("offload_group_size", 0, why=NO_OFFLOAD, do=SMALLER_WEIGHTS),
    absent("offload_params", [], why=NO_OFFLOAD, do=SMALLER_WEIGHTS, many=True),
    pointless("offload_num_in_group", 1, int),
    pointless("offload_prefetch_step", 1, int),
    ForeignOption(
        "kv_offloading_size", None, lambda value: of_kind(NUMBER)(value) and value > 0, "it must be a number of GiB, "
        "above 0", "Give 4, or leave it out.", becomes=lambda value: {"kv_offload": f"host={value:g}G"},
    ),
    absent("kv_offloading_backend", "native", why="LMCache is a tier of kv_offload",
           do="Give kv_offload 'host=4G,lmcache=lm://HOST:PORT'."),
    pointless("swap_space", 4, NUMBER),  # vLLM ignores it too: what is preempted is computed again
    pointless("preemption_mode", "recompute", str, "a request that is preempted is always computed again"),
    absent("calculate_kv_scales", False, why="scales are found beforehand, or token by token",
           do="Run `jaxpaged calibrate`, or give kv_cache_dtype 'int8_per_token_head' or 'fp8_per_token_head'."),
    absent("kv_sharing_fast_prefill", False, why="every layer has a KV cache of its own"),
    absent("prefix_caching_hash_algo", "sha256", "sha256_cbor", why="blocks are known by SHA-256 over canonical CBOR"),
    pointless("prefix_cache_retention_interval", 0, int),
    pointless("prefix_match_unit", None, int),
    pointless("attn_group_size", None, int),
    absent("enable_kv_cache_events", False, why="it is a key of kv_events_config", do="Give it there."),
    absent("disable_hybrid_kv_cache_manager", False, why="layers that cache alike always form a group"),
    pointless("enable_sleep_mode", False, bool),  # sleep is always possible
    pointless("enable_cumem_allocator", False, bool),
    pointless("enable_nccl_comm_suspend", False, bool),
    absent("weight_transfer_config", {}, {"backend": "file"}, why="weights come in files, or from a process",
           do="Give `jaxpaged serve` allowed_weight_dirs or allowed_weight_hosts."),
)  # fmt: skip
SCHEDULING = (
    absent("max_num_partial_prefills", 1, why="prompts are computed in their order"),
    absent("max_long_partial_prefills", 1, why="prompts are computed in their order"),
    absent("max_num_scheduled_tokens", None, why="one limit holds for a step", do="Give max_num_batched_tokens."),
    absent("scheduler_cls", None, why="there is one scheduler"),
    absent("max_num_queued_reqs", None, why=OF_SERVER),
    absent("max_num_queued_tokens", None, why=OF_SERVER),
    absent("shutdown_timeout", 0, why=OF_SERVER),
    pointless("scheduler_reserve_full_isl", True, bool),
    pointless("scheduler_delay_factor", 0, NUMBER),
    pointless("watermark", 0, NUMBER),
    pointless("prefill_schedule_interval", 1, int),
    pointless("use_v2_block_manager", True, bool),
    pointless("num_lookahead_slots", 0, int),
    pointless("multi_step_stream_outputs", True, bool),
    pointless("disable_async_output_proc", False, bool),
    pointless("disable_cascade_attn", False, bool),
    absent("performance_mode", "balanced", why="sizes of steps are options of their own",
           do="Give max_num_seqs and max_num_batched_tokens."),
)  # fmt: skip
ADAPTERS = (
    absent("lora_modules", None, [], why=OF_SERVER, many=True),
    absent("default_mm_loras", None, {}, why="a request names its adapter, whatever its prompt holds",
           do="Give lora_modules to `jaxpaged serve`, and name one as the model of a request."),
    absent("qlora_adapter_name_or_path", None, why="adapters are loaded beside any model",
           do="Give enable_lora, and name it in requests."),
    pointless("lora_extra_vocab_size", 256, int),
    pointless("long_lora_scaling_factors", None, (*LIST, int, float), many=True),
    pointless("fully_sharded_loras", False, bool),
    pointless("enable_lora_bias", False, bool),
    pointless("specialize_active_lora", False, bool),
    pointless("enable_mixed_moe_lora_format", False, bool),
    pointless("enable_moe_shared_loras", False, bool),
    absent("enable_prompt_adapter", False, why=NO_PROMPT_ADAPTERS),
    absent("prompt_adapters", None, [], why=NO_PROMPT_ADAPTERS, many=True),
    pointless("max_prompt_adapters", 1, int),
    pointless("max_prompt_adapter_token", 0, int),
)  # fmt: skip
SPECULATIVE = (
    renamed("spec_method", str, lambda value: {"speculative_config": {"method": value}}),
    renamed("spec_model", str, lambda value: {"speculative_config": {"model": value}}),
    renamed("spec_tokens", int, lambda value: {"speculative_config": {"num_speculative_tokens": value}}),
    *(absent(name, None, why="it is a part of speculative_config", do=SPECULATION) for name in (
        "speculative_model", "num_speculative_tokens", "speculative_model_quantization", "speculative_max_model_len",
        "speculative_draft_tensor_parallel_size", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min",
        "speculative_disable_by_batch_size", "typical_acceptance_sampler_posterior_threshold",
        "typical_acceptance_sampler_posterior_alpha",
    )),
    absent("spec_decoding_acceptance_method", "rejection_sampler", why="drafts never change what is drawn"),
    pointless("speculative_disable_mqa_scorer", False, bool),
    absent("disable_logprobs_during_spec_decoding", None, False, why="log probabilities are reported with drafts, too"),
)  # fmt: skip
OUTPUTS = (
    ForeignOption("structured_outputs_config", {}, asks_for_llguidance, "grammars are compiled by llguidance"),
    absent("guided_decoding_backend", "auto", "guidance", why="grammars are compiled by llguidance"),
    pointless("guided_decoding_disable_fallback", False, bool),
    absent("guided_decoding_disable_any_whitespace", False, why="white space in JSON is the model's choice"),
    absent("guided_decoding_disable_additional_properties", False, why="objects are as their schema says",
           do="Write \"additionalProperties\": false into it."),
    absent("reasoning_parser", None, "", why=OF_SERVER),
    absent("reasoning_parser_plugin", None, "", why=SEE_PLUGINS, do="Give the file as plugin."),
    absent("reasoning_config", {}, why="how thinking is marked is an option of `jaxpaged serve`",
           do="Give reasoning_parser there."),
    absent("tokens_only", False, why="there is no such server"),
    absent("logits_processor_pattern", None, why="requests bring no code", do="Give logits_processors."),
)  # fmt: skip
TELLING = (
    absent("collect_detailed_traces", [], None, why=NO_DETAILED_TRACES, do=RECORD, many=True),
    absent("show_hidden_metrics_for_version", None, why="there are no hidden metrics", do=SEE_METRICS),
    absent("otlp_metrics_endpoint", None, why="metrics are read, not sent", do="Let a collector read /metrics."),
    absent("per_request_spec_decode_metrics", None, "none", why=NO_SUCH_METRIC, do=SEE_METRICS),
    absent("kv_cache_metrics", False, why=NO_SUCH_METRIC, do=SEE_METRICS),
    pointless("kv_cache_metrics_sample", 0.01, NUMBER),
    absent("cudagraph_metrics", False, why=NO_SUCH_METRIC, do=SEE_METRICS),
    absent("enable_mfu_metrics", False, why=NO_SUCH_METRIC, do=SEE_METRICS),
    absent("enable_layerwise_nvtx_tracing", False, why="layers are traced by jax's profiler", do=RECORD),
    absent("enable_logging_iteration_details", False, why="steps are not logged", do=SEE_METRICS),
    absent("profiler_config", {}, why="recordings have the option profile_dir", do="Give profile_dir."),
    pointless("jit_monitor_mode", "warn", str),
    pointless("jit_monitor_verbose", False, bool),
    pointless("aggregate_engine_logging", False, bool),
    pointless("disable_log_stats", False, bool),  # statistics are always kept, and read by get_metrics
    pointless("disable_log_requests", True, bool),  # nothing logs requests
    absent("enable_log_requests", False, why="prompts are not logged",
           do="Leave it out; `jaxpaged serve` logs path, status and duration of every request."),
    pointless("fail_on_environ_validation", False, bool),
)  # fmt: skip
COMPILING = (
    pointless("enforce_eager", False, bool, "there is no eager mode. Every program is compiled; the first start takes "
              "longer, later ones find the programs in the compilation cache or in a bundle (`jaxpaged compile`)"),
    pointless("max_seq_len_to_capture", 8192, int, NO_GRAPHS),
    pointless("max_context_len_to_capture", None, int, NO_GRAPHS),
    pointless("cudagraph_capture_sizes", None, (*LIST, int), NO_GRAPHS, many=True),
    pointless("cuda_graph_sizes", [], (*LIST, int), NO_GRAPHS, many=True),
    pointless("max_cudagraph_capture_size", None, int, NO_GRAPHS),
    pointless("optimization_level", 2, int, "XLA optimises every program as far as it can"),
    pointless("compilation_config", {}, (dict, int), "compiling has the options token_buckets, compilation_cache_dir "
              "and bundle"),
    pointless("attention_config", {}, dict, OWN_KERNELS),
    pointless("kernel_config", {}, dict, OWN_KERNELS),
    pointless("ir_op_priority", {}, dict, OWN_KERNELS),
    pointless("moe_backend", "auto", str, OWN_KERNELS),
    pointless("linear_backend", "auto", str, OWN_KERNELS),
    pointless("enable_flashinfer_autotune", False, bool),
    pointless("enable_bf16x3_router_gemm", False, bool),
    absent("additional_config", {}, why="there are no platforms from outside"),
    absent("override_neuron_config", {}, why="there are no platforms from outside"),
)  # fmt: skip

FOREIGN_OPTIONS: dict[str, ForeignOption] = {
    each.name: each
    for each in (
        *MODEL, *MEDIA, *STATE_SPACES, *DEVICES, *MEMORY, *SCHEDULING, *ADAPTERS, *SPECULATIVE, *OUTPUTS, *TELLING,
        *COMPILING,
    )
}  # fmt: skip

QUANTIZATIONS = (
    "int8", "int4", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block", "fp8", "gptq", "awq", "compressed-tensors",
    "modelopt", "mxfp4", "gguf",
)  # fmt: skip
"""What weights can be rounded to when they are loaded, and names of formats of checkpoints."""
SAME_QUANTIZATION = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
    "cpu_awq": "awq",
    "cpu_gptq": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
    "int8_per_channel_weight_only": "int8",
    "modelopt_fp4": "modelopt",
    "ptpc_fp8": "fp8_per_channel",
    "tpu_int8": "int8",
}
"""vLLM's names for the same."""
CONVERT_THEM = "Serve the 16-bit model with quantization 'int4' or 'int8', which are rounded when it is loaded."
NOT_READ = f"checkpoints in this format are not read. {CONVERT_THEM}"
ONLY_SAFETENSORS = "weights are read from safetensors and GGUF files. Name a file, a folder or a hub id that has them."
VALUES: dict[str, dict[str, str]] = {
    "quantization": {
        **dict.fromkeys((
            "aqlm", "auto-round", "auto_round", "bitblas", "bitsandbytes", "deepspeedfp", "fbgemm_fp8", "fp_quant",
            "gptq_bitblas", "gptq_marlin_24", "hqq", "humming", "inc", "ipex", "marlin", "modelopt_mixed",
            "modelopt_mxfp8", "moe_wna16", "mxfp8", "neuron_quant", "nvfp4", "petit_nvfp4", "qqq", "quark",
            "squeezellm", "torchao", "deepseek_v4_fp8",
        ), NOT_READ),
        "cpu_wna16": "the format is known from the checkpoint. Leave it out.",
        **dict.fromkeys(
            ("experts_int8", "rtn"), "all weights are rounded alike. Give 'int8' or 'int4'.",
        ),
        "online": "it takes a dictionary in vLLM. Give 'fp8_per_channel', 'fp8_per_block', 'fp8_per_tensor' or 'int8'.",
    },
    "kv_cache_dtype": dict.fromkeys((
        "fp8_ds_mla", "fp8_inc", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "turboquant_3bit_nc",
        "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4",
    ), "keys and values are cached in 8 bits or more. Give 'int8_per_token_head' or 'fp8'."),
    "load_format": {
        **dict.fromkeys(
            ("bitsandbytes", "npcache", "pt", "sharded_state", "tensorizer"), ONLY_SAFETENSORS
        ),
        **dict.fromkeys(("hf", "mistral"), "a folder's files say their format. Leave it out."),
        **dict.fromkeys(
            ("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded"),
            "files are mapped and read as they are needed. Give 'safetensors'.",
        ),
    },
    "attention_backend": dict.fromkeys((
        "cpu_attn", "custom", "cutlass_mla", "flash_attn", "flash_attn_diffkv", "flash_attn_mla",
        "flash_attn_vllm_v1", "flashinfer", "flashinfer_mla", "flashinfer_mla_sparse", "flashmla", "flashmla_sparse",
        "flex_attention", "ipex", "pallas", "pallas_vllm_v1", "rocm_aiter_fa", "rocm_aiter_mla",
        "rocm_aiter_unified_attn", "rocm_attn", "rocm_flash", "torch_sdpa", "tree_attn", "triton_attn",
        "triton_attn_vllm_v1", "triton_mla", "xformers",
    ), "that is a kernel of vLLM's. Leave it out: the device decides."),
    "distributed_executor_backend": {
        "external_launcher": "processes are started by the engine, or one on each host. Give nnodes, node_rank and "
                             "master_addr.",
    },
    "runner": dict.fromkeys(
        ("diffusion", "draft"), "that is no engine of its own. Give 'generate', and speculative_config for drafts."
    ),
    "convert": {
        "reward": "token rewards are not computed. Give 'classify' for a model with one score for a sequence.",
    },
}  # fmt: skip
"""Of options that are ours too, vLLM's values that are not here: the second half of a sentence, and what to do."""


ARGUMENTS = {
    "prompt_adapter_request": NO_PROMPT_ADAPTERS,
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
    """The options without those `foreign_options` that ask for nothing, and with ours for those that have another name.

    None means of any option, ours too, that it was not given. Raises ConfigError for what asks for more.
    """
    kept = {name: value for name, value in options.items() if value is not None and name not in foreign_options}
    for name, foreign in foreign_options.items():
        value = options.get(name)
        if value is None:
            continue
        if not foreign.accepts(value):
            raise ConfigError(f"{name} is {shown_option(name, value)}, but {foreign.why}. {foreign.do}")
        if same(value, foreign.default):
            continue
        if foreign.word:
            logger.warning("%s=%s changes nothing: %s.", name, shown_option(name, value), foreign.word)
        if foreign.becomes is not None:
            add_renamed(kept, name, foreign.becomes(value))
    return kept


def add_renamed(kept: dict[str, Any], name: str, ours: Mapping[str, Any]) -> None:
    """Put what the option `name` became among those that are `kept`. Raises ConfigError where they say it already."""
    for option, value in ours.items():
        before = kept.get(option, {})
        together = isinstance(before, Mapping) and isinstance(value, Mapping) and not before.keys() & value.keys()
        if option in kept and not together:
            raise ConfigError(f"{name} and {option} are both given, and mean the same. Leave {name} out.")
        kept[option] = {**before, **value} if together else value
