"""Rows of the sampling state: loading, forgetting the last owner, counting what was drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.sampling.rows import SamplingRows, unpack_rows
from jaxpaged.sampling.state import (
    CHUNK,
    MOST_COUNTED,
    TOKENS_HEADER,
    StateLayout,
    given_tokens,
    load_trace,
    pack_masks,
    pack_row,
    pack_tokens,
    pack_trace,
    record_tokens,
)
from jaxpaged.sampling_params import SamplingParams
from tests.sampling.programs import write_row, write_tokens

V, R = 37, 4
LAYOUT = StateLayout(R, V, num_custom_params=2)
EVERYTHING = SamplingParams(
    seed=1,
    presence_penalty=0.5,
    logit_bias={3: 1.5, 36: -2.0},
    allowed_token_ids=[0, 31, 32, 36],
    min_tokens=2,
    stop_token_ids=[5, 6],
    bad_words_token_ids=[[1, 2, 3], [4]],
    logprob_token_ids=[9, 8],
    max_tokens=9,
)

record = jax.jit(lambda state, packed_SF, tokens_S: record_tokens(state, unpack_rows(packed_SF), tokens_S))


def seen_line(state, row: int) -> tuple[list[int], list[int]]:
    """(Output counts, prompt flags) of a row."""
    line = np.asarray(state.seen_RV)[row].astype(int)
    return (line >> 1).tolist(), (line & 1).tolist()


def test_the_state_has_the_announced_shapes_and_types():
    abstract, state = LAYOUT.abstract(), LAYOUT.zeros()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert state.seen_RV.shape == (R + 1, V)
    assert state.seen_RV.dtype == np.uint16
    assert state.allowed_bits_RW.shape == (R + 1, 2)


def test_a_state_without_custom_parameters_has_no_array_for_them():
    layout = StateLayout(R, V)
    state = write_row(layout.zeros(), pack_row(layout, 2, EVERYTHING))
    assert state.custom_RP is None
    assert all(leaf.size for leaf in jax.tree.leaves(state))
    assert state.allowed_bits_RW[2].tolist() == [1 | 1 << 31, 1 | 1 << 4]


def test_a_row_is_written_as_packed():
    packed = pack_row(
        LAYOUT, 2, EVERYTHING, eos_token_id=7, output_token_ids=[30, 31], custom_params=np.array([0.25, -3.0])
    )
    assert (packed.dtype, packed.shape) == (np.int32, (LAYOUT.packed_size,))
    state = write_row(LAYOUT.zeros(), packed)
    assert state.recent_RH[2].tolist()[-3:] == [-1, 30, 31]
    assert state.bias_ids_RJ[2].tolist()[:3] == [3, 36, V]
    assert state.bias_values_RJ[2].tolist()[:3] == [1.5, -2.0, 0.0]
    assert state.stop_ids_RJ[2].tolist()[:4] == [5, 6, 7, V]
    assert state.bad_tokens_RJ[2].tolist()[:5] == [1, 2, 3, 4, -1]
    assert state.bad_words_RJ[2].tolist()[:4] == [0, 0, 0, 1]
    assert state.bad_distances_RJ[2].tolist()[:5] == [2, 1, 0, 0, -1]
    assert state.logprob_ids_RK[2].tolist()[:3] == [9, 8, 0]
    assert state.allowed_bits_RW[2].tolist() == [1 | 1 << 31, 1 | 1 << 4]
    assert state.custom_RP[2].tolist() == [0.25, -3.0]
    others = jax.tree.map(lambda array: np.delete(np.asarray(array), 2, axis=0), state)
    assert not any(leaf.any() for leaf in jax.tree.leaves(others))


def test_a_row_keeps_nothing_of_its_last_owner():
    plain = pack_row(LAYOUT, 1, SamplingParams(seed=1))
    loaded = write_row(LAYOUT.zeros(), pack_row(LAYOUT, 1, EVERYTHING, output_token_ids=[1, 2, 3]))
    again, fresh = write_row(loaded, plain), write_row(LAYOUT.zeros(), plain)
    jax.tree.map(np.testing.assert_array_equal, again, fresh)


@pytest.mark.parametrize("values", [{"ignore_eos": True}, {"min_tokens": 0}])
def test_the_end_of_sequence_id_is_masked_only_where_it_would_end_the_text_too_early(values):
    params = SamplingParams(**{"min_tokens": 3} | values)
    state = write_row(LAYOUT.zeros(), pack_row(LAYOUT, 0, params, eos_token_id=7))
    assert (np.asarray(state.stop_ids_RJ[0]) == V).all()


def test_the_largest_parameters_fit_a_row():
    layout = StateLayout(R, 2000)
    params = SamplingParams(
        seed=1,
        logit_bias=dict.fromkeys(range(1024), 1.0),
        min_tokens=1,
        stop_token_ids=list(range(127)),
        bad_words_token_ids=[[1] * 8] * 128,
        logprob_token_ids=list(range(128)),
    )
    packed = pack_row(layout, 0, params, eos_token_id=1999, output_token_ids=list(range(1000)))
    assert packed.shape == (layout.packed_size,)


@given(st.lists(st.integers(0, V - 1), max_size=3 * CHUNK), st.floats(0, 1))
def test_tokens_are_counted_in_prompt_and_output(token_ids, share):
    num_prompt = int(len(token_ids) * share)
    state = LAYOUT.zeros()
    state = state.replace(seen_RV=state.seen_RV.at[3].set(999))  # of the row's last owner
    for packed in pack_tokens(3, token_ids, num_prompt):
        assert packed.shape == (TOKENS_HEADER + CHUNK,)
        state = write_tokens(state, packed)
    counts, in_prompt = seen_line(state, 3)
    assert counts == np.bincount(np.array(token_ids[num_prompt:], int), minlength=V).tolist()
    assert in_prompt == [int(token in token_ids[:num_prompt]) for token in range(V)]
    assert not np.asarray(state.seen_RV)[[0, 1, 2, 4]].any()


def test_drawn_tokens_are_counted_only_where_they_matter():
    rows = SamplingRows(R)
    rows.set(1, EVERYTHING)
    rows.set(2, SamplingParams(seed=1))
    rows.set(3, SamplingParams(seed=1, bad_words_token_ids=[[1]]))
    state = LAYOUT.zeros()
    packed = rows.pack(np.array([3, 1, 2]), np.zeros(3), np.zeros(3), 4)
    for token in (8, 9):
        state = record(state, packed, jnp.array([token, token, token, token]))
    for row in (0, 2, 3, 4):
        assert not any(seen_line(state, row)[0])
    assert np.flatnonzero(seen_line(state, 1)[0]).tolist() == [8, 9]
    assert [state.recent_RH[row].tolist()[-2:] for row in range(5)] == [[0, 0], [8, 9], [0, 0], [8, 9], [0, 0]]


def test_counts_end_at_their_type_and_never_wrap():
    rows = SamplingRows(R)
    rows.set(0, EVERYTHING)
    packed = rows.pack(np.array([0]), np.zeros(1), np.zeros(1), 4)
    state = LAYOUT.zeros()
    state = state.replace(seen_RV=state.seen_RV.at[0, 5].set(2 * (MOST_COUNTED - 1) + 1))
    for _ in range(3):
        state = record(state, packed, jnp.array([5, 0, 0, 0]))
        assert seen_line(state, 0)[0][5] == MOST_COUNTED
        assert seen_line(state, 0)[1][5] == 1
    for packed_tokens in pack_tokens(0, [5] * CHUNK, 0):
        packed_tokens[1] = 0  # do not forget
        state = write_tokens(state, packed_tokens)
    assert seen_line(state, 0)[0][5] == MOST_COUNTED


def test_masks_are_padded_with_rows_that_allow_everything_and_columns_that_allow_nothing():
    all_of_them = [0xFFFFFFFF, 0xFFFFFFFF]
    packed = pack_masks(np.array([[1], [0]], np.uint32), [1, 1], num_most=1, size=3, vocab_size=V)
    assert packed.dtype == np.uint32
    assert packed.tolist() == [[[1, 0], [0, 0], all_of_them]]
    packed = pack_masks(np.array([[1], [2], [3], [4]], np.uint32), [1, 3], num_most=3, size=2, vocab_size=V)
    assert packed.tolist() == [[[1, 0], [2, 0]], [all_of_them, [3, 0]], [all_of_them, [4, 0]]]


def test_given_tokens_come_in_their_order_in_the_rows_that_have_some():
    layout, table, trace = StateLayout(R, V, most_traced=2 * CHUNK), SamplingRows(R), [i % V for i in range(CHUNK + 7)]
    state, write = layout.zeros(), jax.jit(load_trace)
    for row, token_ids in ((2, [V - 1] * 2 * CHUNK), (2, trace), (1, trace)):  # another had row 2 before
        for packed in pack_trace(row, token_ids):
            state = write(state, packed)
    table.set(2, SamplingParams(seed=1, trace_decode_token_ids=trace))
    table.set(1, SamplingParams(seed=1))
    for nth in (0, CHUNK - 1, CHUNK, CHUNK + 6):
        rows = unpack_rows(jnp.asarray(table.pack(np.array([2, 1]), nth, nth, 2)))
        assert given_tokens(state, rows, jnp.array([-5, -6])).tolist() == [trace[nth], -6]
