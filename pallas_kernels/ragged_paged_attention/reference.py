"""Ragged paged attention in plain jax.numpy: the definition of correct, and the CPU backend.

Layout: keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous.

Skipping: work follows the tokens that exist, whatever their distribution over rows. Rows with many new tokens are
cut into tiles of `TILE_QUERIES` queries, each walking over its context in chunks. Rows with few (decodes) go query
by query through a list of items: one query, and `ITEM_SLOTS` slots of its context. A tile of items is one batched
product, whomever they belong to, so one long context among many short ones costs what it holds and no more.
Context above the diagonal and outside of the window is not read, at the grain of an item or a chunk.

Padding: tokens beyond the last row's write nowhere; their output is zero.

Numerics: those of `numerics.PLAIN`, unless the caller has others. Values that no query may see are replaced, not
multiplied by zero: slots that nobody owns may hold NaN.

Cost: the loops have traced bounds. Integers that all layers of a group share are computed once, in the plan; what
is left of them divides with `lax.div`, since `//` brings kernels for signs that never occur (README.md).

This module knows nothing of meshes and of who owns which block. Letters beside the package's: I items in a tile,
J the same and the part carried over, Q queries in a tile, X = Q * G, C slots of one item or chunk.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.layout import SplitLayout
from pallas_kernels.ragged_paged_attention.numerics import PLAIN, Numerics, Softmax, nothing
from pallas_kernels.ragged_paged_attention.quantized import is_quantized, kind_of, quantize_new, slot_scales
from pallas_kernels.shapes import ceil_div

LAYOUT = SplitLayout()

ITEM_SLOTS = 64
TILE_BYTES = 4 * 2**20  # keys and values of one tile of items: what the second-level caches of two cores hold
ITEMS_PER_TOKEN = 2
TILE_QUERIES = 128
CHUNK_SLOTS = 256
ITEMS_PER_CHUNK = 48  # this many items take as long as one chunk for a tile of queries

NOWHERE = 2**31 - 1  # an index that scatter drops


def why_not(platform: str) -> str | None:
    """It runs everywhere."""
    return None


def cannot_take(**problem: Any) -> str | None:
    """It takes everything."""
    return None


# ---- once a step ---------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What all layers of a group share in one step.

    slot_block_T, slot_offset_T: where each token's keys and values go. tile_end_R: query tiles up to and with row
    r. item_end_R: items up to and with row r; each query of the row has `items_per_query_R`, the first of which
    is item `first_item_R` of the context.
    """

    slot_block_T: jax.Array
    slot_offset_T: jax.Array
    tile_end_R: jax.Array
    item_end_R: jax.Array
    items_per_query_R: jax.Array
    first_item_R: jax.Array


