"""The bodies of the GPU kernels, in Pallas for Triton: attend from a query tile, and write to the cache.

Every size of a tile is a power of two, as Triton wants it: rows of a tile that have no query are masked, and a head
dim is cut into pieces (pieces.py). This module knows nothing of how the work was cut (items.py) or of how large tiles
should be.

Letters beside the package's: X = queries * G rows of a query tile, C slots of one iteration, P a piece of H.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu import items as at
from pallas_kernels.ragged_paged_attention.gpu.pieces import load_pieces, store_pieces
from pallas_kernels.ragged_paged_attention.gpu.statics import LOG2_E, LOWEST, pieces
from pallas_kernels.ragged_paged_attention.quantized import is_quantized
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import first_visible
from pallas_kernels.triton_bytes import LEAST, SHRUNK, SIGN, multiplied_bytes


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is static of a layer, and of how a kernel walks over it.

    queries: tokens of a query tile. rows: X, a power of two. slots: C, likewise. precision: of float32 products.
    kv_scales: what a cache of 8 bits is multiplied with, "none", "head" or "token". reads_float8: whether the device
    converts float8_e4m3fn by itself. begins: whether spans that rows share come before. sees_ahead: whether queries may
    see positions behind their own. interpreted: whether there is no device that knows PTX. in_halves: whether rows
    are in the order of mosaic_kernels.py.
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
    kv_scales: str
    precision: Any
    reads_float8: bool
    begins: bool = False
    sees_ahead: bool = False
    interpreted: bool = False
    in_halves: bool = False


# ---- attend --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """One query tile of one kv head, inside of a kernel; [X, 1] unless said otherwise."""

    head: jax.Array  # scalar: kv head
    token: jax.Array
    query_head: jax.Array
    position: jax.Array
    real: jax.Array  # whether the row holds a query
    end: jax.Array | None = None  # one past the last position that it sees, if that is not its own


def query_tile(layer: Layer, head: jax.Array, token: jax.Array, num_queries: jax.Array, position: jax.Array) -> Tile:
    """The rows of `num_queries` tokens from `token` on: all query heads of kv head `head`, token by token. In halves,
    each is half of the tokens, head by head."""
    row_X1 = lax.broadcasted_iota(jnp.int32, (layer.rows, 1), 0)
    if layer.in_halves:
        half, queries = jnp.int32(layer.rows // 2), jnp.int32(layer.queries // 2)
        place_X1 = lax.rem(row_X1, half)
        query_X1, member_X1 = lax.rem(place_X1, queries) + lax.div(row_X1, half) * queries, lax.div(place_X1, queries)
        real_X1 = (query_X1 < num_queries) & (member_X1 < layer.group_size)
    else:
        query_X1 = lax.div(row_X1, jnp.int32(layer.group_size))
        member_X1 = row_X1 - query_X1 * layer.group_size
        real_X1 = query_X1 < num_queries
    return Tile(head, token + query_X1, head * layer.group_size + member_X1, position + query_X1, real_X1)


@dataclasses.dataclass(frozen=True)
class Begun:
    """References to what spans that rows share have left of each query: weighted values over the sum of weights, out
    [T, N, H], and the power of 2 that this sum is, top [T, N]. A sink is in there."""

    out: Any
    top: Any


@dataclasses.dataclass(frozen=True)
class Cache:
    """References to keys and values, k and v [B, K, S, H], and to their scales, [B, K, S] or [K], if they have any."""

    tables: Any
    k: Any
    v: Any
    scales: tuple[Any, ...]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


def attend_kernel(items_ref, tables_ref, sinks_ref, q_ref, k_ref, v_ref, *refs, layer: Layer):
    """Attend from one item's queries: write outputs, or a partial result when the item is not all of its tile.

    Grid (I, K). Shapes: items [I, 11], tables [R, M], sinks [N], q and out [T, N, H], the cache as in `Cache`. `refs`
    are the cache's scales, visible_end [T] if the layer sees ahead, what was begun if it has that, out, and partial
    results: part [parts, K, X, H], top and total [parts, K, X]. q and out are one array: a program alone reads the
    queries whose outputs it writes.
    """
    *read_refs, out_ref, part_ref, top_ref, total_ref = refs
    read_refs, begun = split_begun(read_refs, layer)
    scale_refs, end_ref = split_end(read_refs, layer)
    cache = Cache(tables_ref, k_ref, v_ref, tuple(scale_refs))
    item, head = pl.program_id(0), pl.program_id(1)
    fact = lambda column: items_ref[item, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        part = fact(at.PART)
        tile = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), fact(at.POSITION))
        tile = with_end(tile, end_ref, tile.token)
        q_XP = load_pieces(q_ref, (tile.token, tile.query_head), tile.real, layer.head_dim)
        state = _attend(layer, fact, tile, q_XP, cache)

        @pl.when(part == at.NOT_SPLIT)
        def _():
            load = functools.partial(load_pieces, head_dim=layer.head_dim)
            out = finished(layer, fact, tile, state, sinks_ref, begun, load)
            store_pieces(out_ref, (tile.token, tile.query_head), out, tile.real, layer.head_dim)

        @pl.when(part != at.NOT_SPLIT)
        def _():
            store_part((part_ref, top_ref, total_ref), part, head, state, tile.real, layer)


def attend_spans_kernel(items_ref, tables_ref, token_ref, position_ref, q_ref, k_ref, v_ref, *refs, layer: Layer):
    """Attend from queries of rows that share a span: leave a partial result for the whole tile.

    Grid (I, K). Shapes as in `attend_kernel`; token, position and visible_end [Y] of the queries in their order
    (`shared_tiles.py`).
    """
    *read_refs, part_ref, top_ref, total_ref = refs
    scale_refs, end_ref = split_end(read_refs, layer)
    cache = Cache(tables_ref, k_ref, v_ref, tuple(scale_refs))
    item, head = pl.program_id(0), pl.program_id(1)
    fact = lambda column: items_ref[item, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        place = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), 0)
        mine_X1 = place.real & (place.position >= fact(at.FIRST_QUERY))
        token_X1 = plgpu.load(token_ref.at[place.token], mask=mine_X1, other=0)
        position_X1 = plgpu.load(position_ref.at[place.token], mask=mine_X1, other=-1)
        tile = with_end(Tile(head, token_X1, place.query_head, position_X1, mine_X1), end_ref, place.token)
        q_XP = load_pieces(q_ref, (token_X1, tile.query_head), mine_X1, layer.head_dim)
        top_X1, total_X1, *out_XP = _attend(layer, fact, tile, q_XP, cache)
        state = jnp.where(mine_X1, top_X1, LOWEST), *(jnp.where(mine_X1, x, 0.0) for x in (total_X1, *out_XP))
        store_part((part_ref, top_ref, total_ref), fact(at.PART), head, state, mine_X1 | ~mine_X1, layer)


def split_begun(refs: list, layer: Layer) -> tuple[list, Begun | None]:
    """(refs without those of `Begun`, which are the last two if the layer has them, and these)."""
    return (refs[:-2], Begun(*refs[-2:])) if layer.begins else (refs, None)


def split_end(refs: list, layer: Layer) -> tuple[list, Any]:
    """(refs without that of what each query sees, which is the last one if the layer has it, and this)."""
    return (refs[:-1], refs[-1]) if layer.sees_ahead else (refs, None)


def with_end(tile: Tile, end_ref: Any, place_X1: jax.Array) -> Tile:
    """`tile` with what its queries see, which lies at these places, if there is such an array."""
    if end_ref is None:
        return tile
    return dataclasses.replace(tile, end=plgpu.load(end_ref.at[place_X1], mask=tile.real, other=0))


def store_part(refs: tuple, part: jax.Array, head: jax.Array, state: tuple, mask: jax.Array, layer: Layer) -> None:
    """Keep a softmax state as partial result number `part`."""
    top_X1, total_X1, *out_XP = state
    part_ref, top_ref, total_ref = refs
    row_X1 = lax.broadcasted_iota(jnp.int32, (layer.rows, 1), 0)
    store_pieces(part_ref, (part, head, row_X1), out_XP, mask, layer.head_dim)
    plgpu.store(top_ref.at[part, head, row_X1], top_X1, mask=mask)
    plgpu.store(total_ref.at[part, head, row_X1], total_X1, mask=mask)


def finished(
    layer: Layer, fact: Any, tile: Tile, state: tuple, sinks_ref: Any, begun: Begun | None, load: Callable
) -> list:
    """Pieces of outputs: weighted values over the sum of weights, what was begun included. `load(ref, index, mask)` are
    the same pieces of what was begun."""
    top_X1, total_X1, *out_XP = state
    other_X1 = sink_exponents(layer, tile, sinks_ref)
    if begun is not None:
        begun_X1, index = tile.real & (fact(at.BEGUN) > 0), (tile.token, tile.query_head)
        other_X1 = jnp.where(begun_X1, plgpu.load(begun.top.at[index], mask=begun_X1, other=0.0), other_X1)
    highest_X1 = jnp.maximum(top_X1, other_X1)
    weight_X1, other_X1 = jnp.exp2(top_X1 - highest_X1), jnp.exp2(other_X1 - highest_X1)
    scale_X1 = 1 / (total_X1 * weight_X1 + other_X1)
    if begun is None:
        return [out * (weight_X1 * scale_X1) for out in out_XP]
    begun_XP = load(begun.out, index, begun_X1)
    return [(out * weight_X1 + one * other_X1) * scale_X1 for out, one in zip(out_XP, begun_XP)]


def sink_exponents(layer: Layer, tile: Tile, sinks_ref: Any) -> jax.Array:
    """What a sink, one more weight, is a power of 2 of; nothing where the layer has none."""
    if not layer.has_sinks:
        return jnp.full((layer.rows, 1), LOWEST, jnp.float32)
    return plgpu.load(sinks_ref.at[tile.query_head], mask=tile.real, other=0.0) * LOG2_E


def _attend(layer: Layer, fact: Any, tile: Tile, q_XP: list, cache: Cache) -> tuple:
    """(top [X, 1], total [X, 1], pieces of weighted values [X, P]) of one item; scores are in units of log2."""
    first, last = fact(at.POSITION), fact(at.LAST)
    begin, end = lax.div(fact(at.BEGIN), jnp.int32(layer.slots)), ceil_div(fact(at.END), layer.slots)
    end = jnp.maximum(begin, end)
    # Between these two iterations every query of the tile sees every slot.
    full_begin = jnp.clip(ceil_div(first_visible(last, layer.window), layer.slots), begin, end)
    full_end = jnp.clip(lax.div(first + 1, jnp.int32(layer.slots)), full_begin, end)
    lowest, row = first_visible(first, layer.window), fact(at.ROW)
    stop = fact(at.END) if layer.sees_ahead else None  # of a part it ends with an iteration, or with what is seen

    def place(iteration):
        """(positions [C], whether any query sees them [C], the block of each [C]) of an iteration."""
        position_C = iteration * layer.slots + lax.iota(jnp.int32, layer.slots)
        needed_C = (position_C >= lowest) & ((position_C <= last) if stop is None else (position_C < stop))
        column_C = lax.div(position_C, jnp.int32(cache.block_size))
        return position_C, needed_C, plgpu.load(cache.tables.at[row, column_C], mask=needed_C, other=0)

    def walk(begin, end, state, masked: bool):
        def add(count, carry):
            block_C, *state = carry
            position_C, needed_C, _ = place(begin + count)
            slots = _load_slots(layer, cache, tile.head, block_C, position_C, needed_C if masked else None)
            visible_XC = _visible(layer, tile, position_C) if masked else None
            # Blocks are looked up an iteration ahead: Triton then fetches keys and values as early as it can.
            return place(begin + count + 1)[2], *_add_slots(layer, q_XP, slots, visible_XC, state)

        # In a loop that is known to run, Triton leaves products of one iteration in flight during the next.
        run = lambda: lax.fori_loop(0, end - begin, add, (place(begin)[2], *state))[1:]
        return lax.cond(begin < end, run, lambda: state)

    state = _nothing(layer, [size for _, size in pieces(layer.head_dim)])
    if layer.window is not None:
        state = walk(begin, full_begin, state, masked=True)
    state = walk(full_begin, full_end, state, masked=False)
    top_X1, total_X1, *out_XP = walk(full_end, end, state, masked=True)
    return jnp.where(total_X1 > 0, top_X1 * factor(layer), LOWEST), total_X1, *out_XP


def _nothing(layer: Layer, sizes: Iterable[int]) -> tuple:
    """The softmax state over no slots at all, of pieces of these sizes."""
    outs = [jnp.zeros((layer.rows, size), jnp.float32) for size in sizes]
    return jnp.full((layer.rows, 1), LOWEST, jnp.float32), jnp.zeros((layer.rows, 1), jnp.float32), *outs


@dataclasses.dataclass(frozen=True)
class Slots:
    """What one iteration attends to: pieces [C, P], and what they are multiples of, [1, C], scalar or None."""

    k_CP: list[jax.Array]
    v_CP: list[jax.Array]
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


def _load_slots(layer: Layer, cache: Cache, head, block_C, position_C, needed_C) -> Slots:
    """The slots of `position_C`, which lie in `block_C`; zero where not needed."""
    offset_C = lax.rem(position_C, jnp.int32(cache.block_size))
    needed_C1 = None if needed_C is None else needed_C[:, None]
    index = (block_C[:, None], head, offset_C[:, None])
    k_CP, v_CP = (load_pieces(ref, index, needed_C1, layer.head_dim) for ref in (cache.k, cache.v))
    if layer.kv_scales == "none":
        return Slots(k_CP, v_CP)
    if layer.kv_scales == "head":
        return Slots(k_CP, v_CP, *(ref[head] for ref in cache.scales))
    other = None if needed_C is None else 0.0
    scales_C = (plgpu.load(ref.at[block_C, head, offset_C], mask=needed_C, other=other) for ref in cache.scales)
    return Slots(k_CP, v_CP, *(scale_C[None, :] for scale_C in scales_C))


def _visible(layer: Layer, tile: Tile, position_C: jax.Array) -> jax.Array:
    """Whether each query sees each slot, [X, C]."""
    visible_XC = position_C[None, :] <= tile.position if tile.end is None else position_C[None, :] < tile.end
    if layer.window is not None:
        visible_XC &= position_C[None, :] > tile.position - layer.window
    return visible_XC


def _add_slots(layer: Layer, q_XP: list, slots: Slots, visible_XC: jax.Array | None, state: tuple) -> tuple:
    """The softmax state with C more slots."""
    top_X1, total_X1, *out_XP = state
    dtype = operand_dtype(q_XP[0].dtype, slots.k_CP[0].dtype)
    k_CP, v_CP = ([converted(layer, x, dtype) for x in pieces] for pieces in (slots.k_CP, slots.v_CP))
    score_XC = sum(dot(layer, q.astype(dtype), k, transposed=True) for q, k in zip(q_XP, k_CP))
    grown = 1 / SHRUNK if by_bytes(layer, slots.k_CP[0].dtype, dtype) else 1
    if slots.k_scale is not None:
        score_XC *= slots.k_scale * grown
    if layer.soft_cap is not None:
        score_XC = soft_cap(score_XC * layer.scale, layer.soft_cap)
    if visible_XC is not None:
        score_XC = jnp.where(visible_XC, score_XC, -jnp.inf)
    highest_X1 = jnp.maximum(top_X1, jnp.max(score_XC, axis=1)[:, None])
    weight_XC = power(layer, score_XC, highest_X1)
    # Of equal tops the difference is exactly zero, however low they are.
    fade_X1 = jnp.exp2((top_X1 - highest_X1) * factor(layer))
    total_X1 = total_X1 * fade_X1 + jnp.sum(weight_XC, axis=1)[:, None]
    if slots.v_scale is not None:
        weight_XC *= slots.v_scale * grown
    weight_XC = weight_XC.astype(dtype)
    out_XP = [out * fade_X1 + dot(layer, weight_XC, v) for out, v in zip(out_XP, v_CP)]
    return highest_X1, total_X1, *out_XP


def factor(layer: Layer) -> float:
    """What scores are multiplied with to be exponents of 2; positive."""
    return LOG2_E if layer.soft_cap is not None else layer.scale * LOG2_E


def power(layer: Layer, score_XC: jax.Array, top_X1: jax.Array) -> jax.Array:
    """2 ** (factor * (score - top)): two instructions, where Triton makes six of `exp2` of a difference."""
    top_XC = jnp.broadcast_to(top_X1 * -factor(layer), score_XC.shape)
    if layer.interpreted:
        return jnp.exp2(score_XC * factor(layer) + top_XC)
    number = f"0f{struct.pack('>f', factor(layer)).hex()}"
    (weight_XC,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 x; fma.rn.ftz.f32 x, $1, {number}, $2; ex2.approx.ftz.f32 $0, x; }}",
        args=[score_XC, top_XC],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(score_XC.shape, jnp.float32)],
    )
    return weight_XC


def operand_dtype(q_dtype: Any, kv_dtype: Any) -> Any:
    """The type of the products' operands: the cache's, or that of queries when the cache has 8 bits."""
    return q_dtype if is_quantized(kv_dtype) else kv_dtype


def by_bytes(layer: Layer, kv_dtype: Any, dtype: Any) -> bool:
    """Whether `converted` makes bfloat16 of bytes."""
    return kv_dtype == jnp.int8 and dtype == jnp.bfloat16 and not layer.interpreted


def converted(layer: Layer, x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in the type of the products, times `SHRUNK` if it is made of bytes."""
    if by_bytes(layer, x.dtype, dtype):
        return multiplied_bytes(x, SHRUNK / LEAST, -SIGN * SHRUNK)
    return as_operand(layer.reads_float8, x, dtype)


