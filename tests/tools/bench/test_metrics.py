"""Figures of outcomes with known times, against figures computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.metrics import (
    DETAILS,
    limits_of,
    metrics_named,
    most_at_a_time,
    percentiles_of,
    serving_result,
)
from jaxpaged.tools.bench.requests import Outcome
from jaxpaged.tools.bench.serve import EPILOG


def outcome(start, *chunks, tokens=None, prompt=10, queue=0.0, error=""):
    """A request sent at `start` whose chunks came so many seconds later."""
    made = Outcome(start_time=start, queue_time=queue, prompt_len=prompt, error=error)
    for after in chunks:
        made.add_chunk(start + after, "x")
    made.output_tokens = len(chunks) if tokens is None else tokens
    return made


THREE = [
    outcome(0.0, 0.5, 1.0, 1.5),  # TPOT 0.5
    outcome(1.0, 1.0, 1.2, 1.4, 1.6, 1.8, queue=0.25),  # TPOT 0.2
    outcome(1.5, 2.0, queue=0.5),  # a single token: no TPOT
    outcome(9.0, error="refused"),
]
ALL = ["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]


def test_every_figure_is_what_its_definition_says():
    found = serving_result(THREE, 10.0, metrics=ALL, percentiles=[50, 99.9], goodput={"ttft": 1000, "tpot": 300})
    figures = {name: value for name, value in found.items() if name not in DETAILS}
    assert figures == pytest.approx(
        {
            "duration": 10.0,
            "completed": 3,
            "failed": 1,
            "total_input_tokens": 30,
            "total_output_tokens": 9,
            "request_throughput": 0.3,
            "request_goodput": 0.1,
            "output_throughput": 0.9,
            "total_token_throughput": 3.9,
            "max_output_tokens_per_s": 5.0,
            "max_concurrent_requests": 2,
            "rtfx": 0.0,
            "mean_ttft_ms": 3500 / 3,
            "median_ttft_ms": 1000,
            "std_ttft_ms": math.sqrt(7 / 18) * 1e3,
            "p50_ttft_ms": 1000,
            "p99.9_ttft_ms": 1998,
            "mean_tpot_ms": 350,
            "median_tpot_ms": 350,
            "std_tpot_ms": 150,
            "p50_tpot_ms": 350,
            "p99.9_tpot_ms": 499.7,
            "mean_itl_ms": 300,
            "median_itl_ms": 200,
            "std_itl_ms": math.sqrt(2) * 100,
            "p50_itl_ms": 200,
            "p99.9_itl_ms": 500,
            "mean_e2el_ms": 5300 / 3,
            "median_e2el_ms": 1800,
            "std_e2el_ms": 205.48046676563255,
            "p50_e2el_ms": 1800,
            "p99.9_e2el_ms": 1999.6,
            "mean_client_queue_time_ms": 250,
            "median_client_queue_time_ms": 250,
            "std_client_queue_time_ms": math.sqrt(1 / 24) * 1e3,
            "p50_client_queue_time_ms": 250,
            "p99.9_client_queue_time_ms": 499.5,
            "mean_e2el_including_client_queue_ms": 6050 / 3,
            "median_e2el_including_client_queue_ms": 2050,
            "std_e2el_including_client_queue_ms": 409.0,
            "p50_e2el_including_client_queue_ms": 2050,
            "p99.9_e2el_including_client_queue_ms": 2499.1,
        },
        rel=1e-3,
    )
    assert found["output_lens"] == [3, 5, 1, 0] and found["errors"] == ["", "", "", "refused"]
    assert found["queue_times"] == [0.0, 0.25, 0.5, 0.0] and found["start_times"] == [0.0, 1.0, 1.5, 9.0]
    assert found["itls"][0] == pytest.approx([0.5, 0.5]) and found["ttfts"][:3] == pytest.approx([0.5, 1.0, 2.0])
    assert found["generated_texts"] == ["xxx", "xxxxx", "x", ""] and found["input_lens"] == [10] * 4
    assert set(DETAILS) <= set(found)


def test_only_metrics_that_are_asked_for_are_reported_and_goodput_is_none_without_limits():
    found = serving_result(THREE, 10.0)
    assert found["request_goodput"] is None
    assert {name for name in found if name.startswith("mean_")} == {"mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms"}
    assert "p99_itl_ms" in found


def test_a_request_with_one_token_keeps_any_limit_of_tpot_and_a_limit_is_kept_by_its_own_value():
    assert serving_result(THREE[2:3], 1.0, goodput={"tpot": 0})["request_goodput"] == 1.0
    assert serving_result(THREE[2:3], 1.0, goodput={"e2el": 2000})["request_goodput"] == 1.0
    assert serving_result(THREE[2:3], 1.0, goodput={"e2el": 1999})["request_goodput"] == 0.0


def test_tokens_are_those_that_the_server_counted_or_else_those_of_the_text():
    several = outcome(0.0, 0.5, 1.5, tokens=9)
    assert serving_result([several], 1.0)["mean_tpot_ms"] == pytest.approx(125)
    uncounted = outcome(0.0, 0.5, 1.5, tokens=0)
    assert serving_result([uncounted], 1.0, count_tokens=lambda text: 5 * len(text))["total_output_tokens"] == 10
    assert serving_result([uncounted], 1.0)["total_output_tokens"] == 1


def test_the_busiest_second_counts_the_tokens_of_chunks_that_have_several():
    found = serving_result([outcome(0.0, 0.5, 0.9, 1.1, 1.2, tokens=40), outcome(0.2, 0.9, tokens=7)], 2.0)
    assert found["max_output_tokens_per_s"] == pytest.approx(27.0)  # 20 in each second, and 7 in the second one


def test_nothing_that_succeeds_is_no_division_by_zero():
    found = serving_result([outcome(0.0, error="x")], 0.0, metrics=ALL)
    assert found["completed"] == 0 and found["failed"] == 1 and found["mean_ttft_ms"] == 0.0
    assert found["max_concurrent_requests"] == 0 and found["max_output_tokens_per_s"] == 0.0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_the_most_at_a_time_is_that_of_some_moment(spans):
    requests = [outcome(float(begin), float(length)) for begin, length in spans]
    by_moment = [sum(begin <= moment < begin + length for begin, length in spans) for moment in range(40)]
    assert most_at_a_time(requests) == max(by_moment)


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (metrics_named, "ttft,speed", "'speed'"),
        (percentiles_of, "50,x", "'50,x'"),
        (percentiles_of, "101", "from 0 to 100"),
        (limits_of, ["itl:5"], "'itl:5'"),
        (limits_of, ["ttft"], "ttft:500"),
        (limits_of, ["ttft:-1"], "'ttft:-1'"),
        (limits_of, ["ttft:nan"], "'ttft:nan'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_name(function, value, words):
    with pytest.raises(UsageError, match=words):
        function(value)


def test_values_of_flags_are_read():
    assert metrics_named("ttft, e2el") == ["ttft", "e2el"] and percentiles_of("25,99.9") == [25.0, 99.9]
    assert limits_of(["ttft:500", "tpot:5.5"]) == {"ttft": 500.0, "tpot": 5.5}
    assert "--goodput ttft:500 tpot:50" in EPILOG
