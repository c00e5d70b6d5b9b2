"""The least logit that may be drawn: ties, exact thresholds, and what settles a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling.limits import LimitsMethod, sampling_limits
from jaxpaged.sampling.rows import SamplingRows, unpack_rows
from jaxpaged.sampling_params import SamplingParams

V = 16
# Probabilities 1/2, 1/4, 1/8, twice 1/32 and small change; the last ids are padding.
TIED = np.append(np.log(np.array([16, 8, 4, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]) / 32), [-np.inf] * 5)


@functools.cache
def program(num_candidates: int):
    method = LimitsMethod(num_candidates=num_candidates)
    return jax.jit(lambda logits_SV, packed_SF: sampling_limits(logits_SV, unpack_rows(packed_SF), method))


def limits_of(logits_V: np.ndarray, num_candidates: int = V, **values):
    rows = SamplingRows(2)
    rows.set(0, SamplingParams(seed=0, **values))
    packed = rows.pack(np.array([0]), np.array([0]), np.array([0]), 2)
    logits_SV = jnp.asarray(np.tile(logits_V.astype(np.float32), (2, 1)))
    return program(num_candidates)(logits_SV, packed)


def kept(logits_V: np.ndarray, num_candidates: int = V, **values) -> list[int]:
    least = np.asarray(limits_of(logits_V, num_candidates, **values).least_S)[0]
    return np.flatnonzero((logits_V.astype(np.float32) >= least) & np.isfinite(logits_V)).tolist()


@pytest.mark.parametrize("num_candidates", [4, V])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 11),
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 5),  # the fourth and the fifth tie
        ({"top_k": 5}, 5),
        ({"top_k": 6}, 7),
        ({"top_k": 99}, 11),
        ({"top_p": 0.4}, 1),  # one always stays
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.89}, 5),  # the tie goes or stays as one
        ({"top_p": 0.95}, 7),
        ({"min_p": 0.2}, 3),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.05, "top_p": 0.9}, 3),  # 27/32 of the 30/32 that min_p left
        ({"top_k": 2, "top_p": 0.6}, 1),  # of what top_k left, the first has 2/3
    ],
)
def test_limits_keep_the_right_number_of_tokens(num_candidates, values, expected):
    assert kept(TIED, num_candidates, **values) == list(range(expected))


def test_a_row_is_narrow_when_its_candidates_are_all_it_may_draw():
    assert limits_of(TIED, 4, top_k=3).narrow_S[0]
    assert limits_of(TIED, 4, top_p=0.7).narrow_S[0]
    assert not limits_of(TIED, 4, top_k=4).narrow_S[0]  # the tie reaches beyond them
    assert not limits_of(TIED, 4, top_k=7).narrow_S[0]
    assert not limits_of(TIED, 4, top_p=0.99).narrow_S[0]
    assert limits_of(TIED, V, top_p=0.99).narrow_S[0]
