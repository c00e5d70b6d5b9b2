"""A line about the engine's throughput, every ten seconds while it is busy.

The timer runs in the event loop only from a request to the first interval in which nothing happened. This module knows
no requests, only the metrics.
"""

import asyncio
import logging
from collections.abc import Callable

from jaxpaged.engine.observability.metrics import EngineMetrics
from jaxpaged.messages import EngineCoreRequest

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two lines."""


class ThroughputLog:
    """For one event loop at a time. `is_busy`: whether requests are under way. `whose` begins every line. `also` is
    called at the end of every interval, those in which nothing happened included, where there is a line or not."""

    def __init__(self, metrics: EngineMetrics, is_busy: Callable[[], bool], whose: str = ""):
        self._whose = whose
        self.also: Callable[[], None] | None = None
        self._metrics = metrics
        self._is_busy = is_busy
        self._loop: asyncio.AbstractEventLoop | None = None  # in which the timer runs
        self._since = 0.0
        self._before = (0, 0)

    def wake(self) -> None:
        """A request came."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop and (logger.isEnabledFor(logging.INFO) or self.also is not None):
            self._loop = loop
            self._begin(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._since, self._before = loop.time(), (self._metrics.prompt_tokens, self._metrics.generation_tokens)
        loop.call_later(INTERVAL, self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        """The interval is over."""
        if loop is not self._loop:  # the engine is used in another one now
            return
        metrics, seconds = self._metrics, loop.time() - self._since
        if self.also is not None:
            self.also()
        if metrics.prompt_tokens + metrics.generation_tokens > sum(self._before) or self._is_busy():
            write_line(metrics, *self._before, seconds, self._whose)
            self._begin(loop)
        else:
            self._loop = None


def write_line(
    metrics: EngineMetrics, prompt_tokens: int, generation_tokens: int, seconds: float, whose: str = ""
) -> None:
    """Log what happened in the last `seconds`, before which there were so many tokens."""
    stats = metrics.stats
    prompt_rate = (metrics.prompt_tokens - prompt_tokens) / seconds
    generation_rate = (metrics.generation_tokens - generation_tokens) / seconds
    hit_rate = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
    logger.info(
        "%sprompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d requests, waiting: %d "
        "requests, KV cache usage: %.1f %%, prefix cache hit rate: %.1f %%",
        whose,
        prompt_rate,
        generation_rate,
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        100 * stats.kv_cache_usage,
        100 * hit_rate,
        extra={
            "prompt_tokens_per_second": round(prompt_rate, 3),
            "generation_tokens_per_second": round(generation_rate, 3),
            "num_running_reqs": stats.num_running_reqs,
            "num_waiting_reqs": stats.num_waiting_reqs,
            "kv_cache_usage": round(stats.kv_cache_usage, 5),
            "prefix_cache_hit_rate": round(hit_rate, 5),
        },
    )


def log_arrival(request: EngineCoreRequest, num_sequences: int) -> None:
    num_tokens, longest = len(request.prompt_token_ids), request.sampling_params.max_tokens
    logger.debug(
        "request %s: %d prompt tokens, %d sequences of at most %d tokens",
        request.request_id,
        num_tokens,
        num_sequences,
        longest,
        extra={"request_id": request.request_id},
    )
