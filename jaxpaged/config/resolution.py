"""What model and platform decide of the options, and where options contradict each other.

Functions from sections to settled sections; none changes what was given to it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpaged.config.cache_types import CACHE_TYPES, OTHER_NAMES
from jaxpaged.config.sections import CacheConfig, CompileConfig, ModelConfig, ParallelConfig, SchedulerConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.options import EXACT
from jaxpaged.pooling import resolved_pooling

# What suits a platform: (block_size, max_num_batched_tokens, max_num_seqs). On a CPU prefill chunks of about 512
# tokens run at the highest share of the matmul peak.
PLATFORM_DEFAULTS = {"cpu": (32, 512, 64), "gpu": (16, 8192, 256), "tpu": (128, 1024, 256)}
FEW_PROMPTS = 4
"""Of the longest ones, for which an engine without a decoder has room."""


@dataclass(frozen=True)
class ModelFacts:
    """What checking the options needs to know of the model."""

    max_position_embeddings: int
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    num_heads: int
    vocab_size: int
    task: str = "generate"  # what the checkpoint is made for; or "embed", "classify"
    pooler: Mapping[str, Any] = field(default_factory=dict)  # pooling options that come with it
    has_experts: bool = False
    kv_cache_dtype: str = ""  # that the checkpoint was made for; empty: its dtype
    text_len: int | None = None  # tokens of a text at most, as files beside the model say
    num_encoder_caches: int = 0  # kinds of layers of an encoder, by what they see; 0: it is none


def settled[T](value: T | None) -> T:
    """An option of a resolved config that nobody need have given."""
    assert value is not None, "the config is not resolved"
    return value


def defaults_of(platform: str) -> tuple[int, int, int]:
    return PLATFORM_DEFAULTS.get(platform, PLATFORM_DEFAULTS["gpu"])


def resolved_model(given: ModelConfig, facts: ModelFacts, platform: str) -> ModelConfig:
    """Type, lengths, and what the model is used for. A TPU computes in no float16. Raises ConfigError."""
    dtype = "bfloat16" if facts.dtype == "float16" and platform == "tpu" else facts.dtype
    return dataclasses.replace(
        given,
        dtype=dtype if given.dtype == "auto" else given.dtype,
        tokenizer=given.tokenizer or given.model,
        max_model_len=given.max_model_len or facts.text_len or facts.max_position_embeddings,
        max_logprobs=facts.vocab_size if given.max_logprobs == -1 else given.max_logprobs,
        **resolved_pooling(given.runner, given.convert, given.pooler_config, facts.task, facts.pooler),
    )


def resolved_cache(
    given: CacheConfig, model: ModelConfig, parallel: ParallelConfig, facts: ModelFacts, platform: str
) -> CacheConfig:
    """Blocks and their type. Raises ConfigError where a context cannot be split over devices as was asked, and for
    scales without a type that has some."""
    shards, size = parallel.decode_context_parallel_size, parallel.tensor_parallel_size
    if size % shards:
        raise ConfigError(
            f"decode_context_parallel_size {shards} does not divide tensor_parallel_size {size}: it says how many of "
            f"these devices hold a context together. Choose one of {divisors(size)}."
        )
    if given.block_size is not None and given.block_size % shards:
        raise ConfigError(
            f"block_size is {given.block_size}, but each block lies on decode_context_parallel_size = {shards} devices "
            "in equal parts. Choose a multiple."
        )
    name = given.kv_cache_dtype
    name = (facts.kv_cache_dtype or model.dtype) if name == "auto" else OTHER_NAMES.get(name, name)
    of_heads = [each for each, cache_type in CACHE_TYPES.items() if cache_type.scales == "head"]
    if given.kv_cache_scales is not None and name not in of_heads:
        raise ConfigError(
            f"kv_cache_scales names a file of scales, but kv_cache_dtype is {name!r}, which has none of layers and "
            f"heads. Give {', '.join(map(repr, of_heads))}, or leave the file out."
        )
    return dataclasses.replace(
        given,
        block_size=given.block_size or defaults_of(platform)[0] * shards,
        kv_cache_dtype=name,
    )


def resolved_scheduler(
    given: SchedulerConfig, compile: CompileConfig, max_model_len: int, platform: str
) -> SchedulerConfig:
    """Step sizes: what was given, else what suits the other options, else what suits the platform."""
    _, batched_tokens, num_seqs = defaults_of(platform)
    if compile.token_buckets:
        batched_tokens = max(compile.token_buckets)
        num_seqs = min(num_seqs, batched_tokens)
    max_num_seqs = given.max_num_seqs or min(num_seqs, given.max_num_batched_tokens or num_seqs)
    max_num_batched_tokens = given.max_num_batched_tokens or max(batched_tokens, max_num_seqs)
    if not given.enable_chunked_prefill and given.max_num_batched_tokens is None:
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    short_rows = max_num_seqs // 64 if given.num_short_request_rows is None else given.num_short_request_rows
    if short_rows >= max_num_seqs:
        raise ConfigError(
            f"num_short_request_rows is {short_rows}, which leaves none of max_num_seqs = {max_num_seqs} for other "
            "requests. Lower it."
        )
    return dataclasses.replace(
        given,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_short_request_rows=short_rows,
    )


def check_offload(model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig, compile: CompileConfig) -> None:
    """Raise ConfigError where keys and values are to leave the device and cannot, or may not be rounded."""
    if cache.offload is None:
        return
    reasons = {
        "runner is 'pooling'": model.runner == "pooling",
        "enable_prefix_caching is off, and what is kept is found by its hashes": not cache.enable_prefix_caching,
        f"{parallel.num_processes} processes compute as one (distributed_executor_backend, "
        "nnodes)": parallel.num_processes > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"kv_offload (or kv_role) keeps keys and values besides the device, but {reason}. Leave one of them."
            )
    if compile.deterministic and cache.offload.pages != EXACT:
        raise ConfigError(
            f"kv_offload has pages={cache.offload.pages}, which rounds, so that texts depend on what was loaded; "
            "deterministic promises that they do not. Leave one of them."
        )


def for_pooling(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, compile: CompileConfig, facts: ModelFacts
) -> tuple[CacheConfig, SchedulerConfig]:
    """What follows from pooling: no decode steps, and no cached tokens where every token's hidden state counts.

    Raises ConfigError for options that it cannot honour.
    """
    if scheduler.num_scheduler_steps not in (None, 1) or model.logits_processors:
        name = "logits_processors" if model.logits_processors else "num_scheduler_steps"
        raise ConfigError(f"{name} is given, but a pooling engine draws no tokens. Leave it out.")
    reads_cache = model.pooler_config["pooling_type"] == "LAST"
    if compile.deterministic and (facts.num_encoder_caches or not (model.convert == "embed" and reads_cache)):
        raise ConfigError(
            "deterministic was asked for, but encoders, sums over chunks and classifiers have not been shown to be the "
            "same in every batch. Use embeddings of the last token of another model, or leave it out."
        )
    return (
        dataclasses.replace(cache, enable_prefix_caching=cache.enable_prefix_caching and reads_cache),
        dataclasses.replace(scheduler, num_scheduler_steps=1),
    )


def with_whole_prompts(given: SchedulerConfig, facts: ModelFacts) -> SchedulerConfig:
    """An encoder's prompts are computed in one step, since tokens see those behind them."""
    return dataclasses.replace(given, enable_chunked_prefill=False) if facts.num_encoder_caches else given


