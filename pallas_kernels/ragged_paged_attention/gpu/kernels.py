"""The bodies of the GPU kernels, in Pallas for Triton: attend from a query tile, and write to the cache.

Every size of a tile is a power of two, as Triton wants it: a head dim is cut into such pieces (80 = 64 + 16), and
rows of a tile that have no query are masked. Arrays are indexed element by element, so that Pallas's interpreter
runs the same code. This module knows nothing of how the work was cut (items.py) or of how large tiles should be.

Letters beside the package's: X = queries * G rows of a query tile, C slots of one iteration, P a piece of H.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu import items as at
from pallas_kernels.shapes import ceil_div

LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = math.log2(math.e)
MIN_PIECE = 16  # the shortest side of a matrix product in Triton


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is static of a layer, and of how a kernel walks over it.

    queries: tokens of a query tile. rows: X, a power of two. slots: C, likewise. precision: of float32 products.
    """

    queries: int
    rows: int
    slots: int
    group_size: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    precision: Any


def pieces(head_dim: int) -> list[tuple[int, int]]:
    """(offset, size) of the powers of two that make up a head; the last one may reach beyond it."""
    result, offset = [], 0
    while offset < head_dim:
        left = head_dim - offset
        size = max(1 << (left.bit_length() - 1), MIN_PIECE)
        result.append((offset, size))
        offset += size
    return result


def columns(head_dim: int) -> list[tuple[jax.Array, jax.Array | None]]:
    """(index [1, P], whether it is within the head [1, P] or None if all are) of every piece."""
    result = []
    for offset, size in pieces(head_dim):
        column_1P = offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        result.append((column_1P, column_1P < head_dim if offset + size > head_dim else None))
    return result


def both(mask: jax.Array | None, other: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """The conjunction of two masks that broadcast to `shape`; None is true everywhere."""
    masks = [jnp.broadcast_to(x, shape) for x in (mask, other) if x is not None]
    return masks[0] & masks[1] if len(masks) == 2 else (masks or [None])[0]


def load_pieces(ref: Any, index: tuple, mask: jax.Array | None, head_dim: int) -> list[jax.Array]:
    """ref[*index, :] as pieces [X, P], `index` and `mask` being scalars or [X, 1]; zero where masked."""
    result = []
    for column_1P, inside_1P in columns(head_dim):
        num_rows = next(x.shape[0] for x in index if getattr(x, "ndim", 0))
        mask_XP = both(mask, inside_1P, (num_rows, column_1P.shape[1]))
        other = None if mask_XP is None else jnp.zeros((), ref.dtype)
        result.append(plgpu.load(ref.at[(*index, column_1P)], mask=mask_XP, other=other))
    return result


def store_pieces(ref: Any, index: tuple, values: list[jax.Array], mask: jax.Array, head_dim: int) -> None:
    """The reverse of `load_pieces`, in the type of `ref`."""
    for (column_1P, inside_1P), value_XP in zip(columns(head_dim), values):
        mask_XP = both(mask, inside_1P, value_XP.shape)
        plgpu.store(ref.at[(*index, column_1P)], value_XP.astype(ref.dtype), mask=mask_XP)


# ---- attend --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """One query tile of one kv head, inside of a kernel; [X, 1] unless said otherwise."""

    head: jax.Array  # scalar: kv head
    token: jax.Array
    query_head: jax.Array
    position: jax.Array
    real: jax.Array  # whether the row holds a query


def query_tile(layer: Layer, head: jax.Array, token: jax.Array, num_queries: jax.Array, position: jax.Array) -> Tile:
    """The rows of `num_queries` tokens from `token` on: all query heads of kv head `head`, token by token."""
    row_X1 = lax.broadcasted_iota(jnp.int32, (layer.rows, 1), 0)
    query_X1 = lax.div(row_X1, jnp.int32(layer.group_size))
    member_X1 = row_X1 - query_X1 * layer.group_size
    return Tile(
        head, token + query_X1, head * layer.group_size + member_X1, position + query_X1, query_X1 < num_queries
    )


def attend_kernel(
    items_ref, tables_ref, sinks_ref, q_ref, k_ref, v_ref, _zeros_ref, out_ref, part_ref, top_ref, total_ref,
    *, layer: Layer,
):  # fmt: skip
    """Attend from one item's queries: write outputs, or a partial result when the item is not all of its tile.

    Grid (I, K). Shapes: items [I, 8], tables [R, M], sinks [N], q and out [T, N, H], k and v [B, K, S, H];
    partial results: part [parts, K, X, H], top and total [parts, K, X].
    """
    item, head = pl.program_id(0), pl.program_id(1)
    fact = lambda column: items_ref[item, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        part = fact(at.PART)
        tile = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), fact(at.POSITION))
        q_XP = load_pieces(q_ref, (tile.token, tile.query_head), tile.real, layer.head_dim)
        top_X1, total_X1, *out_XP = _attend(layer, fact, tile, q_XP, tables_ref, k_ref, v_ref)

        @pl.when(part == at.NOT_SPLIT)
        def _():
            weight_X1 = final_weight(layer, tile, top_X1, total_X1, sinks_ref)
            out = [piece * weight_X1 for piece in out_XP]
            store_pieces(out_ref, (tile.token, tile.query_head), out, tile.real, layer.head_dim)

        @pl.when(part != at.NOT_SPLIT)
        def _():
            row_X1 = lax.broadcasted_iota(jnp.int32, (layer.rows, 1), 0)
            store_pieces(part_ref, (part, head, row_X1), out_XP, tile.real, layer.head_dim)
            plgpu.store(top_ref.at[part, head, row_X1], top_X1, mask=tile.real)
            plgpu.store(total_ref.at[part, head, row_X1], total_X1, mask=tile.real)


