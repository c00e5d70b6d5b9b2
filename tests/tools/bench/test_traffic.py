"""Times of arrival: rates, bursts and ramps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.load import Traffic, rate_changes


def test_without_a_rate_everything_is_due_at_once():
    assert Traffic().arrivals(3, seed=0) == [0.0, 0.0, 0.0]


@given(st.floats(0.01, 1000), st.floats(0.05, 50), st.integers(1, 200), st.integers(0, 2**32))
def test_a_fixed_rate_is_kept_to_the_end_and_times_never_go_back(rate, burstiness, count, seed):
    times = Traffic(rate, burstiness).arrivals(count, seed)
    assert times == sorted(times) and len(times) == count
    assert times[-1] == pytest.approx(count / rate) and times == Traffic(rate, burstiness).arrivals(count, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_their_distribution_does(burstiness):
    gaps = np.diff(Traffic(5.0, burstiness).arrivals(20_000, seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_clock():
    assert Traffic(4.0, math.inf).arrivals(4, seed=0) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_ramps_rise_as_their_names_say():
    linear = Traffic(strategy="linear", start_rps=1, end_rps=5, burstiness=math.inf)
    assert linear.rates(5).tolist() == [1, 2, 3, 4, 5]
    assert linear.arrivals(3, seed=0) == pytest.approx([1, 1 + 1 / 3, 1 + 1 / 3 + 1 / 5])
    exponential = Traffic(strategy="exponential", start_rps=1, end_rps=16)
    assert exponential.rates(5).tolist() == pytest.approx([1, 2, 4, 8, 16])
    assert Traffic(strategy="linear", start_rps=2, end_rps=9).rates(1).tolist() == [2]


def test_every_whole_rate_of_a_ramp_is_reached_once():
    assert rate_changes([1.0, 1.9, 4.2, 4.9], [0.5, 1.0, 1.5, 2.0]) == [(1, 0.0), (2, 1.5), (3, 1.5), (4, 1.5)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"request_rate": 0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"burstiness": 0}, "--burstiness is 0"),
        ({"start_rps": 1}, "--ramp-up-strategy"),
        ({"strategy": "linear", "request_rate": 1.0}, "Leave one out"),
        ({"strategy": "linear", "start_rps": 1}, "needs --ramp-up-start-rps"),
        ({"strategy": "linear", "start_rps": 5, "end_rps": 1}, "from 5 to 1"),
        ({"strategy": "linear", "start_rps": 0, "end_rps": 1}, "above 0"),
    ],
)
def test_rates_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        Traffic(**settings)
