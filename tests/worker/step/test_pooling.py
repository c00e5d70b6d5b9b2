"""Sums of hidden states over the chunks of several prompts, against numpy."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxpaged.worker.step.packed import step_layout
from jaxpaged.worker.step.prompt_sums import accumulate

NUM_TOKENS, NUM_ROWS, WIDTH = 8, 3, 5
LAYOUT = step_layout(NUM_TOKENS, NUM_ROWS, [4])


def packed_step(shares):
    """The packed array of a step; a share is (row, tokens before, tokens in the step, whether it is the last)."""
    packed = np.zeros(LAYOUT.size, np.int32)
    parts = LAYOUT.split(packed)
    parts.rows_R[:] = NUM_ROWS
    ends = np.cumsum([count for _, _, count, _ in shares])
    parts.query_start_loc_R1[1 : len(shares) + 1] = ends
    parts.query_start_loc_R1[len(shares) + 1 :] = ends[-1]
    parts.num_seqs[0] = len(shares)
    parts.rows_R[: len(shares)] = [row for row, *_ in shares]
    parts.seq_lens_R[: len(shares)] = [before + count for _, before, count, _ in shares]
    done = [end - 1 for end, share in zip(ends, shares) if share[3]]
    parts.sample_idxs_R[: len(done)] = done
    return packed


@pytest.fixture(scope="module")
def programs():
    """One program per pooling type, with four lines of hidden states for those that are done."""
    return {kind: jax.jit(partial(accumulate, LAYOUT, 4, kind)) for kind in ("MEAN", "CLS")}


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
def test_prompts_in_chunks_give_the_mean_or_the_first_whatever_their_rows_held(programs, kind):
    rng = np.random.default_rng(0)
    a_TD, b_TD, c_TD = (rng.standard_normal((length, WIDTH), dtype=np.float32) for length in (9, 3, 2))
    sums_RD = np.full((NUM_ROWS + 1, WIDTH), 1e6, np.float32)  # what earlier requests left
    expected = {"MEAN": lambda x_TD: x_TD.mean(0), "CLS": lambda x_TD: x_TD[0]}[kind]

    def run(sums_RD, shares, *hidden):
        hidden_TD = np.full((NUM_TOKENS, WIDTH), np.nan, np.float32)  # padding must not count
        joined = np.concatenate(hidden)
        hidden_TD[: len(joined)] = joined
        return programs[kind](hidden_TD, sums_RD, packed_step(shares))

    sums_RD, _ = run(sums_RD, [(2, 0, 5, False), (0, 0, 2, False)], a_TD[:5], b_TD[:2])
    sums_RD, done_SD = run(sums_RD, [(2, 5, 2, False), (0, 2, 1, True), (1, 0, 2, True)], a_TD[5:7], b_TD[2:], c_TD)
    assert done_SD.shape == (4, WIDTH)
    np.testing.assert_allclose(done_SD[:2], [expected(b_TD), expected(c_TD)], rtol=1e-5, atol=1e-6)
    _, done_SD = run(sums_RD, [(2, 7, 2, True)], a_TD[7:])
    np.testing.assert_allclose(done_SD[0], expected(a_TD), rtol=1e-5, atol=1e-6)


def test_a_request_with_infinite_hidden_states_harms_no_other(programs):
    hidden_TD = np.ones((NUM_TOKENS, WIDTH), np.float32)
    hidden_TD[1] = np.inf
    shares = [(0, 0, 3, True), (1, 0, 4, True)]
    _, done_SD = programs["MEAN"](hidden_TD, np.zeros((NUM_ROWS + 1, WIDTH), np.float32), packed_step(shares))
    assert np.isinf(done_SD[0]).all()
    np.testing.assert_array_equal(done_SD[1], np.ones(WIDTH))
