"""Metrics of keys and values that travel: from the executor's counters `kv_offload_*`, and of where prompts came from.

Names are vLLM's where it has one. An engine without tiers has none of those of tiers.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from jaxpaged.engine.observability.metrics_types import Counter, Gauge, Histogram, Metric
from jaxpaged.messages import SchedulerStats

OWN = "kv_offload_"
DEVICE, UNSPECIFIED = "device", "external_unspecified"
SOURCES = (DEVICE, "host", "p2p", "disk", UNSPECIFIED)
"""vLLM's words for where cached tokens came from. Redis and S3 are the last."""
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
LENT = (
    "kv_leases",
    "kv_lease_bytes",
    "kv_leases_granted",
    "kv_leases_released",
    "kv_leases_expired",
    "kv_lent_pages",
    "kv_lent_bytes",
    "kv_lent_refused",
)
"""Of a lender; the first two may shrink again."""
BORROWED = ("kv_borrowed_pages", "kv_borrowed_bytes")
"""Of a borrower, by transport."""
NOW = ("bytes", "capacity", "pages")
"""Of a tier, what may shrink again."""


def source_of(tier: str) -> str:
    """vLLM's word for a tier."""
    return tier if tier in SOURCES else UNSPECIFIED


def source_metrics(prompt_tokens: int, cached: int, by_source: Mapping[str, int]) -> list[Metric]:
    """Tokens of prompts by where their keys and values came from. `by_source` has those that were cached."""
    loaded = cached - by_source.get(DEVICE, 0)
    kinds = {
        "local_compute": prompt_tokens - cached,
        "local_cache_hit": cached - loaded,
        "external_kv_transfer": loaded,
    }
    return [
        *(Counter("vllm:prompt_tokens_by_source", {"source": name}, value) for name, value in kinds.items()),
        *(Counter("vllm:prompt_tokens_cached_by_source", {"source": name}, by_source.get(name, 0)) for name in SOURCES),
    ]


def transfer_metrics(stats: SchedulerStats, executor: Mapping[str, Any]) -> Iterator[Metric]:
    """What the tiers did; nothing where there are none."""
    if f"{OWN}pages_saved" not in executor:
        return
    for stage, count in zip(STAGES, stats.num_kv_fetches):
        yield Gauge("vllm:num_requests_kv_fetch_by_stage", {"stage": stage}, count)
    for verb in ("load", "store"):
        num_bytes = executor[f"{OWN}{verb}_bytes"]
        yield Counter(f"vllm:kv_offload_{verb}_bytes", {}, num_bytes)
        yield Counter(f"vllm:kv_offload_{verb}_time", {}, executor[f"{OWN}{verb}_seconds"])
        counts = executor[f"{OWN}{verb}_sizes"]
        bounds = sorted(counts)
        at_most = dict(zip((f"{bound:g}" for bound in bounds), accumulate(counts[bound] for bound in bounds)))
        total = sum(counts.values())
        yield Histogram(f"vllm:kv_offload_{verb}_size", {}, total, num_bytes, at_most | {"+Inf": total})
    for name in LENT:
        if name in executor:
            lent: Any = Gauge if name in LENT[:2] else Counter
            yield lent(f"jaxpaged:{name}", {}, executor[name])
    for name in BORROWED:
        for transport, value in executor.get(name, {}).items():
            yield Counter(f"jaxpaged:{name}", {"transport": transport}, value)
    for name, values in executor.items():
        if name.startswith(f"{OWN}tier_"):
            for field, value in values.items():
                kind: Any = Gauge if field in NOW else Counter
                yield kind(f"jaxpaged:{OWN}tier_{field}", {"tier": name.removeprefix(f"{OWN}tier_")}, value)
