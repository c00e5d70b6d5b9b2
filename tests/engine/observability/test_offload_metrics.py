"""Metrics of keys and values that travel, under vLLM's names."""

from jaxpaged.engine.merged_results import merged_executor_stats, merged_stats
from jaxpaged.engine.observability.metrics import Counter, EngineMetrics, Gauge, Histogram
from jaxpaged.messages import SchedulerStats

EXECUTOR = {
    "steps": 3,
    "kv_offload_pages_saved": 4,
    "kv_offload_load_bytes": 300,
    "kv_offload_load_seconds": 0.5,
    "kv_offload_load_sizes": {16384: 1, 65536: 0},
    "kv_offload_store_bytes": 90_000,
    "kv_offload_store_seconds": 1.5,
    "kv_offload_store_sizes": {16384: 2, 65536: 1},
    "kv_offload_tier_host": {"bytes": 90_000, "hits": 5, "errors": 0},
    "kv_borrowed_bytes": {"shared_memory": 700, "tcp": 0},
}


def values(metrics, name):
    return {tuple(metric.labels.values()): metric for metric in metrics if metric.name == name}


def test_cached_tokens_are_told_by_where_they_came_from():
    metrics = EngineMetrics(1000)
    metrics.record_first_token(0.1, 100, 60, {"disk": 30, "redis": 10})
    metrics.record_first_token(0.1, 50, 20)
    metrics.record_first_token(0.1, 50, 8, {"host": 16})  # some were evicted before it was admitted
    read = metrics.read({})
    by_source = values(read, "vllm:prompt_tokens_cached_by_source")
    assert {name: metric.value for (name,), metric in by_source.items()} == {
        "device": 40,
        "host": 8,
        "p2p": 0,
        "disk": 30,
        "external_unspecified": 10,
    }
    kinds = values(read, "vllm:prompt_tokens_by_source")
    assert {name: metric.value for (name,), metric in kinds.items()} == {
        "local_compute": 112,
        "local_cache_hit": 40,
        "external_kv_transfer": 48,
    }
    assert not [metric for metric in read if "offload" in metric.name or "fetch" in metric.name]


def test_what_tiers_did_is_told_for_several_cores_too():
    stats = SchedulerStats(num_kv_fetches=[1, 2, 3])
    metrics = EngineMetrics(1000, stats=merged_stats([stats, stats, SchedulerStats()]))
    read = metrics.read(merged_executor_stats([EXECUTOR, EXECUTOR]))
    stages = values(read, "vllm:num_requests_kv_fetch_by_stage")
    assert {name: metric.value for (name,), metric in stages.items()} == {
        "waiting_to_start": 2,
        "in_progress": 4,
        "completed_waiting": 6,
    }
    for name, value in (("load_bytes", 600), ("load_time", 1.0), ("store_bytes", 180_000), ("store_time", 3.0)):
        assert values(read, f"vllm:kv_offload_{name}")[()] == Counter(f"vllm:kv_offload_{name}", {}, value)
    sizes = values(read, "vllm:kv_offload_store_size")[()]
    assert sizes == Histogram(sizes.name, {}, 6, 180_000, {"16384": 4, "65536": 6, "+Inf": 6})
    of_host = lambda kind, field, value: kind(f"jaxpaged:kv_offload_tier_{field}", {"tier": "host"}, value)
    for kind, field, value in ((Gauge, "bytes", 180_000), (Counter, "hits", 10), (Counter, "errors", 0)):
        assert values(read, f"jaxpaged:kv_offload_tier_{field}")[("host",)] == of_host(kind, field, value)
    borrowed = values(read, "jaxpaged:kv_borrowed_bytes")
    assert borrowed[("shared_memory",)] == Counter("jaxpaged:kv_borrowed_bytes", {"transport": "shared_memory"}, 1400)
    assert borrowed[("tcp",)].value == 0
    assert Gauge("jaxpaged:kv_offload_pages_saved", {}, 8) in read
    assert not [metric for metric in read if metric.name.startswith("jaxpaged:kv_offload_load")]


def test_memory_of_a_device_is_not_summed_over_cores():
    memory = {"weight_bytes": 7, "state_bytes": 1, "kv_cache_bytes": 30, "encoder_cache_bytes": 4}
    assert merged_executor_stats([{"steps": 2, **memory}] * 2) == {"steps": 4, **memory}
