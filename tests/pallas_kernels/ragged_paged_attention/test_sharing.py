"""What rows share: which spans are found, and that attention over them is that of each row by itself."""

import functools
from itertools import pairwise
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import sharing, work_lists
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.sharing import SharedWork
from pallas_kernels.testing import QUICK_COMPILE, expected, make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import case_tolerance

UNIT = 64
ALWAYS = SharedWork(UNIT, tile=1000, break_even=1)


def in_common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def spans(tables, work=ALWAYS, num_queries=None):
    """[6, R] for rows with these units of blocks."""
    order = sorted(range(len(tables)), key=tables.__getitem__)
    common = [0, *(in_common(tables[one], tables[other]) for one, other in pairwise(order))]
    shared_6R = np.zeros((6, len(tables)), np.int32)
    counts = np.ones(len(tables), np.int32) if num_queries is None else np.array(num_queries)
    sharing.fill_spans(shared_6R, order, common[: len(order)], counts, work)
    return shared_6R


def taken(shared_6R):
    """(rows, begin, end) of every span, in units."""
    rows, _, *spans_4R = shared_6R.tolist()
    return [
        (rows[first:last], begin // UNIT, end // UNIT) for first, last, begin, end in zip(*spans_4R) if last > first
    ]


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=9))
def test_each_row_shares_one_piece_from_its_beginning_as_long_as_any_other_has_it(tables):
    shared_6R = spans(tables)
    end_of = [0] * len(tables)
    for rows, begin, end in taken(shared_6R):
        assert len(rows) > 1 and begin < end
        assert len({tuple(tables[row][:end]) for row in rows}) == 1
        for row in rows:
            assert end_of[row] == begin, "a span continues the one before it"
            end_of[row] = end
    others = lambda row: (tables[i] for i in range(len(tables)) if i != row)
    assert end_of == [max((in_common(tables[i], x) for x in others(i)), default=0) for i in range(len(tables))]
    assert (shared_6R[sharing.OWN] // UNIT).tolist() == end_of


def test_a_span_is_taken_where_one_tile_costs_less_than_its_rows_do():
    work = SharedWork(UNIT, tile=8, break_even=3)
    assert not spans([[1, 2]] * 3, work).any()
    assert taken(spans([[1, 2]] * 4, work)) == [([0, 1, 2, 3], 0, 2)]
    assert not spans([[1, 2]] * 2, work, [8, 1]).any(), "two tiles in place of one and a query"
    assert taken(spans([[1, 2]] * 2, work, [20, 4])) == [([0, 1], 0, 2)], "three tiles in place of four"
    # Below what four rows share, two share more, which costs more than it saves; but for them it would be taken.
    assert taken(spans([[1], [1, 5], [1, 5], [1]], work)) == [([0, 3, 1, 2], 0, 1)]


R, T, M, B = 5, 16, 26, 120
OF_OUR_OWN = ("cpu",) if rpa.backends("cpu")["cpu"] is None else ()
"""Kernels for this CPU, whose tiles hold 12 of the queries with the larger groups."""
SETTINGS = {None: {}, 70: {"soft_cap": 1.5}}


@functools.cache
def program(backend, window):
    """Attention of a step of R rows and T tokens; tiles are so small that a span has several."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def attend(q_TNH, k_TKH, v_TKH, kv, shared_6R, num_seqs, *where):
        metadata = rpa.make_metadata(
            num_seqs, *where, num_tokens=T, block_size=16, window=window, backend=backend, shared_6R=shared_6R
        )
        settings = {"scale": 16**-0.5, "window": window, "backend": backend}
        return rpa.ragged_paged_attention(q_TNH, k_TKH, v_TKH, kv, metadata, **settings, **SETTINGS[window])[0]

    def run(case, step, shared_6R):
        pad = lambda x, size, value: np.concatenate([x, np.full((size - len(x), *x.shape[1:]), value, x.dtype)])
        kv = rpa.KVTensor(tuple(jnp.asarray(pad(x, B, np.nan)) for x in (step.k_BKSH, step.v_BKSH)))
        table_RM = np.full((R, M), -1, np.int32)
        table_RM[:, : step.block_tables_RM.shape[1]] = step.block_tables_RM
        new = (jnp.asarray(x) for x in (step.q_TNH, step.k_TKH, step.v_TKH))
        with mock.patch.object(work_lists, "TILE_QUERIES", 4):
            out = attend(*new, kv, shared_6R, len(case.rows), step.query_start_loc_R1, step.seq_lens_R, table_RM)
        return np.asarray(out)

    return run


@st.composite
def cases(draw):
    """Up to R rows, each of which may hold beginnings of earlier ones."""
    rows = draw(st.lists(st.tuples(st.integers(0, 350), st.integers(1, 3)), min_size=2, max_size=R))
    held = []
    for row in range(1, len(rows)):
        other = draw(st.integers(0, row - 1))
        num_blocks = min(rows[row][0], rows[other][0]) // 16
        held.append((row, other, draw(st.sampled_from([0, num_blocks, num_blocks, num_blocks // 2]))))
    padding, empty = T - sum(new for _, new in rows), R - len(rows)
    heads = draw(st.sampled_from([{}, {"num_kv_heads": 1, "group_size": 8}]))
    window = draw(st.sampled_from(list(SETTINGS)))
    return Case(
        "drawn",
        tuple(rows),
        window=window,
        padding=padding,
        empty_rows=empty,
        shared=tuple(held),
        **SETTINGS[window],
        **heads,
    )


@settings(max_examples=60)
@given(cases(), st.integers(0, 3))
def test_whatever_rows_share_attention_is_that_of_each_row_by_itself(case, seed):
    step = make_step(case, jnp.float32, seed)
    for backend in ("reference", *OF_OUR_OWN):
        out_TNH = program(backend, case.window)(case, step, step.shared_6R)
        assert np.abs(out_TNH - expected(case, step)).max() <= case_tolerance(case, jnp.float32), backend
    alone_TNH = program("invariant", case.window)(case, step, np.zeros_like(step.shared_6R))
    np.testing.assert_array_equal(program("invariant", case.window)(case, step, step.shared_6R), alone_TNH)


def test_spans_are_taken_only_if_a_step_saves_more_than_sharing_costs_it_and_its_lists_have_room():
    work = ALWAYS._replace(overhead=4 * UNIT)
    assert not spans([[1, 2]] * 3, work).any(), "two rows read two units less: no more than it costs"
    assert taken(spans([[1, 2], [1, 2], [1, 2], [3], [3]], work)) == [([3, 4], 0, 1), ([0, 1, 2], 0, 2)], "five"
    two_tiles = ALWAYS._replace(most_tiles=3)
    assert taken(spans([[1, 2], [1, 2], [1]], two_tiles)) == [([2, 0, 1], 0, 1)], "two more would be the fourth"
    assert taken(spans([[1, 2], [1, 2], [1]], ALWAYS._replace(most_tiles=4)))[1] == ([0, 1], 1, 2)


def test_steps_in_which_sharing_never_pays_have_nothing_for_it():
    assert [rpa.shared_work(backend, 2, 16) for backend in ("tpu", "gpu")] == [None, None]
    assert [rpa.shared_work(backend, 8, 48).unit % 48 for backend in ("tpu", "gpu")] == [0, 0]
    assert rpa.shared_work("reference", 2, 16) is None
    assert rpa.shared_work("reference", 8, 16).break_even < 8
