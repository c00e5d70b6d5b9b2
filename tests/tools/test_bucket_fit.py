"""Proposed buckets against the best of all sets, tried one by one."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.tools.bucket_fit import fit_buckets, padding_of

SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=40)


def least_padding(steps, num_buckets, largest, multiple_of):
    """Over all sets of sizes, not only of those that occur."""
    allowed = [size for size in range(1, largest) if size % multiple_of == 0]
    sets = itertools.chain.from_iterable(itertools.combinations(allowed, n) for n in range(num_buckets))
    return min(padding_of(steps, [*chosen, largest]) for chosen in sets)


@given(SIZES, st.integers(1, 4), st.integers(0, 6), st.sampled_from([1, 2, 4]))
def test_no_other_set_pads_less(sizes, num_buckets, headroom, multiple_of):
    steps, largest = Counter(sizes), max(sizes) + headroom
    chosen = fit_buckets(steps, num_buckets, largest, multiple_of)
    assert len(chosen) <= num_buckets
    assert chosen[-1] == largest
    assert list(chosen) == sorted(set(chosen))
    assert all(size % multiple_of == 0 for size in chosen[:-1])
    assert padding_of(steps, chosen) == least_padding(steps, num_buckets, largest, multiple_of)


@given(SIZES)
def test_a_bucket_for_every_size_pads_nothing_and_useless_buckets_are_not_proposed(sizes):
    chosen = fit_buckets(Counter(sizes), 100, max(sizes))
    assert chosen == tuple(sorted(set(sizes)))


def test_one_bucket_is_the_largest():
    assert fit_buckets({3: 10, 5: 1}, 1, 64) == (64,)


def test_steps_that_come_often_decide():
    assert fit_buckets({9: 1000, 100: 1}, 2, 128) == (9, 128)
    assert fit_buckets({9: 1, 100: 1000}, 2, 128) == (100, 128)
    assert fit_buckets({9: 1000, 100: 1}, 2, 128, multiple_of=8) == (16, 128)


@pytest.mark.parametrize(("buckets", "padding"), [([8], 0 + 5 * 2), ([3, 8], 0), ([4, 8], 2), ([16], 8 + 13 * 2)])
def test_padding_is_counted_per_step(buckets, padding):
    assert padding_of({8: 1, 3: 2}, buckets) == padding
