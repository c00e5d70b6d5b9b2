"""Work lists: every query sees every slot of its context once, in lists no longer than promised."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.gpu.items import (
    BEGIN,
    END,
    NOT_SPLIT,
    NUM_PARTS,
    NUM_QUERIES,
    PART,
    POSITION,
    ROW,
    TOKEN,
    Sizes,
    make_items,
)

ROWS = [(0, 5), (300, 1), (10, 90), (63, 1), (0, 1), (9, 0), (1000, 3), (260, 70)]


def lists(rows, sizes, window):
    """(items, split tiles), only those in use, for rows of (cached, new) tokens."""
    num_tiles = sum(-(-new // sizes.queries) for _, new in rows)

    @jax.jit
    def lists(start_R1, seq_lens_R):
        metadata = SimpleNamespace(query_start_loc_R1=start_R1, seq_lens_R=seq_lens_R)
        return make_items(metadata, jnp.ones(len(rows), bool), num_tiles, sizes, window)

    work = lists(np.cumsum([0] + [new for _, new in rows]).astype(np.int32), np.array([sum(r) for r in rows], np.int32))
    return tuple(np.asarray(x)[np.asarray(x)[:, NUM_QUERIES] > 0] for x in (work.items_I, work.tiles_E))


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("programs", [1, 60])
def test_every_query_sees_every_slot_of_its_context_once(window, programs):
    sizes = Sizes(queries=4, slots=32, programs=programs, min_slots=32)
    items, _ = lists(ROWS, sizes, window)
    seen = [np.zeros((new, cached + new), int) for cached, new in ROWS]
    starts = np.cumsum([0] + [new for _, new in ROWS])
    for item in items:
        cached, _new = ROWS[item[ROW]]
        first = item[TOKEN] - starts[item[ROW]]
        assert item[POSITION] == cached + first
        assert item[BEGIN] % sizes.slots == 0
        assert item[NUM_QUERIES] <= sizes.queries
        seen[item[ROW]][first : first + item[NUM_QUERIES], item[BEGIN] : max(item[END], item[BEGIN])] += 1
    for (cached, new), seen_QP in zip(ROWS, seen):
        distance_QP = np.arange(cached, cached + new)[:, None] - np.arange(cached + new)
        visible_QP = (distance_QP >= 0) & (distance_QP < (window or cached + new))
        assert (seen_QP[visible_QP] == 1).all()
        assert (seen_QP <= 1).all()


@pytest.mark.parametrize("programs", [20, 60])
def test_parts_have_places_of_their_own_and_are_listed_with_their_tiles(programs):
    sizes = Sizes(queries=4, slots=32, programs=programs, min_slots=32)
    items, tiles = lists(ROWS, sizes, None)
    parts = {item[PART]: item for item in items if item[PART] != NOT_SPLIT}
    assert len(parts) == sum(item[PART] != NOT_SPLIT for item in items)
    assert all(0 <= part < sizes.num_parts for part in parts)
    assert sum(tile[NUM_PARTS] for tile in tiles) == len(parts) > 0
    for tile in tiles:
        for part in range(tile[PART], tile[PART] + tile[NUM_PARTS]):
            assert (parts[part][[TOKEN, NUM_QUERIES]] == tile[[TOKEN, NUM_QUERIES]]).all()


def test_one_long_context_is_cut_into_as_many_parts_as_fill_the_device():
    sizes = Sizes(queries=4, slots=64, programs=66, min_slots=256)
    items, _ = lists([(131071, 1), *[(100, 1)] * 15], sizes, None)
    lengths = (items[:, END] - items[:, BEGIN])[items[:, ROW] == 0]
    assert 60 <= len(lengths) <= 66
    assert len(set(lengths)) <= 2  # all alike, but for the last one
    assert (items[items[:, ROW] > 0, PART] == NOT_SPLIT).all()


def test_a_prompt_that_fills_the_device_is_not_cut():
    items, tiles = lists([(0, 2048)], Sizes(queries=32, slots=64, programs=33, min_slots=1024), None)
    assert len(items) == 64
    assert len(tiles) == 0
    assert items[0, POSITION] == 2048 - 32  # what takes longest comes first
