"""Every option of the engine, by topic: its name, type, default, help and limits stand here and nowhere else.

The field names are vLLM's flag names, so `--max-num-seqs` on the command line, `max_num_seqs:` in a YAML file and
`LLM(max_num_seqs=...)` are the same option. A field's help text and choices are in its metadata; command line
and documentation are generated from it.
"""

from dataclasses import dataclass
from typing import Any

from jaxpaged.config.cache_types import CHOICES
from jaxpaged.config.expert_balance import ExpertBalance, expert_balance_of
from jaxpaged.config.option_checks import option
from jaxpaged.config.speculation import checked_speculation
from jaxpaged.config.vllm_options import QUANTIZATIONS, SAME_QUANTIZATION, VALUES
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.options import KVOffload, offload_of
from jaxpaged.kv_store.peering import DEFAULT_TRANSPORT, TRANSPORTS
from jaxpaged.kv_store.transfer_params import DEFAULT_ADDRESS, DEFAULT_LEASE_SECONDS, DEFAULT_PEERS, ROLES
from jaxpaged.pooling import CONVERSIONS, RUNNERS

EMBEDDED_MODEL = "demo"
"""The name of the model that ships inside the package."""
RAW_AND_PROCESSED = "raw_and_processed_logprobs"
"""A `logprobs_mode` of our own."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how requests may use it."""

    model: str = option(EMBEDDED_MODEL, "a folder in Hugging Face format, a hub id, or 'demo', the embedded model")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer (default: the model's own)")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and answers are token ids")
    revision: str | None = option(None, "branch, tag or commit of the model on the hub")
    hf_overrides: dict[str, Any] = option(
        {}, "fields that replace those of the model's config.json, as JSON such as '{\"rope_theta\": 1000000.0}'"
    )
    dtype: str = option(
        "auto",
        "type of weights and activations",
        choices=("auto", "bfloat16", "float16", "float32"),
        aliases={"half": "float16", "float": "float32"},
    )
    quantization: str | None = option(
        None,
        "round 16-bit weights while they are loaded: 'int8' and the kinds of 'fp8' halve them, 'int4' stores most of "
        "them in 4.5 bits. The format of a quantised checkpoint, such as 'awq', is known without it",
        choices=QUANTIZATIONS,
        aliases=SAME_QUANTIZATION,
        foreign=VALUES["quantization"],
    )
    quantized_form: str = option(
        "auto",
        "what weights of a quantised checkpoint are on the devices: 'stored' as they lie in the file, 'rows' of 8 "
        "bits with a scale for each output, or '16bit'; 'auto' means what the device multiplies best. Guide: "
        "guides/quantization.md",
        choices=("auto", "stored", "rows", "16bit"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output in tokens (default: 'auto', the model's own limit)",
        minimum=1,
        aliases={"auto": None, -1: None},
    )
    seed: int = option(
        0,
        "seed for dummy weights, and for the seeds of requests that bring none",
        minimum=0,
        maximum=2**63 - 1,
    )
    max_logprobs: int = option(
        20,
        "most log probabilities per token that a request may ask for; -1 means all",
        minimum=-1,
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "what log probabilities show: values before or after the sampling parameters, normalised or not; "
        "raw_and_processed_logprobs are raw ones with the drawn token's processed one beside them",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits", RAW_AND_PROCESSED),
    )
    enable_trace_replay: bool = option(
        False,
        "let requests say with trace_decode_token_ids which tokens are drawn; 4 bytes on the devices for each token of "
        "max_model_len and each of max_num_seqs. Guide: guides/training.md",
    )
    return_sampling_mask: bool = option(
        False,
        "tell of each token that was drawn with limits which tokens these left; requests with other limits need a "
        "top_k. Guide: guides/training.md",
    )
    enable_return_routed_experts: bool = option(
        False,
        "tell which experts each token of a finished request went to. Guide: guides/training.md",
    )
    generation_config: str = option(
        "auto",
        "source of the default sampling parameters: the model's own file, or vLLM's defaults",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] = option({}, "sampling defaults that override generation_config.json")
    chat_template: str | None = option(None, "a Jinja file, or a template in one line, in place of the model's own")
    logits_processors: tuple[Any, ...] = option((), "custom logits processors as classes, or as 'module:Class'")
    runner: str = option(
        "auto",
        "purpose of the engine: generate text, or pooling (embeddings, scores)",
        choices=RUNNERS,
        foreign=VALUES["runner"],
    )
    convert: str = option(
        "auto",
        "result of a pooling engine: embed, or classify with the checkpoint's classifier",
        choices=CONVERSIONS,
        foreign=VALUES["convert"],
    )
    pooler_config: dict[str, Any] = option(
        {}, "pooling_type LAST, MEAN or CLS (MEAN and CLS without prefix caching), and use_activation, as JSON"
    )


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(
        None,
        "tokens per KV block, over all devices that hold a context together (default: what the device's kernel "
        "prefers)",
        minimum=1,
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of cached keys and values; 'auto' means the model's. 8 bits: fp8 (fp8_e4m3), fp8_e5m2 and int8, with "
        "scales of layers and heads; int8_per_token_head and fp8_per_token_head. Guide: guides/kv_cache_dtype.md",
        choices=CHOICES,
        foreign=VALUES["kv_cache_dtype"],
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = option(
        (),
        "layers that keep the model's type where kv_cache_dtype is of 8 bits: their numbers, or sliding_window, "
        "full_attention",
        several=True,
    )
    kv_cache_scales: str | None = option(
        None,
        "JSON file with the scales of layers or heads for kv_cache_dtype fp8, fp8_e5m2 and int8, as `jaxpaged "
        "calibrate` writes it; default: the checkpoint's",
        not_empty=True,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of device memory for weights, temporaries and KV blocks", above=0.0, maximum=1.0
    )
    kv_cache_memory_bytes: int | None = option(None, "bytes per device for KV blocks; replaces the share", minimum=1)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks; replaces what is measured", minimum=2)
    enable_prefix_caching: bool = option(True, "reuse KV blocks of prompts that begin alike")
    kv_events_config: dict[str, Any] = option(
        {},
        "tell routers over ZeroMQ what enters and leaves the prefix cache, as vLLM does: enable_kv_cache_events "
        "true, and endpoint, replay_endpoint, topic, ..., see engine/observability/kv_event_publisher.py",
    )
    kv_offload: str | None = option(
        None,
        "keep computed keys and values besides the device, fastest tier first: 'host=8G,disk=PATH:200G', also "
        "redis=redis://HOST:PORT, s3=s3://BUCKET/PREFIX and lmcache=lm://HOST:PORT (or grpc://). All but the host's "
        "outlive the engine. pages=int8 or pages=fp8 keeps half the bytes, rounded. Guide: guides/kv_tiers.md",
        not_empty=True,
    )
    kv_offload_secrets: str | None = option(
        None,
        "JSON file with redis_username, redis_password, and page_secret to sign pages with; credentials of S3 "
        "come from AWS's environment variables",
        not_empty=True,
    )
    kv_role: str | None = option(
        None,
        "compute prompts for other engines (kv_producer), go on from what others computed (kv_consumer), or "
        "both. Guide: guides/kv_transfer.md",
        choices=ROLES,
    )
    kv_address: str = option(
        DEFAULT_ADDRESS,
        "HOST:PORT where other engines fetch the keys and values of prompts; port 0 takes any free one",
    )
    kv_peers: str = option(
        DEFAULT_PEERS,
        "hosts from which keys and values may be fetched, as HOST or HOST:PORT with commas between; no "
        "others are asked",
        not_empty=True,
    )
    kv_lease_seconds: float = option(
        DEFAULT_LEASE_SECONDS,
        "seconds for which keys and values of a prompt wait in host memory to be fetched",
        above=0.0,
        maximum=86400.0,
    )
    kv_transport: str = option(
        DEFAULT_TRANSPORT,
        "how pages come from other engines: through memory from those on this host and else over "
        "TCP (auto), or over TCP only",
        choices=TRANSPORTS,
    )
    kv_ssl_certfile: str | None = option(
        None,
        "file with the certificate (PEM) that other engines see; it switches on TLS between engines",
        not_empty=True,
    )
    kv_ssl_keyfile: str | None = option(
        None,
        "file with the certificate's key, where that is a file of its own",
        not_empty=True,
    )
    kv_ssl_ca_certs: str | None = option(
        None,
        "file with the authorities (PEM) that sign other engines' certificates, which must then have one",
        not_empty=True,
    )
    kv_transfer_config: dict[str, Any] = option(
        {},
        "vLLM's JSON: kv_connector OffloadingConnector, LMCacheConnectorV1, LMCacheMPConnector, NixlConnector, "
        "SharedStorageConnector, MultiConnector or one's own (my_package.module:MyConnector), kv_role kv_both, "
        "kv_load_failure_policy recompute or fail, kv_connector_extra_config with cpu_bytes_to_use, ...; without a "
        "connector its kv_role is the option of that name",
    )

    def __post_init__(self) -> None:
        offload_of(self)  # what is wrong with it is said before a model is read

    @property
    def offload(self) -> KVOffload | None:
        """Where keys and values are kept besides the device, if anywhere."""
        return offload_of(self)

    @property
    def role(self) -> str | None:
        """What the engine does for others, or has others do for it."""
        offload = self.offload
        return offload.peering.role if offload is not None and offload.peering is not None else None

    @property
    def load_failure_policy(self) -> str:
        """What becomes of a request whose pages do not come: recompute or fail."""
        return self.offload.failure_policy if self.offload is not None else "recompute"


LEAST_SECRET = 16
"""Letters of the secret that hosts share, at least."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices share the work: those of one engine core, and several cores behind one server."""

    tensor_parallel_size: int = option(
        1,
        "devices over which attention heads and feed-forward layers are split",
        minimum=1,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of layers, each with tensor_parallel_size devices. Guide: guides/several_devices.md",
        minimum=1,
    )
    decode_context_parallel_size: int = option(
        1,
        "devices among which the tokens of a context are split, out of those that would hold the same keys and "
        "values; the KV cache then holds as many times more tokens. It must divide the number of copies of a "
        "key-value head. Guide: guides/several_devices.md",
        minimum=1,
    )
    enable_expert_parallel: bool = option(False, "give each device whole experts in place of a part of every expert")
    enable_eplb: bool = option(
        False,
        "move experts between devices while the engine runs, so that all have about as much to do; needs "
        "enable_expert_parallel",
    )
    eplb_config: dict[str, Any] = option(
        {},
        "how experts are moved, as vLLM's JSON: step_interval, window_size, num_redundant_experts, "
        "log_balancedness; see expert_balance.py",
    )
    data_parallel_size: int = option(
        1,
        "engine cores behind one server, each with its own devices and a whole copy of the model. With "
        "enable_expert_parallel: attention ranks of one core, each with its own devices, requests and KV cache, and "
        "with a part of the experts. Guide: guides/several_devices.md",
        minimum=1,
        maximum=64,
    )
    distributed_executor_backend: str = option(
        "uni",
        "uni: one process of a host computes with all its devices; mp: one process for each device; ray: a Ray "
        "cluster starts a process on each of nnodes hosts",
        choices=("uni", "mp", "ray"),
        foreign=VALUES["distributed_executor_backend"],
    )
    nnodes: int = option(
        1,
        "hosts that compute together; start the engine on each with its node_rank, or let Ray do it",
        minimum=1,
    )
    node_rank: int = option(0, "number of this host among them, from 0; host 0 serves", minimum=0)
    master_addr: str = option("127.0.0.1", "address of host 0, where the others find it; with Ray, its node's address")
    master_port: int = option(
        29501,
        "first of three ports of host 0 that the hosts use; each engine core takes three",
        minimum=1,
        maximum=65533,
    )
    distributed_timeout_seconds: int = option(
        600,
        "seconds for which hosts wait for each other at the start",
        minimum=1,
    )
    group_secret_file: str | None = option(
        None, f"file with {LEAST_SECRET} letters or more, the same on every host, by which hosts know each other"
    )

    def __post_init__(self) -> None:
        expert_balance_of(self)  # what is wrong with it is said before a model is read
        check_ray(self)

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """How experts are moved while the engine runs, if they are."""
        return expert_balance_of(self)

    @property
    def num_ranks(self) -> int:
        """Attention ranks of one engine core, which have the experts together."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_cores(self) -> int:
        """Engine cores behind one server."""
        return self.data_parallel_size // self.num_ranks

    @property
    def devices(self) -> tuple[int, bool]:
        """How many devices a rank of an engine core has, or a stage, and whether whole experts are spread over them."""
        return self.tensor_parallel_size, self.enable_expert_parallel

    @property
    def devices_of_core(self) -> int:
        """How many devices an engine core has, of all hosts, where it has no attention ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_processes(self) -> int:
        """How many processes compute as one."""
        if self.nnodes > 1:
            return self.nnodes
        return self.tensor_parallel_size if self.distributed_executor_backend == "mp" else 1


def check_ray(parallel: ParallelConfig) -> None:
    """Raise ConfigError for options that contradict processes that Ray starts."""
    if parallel.distributed_executor_backend != "ray":
        return
    reasons = {
        f"nnodes is {parallel.nnodes}: it says on how many hosts Ray starts a process. Give it, 2 or "
        "more": parallel.nnodes == 1,
        f"node_rank is {parallel.node_rank}: Ray starts the others. Start one engine, without it": parallel.node_rank,
        f"group_secret_file is {parallel.group_secret_file}: Ray brings every process a new one. Leave it "
        "out": parallel.group_secret_file is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"distributed_executor_backend is ray, and {reason}.")


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int | None = option(None, "most tokens in one step", minimum=1)
    max_num_seqs: int | None = option(None, "most requests running at a time", minimum=1)
    scheduling_policy: str = option("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    enable_chunked_prefill: bool = option(True, "let a long prompt take several steps")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step while others run; 0 sets no limit", minimum=0
    )
    num_short_request_rows: int | None = option(
        None,
        "rows of max_num_seqs that only short requests get, of at most 16 new tokens, while more wait than can "
        "run (default: 1 for each 64; 0 means none)",
        minimum=0,
    )
    async_scheduling: bool = option(True, "prepare the next step while this one runs")
    stream_interval: int = option(
        1,
        "tokens of a stream that are sent together, which saves work; the first is sent at once",
        minimum=1,
    )
    num_scheduler_steps: int | None = option(
        None,
        "most decode steps in one program while nobody waits; 1 always runs one. Tokens are streamed, and "
        "requests start, between programs (default: what measured times suggest)",
        minimum=1,
        maximum=256,
    )


@dataclass(frozen=True)
class SpeculativeConfig:
    """Tokens that are drafted, and verified several at a time."""

    speculative_config: dict[str, Any] = option(
        {},
        "draft tokens and verify them in one step, as JSON with vLLM's keys: method ngram, suffix or draft_model, "
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, suffix_decoding_max_tree_depth, model, "
        "revision, quantization",
    )

    def __post_init__(self) -> None:
        checked_speculation(self.speculative_config)  # what is wrong with it is said before a model is read

    @property
    def num_drafts(self) -> int:
        """Tokens that are drafted for a request and step, at most."""
        return self.speculative_config.get("num_speculative_tokens", 0)


@dataclass(frozen=True)
class LoadConfig:
    """How weights get from files to devices."""

    load_format: str = option(
        "auto",
        "format of the weights; 'dummy' makes random ones from the seed",
        choices=("auto", "safetensors", "orbax", "dummy"),
        aliases={"gguf": "auto"},
        foreign=VALUES["load_format"],
    )
    download_dir: str | None = option(None, "folder for downloads from the hub (default: huggingface_hub's cache)")


@dataclass(frozen=True)
class CompileConfig:
    """Compiled programs."""

    compilation_cache_dir: str | None = option(
        None,
        "folder that keeps compiled programs between runs; 'off' keeps none (default: in the user's cache folder)",
    )
    bundle: str | None = option(
        None, "folder of compiled programs from `jaxpaged compile`: nothing is compiled at the start", not_empty=True
    )
    wait_for_programs: bool = option(
        False, "start only when all programs of ordinary requests are compiled, so that none of these waits"
    )
    token_buckets: tuple[int, ...] | None = option(
        None,
        "step sizes in tokens for which programs are compiled; steps are padded to the next one",
        minimum=1,
        not_empty=True,
    )
    attention_backend: str = option(
        "auto",
        "attention kernel; names that end in -interpret simulate a device, very slowly, for tests; 'module:NAME' is "
        "one's own",
        or_place=True,
        choices=(
            "auto",
            "reference",
            "cpu",
            "tpu",
            "gpu",
            "gpu-triton",
            "tpu-interpret",
            "gpu-interpret",
            "gpu-triton-interpret",
        ),
        foreign=VALUES["attention_backend"],
    )
    recurrence_backend: str = option(
        "reference",
        "what computes layers with a recurrent state, such as LFM2's convolutions; 'module:NAME' is one's own",
        or_place=True,
        choices=("reference",),
    )
    deterministic: bool = option(
        False,
        "compute the same bits for a request in every batch, however its prompt is cut, cached or computed again",
    )


@dataclass(frozen=True)
class ProfilerConfig:
    """Recordings of what the devices do."""

    profile_dir: str | None = option(
        None,
        "folder for the recordings of /start_profile and start_profile",
        not_empty=True,
    )


@dataclass(frozen=True)
class ObservabilityConfig:
    """What is told of requests, besides metrics."""

    otlp_traces_endpoint: str | None = option(
        None,
        "send a trace of every request to this OpenTelemetry collector (extra otel): http://HOST:4317 over gRPC, "
        "http://HOST:4318/v1/traces over HTTP",
        not_empty=True,
    )
