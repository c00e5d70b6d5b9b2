"""Ragged paged attention in plain jax.numpy: the definition of correct, and the CPU backend.

Layout: keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous.

Work follows the tokens that exist, whatever their distribution over rows. Rows with many new tokens are cut into
tiles of `QUERY_TILE` queries, each walking over its context in chunks. Rows with few (decodes) go token by token
through a list of items: (token, `ITEM_SLOTS` slots of its context). A tile of items is one batched product,
whichever tokens they belong to, so one long context among many short ones costs what it holds and no more.

Skipping: context above the diagonal and outside of the window is never read, at the grain of an item or a chunk.
Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the
cache's dtype. Masked values are replaced, not multiplied by zero: unowned slots may hold NaN.

This module knows nothing of meshes and of who owns which block.

Letters beside the package's: I items in a tile, Q queries in a tile, C slots of one item or chunk,
A blocks of one item or chunk (C = A * S).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.shapes import ceil_div

NUM_KV_ARRAYS = 2
KV_HEADS_AXIS = 1

ITEM_SLOTS = 64  # smaller: more partial results to merge; larger: more padding on short contexts
TILE_SLOTS = 4096
QUERY_TILE = 64
CHUNK_SLOTS = 512
MAX_SINGLE_QUERIES = 4  # rows with at most this many new tokens go token by token
MASKED = -1e30  # below any score, and finite: MASKED - MASKED is 0, not NaN
NOWHERE = 2**31 - 1  # an index that scatter drops


def why_not(platform: str) -> str | None:
    """It runs everywhere."""
    return None


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, num_kv_heads, block_size, head_dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What all layers of a group share in one step.

    slot_block_T, slot_offset_T: where each token's keys and values go. single_*: the tokens that go one by one,
    in order, then padding: token id, row, position; `item_start_T` is the first item of each in the list of items,
    `num_items` its length. tile_start_R1: the first query tile of each row; its last entry is their number.
    """

    slot_block_T: jax.Array
    slot_offset_T: jax.Array
    single_token_T: jax.Array
    single_row_T: jax.Array
    single_position_T: jax.Array
    item_end_T: jax.Array
    num_items: jax.Array
    tile_end_R: jax.Array