def as_operand(reads_float8: bool, x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in the type of the products."""
    if x.dtype != jnp.float8_e4m3fn:
        return x.astype(dtype)
    if reads_float8:
        # Triton's own way to bfloat16 has a slow instruction a number.
        return x.astype(jnp.float16).astype(jnp.float32).astype(dtype)
    # The bits of a float16 whose exponent is too small by 8: its bias is 15, not 7. Holds for subnormal numbers too.
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return (lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256).astype(dtype)


def soft_cap(score: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(score / cap), through the one transcendental function that the hardware is fast at."""
    return cap - 2 * cap / (jnp.exp2(score * (2 * LOG2_E / cap)) + 1)


def dot(layer: Layer, a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a @ b or a @ b.T in float32."""
    precision = layer.precision if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=transposed, precision=precision)


# ---- merge ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Merger:
    """How a program puts parts together: for so many columns of a head, so many parts at a time."""

    columns: int
    parts: int

    def place(self, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """(a program's columns [1, P], whether they are within the head)."""
        column_1P = pl.program_id(2) * self.columns + lax.broadcasted_iota(jnp.int32, (1, self.columns), 1)
        return column_1P, column_1P < head_dim


def merge_kernel(tiles_ref, sinks_ref, part_ref, top_ref, total_ref, _out_ref, *refs, layer: Layer, merger: Merger):
    """Put the partial results of one tile together and write its outputs. Grid (E, K, H / columns); shapes as in
    `attend_kernel`."""
    *read_refs, out_ref = refs
    _, begun = split_begun(read_refs, layer)
    entry, head = pl.program_id(0), pl.program_id(1)
    column_1P, inside_1P = place = merger.place(layer.head_dim)
    fact = lambda column: tiles_ref[entry, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        tile = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), fact(at.POSITION))
        state = _merged((part_ref, top_ref, total_ref), fact, tile, layer, merger.parts, place)
        load = lambda ref, index, mask: [plgpu.load(ref.at[(*index, column_1P)], mask=mask & inside_1P, other=0.0)]
        (out_XP,) = finished(layer, fact, tile, state, sinks_ref, begun, load)
        index = (tile.token, tile.query_head, column_1P)
        plgpu.store(out_ref.at[index], out_XP.astype(out_ref.dtype), mask=tile.real & inside_1P)


def merge_spans_kernel(
    tiles_ref,
    sinks_ref,
    token_ref,
    part_ref,
    top_ref,
    total_ref,
    out_ref,
    begun_top_ref,
    *,
    layer: Layer,
    merger: Merger,
):
    """Put the partial results of one tile of queries that share spans together: what `Begun` has of them."""
    entry, head = pl.program_id(0), pl.program_id(1)
    column_1P, inside_1P = place = merger.place(layer.head_dim)
    is_first = pl.program_id(2) == 0
    fact = lambda column: tiles_ref[entry, column]

    @pl.when(fact(at.NUM_QUERIES) > 0)
    def _():
        tile = query_tile(layer, head, fact(at.TOKEN), fact(at.NUM_QUERIES), 0)
        top_X1, total_X1, out_XP = _merged((part_ref, top_ref, total_ref), fact, tile, layer, merger.parts, place)
        sink_X1 = sink_exponents(layer, tile, sinks_ref)
        highest_X1 = jnp.maximum(top_X1, sink_X1)
        fade_X1 = jnp.exp2(top_X1 - highest_X1)
        total_X1 = total_X1 * fade_X1 + jnp.exp2(sink_X1 - highest_X1)
        token_X1 = plgpu.load(token_ref.at[tile.token], mask=tile.real, other=out_ref.shape[0])
        index = (token_X1, tile.query_head)
        plgpu.store(out_ref.at[(*index, column_1P)], out_XP * (fade_X1 / total_X1), mask=tile.real & inside_1P)
        plgpu.store(begun_top_ref.at[index], highest_X1 + jnp.log(total_X1) * LOG2_E, mask=tile.real & is_first)


def _merged(refs: tuple, fact: Any, tile: Tile, layer: Layer, at_a_time: int, place: tuple) -> tuple:
    """The softmax state of all parts of one tile, for the columns of `place`. Several parts are loaded at a time, which
    take about as long as one."""
    part_ref, top_ref, total_ref = refs
    first, num_parts = fact(at.PART), fact(at.NUM_PARTS)
    (column_1P, inside_1P), shape = place, (at_a_time, layer.rows)
    row_MX = lax.broadcasted_iota(jnp.int32, shape, 1)

    def add(step, state):
        top_X1, total_X1, out_XP = state
        number_MX = step * at_a_time + lax.broadcasted_iota(jnp.int32, shape, 0)
        is_query_MX = row_MX < fact(at.NUM_QUERIES) * layer.group_size
        if layer.in_halves:
            is_query_MX = jnp.broadcast_to(tile.real[:, 0][None], shape)
        real_MX = (number_MX < num_parts) & is_query_MX
        index = (first + number_MX, tile.head, row_MX)
        new_top_MX = plgpu.load(top_ref.at[index], mask=real_MX, other=LOWEST)
        new_total_MX = plgpu.load(total_ref.at[index], mask=real_MX, other=0.0)
        index = (index[0][:, :, None], tile.head, row_MX[:, :, None], column_1P[None])
        new_MXP = plgpu.load(part_ref.at[index], mask=real_MX[:, :, None] & inside_1P[None], other=0.0)
        highest_X1 = jnp.maximum(top_X1, jnp.max(new_top_MX, axis=0)[:, None])
        fade_X1, weight_MX = jnp.exp2(top_X1 - highest_X1), jnp.exp2(new_top_MX - highest_X1[:, 0][None])
        out_XP = out_XP * fade_X1 + jnp.sum(new_MXP * weight_MX[:, :, None], axis=0)
        return highest_X1, total_X1 * fade_X1 + jnp.sum(new_total_MX * weight_MX, axis=0)[:, None], out_XP

    return lax.fori_loop(0, ceil_div(num_parts, at_a_time), add, _nothing(layer, column_1P.shape[1:]))


# ---- write ---------------------------------------------------------------------------------------


def write_kernel(block_ref, offset_ref, *refs, tokens: int):
    """Put what is new of `tokens` tokens and one head into their slots, if their blocks are in the pool.

    Grid (T / tokens, K). `refs` are the new arrays, the caches as they were, and the caches. Shapes: block and offset
    [T]; keys and values [T, K, H] for caches [B, K, S, H], scales [T, K] for caches [B, K, S].
    """
    new_refs, cache_refs = refs[: len(refs) // 3], refs[-len(refs) // 3 :]
    tile, head = pl.program_id(0), pl.program_id(1)
    num_tokens, num_blocks = new_refs[0].shape[0], cache_refs[0].shape[0]
    token = tile * tokens + lax.broadcasted_iota(jnp.int32, (tokens, 1), 0)
    exists = token < num_tokens
    block = plgpu.load(block_ref.at[token], mask=exists, other=num_blocks)
    offset = plgpu.load(offset_ref.at[token], mask=exists, other=0)
    wanted = (block >= 0) & (block < num_blocks)
    for new_ref, cache_ref in zip(new_refs, cache_refs):
        if len(new_ref.shape) == 3:
            values = load_pieces(new_ref, (token, head), wanted, new_ref.shape[2])
            store_pieces(cache_ref, (block, head, offset), values, wanted, new_ref.shape[2])
        else:
            scale = plgpu.load(new_ref.at[token, head], mask=wanted, other=0.0)
            plgpu.store(cache_ref.at[block, head, offset], scale, mask=wanted)
