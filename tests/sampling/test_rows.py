"""The packed parameters of a step: what goes in comes out, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling.rows import NUM_COLUMNS, RowParams, SamplingRows, unpack_rows
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Feature, features_of

FIRST = SamplingParams(
    seed=2**64 - 3,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.3,
    min_tokens=7,
)
SECOND = SamplingParams(seed=2**31, temperature=0)


def unpack(packed_SF: np.ndarray) -> RowParams:
    return unpack_rows(jnp.asarray(packed_SF))


def filled_rows() -> SamplingRows:
    rows = SamplingRows(6)
    rows.set(5, FIRST, custom_bits=1 << 9)
    rows.set(2, SECOND)
    return rows


def test_parameters_arrive_on_the_device_as_they_left():
    packed = filled_rows().pack(np.array([2, 5]), np.array([70_000, 2**24 + 1]), np.array([3, 12]), 4)
    assert (packed.dtype, packed.shape) == (np.float32, (4, NUM_COLUMNS))
    rows = unpack(packed)
    assert rows.row_S.tolist() == [2, 5, 6, 6]
    assert rows.position_S.tolist()[:2] == [70_000, 2**24 + 1]
    assert rows.num_output_S.tolist()[:2] == [3, 12]
    assert rows.seed_S2.tolist()[:2] == [[2**31, 0], [2**32 - 3, 2**32 - 1]]
    assert rows.top_k_S.tolist()[:2] == [0, 40]
    assert rows.min_tokens_S.tolist()[:2] == [0, 7]
    np.testing.assert_array_equal(rows.temperature_S[:2], np.float32([0, 0.7]))
    for name in ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        assert getattr(rows, f"{name}_S")[1] == np.float32(getattr(FIRST, name))
    assert rows.has(Feature.PENALTIES).tolist() == [False, True, False, False]
    assert rows.has(1 << 9).tolist() == [False, True, False, False]


def test_lines_that_no_request_fills_are_greedy_and_change_nothing():
    rows = unpack(filled_rows().pack(np.array([5]), np.array([1]), np.array([1]), 4))
    for name, value in {"top_p": 1, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0, "flags": 0}.items():
        assert getattr(rows, f"{name}_S").tolist()[1:] == [value] * 3
    assert rows.random_S.tolist() == [True, False, False, False]


def test_a_row_keeps_nothing_of_its_last_owner():
    rows, fresh = filled_rows(), SamplingRows(6)
    rows.set(5, SECOND)
    fresh.set(5, SECOND)
    step = np.array([5]), np.array([1]), np.array([1]), 2
    np.testing.assert_array_equal(rows.pack(*step).view(np.int32), fresh.pack(*step).view(np.int32))


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        ({}, Feature.NONE),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 0.5, "stop_token_ids": [3]}, Feature.NONE),
        ({"presence_penalty": 0.1}, Feature.PENALTIES),
        ({"frequency_penalty": -0.1}, Feature.PENALTIES),
        ({"repetition_penalty": 1.1}, Feature.PENALTIES),
        ({"logit_bias": {1: 1.0}}, Feature.LOGIT_BIAS),
        ({"logit_bias": {}}, Feature.NONE),
        ({"allowed_token_ids": [1]}, Feature.ALLOWED),
        ({"min_tokens": 1}, Feature.MIN_TOKENS),
        ({"bad_words_token_ids": [[1]]}, Feature.BAD_WORDS),
        ({"logprobs": 0}, Feature.LOGPROBS),
        ({"logprob_token_ids": [1]}, Feature.LOGPROBS | Feature.LOGPROB_IDS),
    ],
)
def test_features_are_those_that_the_plain_program_lacks(values, feature):
    assert features_of(SamplingParams(**values)) == feature


@pytest.mark.parametrize("seed", [0, -5, -(2**63), 2**64 - 2])
def test_negative_seeds_are_their_64_bits(seed):
    rows = SamplingRows(1)
    rows.set(0, SamplingParams(seed=seed))
    halves = unpack(rows.pack(np.array([0]), np.array([0]), np.array([0]), 4)).seed_S2[0].tolist()
    assert halves[0] + (halves[1] << 32) == seed % 2**64