def final_weight(layer: Layer, tile: Tile, top_X1: jax.Array, total_X1: jax.Array, sinks_ref: Any) -> jax.Array:
    """What weighted values are multiplied with: one over the sum of weights. A sink is one more weight."""
    if not layer.has_sinks:
        return 1 / total_X1
    sink_X1 = plgpu.load(sinks_ref.at[tile.query_head], mask=tile.real, other=0.0) * LOG2_E
    highest_X1 = jnp.maximum(top_X1, sink_X1)
    weight_X1 = jnp.exp2(top_X1 - highest_X1)
    return weight_X1 / (total_X1 * weight_X1 + jnp.exp2(sink_X1 - highest_X1))


def _attend(layer: Layer, fact: Any, tile: Tile, q_XP: list, tables_ref: Any, k_ref: Any, v_ref: Any) -> tuple:
    """(top [X, 1], total [X, 1], pieces of weighted values [X, P]) of one item; scores are in units of log2."""
    first, last = fact(at.POSITION), fact(at.POSITION) + fact(at.NUM_QUERIES) - 1
    begin, end = lax.div(fact(at.BEGIN), jnp.int32(layer.slots)), ceil_div(fact(at.END), layer.slots)
    end = jnp.maximum(begin, end)
    # Between these two iterations every query of the tile sees every slot.
    full_begin = jnp.clip(ceil_div(at.first_visible(last, layer.window), layer.slots), begin, end)
    full_end = jnp.clip(lax.div(first + 1, jnp.int32(layer.slots)), full_begin, end)
    lowest, row = at.first_visible(first, layer.window), fact(at.ROW)

    def place(iteration):
        """(positions [C], whether any query sees them [C], the block of each [C]) of an iteration."""
        position_C = iteration * layer.slots + lax.iota(jnp.int32, layer.slots)
        needed_C = (position_C >= lowest) & (position_C <= last)
        column_C = lax.div(position_C, jnp.int32(k_ref.shape[2]))
        return position_C, needed_C, plgpu.load(tables_ref.at[row, column_C], mask=needed_C, other=0)

    def walk(begin, end, state, masked: bool):
        def add(count, carry):
            block_C, *state = carry
            position_C, needed_C, _ = place(begin + count)
            k_CP, v_CP = (
                _load_slots(layer, ref, tile.head, block_C, position_C, needed_C if masked else None)
                for ref in (k_ref, v_ref)
            )
            visible_XC = _visible(layer, tile, position_C) if masked else None
            # Blocks are looked up an iteration ahead: Triton then fetches keys and values as early as it can.
            return place(begin + count + 1)[2], *_add_slots(layer, q_XP, k_CP, v_CP, visible_XC, state)

        # In a loop that is known to run, Triton leaves products of one iteration in flight during the next.
        run = lambda: lax.fori_loop(0, end - begin, add, (place(begin)[2], *state))[1:]
        return lax.cond(begin < end, run, lambda: state)

    state = _nothing(layer)
    if layer.window is not None:
        state = walk(begin, full_begin, state, masked=True)
    state = walk(full_begin, full_end, state, masked=False)
    return walk(full_end, end, state, masked=True)


def _nothing(layer: Layer) -> tuple:
    """The softmax state over no slots at all."""
    outs = [jnp.zeros((layer.rows, size), jnp.float32) for _, size in pieces(layer.head_dim)]
    return jnp.full((layer.rows, 1), LOWEST, jnp.float32), jnp.zeros((layer.rows, 1), jnp.float32), *outs


def _load_slots(layer: Layer, ref: Any, head, block_C, position_C, needed_C) -> list[jax.Array]:
    """Pieces [C, P] of keys or values at `position_C`, which lie in `block_C`; zero where not needed."""
    offset_C = lax.rem(position_C, jnp.int32(ref.shape[2]))
    needed_C1 = None if needed_C is None else needed_C[:, None]
    return load_pieces(ref, (block_C[:, None], head, offset_C[:, None]), needed_C1, layer.head_dim)