def make_plan(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> Plan:
    num_rows = seq_lens_R.shape[0]
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.searchsorted(query_start_loc_R1[1:], token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, num_rows - 1)
    real_T = token_T < query_start_loc_R1[-1]
    position_T = seq_lens_R[row_T] - query_start_loc_R1[row_T + 1] + token_T
    slot_block_T = block_tables_RM.at[row_T, position_T // block_size].get(mode="clip")

    num_queries_R = jnp.diff(query_start_loc_R1)
    single_R = num_queries_R <= MAX_SINGLE_QUERIES
    single_T = real_T & single_R[row_T]
    (single_token_T,) = jnp.nonzero(single_T, size=num_tokens, fill_value=NOWHERE)
    single_row_T = row_T.at[single_token_T].get(mode="clip")
    single_position_T = position_T.at[single_token_T].get(mode="clip")
    item_slots = _whole_blocks(ITEM_SLOTS, block_size)
    first_T = _first_visible(single_position_T, window) // item_slots
    num_items_T = jnp.where(single_token_T < num_tokens, single_position_T // item_slots - first_T + 1, 0)
    item_end_T = jnp.cumsum(num_items_T)
    num_tiles_R = jnp.where(single_R, 0, ceil_div(num_queries_R, QUERY_TILE))
    return Plan(
        slot_block_T=jnp.where(real_T, slot_block_T, NOWHERE),
        slot_offset_T=position_T % block_size,
        single_token_T=single_token_T,
        single_row_T=single_row_T,
        single_position_T=single_position_T,
        item_end_T=item_end_T,
        num_items=item_end_T[-1],
        tile_end_R=jnp.cumsum(num_tiles_R),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Softmax:
    """A softmax-weighted sum over part of a context, not yet divided: maximum, sum of weights, weighted values.

    `max` and `sum` have a query per entry; `out` has one axis more, the head dim.
    """

    max: jax.Array
    sum: jax.Array
    out: jax.Array


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What the loops of one call only read."""

    q_TKGH: jax.Array
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    sinks_KG: jax.Array | None
    metadata: Any
    scale: float
    window: int | None
    soft_cap: float | None


def attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    metadata: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """See `ragged_paged_attention`; `kv` is (k_BKSH, v_BKSH)."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    slots = (metadata.plan.slot_block_T, slice(None), metadata.plan.slot_offset_T)
    k_BKSH = kv[0].at[slots].set(k_TKH.astype(kv[0].dtype), mode="drop")
    v_BKSH = kv[1].at[slots].set(v_TKH.astype(kv[1].dtype), mode="drop")
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, N // K)
    problem = _Problem(q_TKGH, k_BKSH, v_BKSH, sinks_KG, metadata, scale, window, soft_cap)
    out_TKGH = jnp.zeros_like(q_TKGH)
    out_TKGH = _attend_query_tiles(problem, out_TKGH)
    out_TKGH = _attend_single_queries(problem, out_TKGH)
    return out_TKGH.reshape(T, N, H), (k_BKSH, v_BKSH)


# ---- rows with many new tokens: tiles of queries ------------------------------------------------


def _attend_query_tiles(problem: _Problem, out_TKGH: jax.Array) -> jax.Array:
    """Fill in the outputs of the rows that are cut into query tiles, one tile after the other."""
    tile_end_R = problem.metadata.plan.tile_end_R
    num_queries = min(QUERY_TILE, out_TKGH.shape[0])

    def attend_tile(tile, out_TKGH):
        row = jnp.sum(tile_end_R <= tile)
        tile_in_row = tile - jnp.where(row > 0, tile_end_R[row - 1], 0)
        start, end = problem.metadata.query_start_loc_R1[row], problem.metadata.query_start_loc_R1[row + 1]
        token_Q = start + tile_in_row * num_queries + jnp.arange(num_queries)
        position_Q = problem.metadata.seq_lens_R[row] - end + token_Q
        q_QKGH = problem.q_TKGH.at[token_Q].get(mode="clip")
        out_QKGH = _attend_query_tile(problem, row, position_Q, q_QKGH)
        token_Q = jnp.where(token_Q < end, token_Q, NOWHERE)
        return out_TKGH.at[token_Q].set(out_QKGH.astype(out_TKGH.dtype), mode="drop")

    return lax.fori_loop(0, tile_end_R[-1], attend_tile, out_TKGH)


def _attend_query_tile(problem: _Problem, row: jax.Array, position_Q: jax.Array, q_QKGH: jax.Array) -> jax.Array:
    """Attend from neighbouring queries of one row. Positions beyond the row's context give undefined outputs."""
    Q, K, G, H = q_QKGH.shape
    q_KXH = q_QKGH.transpose(1, 0, 2, 3).reshape(K, Q * G, H)
    first_Q = _first_visible(position_Q, problem.window)
    last = jnp.minimum(position_Q[-1], problem.metadata.seq_lens_R[row] - 1)
    chunk_slots = _whole_blocks(CHUNK_SLOTS, problem.k_BKSH.shape[2])

    def add_chunk(chunk, state_KX):
        position_C = chunk * chunk_slots + jnp.arange(chunk_slots)
        needed_C = (position_C >= first_Q[0]) & (position_C <= last)
        k_KCH, v_KCH = _gather_slots(problem, row, position_C, needed_C)
        visible_QC = (position_C >= first_Q[:, None]) & (position_C <= position_Q[:, None])
        part_KX = _attend_slots(problem, q_KXH, k_KCH, v_KCH, jnp.repeat(visible_QC, G, axis=0))
        return _merge_two(state_KX, part_KX)

    state_KX = _nothing((K, Q * G), H)
    state_KX = lax.fori_loop(first_Q[0] // chunk_slots, last // chunk_slots + 1, add_chunk, state_KX)
    sinks_KX = None if problem.sinks_KG is None else jnp.tile(problem.sinks_KG, (1, Q))
    out_KXH = _divide(state_KX, sinks_KX)
    return out_KXH.reshape(K, Q, G, H).transpose(1, 0, 2, 3)


# ---- rows with few new tokens: a list of items ---------------------------------------------------


def _attend_single_queries(problem: _Problem, out_TKGH: jax.Array) -> jax.Array:
    """Fill in the outputs of the tokens that go one by one, a tile of items at a time.

    Items of a token are neighbours in the list, so only the last token of a tile can go on in the next one:
    its state is carried over. What is written for it meanwhile is overwritten by the next tile.
    """
    plan = problem.metadata.plan
    T, K, G, H = out_TKGH.shape
    item_slots = _whole_blocks(ITEM_SLOTS, problem.k_BKSH.shape[2])
    num_items = max(1, TILE_SLOTS // item_slots)

    def attend_tile(tile, carry):
        out_TKGH, carried_single, carried_KG = carry
        item_I = jnp.minimum(tile * num_items + jnp.arange(num_items), plan.num_items - 1)
        real_I = tile * num_items + jnp.arange(num_items) < plan.num_items
        single_I = jnp.sum(plan.item_end_T <= item_I[:, None], axis=-1)
        part_IKG = _attend_items(problem, item_I, single_I, real_I)

        segment_I = single_I - single_I[0]
        carried_segment = jnp.where(carried_single == single_I[0], 0, num_items)
        state_IKG = _merge_segments(part_IKG, segment_I, carried_KG, carried_segment)
        token_I = plan.single_token_T.at[single_I[0] + jnp.arange(num_items)].get(mode="clip")
        token_I = jnp.where(jnp.arange(num_items) <= segment_I[-1], token_I, NOWHERE)
        out_IKGH = _divide(state_IKG, problem.sinks_KG)
        out_TKGH = out_TKGH.at[token_I].set(out_IKGH.astype(out_TKGH.dtype), mode="drop")
        return out_TKGH, single_I[-1], jax.tree.map(lambda x: x[segment_I[-1]], state_IKG)

    carry = (out_TKGH, jnp.int32(-1), _nothing((K, G), H))
    return lax.fori_loop(0, ceil_div(plan.num_items, num_items), attend_tile, carry)[0]


def _attend_items(problem: _Problem, item_I: jax.Array, single_I: jax.Array, real_I: jax.Array) -> _Softmax:
    """Attend from each item's token to the item's slots."""
    plan = problem.metadata.plan
    item_slots = _whole_blocks(ITEM_SLOTS, problem.k_BKSH.shape[2])
    position_I = plan.single_position_T[single_I]
    items_left_I = plan.item_end_T[single_I] - 1 - item_I
    first_slot_I = (position_I // item_slots - items_left_I) * item_slots
    position_IC = first_slot_I[:, None] + jnp.arange(item_slots)
    visible_IC = (position_IC >= _first_visible(position_I, problem.window)[:, None]) & real_I[:, None]
    visible_IC &= position_IC <= position_I[:, None]
    k_IKCH, v_IKCH = _gather_slots(problem, plan.single_row_T[single_I][:, None], position_IC, visible_IC)
    q_IKGH = problem.q_TKGH.at[plan.single_token_T[single_I]].get(mode="clip")
    return _attend_slots(problem, q_IKGH, k_IKCH, v_IKCH, visible_IC[:, None, None, :])


def _merge_segments(part_IKG: _Softmax, segment_I: jax.Array, carried_KG: _Softmax, carried_segment) -> _Softmax:
    """Merge the parts of each segment; `carried_KG` joins `carried_segment`. Empty segments are undefined."""
    num_segments = segment_I.shape[0]
    part_JKG = jax.tree.map(lambda x, one: jnp.concatenate([one[None], x]), part_IKG, carried_KG)
    segment_J = jnp.concatenate([carried_segment[None], segment_I])
    max_IKG = jax.ops.segment_max(part_JKG.max, segment_J, num_segments)
    weight_JKG = jnp.exp(part_JKG.max - max_IKG.at[segment_J].get(mode="clip"))
    sum_IKG = jax.ops.segment_sum(part_JKG.sum * weight_JKG, segment_J, num_segments)
    out_IKGH = jax.ops.segment_sum(part_JKG.out * weight_JKG[..., None], segment_J, num_segments)
    return _Softmax(max_IKG, sum_IKG, out_IKGH)


# ---- what both lists share -----------------------------------------------------------------------


def _whole_blocks(slots: int, block_size: int) -> int:
    """The multiple of `block_size` that is nearest to `slots` from below, but at least one block."""
    return max(1, slots // block_size) * block_size


def _first_visible(position: jax.Array, window: int | None) -> jax.Array:
    """The first position that a query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def _gather_slots(problem: _Problem, row: jax.Array, position: jax.Array, needed: jax.Array):
    """Keys and values [..., K, C, H] of `row` at `position` [..., C], whole blocks; values 0 where not `needed`.

    Blocks of which nothing is needed are not looked up: their ids may be anything.
    """
    S = problem.k_BKSH.shape[2]
    needed_block = needed.reshape(*needed.shape[:-1], -1, S).any(-1)
    block = problem.metadata.block_tables_RM.at[row, position[..., ::S] // S].get(mode="clip")
    block = jnp.where(needed_block, block, 0)
    _, K, _, H = problem.k_BKSH.shape
    index = (block[..., None, :], jnp.arange(K)[:, None])
    shape = (*needed.shape[:-1], K, needed.shape[-1], H)
    k = problem.k_BKSH.at[index].get(mode="clip").reshape(shape)
    v = problem.v_BKSH.at[index].get(mode="clip").reshape(shape)
    return k, jnp.where(needed[..., None, :, None], v, 0)


def _attend_slots(problem: _Problem, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> _Softmax:
    """Attend from queries [..., X, H] to slots [..., C, H]; `visible` broadcasts to [..., X, C]."""
    score = jnp.einsum("...XH,...CH->...XC", q.astype(k.dtype), k, preferred_element_type=jnp.float32) * problem.scale
    if problem.soft_cap is not None:
        score = problem.soft_cap * jnp.tanh(score / problem.soft_cap)
    score = jnp.where(visible, score, MASKED)
    top = score.max(-1)
    weight = jnp.where(visible, jnp.exp(score - top[..., None]), 0)
    out = jnp.einsum("...XC,...CH->...XH", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Softmax(top, weight.sum(-1), out)


def _nothing(shape: tuple[int, ...], head_dim: int) -> _Softmax:
    """The softmax over no slots at all."""
    return _Softmax(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def _merge_two(a: _Softmax, b: _Softmax) -> _Softmax:
    top = jnp.maximum(a.max, b.max)
    weight_a, weight_b = jnp.exp(a.max - top), jnp.exp(b.max - top)
    out = a.out * weight_a[..., None] + b.out * weight_b[..., None]
    return _Softmax(top, a.sum * weight_a + b.sum * weight_b, out)


def _divide(state: _Softmax, sinks: jax.Array | None) -> jax.Array:
    """Weighted values over the sum of weights; a sink is one more weight, with no value."""
    if sinks is None:
        return state.out / state.sum[..., None]
    top = jnp.maximum(state.max, sinks)
    weight = jnp.exp(state.max - top)
    return state.out * (weight / (state.sum * weight + jnp.exp(sinks - top)))[..., None]