def for_encoder(
    cache: CacheConfig, parallel: ParallelConfig, scheduler: SchedulerConfig, facts: ModelFacts
) -> CacheConfig:
    """What follows from an encoder: nothing is read from the cache in a later step, so it has room for two steps, of
    which one is scheduled while the other runs, and no more.

    Raises ConfigError for options that it cannot honour.
    """
    if not facts.num_encoder_caches:
        return cache
    given = {
        f"decode_context_parallel_size is {parallel.decode_context_parallel_size}, and tokens that see those behind "
        "them need whole contexts": parallel.decode_context_parallel_size > 1,
        f"kv_cache_dtype is {cache.kv_cache_dtype!r}, and no keys and values are kept": CACHE_TYPES[
            settled(cache.kv_cache_dtype)
        ].is_scaled,
    }
    for what, is_given in given.items():
        if is_given:
            raise ConfigError(f"the model is an encoder, but {what}. Leave it out.")
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None and cache.kv_cache_memory_bytes is None:
        tokens, rows = settled(scheduler.max_num_batched_tokens), settled(scheduler.max_num_seqs)
        num_blocks = 2 * facts.num_encoder_caches * (-(-tokens // settled(cache.block_size)) + rows) + 1
    return dataclasses.replace(cache, enable_prefix_caching=False, num_gpu_blocks_override=num_blocks)


def for_encoder_only(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, num_drafts: int
) -> tuple[CacheConfig, SchedulerConfig]:
    """What follows from an engine that encodes pictures and nothing else: no decode steps, and no cached prompts, since
    what they hold would not be encoded. Its KV cache holds no keys and values, so it has blocks for few long prompts.

    Raises ConfigError for options that it cannot honour.
    """
    given = {
        "runner is 'pooling'": model.runner == "pooling",
        "logits_processors are given": bool(model.logits_processors),
        "num_scheduler_steps is given": scheduler.num_scheduler_steps not in (None, 1),
        "kv_offload (or kv_role, kv_transfer_config) is given": cache.offload is not None,
        "kv_events_config is given": bool(cache.kv_events_config),
        "speculative_config is given": num_drafts > 0,
    }
    for what, is_given in given.items():
        if is_given:
            raise ConfigError(f"{what}, but with mm_encoder_only an engine computes no tokens. Leave it out.")
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None and cache.kv_cache_memory_bytes is None:
        num_blocks = FEW_PROMPTS * -(-settled(model.max_model_len) // settled(cache.block_size)) + FEW_PROMPTS
    return (
        dataclasses.replace(cache, enable_prefix_caching=False, num_gpu_blocks_override=num_blocks),
        dataclasses.replace(scheduler, num_scheduler_steps=1),
    )


def check_deterministic(compile: CompileConfig, parallel: ParallelConfig, facts: ModelFacts, platform: str) -> None:
    """Raise ConfigError where equal bits in every batch are unproven."""
    if not compile.deterministic:
        return
    if platform != "cpu":
        raise ConfigError(
            f"deterministic was asked for on {platform!r}, but equal bits in every batch have been shown on "
            "'cpu' only. Leave the option out."
        )
    if parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"deterministic was asked for with tensor_parallel_size {parallel.tensor_parallel_size}, but the order in "
            "which devices add their parts has not been shown to be the same for every batch. Use one device, or leave "
            "it out."
        )
    if facts.has_experts:
        raise ConfigError(
            "deterministic was asked for, but sums over the experts of a token have not been shown to be the same in "
            "every batch. Use a model without experts, or leave it out."
        )
    if compile.attention_backend != "auto":
        raise ConfigError(
            f"deterministic needs an attention of its own, but attention_backend is {compile.attention_backend!r}. "
            "Leave one of the two out."
        )
    if compile.recurrence_backend != "reference":
        raise ConfigError(
            f"deterministic needs our own recurrences, but recurrence_backend is {compile.recurrence_backend!r}. Leave "
            "one of the two out."
        )


def check_stages(
    cache: CacheConfig,
    parallel: ParallelConfig,
    scheduler: SchedulerConfig,
    compile: CompileConfig,
    load_format: str,
    num_drafts: int,
) -> None:
    """Raise ConfigError for what stages of a pipeline cannot do."""
    if parallel.pipeline_parallel_size == 1:
        return
    reasons = {
        f"num_scheduler_steps is {scheduler.num_scheduler_steps}, and a step of several is one program on "
        "one stage": scheduler.num_scheduler_steps not in (None, 1),
        f"speculative_config drafts {num_drafts} tokens": num_drafts > 0,
        "kv_offload (or kv_role) keeps keys and values besides the device": cache.offload is not None,
        "enable_eplb moves experts": parallel.enable_eplb,
        f"distributed_executor_backend is {parallel.distributed_executor_backend!r}, with nnodes "
        f"{parallel.nnodes}": parallel.distributed_executor_backend != "uni" or parallel.nnodes > 1,
        f"bundle is {compile.bundle}, which has programs of one stage": compile.bundle is not None,
        "deterministic has not been shown to keep its bits there": compile.deterministic,
        f"load_format is {load_format!r}, which is read as a whole": load_format == "orbax",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, but {reason}: stages of a pipeline do "
                "not go with it. Leave one of them out."
            )


def check_ranks(cache: CacheConfig, parallel: ParallelConfig, num_drafts: int) -> None:
    """Raise ConfigError for what attention ranks cannot do."""
    if parallel.num_ranks == 1:
        return
    reasons = {
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and a stage has no part in the experts of "
        "another. Leave out pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        f"decode_context_parallel_size is {parallel.decode_context_parallel_size}, and ranks spread requests in place "
        "of contexts. Leave out decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        f"speculative_config drafts {num_drafts} tokens, and what drafts serves one rank. Leave out "
        "speculative_config": num_drafts > 0,
        "kv_offload (or kv_role) keeps keys and values besides the device, of one rank only. Leave it out, or "
        "data_parallel_size": cache.offload is not None,
        f"distributed_executor_backend is {parallel.distributed_executor_backend!r}, with nnodes {parallel.nnodes}: "
        "all ranks are in one process. Choose devices of one host, and uni": parallel.distributed_executor_backend
        != "uni"
        or parallel.nnodes > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"data_parallel_size is {parallel.data_parallel_size} with enable_expert_parallel: attention ranks. "
                f"But {reason}."
            )


def check_experts(parallel: ParallelConfig, facts: ModelFacts) -> None:
    """Raise ConfigError where experts are to be spread and there are none."""
    if parallel.enable_expert_parallel and not facts.has_experts:
        raise ConfigError("enable_expert_parallel was asked for, but the model has no experts. Leave it out.")


def check_routed_experts(model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig, facts: ModelFacts) -> None:
    """Raise ConfigError where the experts of tokens are wanted, and nobody could say which they were."""
    if not model.enable_return_routed_experts:
        return
    reasons = {
        "the model has no experts": not facts.has_experts,
        "a pooling engine tells nothing of tokens": model.runner == "pooling",
        "kv_offload (or kv_role) keeps keys and values of tokens without their experts": cache.offload is not None,
        f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and each stage knows its own layers alone": (
            parallel.pipeline_parallel_size > 1
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"enable_return_routed_experts was asked for, but {reason}. Leave one of them out.")


def check_processes(compile: CompileConfig, parallel: ParallelConfig, platform: str) -> None:
    """Raise ConfigError where several processes cannot compute together as was asked."""
    size, hosts = parallel.tensor_parallel_size, parallel.nnodes
    if parallel.node_rank >= hosts:
        raise ConfigError(f"node_rank is {parallel.node_rank}, but nnodes is {hosts}: ranks go from 0 to {hosts - 1}.")
    if hosts > 1 and parallel.distributed_executor_backend == "mp":
        raise ConfigError(
            "distributed_executor_backend mp, a process for each device, goes with one host only, but nnodes is "
            f"{hosts}. Leave it out: one process of each host computes with all its devices."
        )
    if size % hosts:
        raise ConfigError(
            f"tensor_parallel_size {size} does not split evenly over {hosts} hosts (nnodes). It must be the number of "
            "all their devices."
        )
    if parallel.num_processes == 1:
        return
    if parallel.data_parallel_size > 1 and parallel.distributed_executor_backend == "uni":
        raise ConfigError(
            f"data_parallel_size is {parallel.data_parallel_size}, and {hosts} hosts (nnodes) are to compute as one, "
            "each of which would have to be started once for every engine core. Let Ray start them "
            "(distributed_executor_backend ray), or leave one of the two out."
        )
    if platform == "tpu" and hosts == 1:
        raise ConfigError(
            "distributed_executor_backend is mp, but one process must have all TPU chips of a host. Leave it out."
        )
    if compile.bundle is not None:
        raise ConfigError(
            f"bundle {compile.bundle} is for one process, but {parallel.num_processes} compute together. Leave it out: "
            "each compiles what it needs, and the next start finds it in the compilation cache."
        )


def check_sizes(
    model: ModelConfig, scheduler: SchedulerConfig, compile: CompileConfig, parallel: ParallelConfig, facts: ModelFacts
) -> None:
    """Raise ConfigError for sizes of settled sections that do not go together."""
    max_model_len, max_num_seqs = settled(model.max_model_len), settled(scheduler.max_num_seqs)
    max_num_batched_tokens = settled(scheduler.max_num_batched_tokens)
    if max_model_len > facts.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model was made for {facts.max_position_embeddings} positions. "
            "Lower max_model_len."
        )
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) is less than max_num_seqs ({max_num_seqs}), but every "
            "running request needs a token per step. Raise the first or lower the second."
        )
    if not scheduler.enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a whole prompt must fit one step, but max_num_batched_tokens "
            f"({max_num_batched_tokens}) is less than max_model_len ({max_model_len}). "
            f"Raise it, or {'lower the second' if facts.num_encoder_caches else 'leave chunked prefill on'}."
        )
    if facts.num_heads % parallel.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} does not divide the model's {facts.num_heads} "
            f"attention heads. Choose one of {divisors(facts.num_heads)}."
        )
    buckets = compile.token_buckets
    if buckets is not None and max(buckets) < max_num_batched_tokens:
        raise ConfigError(
            f"the largest of token_buckets is {max(buckets)}, but a step may hold max_num_batched_tokens = "
            f"{max_num_batched_tokens} tokens. Add a bucket of that size."
        )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
