"""Ragged paged attention in plain jax.numpy: the definition of correct, and the CPU backend.

Layout: keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous.

Skipping: work follows the tokens that exist, whatever their distribution over rows. Rows with many new tokens are
cut into tiles of queries, each walking over its context in chunks. Rows with few (decodes) go query by query through
a list of items: one query, and some slots of its context. A tile of items is one batched product, whomever they
belong to, so one long context among many short ones costs what it holds and no more. Spans of blocks that several
rows hold are read by tiles of all their queries, before what is each row's own (`work_lists.py` has both lists).
Context that no query sees, behind the last or outside of the window, is not read, at the grain of an item or a chunk.

Padding: tokens beyond the last row's write nowhere; their output is zero.

Numerics: those of `numerics.PLAIN`, unless the caller has others. Values that no query may see are replaced, not
multiplied by zero: slots that nobody owns may hold NaN.

Cost: the loops have traced bounds. Integers that all layers of a group share are computed once, in the plan; what
is left of them divides with `lax.div`, since `//` brings kernels for signs that never occur (README.md).

This module knows nothing of meshes and of who owns which block. Letters beside the package's: I items in a tile,
J the same and the part carried over, Q queries in a tile, X = Q * G, C slots of one item or chunk,
P what `numerics.packed` has for a query and head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import work_lists
from pallas_kernels.ragged_paged_attention.layout import SplitLayout
from pallas_kernels.ragged_paged_attention.numerics import PLAIN, Numerics, Softmax, nothing, packed, unpacked
from pallas_kernels.ragged_paged_attention.quantized import is_quantized, kind_of, quantize_new
from pallas_kernels.ragged_paged_attention.work_lists import NOWHERE, Tile
from pallas_kernels.token_places import first_visible

LAYOUT = SplitLayout()
make_plan = work_lists.make_plan
shared_work = work_lists.shared_work

TILE_BYTES = 4 * 2**20  # keys and values of one tile of items: what the second-level caches of two cores hold
ITEMS_PER_TOKEN = 2


def why_not(platform: str) -> str | None:
    """It runs everywhere."""
    return None


def cannot_take(**problem: Any) -> str | None:
    """It takes everything."""
    return None


# ---- once a layer --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the loops of one call only read. `scales`: those of a cache of 8 bits, for each slot or each head."""

    q_TKGH: jax.Array
    k_BKSH: jax.Array
    v_BKSH: jax.Array
    scales: tuple[jax.Array, ...]
    sinks_KG: jax.Array | None
    metadata: Any
    scale: float
    window: int | None
    soft_cap: float | None
    numerics: Numerics


def attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    kv: tuple[jax.Array, jax.Array],
    metadata: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_N: jax.Array | None,
    scales: tuple[jax.Array, ...] = (),
    numerics: Numerics | None = None,
    undivided: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """See `ragged_paged_attention`; `kv` is (k_BKSH, v_BKSH), `scales` are (k_BKS, v_BKS) or (k_K, v_K)."""
    (T, N, H), K = q_TNH.shape, kv[0].shape[1]
    if k_TKH is not None and v_TKH is not None:
        kv, scales = written(kv, scales, (k_TKH, v_TKH), metadata.plan)
    k_BKSH, v_BKSH = kv
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, N // K)
    numerics = numerics or PLAIN
    out_TKGH, part_TKGP = jnp.zeros_like(q_TKGH), None
    if undivided:
        numerics = numerics._replace(divide=lambda state, sinks: packed(state))
        out_TKGH = packed(nothing(q_TKGH.shape[:-1], H))
    problem = Problem(q_TKGH, k_BKSH, v_BKSH, scales, sinks_KG, metadata, scale, window, soft_cap, numerics)
    if metadata.plan.num_shared is not None:
        part_TKGP = packed(nothing(q_TKGH.shape[:-1], H))
    if part_TKGP is not None or not metadata.decodes_only:
        out_TKGH, part_TKGP = _attend_tiles(problem, out_TKGH, part_TKGP)
    out_TKGH = _attend_items(problem, out_TKGH, part_TKGP)
    return out_TKGH.reshape(T, N, -1), (k_BKSH, v_BKSH), scales