def _visible(layer: Layer, tile: Tile, position_C: jax.Array) -> jax.Array:
    """Whether each query sees each slot, [X, C]."""
    visible_XC = position_C[None, :] <= tile.position
    if layer.window is not None:
        visible_XC &= position_C[None, :] > tile.position - layer.window
    return visible_XC


def _add_slots(layer: Layer, q_XP: list, k_CP: list, v_CP: list, visible_XC: jax.Array | None, state: tuple) -> tuple:
    """The softmax state with C more slots."""
    top_X1, total_X1, *out_XP = state
    score_XC = sum(dot(layer, q.astype(k.dtype), k, transposed=True) for q, k in zip(q_XP, k_CP))
    if layer.soft_cap is None:
        score_XC *= layer.scale * LOG2_E
    else:
        score_XC = soft_cap(score_XC * layer.scale, layer.soft_cap) * LOG2_E
    if visible_XC is not None:
        score_XC = jnp.where(visible_XC, score_XC, -jnp.inf)
    highest_X1 = jnp.maximum(top_X1, jnp.max(score_XC, axis=1)[:, None])
    weight_XC = jnp.exp2(score_XC - highest_X1)
    fade_X1 = jnp.exp2(top_X1 - highest_X1)
    total_X1 = total_X1 * fade_X1 + jnp.sum(weight_XC, axis=1)[:, None]
    out_XP = [out * fade_X1 + dot(layer, weight_XC.astype(v.dtype), v) for out, v in zip(out_XP, v_CP)]
    return highest_X1, total_X1, *out_XP


def soft_cap(score: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(score / cap), through the one transcendental function that the hardware is fast at."""
    return cap - 2 * cap / (jnp.exp2(score * (2 * LOG2_E / cap)) + 1)


def dot(layer: Layer, a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a @ b or a @ b.T in float32."""
    precision = layer.precision if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=transposed, precision=precision)


# ---- merge ---------------------------------------------------------------------------------------


def merge_kernel(tiles_ref, sinks_ref, part_ref, top_ref, total_ref, _out_ref, out_ref, *, layer: Layer):
    """Put the partial results of one tile together and write its outputs. Grid (E, K); shapes as in `attend_kernel`."""
    entry, head = pl.program_id(0), pl.program_id(1)
    fact = lambda column: tiles_ref[entry, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        tile = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), fact(at.POSITION))
        row_X1 = lax.broadcasted_iota(jnp.int32, (layer.rows, 1), 0)

        def add(part, state):
            top_X1, total_X1, *out_XP = state
            new_top_X1 = plgpu.load(top_ref.at[part, head, row_X1], mask=tile.real, other=LOWEST)
            new_total_X1 = plgpu.load(total_ref.at[part, head, row_X1], mask=tile.real, other=0.0)
            new_XP = load_pieces(part_ref, (part, head, row_X1), tile.real, layer.head_dim)
            highest_X1 = jnp.maximum(top_X1, new_top_X1)
            fade_X1, weight_X1 = jnp.exp2(top_X1 - highest_X1), jnp.exp2(new_top_X1 - highest_X1)
            out_XP = [out * fade_X1 + new * weight_X1 for out, new in zip(out_XP, new_XP)]
            return highest_X1, total_X1 * fade_X1 + new_total_X1 * weight_X1, *out_XP

        first, state = fact(at.PART), _nothing(layer)
        top_X1, total_X1, *out_XP = lax.fori_loop(first, first + fact(at.NUM_PARTS), add, state)
        weight_X1 = final_weight(layer, tile, top_X1, total_X1, sinks_ref)
        out = [piece * weight_X1 for piece in out_XP]
        store_pieces(out_ref, (tile.token, tile.query_head), out, tile.real, layer.head_dim)


# ---- write ---------------------------------------------------------------------------------------


def write_kernel(block_ref, offset_ref, k_ref, v_ref, _k_in_ref, _v_in_ref, k_out_ref, v_out_ref, *, tokens: int):
    """Put the keys and values of `tokens` tokens of one head into their slots, if their blocks are in the pool.

    Grid (T / tokens, K). Shapes: block and offset [T], k and v [T, K, H], the caches [B, K, S, H].
    """
    tile, head = pl.program_id(0), pl.program_id(1)
    (num_tokens, _, head_dim), num_blocks = k_ref.shape, k_out_ref.shape[0]
    token = tile * tokens + lax.broadcasted_iota(jnp.int32, (tokens, 1), 0)
    exists = token < num_tokens
    block = plgpu.load(block_ref.at[token], mask=exists, other=num_blocks)
    offset = plgpu.load(offset_ref.at[token], mask=exists, other=0)
    wanted = (block >= 0) & (block < num_blocks)
    for new_ref, cache_ref in ((k_ref, k_out_ref), (v_ref, v_out_ref)):
        values = load_pieces(new_ref, (token, head), wanted, head_dim)
        store_pieces(cache_ref, (block, head, offset), values, wanted, head_dim)
