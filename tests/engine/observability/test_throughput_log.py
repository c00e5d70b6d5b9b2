"""What a line says; when there is one is tested with `AsyncLLM`."""

from jaxpaged.engine.observability.metrics import EngineMetrics
from jaxpaged.engine.observability.throughput_log import write_line
from jaxpaged.messages import SchedulerStats


def test_a_line_tells_rates_queues_and_cache_as_text_and_as_fields(caplog):
    caplog.set_level("INFO", "jaxpaged")
    metrics = EngineMetrics(100, prompt_tokens=150, generation_tokens=80)
    metrics.stats = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.125, prefix_cache_queries=40, prefix_cache_hits=10
    )
    write_line(metrics, 50, 30, 10.0)
    [record] = caplog.records
    assert record.getMessage() == (
        "prompt throughput: 10.0 tokens/s, generation throughput: 5.0 tokens/s, running: 3 requests, waiting: 2 "
        "requests, KV cache usage: 12.5 %, prefix cache hit rate: 25.0 %"
    )
    assert (record.prompt_tokens_per_second, record.kv_cache_usage, record.prefix_cache_hit_rate) == (10.0, 0.125, 0.25)