def written(
    kv: tuple[jax.Array, jax.Array],
    scales: tuple[jax.Array, ...],
    new: tuple[jax.Array, jax.Array],
    plan: work_lists.Plan,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """The cache with new keys and values, and its scales with theirs where each slot has one."""
    slots = (plan.slot_block_T, slice(None), plan.slot_offset_T)
    if is_quantized(kv[0].dtype):
        stored = [quantize_new(x, scale, kv[0].dtype) for x, scale in zip(new, scales or (None, None))]
        new = stored[0][0], stored[1][0]
        if kind_of(scales) == "token":
            scales = tuple(x.at[slots].set(scale_TK, mode="drop") for x, (_, scale_TK) in zip(scales, stored))
    k_BKSH, v_BKSH = (x.at[slots].set(each.astype(x.dtype), mode="drop") for x, each in zip(kv, new))
    return (k_BKSH, v_BKSH), scales


# ---- spans that rows share, and rows with many new tokens: tiles of queries -----------------------


def _attend_tiles(
    problem: Problem, out_TKGH: jax.Array, part_TKGP: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Fill in the outputs of the rows that are cut into tiles, one tile after the other.

    `part_TKGP` is what spans that rows share leave for each token, for whatever reads the rest of its context; what is
    written as their output meanwhile is overwritten. None: rows share none.
    """
    tiles = problem.metadata.plan.tiles
    num_queries = work_lists.tile_queries(len(out_TKGH))

    def attend_tile(index, carry):
        out_TKGH, part_TKGP = carry
        tile = work_lists.find_tile(tiles, index, num_queries)
        begun_QKG = None if part_TKGP is None else unpacked(part_TKGP.at[tile.token_Q].get(mode="clip"))
        state_QKG = _attend_tile(problem, tile, begun_QKG)
        out_QKGH = problem.numerics.divide(state_QKG, problem.sinks_KG).astype(out_TKGH.dtype)
        if part_TKGP is not None:
            part_TKGP = part_TKGP.at[tile.token_Q].set(packed(state_QKG), mode="drop")
        return out_TKGH.at[tile.token_Q].set(out_QKGH, mode="drop"), part_TKGP

    return lax.fori_loop(0, tiles.tile_end_L[-1], attend_tile, (out_TKGH, part_TKGP))


def _attend_tile(problem: Problem, tile: Tile, begun_QKG: Softmax | None) -> Softmax:
    """`begun_QKG`, nothing if None, with the piece of a context that the tile reads added."""
    q_QKGH = problem.q_TKGH.at[tile.token_Q].get(mode="clip")
    Q, K, G, H = q_QKGH.shape
    position_Q = problem.metadata.plan.position_T.at[tile.token_Q].get(mode="fill", fill_value=-1)
    first_Q = jnp.maximum(first_visible(position_Q, problem.window), tile.begin)
    last_Q = jnp.minimum(_last_visible(problem, tile.token_Q, position_Q), tile.end - 1)
    first, last = jnp.min(jnp.where(position_Q < 0, NOWHERE, first_Q)), jnp.max(last_Q)
    _, chunk_slots = work_lists.item_and_chunk_slots(problem.k_BKSH.shape[2])

    def by_head(x_QKG: jax.Array) -> jax.Array:
        return jnp.swapaxes(x_QKG, 0, 1).reshape(K, Q * G, *x_QKG.shape[3:])

    def add_chunk(chunk, state_KX):
        position_C = chunk * chunk_slots + jnp.arange(chunk_slots)
        needed_C = (position_C >= first) & (position_C <= last)
        k_KCH, v_KCH = _gather_slots(problem, tile.row, position_C, needed_C)
        visible_QC = (position_C >= first_Q[:, None]) & (position_C <= last_Q[:, None])
        return problem.numerics.add_chunk(
            problem, state_KX, by_head(q_QKGH), k_KCH, v_KCH, jnp.repeat(visible_QC, G, axis=0)
        )

    begun_KX = nothing((K, Q * G), H) if begun_QKG is None else jax.tree.map(by_head, begun_QKG)
    state_KX = lax.fori_loop(lax.div(first, chunk_slots), lax.div(last, chunk_slots) + 1, add_chunk, begun_KX)
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(K, Q, G, *x.shape[2:]), 0, 1), state_KX)


# ---- rows with few new tokens: a list of items ---------------------------------------------------


def _attend_items(problem: Problem, out_TKGH: jax.Array, part_TKGP: jax.Array | None) -> jax.Array:
    """Fill in the outputs of the rows that go query by query, a tile of items at a time; `part_TKGP` is what shared
    spans left of each query's context before its first item.

    Items of a query are neighbours in the list, so only the last query of a tile can go on in the next one:
    its state is carried over, and what is written for it meanwhile is overwritten.
    """
    num_items = problem.metadata.plan.item_end_R[-1]
    T, K, G, H = problem.q_TKGH.shape
    tile_items = _items_per_tile(problem.k_BKSH, T)

    def attend_tile(tile, carry):
        out_TKGH, carried_token, carried_KG = carry
        item_I = tile * tile_items + jnp.arange(tile_items)
        real_I = item_I < num_items
        token_I, part_IKG = _attend_item_tile(problem, jnp.minimum(item_I, num_items - 1), real_I, part_TKGP)
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
    item_bytes = 2 * work_lists.whole_blocks(work_lists.ITEM_SLOTS, S) * K * H * k_BKSH.dtype.itemsize
    return min(max(TILE_BYTES // item_bytes, 16), 64, ITEMS_PER_TOKEN * num_tokens)


def _attend_item_tile(
    problem: Problem, item_I: jax.Array, real_I: jax.Array, part_TKGP: jax.Array | None
) -> tuple[jax.Array, Softmax]:
    """The query token of each item, and its attention to the item's slots; to none unless `real_I`.

    A query's first item has what `part_TKGP` says of the query, too.
    """
    metadata, plan = problem.metadata, problem.metadata.plan
    row_I = jnp.sum(plan.item_end_R <= item_I[:, None], axis=-1)
    items_left_I = plan.item_end_R[row_I] - 1 - item_I
    items_per_query_I = plan.items_per_query_R[row_I]
    queries_left_I = lax.div(items_left_I, items_per_query_I)
    token_I = metadata.query_start_loc_R1[row_I + 1] - 1 - queries_left_I
    position_I = plan.position_T[token_I]
    nth_I = items_per_query_I - 1 - lax.rem(items_left_I, items_per_query_I)

    item_slots = work_lists.whole_blocks(work_lists.ITEM_SLOTS, problem.k_BKSH.shape[2])
    position_IC = (plan.first_item_R[row_I] + nth_I)[:, None] * item_slots + jnp.arange(item_slots)
    visible_IC = (position_IC <= _last_visible(problem, token_I, position_I)[:, None]) & real_I[:, None]
    visible_IC &= position_IC >= first_visible(position_I, problem.window)[:, None]
    k_IKCH, v_IKCH = _gather_slots(problem, row_I[:, None], position_IC, visible_IC)
    item_IKG = problem.numerics.attend_items(problem, problem.q_TKGH[token_I], k_IKCH, v_IKCH, visible_IC)
    if part_TKGP is None:
        return token_I, item_IKG
    is_first_IKG1 = ((nth_I == 0) & real_I)[:, None, None, None]
    begun_IKGP = jnp.where(
        is_first_IKG1, part_TKGP[token_I], packed(nothing(item_IKG.top.shape, item_IKG.out.shape[-1]))
    )
    return token_I, problem.numerics.add(unpacked(begun_IKGP), item_IKG)


# ---- what both lists share -----------------------------------------------------------------------


def _last_visible(problem: Problem, token: jax.Array, position: jax.Array) -> jax.Array:
    """The last position that each token sees, its own if the step's attention is causal; -1 for no token."""
    visible_end_T = problem.metadata.visible_end_T
    return position if visible_end_T is None else visible_end_T.at[token].get(mode="fill", fill_value=0) - 1


def _gather_slots(problem: Problem, row: jax.Array, position: jax.Array, needed: jax.Array):
    """Keys and values [..., K, C, H] of `row` at `position` [..., C], whole blocks; values 0 where not `needed`. What
    has 8 bits becomes float32, times its scales.

    Ids of blocks of which nothing is needed may be anything: what they lead to is replaced here, or masked later.
    """
    _, K, S, H = problem.k_BKSH.shape
    block = problem.metadata.block_tables_RM.at[row, lax.div(position[..., ::S], S)].get(mode="clip")
    index = block[..., None, :] * K + jnp.arange(K)[:, None]  # into blocks of one head
    shape = (*needed.shape[:-1], K, needed.shape[-1])

    def gathered(cache_BKSH: jax.Array, scale: jax.Array | None) -> jax.Array:
        x = cache_BKSH.reshape(-1, S, H).at[index].get(mode="clip").reshape(*shape, H)
        if not is_quantized(x.dtype):
            return x
        x = x.astype(jnp.float32)
        if scale is None:
            return x
        if scale.ndim > 1:
            return x * scale.reshape(-1, S).at[index].get(mode="clip").reshape(*shape, 1)
        return x * scale[:, None, None]

    k, v = map(gathered, (problem.k_BKSH, problem.v_BKSH), problem.scales or (None, None))
    return k, jnp.where(needed[..., None, :, None], v, 0)
