"""Which texts are compared, and how two vectors are."""

import numpy as np
import pytest

from jaxpaged.engine.pooling.scoring import cosine, paired
from jaxpaged.errors import RequestError

NAMES = ("queries", "documents")


def test_one_text_is_compared_with_each_and_many_one_by_one():
    assert paired(["a"], ["b", "c"], NAMES) == [(0, 0), (0, 1)]
    assert paired(["a", "b"], ["c", "d"], NAMES) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("first", "second", "name"), [([], ["a"], "queries"), (["a"], [], "documents"), (["a", "b"], ["c"], "documents")]
)
def test_lists_that_do_not_fit_are_refused_by_name(first, second, name):
    with pytest.raises(RequestError, match=name) as caught:
        paired(first, second, NAMES)
    assert caught.value.parameter == name


def test_the_cosine_does_not_depend_on_lengths():
    assert cosine([3.0, 0.0], [1.0, 1.0]) == pytest.approx(0.5**0.5)
    assert cosine([1.0, 2.0], [-2.0, -4.0]) == pytest.approx(-1.0)
    assert cosine(np.zeros(2), [1.0, 2.0]) == 0.0
