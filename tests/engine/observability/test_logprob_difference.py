"""How far an engine's and a trainer's log probabilities are apart."""

import math

import numpy as np
import pytest

from jaxpaged import logprob_difference
from jaxpaged.errors import UsageError
from tests.engine.fake_engine import make_engine


def test_mean_percentile_and_largest_over_all_tokens_of_all_texts():
    trained = np.linspace(-1, 0, 200)
    drawn = trained.copy()
    drawn[3] += 0.5
    whole = logprob_difference(drawn, trained)
    assert whole == pytest.approx((0.0025, 0.0, 0.5, 200), abs=1e-12)
    texts = [[drawn[:7], drawn[7:]], [list(trained[:7]), trained[7:]]]
    assert logprob_difference(*texts) == pytest.approx(whole)
    assert logprob_difference(np.float32([[-1, -2], [-3, -4]]), [[-1, -2], [-3, -4]]).largest == 0.0
    assert "at most 5.0e-01" in str(whole) and "of 200 tokens" in str(whole)


def test_what_is_no_number_shows():
    assert math.isnan(logprob_difference([-1.0, float("nan")], [-1.0, -1.0]).largest)


@pytest.mark.parametrize(
    ("drawn", "trained"), [([], []), ([-1.0], [-1.0, -2.0]), ([[-1.0], [-2.0, -3.0]], [[-1.0, -2.0], [-3.0]])]
)
def test_other_tokens_are_not_compared(drawn, trained):
    with pytest.raises(UsageError, match="log probabilities"):
        logprob_difference(drawn, trained)


def test_metrics_have_the_last_one_that_was_told():
    engine, _ = make_engine()
    told = lambda: {each.labels["of_tokens"]: each.value for each in engine.get_metrics() if "logprob" in each.name}
    assert not told()
    for largest in (0.5, 0.25):
        engine.note_logprob_difference(logprob_difference([-1.0, -2.0], [-1.0, -2.0 + largest]))
    assert told() == {"mean": 0.125, "p99": pytest.approx(0.2475), "largest": 0.25}