def make_plan(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> Plan:
    """The plan of one step; see `make_metadata` for the arguments."""
    start_R, end_R = query_start_loc_R1[:-1], query_start_loc_R1[1:]
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.minimum(jnp.sum(end_R <= token_T[:, None], axis=-1), len(seq_lens_R) - 1)
    position_T = (seq_lens_R - end_R)[row_T] + token_T
    block_T = block_tables_RM.at[row_T, position_T // block_size].get(mode="clip")

    num_queries_R = end_R - start_R
    first_R, last_R = first_visible(seq_lens_R - num_queries_R, window), seq_lens_R - 1
    item_slots, chunk_slots = item_and_chunk_slots(block_size)
    items_per_query_R = last_R // item_slots - first_R // item_slots + 1
    chunks_per_tile_R = last_R // chunk_slots - first_R // chunk_slots + 1
    num_items_R = num_queries_R * items_per_query_R
    num_tiles_R = ceil_div(num_queries_R, TILE_QUERIES)
    tiled_R = num_items_R > num_tiles_R * chunks_per_tile_R * ITEMS_PER_CHUNK
    ends_2R = jnp.cumsum(jnp.stack([jnp.where(tiled_R, num_tiles_R, 0), jnp.where(tiled_R, 0, num_items_R)]), axis=-1)
    return Plan(
        slot_block_T=jnp.where(token_T < end_R[-1], block_T, NOWHERE),
        slot_offset_T=position_T % block_size,
        tile_end_R=ends_2R[0],
        item_end_R=ends_2R[1],
        items_per_query_R=items_per_query_R,
        first_item_R=first_R // item_slots,
    )


def item_and_chunk_slots(block_size: int) -> tuple[int, int]:
    """Slots of an item, in whole blocks, and of a chunk, in whole items."""
    item_slots = whole_blocks(ITEM_SLOTS, block_size)
    return item_slots, whole_blocks(CHUNK_SLOTS, item_slots)


def whole_blocks(slots: int, block_size: int) -> int:
    """The multiple of `block_size` that is nearest to `slots` from below, but at least one block."""
    return max(1, slots // block_size) * block_size


def first_visible(position: jax.Array, window: int | None) -> jax.Array:
    """The first position that a query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


# ---- once a layer --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the loops of one call only read."""

    q_TKGH: jax.Array
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    sinks_KG: jax.Array | None
    metadata: Any
    scale: float
    window: int | None
    soft_cap: float | None
    numerics: Numerics


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
    scales: tuple[jax.Array, ...] = (),
    numerics: Numerics | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """See `ragged_paged_attention`; `kv` is (k_BKSH, v_BKSH), `scales` are (k_BKS, v_BKS) or (k_K, v_K)."""
    if is_quantized(kv[0].dtype):
        settings = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks_N": sinks_N, "numerics": numerics}
        return _attend_dequantized(q_TNH, (k_TKH, v_TKH), kv, scales, metadata, settings)
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    slots = (metadata.plan.slot_block_T, slice(None), metadata.plan.slot_offset_T)
    k_BKSH = kv[0].at[slots].set(k_TKH.astype(kv[0].dtype), mode="drop")
    v_BKSH = kv[1].at[slots].set(v_TKH.astype(kv[1].dtype), mode="drop")
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, N // K)
    problem = Problem(q_TKGH, k_BKSH, v_BKSH, sinks_KG, metadata, scale, window, soft_cap, numerics or PLAIN)
    out_TKGH = jnp.zeros_like(q_TKGH)
    if not metadata.decodes_only:
        out_TKGH = _attend_query_tiles(problem, out_TKGH)
    out_TKGH = _attend_items(problem, out_TKGH)
    return out_TKGH.reshape(T, N, H), (k_BKSH, v_BKSH), ()


def _attend_dequantized(
    q_TNH: jax.Array,
    new: tuple[jax.Array, jax.Array],
    kv: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array, ...],
    metadata: Any,
    settings: dict[str, Any],
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`attention` over what a quantised cache means, in float32: a definition, not a way to save memory."""
    slots = (metadata.plan.slot_block_T, slice(None), metadata.plan.slot_offset_T)
    meant, meant_new, stored, stored_scales = [], [], [], []
    for x_TKH, x_BKSH, scale in zip(new, kv, scales or (None, None)):
        stored_TKH, scale_TK = quantize_new(x_TKH, scale, x_BKSH.dtype)
        scale_BKS = slot_scales(scale, x_BKSH.shape[:3])
        meant.append(x_BKSH.astype(jnp.float32) * scale_BKS[..., None])
        meant_new.append(stored_TKH.astype(jnp.float32) * scale_TK[..., None])
        stored.append(x_BKSH.at[slots].set(stored_TKH, mode="drop"))
        stored_scales.append(scale_BKS.at[slots].set(scale_TK, mode="drop"))
    out_TNH, _, _ = attention(q_TNH, *meant_new, tuple(meant), metadata, **settings)
    return out_TNH, tuple(stored), tuple(stored_scales) if kind_of(scales) == "token" else scales


# ---- rows with many new tokens: tiles of queries -------------------------------------------------


def _attend_query_tiles(problem: Problem, out_TKGH: jax.Array) -> jax.Array:
    """Fill in the outputs of the rows that are cut into query tiles, one tile after the other."""
    metadata, tile_end_R = problem.metadata, problem.metadata.plan.tile_end_R

    def attend_tile(tile, out_TKGH):
        row = jnp.sum(tile_end_R <= tile)
        end = metadata.query_start_loc_R1[row + 1]
        tiles_left = tile_end_R[row] - tile
        num_tiles = lax.div(end - metadata.query_start_loc_R1[row] + TILE_QUERIES - 1, TILE_QUERIES)
        start = metadata.query_start_loc_R1[row] + (num_tiles - tiles_left) * TILE_QUERIES
        token_Q = start + jnp.arange(TILE_QUERIES)
        position_Q = metadata.seq_lens_R[row] - end + token_Q
        q_QKGH = problem.q_TKGH.at[token_Q].get(mode="clip")
        out_QKGH = _attend_query_tile(problem, row, position_Q, q_QKGH)
        token_Q = jnp.where(token_Q < end, token_Q, NOWHERE)
        return out_TKGH.at[token_Q].set(out_QKGH.astype(out_TKGH.dtype), mode="drop")

    return lax.fori_loop(0, tile_end_R[-1], attend_tile, out_TKGH)


def _attend_query_tile(problem: Problem, row: jax.Array, position_Q: jax.Array, q_QKGH: jax.Array) -> jax.Array:
    """Attend from neighbouring queries of one row. Positions beyond the row's context give undefined outputs."""
    Q, K, G, H = q_QKGH.shape
    q_KXH = q_QKGH.transpose(1, 0, 2, 3).reshape(K, Q * G, H)
    first_Q = first_visible(position_Q, problem.window)
    last = jnp.minimum(position_Q[-1], problem.metadata.seq_lens_R[row] - 1)
    _, chunk_slots = item_and_chunk_slots(problem.k_BKSH.shape[2])

    def add_chunk(chunk, state_KX):
        position_C = chunk * chunk_slots + jnp.arange(chunk_slots)
        needed_C = (position_C >= first_Q[0]) & (position_C <= last)
        k_KCH, v_KCH = _gather_slots(problem, row, position_C, needed_C)
        visible_QC = (position_C >= first_Q[:, None]) & (position_C <= position_Q[:, None])
        visible_XC = jnp.repeat(visible_QC, G, axis=0)
        return problem.numerics.add_chunk(problem, state_KX, q_KXH, k_KCH, v_KCH, visible_XC)

    state_KX = lax.fori_loop(
        lax.div(first_Q[0], chunk_slots), lax.div(last, chunk_slots) + 1, add_chunk, nothing((K, Q * G), H)
    )
    sinks_KX = None if problem.sinks_KG is None else jnp.tile(problem.sinks_KG, (1, Q))
    return problem.numerics.divide(state_KX, sinks_KX).reshape(K, Q, G, H).transpose(1, 0, 2, 3)


# ---- rows with few new tokens: a list of items ---------------------------------------------------


def _attend_items(problem: Problem, out_TKGH: jax.Array) -> jax.Array:
    """Fill in the outputs of the rows that go query by query, a tile of items at a time.

    Items of a query are neighbours in the list, so only the last query of a tile can go on in the next one:
    its state is carried over, and what is written for it meanwhile is overwritten.
    """
    num_items = problem.metadata.plan.item_end_R[-1]
    T, K, G, H = out_TKGH.shape
    tile_items = _items_per_tile(problem.k_BKSH, T)

    def attend_tile(tile, carry):
        out_TKGH, carried_token, carried_KG = carry
        item_I = tile * tile_items + jnp.arange(tile_items)
        real_I = item_I < num_items
        token_I, part_IKG = _attend_item_tile(problem, jnp.minimum(item_I, num_items - 1), real_I)
        token_J = jnp.concatenate([carried_token[None], token_I])
        part_JKG = jax.tree.map(lambda one, x: jnp.concatenate([one[None], x]), carried_KG, part_IKG)
        state_JKG = problem.numerics.merge_queries(part_JKG, token_J)
        out_JKGH = problem.numerics.divide(state_JKG, problem.sinks_KG).astype(out_TKGH.dtype)
        return out_TKGH.at[token_J].set(out_JKGH, mode="drop"), token_J[-1], jax.tree.map(lambda x: x[-1], state_JKG)

    carry = (out_TKGH, jnp.int32(NOWHERE), nothing((K, G), H))
    return lax.fori_loop(0, lax.div(num_items + tile_items - 1, tile_items), attend_tile, carry)[0]


def _items_per_tile(k_BKSH: jax.Array, num_tokens: int) -> int:
    """As many items as `TILE_BYTES` hold; few enough that merging them stays cheap, enough to be worth an iteration.

    The last tile is computed whole, so a step with few tokens has small ones: `ITEMS_PER_TOKEN` are a short context.
    """
    _, K, S, H = k_BKSH.shape
    item_bytes = 2 * whole_blocks(ITEM_SLOTS, S) * K * H * k_BKSH.dtype.itemsize
    return min(max(TILE_BYTES // item_bytes, 16), 64, ITEMS_PER_TOKEN * num_tokens)


def _attend_item_tile(problem: Problem, item_I: jax.Array, real_I: jax.Array) -> tuple[jax.Array, Softmax]:
    """The query token of each item, and its attention to the item's slots; to none unless `real_I`."""
    metadata, plan = problem.metadata, problem.metadata.plan
    row_I = jnp.sum(plan.item_end_R <= item_I[:, None], axis=-1)
    items_left_I = plan.item_end_R[row_I] - 1 - item_I
    items_per_query_I = plan.items_per_query_R[row_I]
    queries_left_I = lax.div(items_left_I, items_per_query_I)
    token_I = metadata.query_start_loc_R1[row_I + 1] - 1 - queries_left_I
    position_I = metadata.seq_lens_R[row_I] - 1 - queries_left_I
    item_in_row_I = plan.first_item_R[row_I] + items_per_query_I - 1 - lax.rem(items_left_I, items_per_query_I)

    item_slots = whole_blocks(ITEM_SLOTS, problem.k_BKSH.shape[2])
    position_IC = item_in_row_I[:, None] * item_slots + jnp.arange(item_slots)
    visible_IC = (position_IC <= position_I[:, None]) & real_I[:, None]
    visible_IC &= position_IC >= first_visible(position_I, problem.window)[:, None]
    k_IKCH, v_IKCH = _gather_slots(problem, row_I[:, None], position_IC, visible_IC)
    return token_I, problem.numerics.attend_items(problem, problem.q_TKGH[token_I], k_IKCH, v_IKCH, visible_IC)


# ---- what both lists share -----------------------------------------------------------------------


def _gather_slots(problem: Problem, row: jax.Array, position: jax.Array, needed: jax.Array):
    """Keys and values [..., K, C, H] of `row` at `position` [..., C], whole blocks; values 0 where not `needed`.

    Ids of blocks of which nothing is needed may be anything: what they lead to is replaced here, or masked later.
    """
    _, K, S, H = problem.k_BKSH.shape
    block = problem.metadata.block_tables_RM.at[row, lax.div(position[..., ::S], S)].get(mode="clip")
    index = block[..., None, :] * K + jnp.arange(K)[:, None]  # into blocks of one head
    shape = (*needed.shape[:-1], K, needed.shape[-1], H)
    k = problem.k_BKSH.reshape(-1, S, H).at[index].get(mode="clip").reshape(shape)
    v = problem.v_BKSH.reshape(-1, S, H).at[index].get(mode="clip").reshape(shape)
    return k, jnp.where(needed[..., None, :, None], v, 0)
