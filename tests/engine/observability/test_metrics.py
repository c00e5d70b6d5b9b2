import pytest

from jaxpaged.engine.observability.metrics import Counter, EngineMetrics, FinishedSequence, Gauge, Tally, length_buckets
from jaxpaged.messages import SchedulerStats

TIMES = ("queue", "prefill", "decode", "inference")


def values(metrics, **executor_stats):
    return {
        (m.name, *m.labels.values()): m.value for m in metrics.read(executor_stats) if isinstance(m, Counter | Gauge)
    }


def test_a_histogram_counts_what_is_at_most_each_bound():
    tally = Tally((1, 2.5, 5))
    for value in (0, 1, 2, 5, 6):
        tally.observe(value)
    histogram = tally.read("h")
    assert histogram.buckets == {"1": 2, "2.5": 3, "5": 4, "+Inf": 5}
    assert (histogram.count, histogram.sum) == (5, 14)


def test_length_buckets_are_a_1_2_5_series():
    assert length_buckets(64) == (1, 2, 5, 10, 20, 50)
    assert length_buckets(1) == (1,)


def test_scheduler_and_executor_numbers_are_passed_on():
    metrics = EngineMetrics(100)
    metrics.record_step(
        SchedulerStats(
            num_running_reqs=3,
            num_waiting_reqs=2,
            kv_cache_usage=0.5,
            prefix_cache_queries=40,
            prefix_cache_hits=8,
            num_preemptions=1,
        ),
        num_tokens=7,
    )
    metrics.record_step(SchedulerStats(), num_tokens=0)
    seen = values(metrics, recompiles=2, bucket_steps={16: 1})
    assert seen["jaxpaged:recompiles",] == 2
    assert ("jaxpaged:bucket_steps",) not in seen
    assert seen["vllm:num_requests_running",] == 0
    tokens = next(m for m in metrics.read({}) if m.name == "vllm:iteration_tokens_total")
    assert (tokens.count, tokens.sum) == (1, 7)


@pytest.mark.parametrize(("level", "state"), [(None, "awake"), (0, None), (1, "weights_offloaded"), (2, "discard_all")])
def test_one_gauge_says_how_an_engine_sleeps_and_none_that_it_only_pauses(level, state):
    metrics = EngineMetrics(100)
    metrics.stats = SchedulerStats(sleep_level=level)
    seen = values(metrics)
    for each in ("awake", "weights_offloaded", "discard_all"):
        assert seen["vllm:engine_sleep_state", each] == float(each == state)


@pytest.mark.parametrize(("num_tokens", "count"), [(12, 4), (14, 4), (3, 3), (0, 0)])
def test_the_steps_of_a_run_are_counted_one_by_one(num_tokens, count):
    metrics = EngineMetrics(100)
    metrics.record_step(SchedulerStats(num_steps=4), num_tokens)
    tokens = next(m for m in metrics.read({}) if m.name == "vllm:iteration_tokens_total")
    assert (tokens.count, tokens.sum) == (count, num_tokens)


def test_tokens_that_come_together_took_their_share_of_the_time_each():
    metrics = EngineMetrics(100)
    metrics.record_next_tokens(10.0, 8.0, num_sequences=3, num_tokens=4)
    times = metrics.tallies["vllm:inter_token_latency_seconds"].read("")
    assert (times.count, times.sum, times.buckets["0.5"]) == (12, 6.0, 12)


def test_times_are_counted_of_sequences_that_had_them():
    metrics = EngineMetrics(100)
    metrics.record_finished(FinishedSequence("abort", 10, 0, 16, latency=2.0))
    metrics.record_finished(FinishedSequence("error", 10, 0, 16, latency=2.0, queue_time=1.0))
    metrics.record_finished(
        FinishedSequence("stop", 10, 5, 16, latency=2.0, queue_time=0.5, prefill_time=0.25, decode_time=1.0)
    )
    times = {name: metrics.tallies[f"vllm:request_{name}_time_seconds"].read("") for name in TIMES}
    assert {name: (time.count, time.sum) for name, time in times.items()} == {
        "queue": (2, 1.5),
        "prefill": (1, 0.25),
        "decode": (1, 1.0),
        "inference": (1, 1.25),
    }


def test_a_sequence_is_counted_when_it_ends():
    metrics = EngineMetrics(100)
    metrics.record_finished(FinishedSequence("stop", 10, 5, 16, latency=2.0, decode_time=0.4))
    assert values(metrics)["vllm:request_success", "stop"] == 1
    assert values(metrics)["vllm:request_success", "length"] == 0
    per_token = next(m for m in metrics.read({}) if m.name == "vllm:request_time_per_output_token_seconds")
    assert per_token.sum == 0.1
