"""Every option of the engine: frozen classes, resolved once, checked before any weight is read.

    options = EngineConfig.from_options(model="...", max_num_seqs=64)   # unknown keys are errors
    config = options.resolve(facts, platform="cpu")                     # what model and platform decide is settled

The field names are vLLM's flag names, so `--max-num-seqs` on the command line, `max_num_seqs:` in a YAML file and
`LLM(max_num_seqs=...)` are the same option. A field's help text and choices are in its metadata; command line
and documentation are generated from it.

This module reads no model files: what it needs of a model comes in as `ModelFacts`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.option_checks import checked, option
from jaxpaged.pooling import CONVERSIONS, RUNNERS, resolved_pooling
from jaxpaged.speculation import checked_speculation, resolved_speculation
from jaxpaged.vllm_options import without_neutral

EMBEDDED_MODEL = "demo"
"""The name of the model that ships inside the package."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how requests may use it."""

    model: str = option(EMBEDDED_MODEL, "a folder in Hugging Face format, a hub id, or 'demo', the embedded model")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, when it is not the model's")
    skip_tokenizer_init: bool = option(False, "no tokenizer: prompts are token ids, and so are answers")
    revision: str | None = option(None, "branch, tag or commit of the model on the hub")
    dtype: str = option(
        "auto", "type of weights and activations", choices=("auto", "bfloat16", "float16", "float32"),
        aliases={"half": "float16", "float": "float32"},
    )  # fmt: skip
    quantization: str | None = option(
        None, "round the weights when they are loaded: 'int8' halves 16-bit ones", choices=("int8",)
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output in tokens; 'auto', the default, is the model's own limit", minimum=1,
        aliases={"auto": None, -1: None},
    )  # fmt: skip
    seed: int = option(
        0,
        "the seeds of requests that bring none are drawn from this one, and dummy weights",
        minimum=0,
        maximum=2**63 - 1,
    )
    max_logprobs: int = option(20, "most log probabilities per token that a request may ask for; -1: all", minimum=-1)
    logprobs_mode: str = option(
        "raw_logprobs",
        "what log probabilities show: before or after the sampling parameters, normalised or not",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    generation_config: str = option(
        "auto",
        "where default sampling parameters come from: the model's own file, or vLLM's defaults",
        choices=("auto", "vllm"),
    )
    override_generation_config: dict[str, Any] = option({}, "sampling defaults that override generation_config.json")
    chat_template: str | None = option(None, "a Jinja file, or a template in one line, in place of the model's own")
    logits_processors: tuple[Any, ...] = option((), "custom logits processors, as classes or 'module:Class'")
    runner: str = option(
        "auto", "what the engine is for: to generate, or pooling (embeddings, scores)", choices=RUNNERS
    )
    convert: str = option(
        "auto", "what a pooling engine gives: embed, or classify with the checkpoint's classifier", choices=CONVERSIONS
    )
    pooler_config: dict[str, Any] = option(
        {}, "pooling_type LAST, MEAN or CLS (the latter two without prefix caching), and use_activation"
    )


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(None, "tokens per KV block; what the device's kernel likes by default", minimum=1)
    kv_cache_dtype: str = option(
        "auto",
        "type of cached keys and values; 'auto' is the model's",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    gpu_memory_utilization: float = option(
        0.9, "share of device memory for weights, temporaries and KV blocks", above=0.0, maximum=1.0
    )
    kv_cache_memory_bytes: int | None = option(None, "bytes per device for KV blocks, in place of the share", minimum=1)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, in place of any measurement", minimum=2)
    enable_prefix_caching: bool = option(True, "reuse KV blocks of equal prompt beginnings")
    kv_events_config: dict[str, Any] = option(
        {}, "tell routers over ZeroMQ what enters and leaves the prefix cache, as vLLM does: enable_kv_cache_events "
        "true, and endpoint, replay_endpoint, topic, ..., see engine/observability/kv_event_publisher.py"
    )  # fmt: skip


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices share the work."""

    tensor_parallel_size: int = option(1, "devices over which heads and feed-forward are split", minimum=1)


@dataclass(frozen=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_num_batched_tokens: int | None = option(None, "most tokens in one step", minimum=1)
    max_num_seqs: int | None = option(None, "most requests running at a time", minimum=1)
    scheduling_policy: str = option("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    enable_chunked_prefill: bool = option(True, "let a long prompt take several steps")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step while others run; 0: no such limit", minimum=0
    )
    async_scheduling: bool = option(True, "prepare the next step while this one runs")
    stream_interval: int = option(
        1, "tokens of a stream that are handed out together, for less work per token; the first comes at once",
        minimum=1,
    )  # fmt: skip
    num_scheduler_steps: int | None = option(
        None, "most decode steps in one program while nobody waits; by default what measured times suggest, 1: always "
        "one. Tokens are streamed, and new requests start, between programs", minimum=1, maximum=256,
    )  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig:
    """Tokens that are drafted, and verified several at a time."""

    speculative_config: dict[str, Any] = option(
        {}, "draft tokens and verify them in one step, as JSON with vLLM's keys: method ngram or suffix, "
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, suffix_decoding_max_tree_depth"
    )  # fmt: skip

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
        "auto", "'dummy' makes random weights from the seed", choices=("auto", "safetensors", "orbax", "dummy")
    )
    download_dir: str | None = option(None, "where hub downloads are kept; huggingface_hub's cache by default")


@dataclass(frozen=True)
class CompileConfig:
    """Compiled programs."""

    compilation_cache_dir: str | None = option(
        None, "where compiled programs are kept between runs; 'off' for nowhere. Default: the user's cache folder"
    )
    bundle: str | None = option(
        None, "folder of compiled programs from `jaxpaged compile`: nothing is compiled at the start", not_empty=True
    )
    token_buckets: tuple[int, ...] | None = option(
        None, "padded step sizes in tokens that get a program", minimum=2, not_empty=True
    )
    attention_backend: str = option(
        "auto",
        "which attention kernel; those that end in -interpret simulate a device, very slowly, for tests",
        choices=(
            "auto",
            "reference",
            "tpu",
            "gpu",
            "gpu-triton",
            "tpu-interpret",
            "gpu-interpret",
            "gpu-triton-interpret",
        ),
    )
    deterministic: bool = option(
        False, "the same bits for a request in every batch, however its prompt is cut, cached or computed again"
    )


@dataclass(frozen=True)
class ProfilerConfig:
    """Recordings of what the devices do."""

    profile_dir: str | None = option(None, "folder for what /start_profile and start_profile record", not_empty=True)


@dataclass(frozen=True)
class ObservabilityConfig:
    """What is told of requests, besides metrics."""

    otlp_traces_endpoint: str | None = option(
        None, "send a trace of every request to this OpenTelemetry collector (extra otel): http://HOST:4317 over gRPC, "
        "http://HOST:4318/v1/traces over HTTP", not_empty=True,
    )  # fmt: skip


@dataclass(frozen=True)
class ModelFacts:
    """What checking the options needs to know of the model."""

    max_position_embeddings: int
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    num_heads: int
    vocab_size: int
    task: str = "generate"  # what the checkpoint is made for; or "embed", "classify"
    pooler: Mapping[str, Any] = field(default_factory=dict)  # pooling options that come with it


# What suits a platform: (block_size, max_num_batched_tokens, max_num_seqs). On a CPU prefill chunks of about 512
# tokens run at the highest share of the matmul peak.
PLATFORM_DEFAULTS = {"cpu": (32, 512, 64), "gpu": (16, 8192, 256), "tpu": (128, 1024, 256)}


def defaults_of(platform: str) -> tuple[int, int, int]:
    return PLATFORM_DEFAULTS.get(platform, PLATFORM_DEFAULTS["gpu"])


@dataclass(frozen=True)
class EngineConfig:
    """All options, by topic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from flat keywords, of which None means that it was not given; `vllm_options` says which others of
        vLLM's pass. Raises ConfigError for unknown names and for values out of range."""
        sections: dict[str, dict[str, Any]] = {}
        owners = {f.name: (section, f) for section, f in all_options()}
        for name, value in without_neutral(options).items():
            if name not in owners:
                raise ConfigError(f"unknown option {name!r}.{did_you_mean(name, owners)}")
            section, f = owners[name]
            sections.setdefault(section, {})[name] = checked(f, value)
        types = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        return cls(**{section: types[section](**values) for section, values in sections.items()})

    @property
    def max_model_len(self) -> int:
        """Of a resolved config: tokens of a prompt and its answer, at most."""
        assert self.model.max_model_len is not None, "the config is not resolved"
        return self.model.max_model_len

    def options(self) -> dict[str, Any]:
        """Every option by its name: `from_options` makes an equal config of them."""
        return {f.name: getattr(getattr(self, section), f.name) for section, f in all_options()}

    def resolve(self, facts: ModelFacts, platform: str) -> "EngineConfig":
        """Settle what model and platform decide. Raises ConfigError where options contradict each other."""
        max_model_len = self.model.max_model_len or facts.max_position_embeddings
        dtype = facts.dtype if self.model.dtype == "auto" else self.model.dtype
        given = self.model
        pooling = resolved_pooling(given.runner, given.convert, given.pooler_config, facts.task, facts.pooler)
        config = dataclasses.replace(
            self,
            model=dataclasses.replace(
                self.model,
                dtype=dtype,
                tokenizer=self.model.tokenizer or self.model.model,
                max_model_len=max_model_len,
                max_logprobs=facts.vocab_size if self.model.max_logprobs == -1 else self.model.max_logprobs,
                **pooling,
            ),
            cache=dataclasses.replace(
                self.cache,
                block_size=self.cache.block_size or defaults_of(platform)[0],
                kv_cache_dtype=dtype if self.cache.kv_cache_dtype == "auto" else self.cache.kv_cache_dtype,
            ),
            scheduler=self._resolved_scheduler(max_model_len, platform),
            speculative=SpeculativeConfig(resolved_speculation(self.speculative.speculative_config, pooling["runner"])),
        )
        config._cross_check(facts)
        config._check_deterministic(platform)
        return config._for_pooling() if pooling["runner"] == "pooling" else config

    def _for_pooling(self) -> "EngineConfig":
        """What follows from pooling: no decode steps, and no cached tokens where every token's hidden state counts."""
        if self.scheduler.num_scheduler_steps not in (None, 1) or self.model.logits_processors:
            name = "logits_processors" if self.model.logits_processors else "num_scheduler_steps"
            raise ConfigError(f"{name} is given, but a pooling engine draws no tokens. Leave it out.")
        if self.compile.deterministic and (self.model.convert, self.model.pooler_config["pooling_type"]) != (
            "embed", "LAST",
        ):  # fmt: skip
            raise ConfigError(
                "deterministic was asked for, but sums over chunks and classifiers have not been shown to be the same "
                "in every batch. Use embeddings of the last token, or leave it out."
            )
        reads_cache = self.model.pooler_config["pooling_type"] == "LAST"
        return dataclasses.replace(
            self,
            scheduler=dataclasses.replace(self.scheduler, num_scheduler_steps=1),
            cache=dataclasses.replace(
                self.cache, enable_prefix_caching=self.cache.enable_prefix_caching and reads_cache
            ),
        )

    def _check_deterministic(self, platform: str) -> None:
        """Raise ConfigError where equal bits in every batch are unproven."""
        given, devices = self.compile.deterministic, self.parallel.tensor_parallel_size
        if given and platform != "cpu":
            raise ConfigError(
                f"deterministic was asked for on {platform!r}, but equal bits in every batch have been shown on "
                "'cpu' only. Leave the option out."
            )
        if given and devices > 1:
            raise ConfigError(
                f"deterministic was asked for with tensor_parallel_size {devices}, but the order in which devices add "
                "their parts has not been shown to be the same for every batch. Use one device, or leave it out."
            )
        if given and self.compile.attention_backend != "auto":
            raise ConfigError(
                f"deterministic needs an attention of its own, but attention_backend is "
                f"{self.compile.attention_backend!r}. Leave one of the two out."
            )

    def _resolved_scheduler(self, max_model_len: int, platform: str) -> SchedulerConfig:
        """Step sizes: what was given, else what suits the other options, else what suits the platform."""
        given, buckets = self.scheduler, self.compile.token_buckets
        _, batched_tokens, num_seqs = defaults_of(platform)
        if buckets:
            batched_tokens = max(buckets)
            num_seqs = min(num_seqs, batched_tokens)
        max_num_seqs = given.max_num_seqs or min(num_seqs, given.max_num_batched_tokens or num_seqs)
        max_num_batched_tokens = given.max_num_batched_tokens or max(batched_tokens, max_num_seqs)
        if not given.enable_chunked_prefill and given.max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        return dataclasses.replace(given, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)

    def _cross_check(self, facts: ModelFacts) -> None:
        scheduler, model = self.scheduler, self.model
        if model.max_model_len > facts.max_position_embeddings:
            raise ConfigError(
                f"max_model_len is {model.max_model_len}, but the model was made for "
                f"{facts.max_position_embeddings} positions. Lower max_model_len."
            )
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) is less than max_num_seqs "
                f"({scheduler.max_num_seqs}), but every running request needs a token per step. "
                "Raise the first or lower the second."
            )
        if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < model.max_model_len:
            raise ConfigError(
                f"without chunked prefill a whole prompt must fit one step, but max_num_batched_tokens "
                f"({scheduler.max_num_batched_tokens}) is less than max_model_len ({model.max_model_len}). "
                "Raise it, or leave chunked prefill on."
            )
        if facts.num_heads % self.parallel.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.parallel.tensor_parallel_size} does not divide the model's "
                f"{facts.num_heads} attention heads. Choose one of {divisors(facts.num_heads)}."
            )
        buckets = self.compile.token_buckets
        if buckets is not None and max(buckets) < scheduler.max_num_batched_tokens:
            raise ConfigError(
                f"the largest of token_buckets is {max(buckets)}, but a step may hold max_num_batched_tokens = "
                f"{scheduler.max_num_batched_tokens} tokens. Add a bucket of that size."
            )


def all_options() -> list[tuple[str, dataclasses.Field]]:
    """(section name, field) of every option, in order of declaration."""
    return [
        (section.name, f)
        for section in dataclasses.fields(EngineConfig)
        for f in dataclasses.fields(section.default_factory)
    ]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
