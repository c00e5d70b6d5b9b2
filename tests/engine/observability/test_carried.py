"""Counters go on where a core that is gone left them."""

from jaxpaged.engine.observability.metrics import CarriedCounts, EngineMetrics
from jaxpaged.engine.observability.metrics_types import Counter, Gauge, Histogram
from jaxpaged.messages import SchedulerStats

TIERS = {
    "kv_offload_pages_saved": 1,
    "kv_offload_load_bytes": 100,
    "kv_offload_load_seconds": 0.5,
    "kv_offload_load_sizes": {64.0: 2},
    "kv_offload_store_bytes": 10,
    "kv_offload_store_seconds": 1.5,
    "kv_offload_store_sizes": {},
    "kv_leases": 3,
    "kv_leases_granted": 4,
    "kv_borrowed_bytes": {"tcp": 5},
    "kv_offload_tier_host": {"hits": 6, "bytes": 7},
}
STATS = SchedulerStats(
    prefix_cache_queries=40,
    prefix_cache_hits=8,
    num_preemptions=1,
    num_corrupted_reqs=2,
    num_drafts=3,
    num_draft_tokens=9,
    num_accepted_tokens=4,
    num_accepted_per_pos=[3, 1],
    external_prefix_cache_queries=20,
    external_prefix_cache_hits=16,
    num_kv_fetches=[1, 1, 1],
)


def counts(metrics, executor_stats):
    """Every counter, and every part of a histogram."""
    found = {}
    for each in metrics.read(executor_stats):
        key = (each.name, *each.labels.values())
        if isinstance(each, Counter):
            found[key] = each.value
        elif isinstance(each, Histogram):
            found[(*key, "count")], found[(*key, "sum")] = each.count, each.sum
            found |= {(*key, bound): number for bound, number in each.buckets.items()}
    return found


def test_no_counter_falls_whatever_cores_count():
    metrics = EngineMetrics(100)
    metrics.stats = STATS
    last = counts(metrics, TIERS)
    assert last["vllm:prefix_cache_queries",] == 40 and last["vllm:kv_offload_load_size", "count"] == 2
    for round in (2, 3):
        metrics.lose_core(TIERS)
        for stats, executor_stats in ((SchedulerStats(), {}), (SchedulerStats(), TIERS), (STATS, TIERS)):
            metrics.stats = stats
            now = counts(metrics, executor_stats)
            assert now.keys() == last.keys()
            assert all(now[key] >= last[key] for key in last), (round, stats)
            last = now
        assert last["vllm:prefix_cache_queries",] == 40 * round
        assert last["vllm:spec_decode_num_accepted_tokens_per_pos", "1"] == round
        assert last["vllm:kv_offload_load_size", "+Inf"] == 2 * round
        assert last["jaxpaged:kv_borrowed_bytes", "tcp"] == 5 * round


def test_what_says_how_things_are_now_is_that_of_the_new_core():
    metrics = EngineMetrics(100)
    metrics.stats = STATS
    metrics.lose_core(TIERS)
    gauges = {(m.name, *m.labels.values()): m.value for m in metrics.read(TIERS) if isinstance(m, Gauge)}
    assert gauges["jaxpaged:kv_leases",] == 3 and gauges["vllm:num_requests_running",] == 0


def test_a_core_that_counted_nothing_leaves_what_those_before_counted():
    counts = CarriedCounts()
    for last in ([Counter("a", {}, 1), Gauge("b", {}, 5)], [], [Counter("c", {}, 2)]):
        counts.keep(last)
    assert counts.added_to([]) == [Counter("c", {}, 2), Counter("a", {}, 1)]
    assert counts.added_to([Counter("a", {}, 4)]) == [Counter("a", {}, 5), Counter("c", {}, 2)]
