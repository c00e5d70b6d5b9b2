"""Counters, gauges and histograms of one engine, under vLLM's names; fed from messages only.

This module knows no exposition format and no HTTP: `EngineMetrics.read` returns plain records.
"""

import bisect
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpaged.engine.observability.logprob_difference import LogprobDifference
from jaxpaged.engine.observability.lora_metrics import lora_counters, lora_info
from jaxpaged.engine.observability.metrics_types import Counter, Gauge, Histogram, Metric
from jaxpaged.engine.observability.offload_metrics import (
    DEVICE,
    LENT,
    OWN,
    source_metrics,
    source_of,
    transfer_metrics,
)
from jaxpaged.messages import SchedulerStats

logger = logging.getLogger(__name__)

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_LATENCY_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
SLEEP_STATES = (("awake", None), ("weights_offloaded", 1), ("discard_all", 2))
"""vLLM's name of the state, and the level. At level 0, where only scheduling pauses, there is none of them."""
WARNING_SECONDS = 60.0
FINISH_REASONS = ("stop", "length", "abort", "error")


class Tally:
    """Observations counted per bucket while the engine runs."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self, name: str) -> Histogram:
        at_most = list(itertools.accumulate(self._counts))
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return Histogram(name, {}, at_most[-1], self._sum, dict(zip(bounds, at_most, strict=True)))


@dataclass
class FinishedSequence:
    """What is counted of a sequence when it ends. Times are seconds."""

    finish_reason: str
    num_prompt_tokens: int
    num_generated_tokens: int
    max_tokens: int
    latency: float
    queue_time: float | None = None  # until it was first scheduled; None if it never was
    prefill_time: float | None = None  # from then to the first token; None without one
    decode_time: float | None = None  # from the first token to the last


@dataclass
class EngineMetrics:
    """Everything counted since the engine started."""

    max_model_len: int
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    cached_by_source: dict[str, int] = field(default_factory=dict)  # those of them, by vLLM's words
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    spans_lost: Callable[[], int] | None = None  # of traces, where there are any
    logprob_difference: LogprobDifference | None = None  # the last one that a trainer told of

    def __post_init__(self) -> None:
        self._num_unwarned, self._next_warning = 0, -math.inf
        self._carried = CarriedCounts()
        lengths = length_buckets(self.max_model_len)
        self.tallies = {
            "vllm:time_to_first_token_seconds": Tally(TTFT_BUCKETS),
            "vllm:inter_token_latency_seconds": Tally(TOKEN_LATENCY_BUCKETS),
            "vllm:request_time_per_output_token_seconds": Tally(TOKEN_LATENCY_BUCKETS),
            "vllm:e2e_request_latency_seconds": Tally(REQUEST_LATENCY_BUCKETS),
            "vllm:request_queue_time_seconds": Tally(REQUEST_LATENCY_BUCKETS),
            "vllm:request_prefill_time_seconds": Tally(REQUEST_LATENCY_BUCKETS),
            "vllm:request_decode_time_seconds": Tally(REQUEST_LATENCY_BUCKETS),
            "vllm:request_inference_time_seconds": Tally(REQUEST_LATENCY_BUCKETS),
            "vllm:request_prompt_tokens": Tally(lengths),
            "vllm:request_generation_tokens": Tally(lengths),
            "vllm:request_max_num_generation_tokens": Tally(lengths),
            "vllm:request_params_max_tokens": Tally(lengths),
            "vllm:request_params_n": Tally(N_BUCKETS),
            "vllm:iteration_tokens_total": Tally(STEP_TOKENS_BUCKETS),
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and outputs so far."""
        return self.prompt_tokens + self.generation_tokens

    def record_step(self, stats: SchedulerStats, num_tokens: int) -> None:
        """One engine step that gave `num_tokens`: a prompt counts when its first token is there.

        Steps that gave none are not counted, and those of a run one by one.
        """
        if self._num_unwarned or stats.num_corrupted_reqs > self.stats.num_corrupted_reqs:
            self._warn_of_corrupted(stats.num_corrupted_reqs - self.stats.num_corrupted_reqs)
        self.stats = stats
        num_steps = min(stats.num_steps, num_tokens)
        if num_steps:
            each, more = divmod(num_tokens, num_steps)
            self.tallies["vllm:iteration_tokens_total"].observe(each, num_steps - more)
            if more:
                self.tallies["vllm:iteration_tokens_total"].observe(each + 1, more)

    def lose_core(self, executor_stats: Mapping[str, Any]) -> None:
        """The core that counted is gone, and the next one begins at 0. `executor_stats` are its last ones."""
        self._carried.keep(counts_of_core(self.stats, executor_stats))
        self.stats = SchedulerStats()

    def _warn_of_corrupted(self, num_new: int) -> None:
        """Log, once in `WARNING_SECONDS` at most, that the model computes no finite numbers for some requests."""
        self._num_unwarned += max(num_new, 0)
        if self._num_unwarned and time.monotonic() >= self._next_warning:
            logger.warning(
                "%d requests failed: what the model computed for them were no finite numbers. Check its weights, and "
                "dtype: float16 overflows where bfloat16 does not.",
                self._num_unwarned,
            )
            self._num_unwarned, self._next_warning = 0, time.monotonic() + WARNING_SECONDS

    def record_finished_prompt(self, lengths: Sequence[int]) -> None:
        """All sequences of a prompt have ended, with so many tokens."""
        self.tallies["vllm:request_params_n"].observe(len(lengths))
        self.tallies["vllm:request_max_num_generation_tokens"].observe(max(lengths))

    def record_first_token(
        self, seconds: float, num_prompt_tokens: int, num_cached_tokens: int, loaded: Mapping[str, int] | None = None
    ) -> None:
        """The prompt of one sequence is computed, `seconds` after it arrived. Of its cached tokens some were `loaded`
        from tiers, by these names."""
        self._record_prompt(num_prompt_tokens, num_cached_tokens, loaded or {})
        self.tallies["vllm:time_to_first_token_seconds"].observe(seconds)

    def record_pooled(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The vector of one prompt is there."""
        self._record_prompt(num_prompt_tokens, num_cached_tokens, {})

    def _record_prompt(self, num_tokens: int, num_cached: int, loaded: Mapping[str, int]) -> None:
        self.prompt_tokens += num_tokens
        self.prompt_tokens_cached += num_cached
        by_source, left = self.cached_by_source, num_cached
        for tier, count in loaded.items():
            count = min(count, left)  # some may have been evicted again before it was admitted
            by_source[source_of(tier)] = by_source.get(source_of(tier), 0) + count
            left -= count
        by_source[DEVICE] = by_source.get(DEVICE, 0) + left

    def record_next_tokens(self, now: float, last_time: float, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Sequences got `num_tokens` more tokens each, which took from `last_time` to `now`."""
        per_token = (now - last_time) / num_tokens
        self.tallies["vllm:inter_token_latency_seconds"].observe(per_token, num_sequences * num_tokens)

    def record_finished(self, end: FinishedSequence) -> None:
        self.finished[end.finish_reason] = self.finished.get(end.finish_reason, 0) + 1
        self.tallies["vllm:e2e_request_latency_seconds"].observe(end.latency)
        self.tallies["vllm:request_prompt_tokens"].observe(end.num_prompt_tokens)
        self.tallies["vllm:request_generation_tokens"].observe(end.num_generated_tokens)
        self.tallies["vllm:request_params_max_tokens"].observe(end.max_tokens)
        if end.num_generated_tokens > 1 and end.decode_time is not None:
            per_token = end.decode_time / (end.num_generated_tokens - 1)
            self.tallies["vllm:request_time_per_output_token_seconds"].observe(per_token)
        if end.queue_time is not None:
            self.tallies["vllm:request_queue_time_seconds"].observe(end.queue_time)
        if end.prefill_time is not None and end.decode_time is not None:
            self.tallies["vllm:request_prefill_time_seconds"].observe(end.prefill_time)
            self.tallies["vllm:request_decode_time_seconds"].observe(end.decode_time)
            self.tallies["vllm:request_inference_time_seconds"].observe(end.prefill_time + end.decode_time)

    def read(self, executor_stats: Mapping[str, Any], num_restarts: int = 0) -> list[Metric]:
        """All metrics; numbers among the executor's counters become gauges "jaxpaged:...", `recompiles` with them."""
        stats = self.stats
        told_otherwise = tuple(f"{OWN}{verb}_" for verb in ("load", "store"))
        own = {
            name: value
            for name, value in executor_stats.items()
            if type(value) in (int, float) and name not in LENT and not name.startswith(told_otherwise)
        }
        return [
            Gauge("vllm:num_requests_running", {}, stats.num_running_reqs),
            Gauge("vllm:num_requests_waiting", {}, stats.num_waiting_reqs),
            Gauge("vllm:kv_cache_usage_perc", {}, stats.kv_cache_usage),
            *(
                Gauge("vllm:engine_sleep_state", {"sleep_state": state}, float(stats.sleep_level == level))
                for state, level in SLEEP_STATES
            ),
            Counter("vllm:prompt_tokens", {}, self.prompt_tokens),
            Counter("vllm:prompt_tokens_cached", {}, self.prompt_tokens_cached),
            *source_metrics(self.prompt_tokens, self.prompt_tokens_cached, self.cached_by_source),
            Counter("vllm:generation_tokens", {}, self.generation_tokens),
            *self._carried.added_to(counts_of_core(stats, executor_stats)),
            *lora_info(stats),
            *weight_info(stats),
            *(Counter("vllm:request_success", {"finished_reason": r}, n) for r, n in self.finished.items()),
            Counter("jaxpaged:engine_restarts", {}, num_restarts),
            *([] if self.spans_lost is None else [Counter("jaxpaged:trace_spans_lost", {}, self.spans_lost())]),
            *([] if self.logprob_difference is None else self.logprob_difference.metrics()),
            *(tally.read(name) for name, tally in self.tallies.items()),
            *(Gauge(f"jaxpaged:{name}", {}, value) for name, value in own.items()),
        ]


def counts_of_core(stats: SchedulerStats, executor_stats: Mapping[str, Any]) -> list[Metric]:
    """What the core and its executor count themselves, from their beginning on."""
    return [
        Counter("vllm:prefix_cache_queries", {}, stats.prefix_cache_queries),
        Counter("vllm:prefix_cache_hits", {}, stats.prefix_cache_hits),
        Counter("vllm:external_prefix_cache_queries", {}, stats.external_prefix_cache_queries),
        Counter("vllm:external_prefix_cache_hits", {}, stats.external_prefix_cache_hits),
        Counter("vllm:mm_cache_queries", {}, stats.mm_cache_queries),
        Counter("vllm:mm_cache_hits", {}, stats.mm_cache_hits),
        Counter("vllm:num_preemptions", {}, stats.num_preemptions),
        Counter("vllm:corrupted_requests", {}, stats.num_corrupted_reqs),
        *transfer_metrics(stats, executor_stats),
        *(
            Counter("jaxpaged:encoder_outputs", {"outcome": name.removeprefix("ec_")}, count)
            for name, count in executor_stats.items()
            if name.startswith("ec_")
        ),
        *draft_counters(stats),
        *lora_counters(stats),
        *([] if stats.weights is None else [Counter("jaxpaged:weight_updates", {}, stats.weights.num_updates)]),
    ]


def weight_info(stats: SchedulerStats) -> list[Gauge]:
    """What outputs call the weights that compute now; nothing where there were no others."""
    if stats.weights is None:
        return []
    return [Gauge("jaxpaged:weight_version_info", {"weight_version": stats.weights.version}, 1.0)]


def draft_counters(stats: SchedulerStats) -> list[Counter]:
    """What became of drafts; nothing where none are made."""
    if not stats.num_accepted_per_pos:
        return []
    return [
        Counter("vllm:spec_decode_num_drafts", {}, stats.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", {}, stats.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", {}, stats.num_accepted_tokens),
        *(
            Counter("vllm:spec_decode_num_accepted_tokens_per_pos", {"position": str(place)}, count)
            for place, count in enumerate(stats.num_accepted_per_pos)
        ),
    ]


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `longest`."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bound: bound <= longest, series))


Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a metric."""


class CarriedCounts:
    """Counters and histograms of all cores before the one that counts now. What else there is shrinks anyway."""

    def __init__(self) -> None:
        self._before: dict[Key, Counter | Histogram] = {}

    def keep(self, metrics: Iterable[Metric]) -> None:
        """A core is gone, of which these are the last metrics."""
        self._before = {key_of(each): each for each in self.added_to(metrics) if isinstance(each, Counter | Histogram)}

    def added_to(self, metrics: Iterable[Metric]) -> list[Metric]:
        """Those of the core that counts now with those before, also where it has not counted such a thing yet."""
        before = dict(self._before)
        now = [total(each, before.pop(key_of(each), None)) for each in metrics]
        return [*now, *before.values()]


def key_of(metric: Metric) -> Key:
    return metric.name, tuple(sorted(metric.labels.items()))


def total(now: Metric, before: Counter | Histogram | None) -> Metric:
    if isinstance(now, Counter) and isinstance(before, Counter):
        return replace(now, value=now.value + before.value)
    if isinstance(now, Histogram) and isinstance(before, Histogram):
        bounds = dict.fromkeys([*before.buckets, *now.buckets], 0)
        buckets = {bound: now.buckets.get(bound, 0) + before.buckets.get(bound, 0) for bound in bounds}
        return replace(now, count=now.count + before.count, sum=now.sum + before.sum, buckets=buckets)
    return now
