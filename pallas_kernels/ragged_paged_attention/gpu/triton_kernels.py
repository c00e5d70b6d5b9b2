"""The bodies of the GPU kernels in Triton itself: what kernels.py computes, without Pallas, for triton_calls.py.

They take the same lists of work (items.py) and leave the same partial results. Triton pipelines the loads of a loop by
itself, those that lead from a block table to keys included. This module knows nothing of jax, of how the work was cut,
or of how large tiles should be.

Letters beside the package's: X = queries * G rows of a query tile, C slots of one iteration, P a piece of H.
"""

import dataclasses
from typing import Any

import triton
import triton.language as tl

from pallas_kernels.ragged_paged_attention.gpu.triton_pieces import load_pieces, store_pieces

LOWEST = tl.constexpr(-1e30)  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = tl.constexpr(1.4426950408889634)
# Columns of `Items`, see items.py.
ROW, TOKEN, NUM_QUERIES, POSITION, LAST, BEGIN, END, PART, NUM_PARTS, FIRST_QUERY, BEGUN, NUM_COLUMNS = (
    tl.constexpr(i) for i in range(12)
)
NOT_SPLIT = tl.constexpr(-1)
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@dataclasses.dataclass(frozen=True)
class Heads:
    """The static shape of keys and values. pieces: (offset, size) of the powers of two that make up a head."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    pieces: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is static of a layer, and of how a kernel walks over it.

    rows: X, a power of two. slots: C, likewise. operand: Triton's type of the products' operands. kv_scales: what a
    cache of 8 bits is multiplied with, "none", "head" or "token". float8_as_bits: the bytes of the cache are those of
    float8_e4m3fn, which Triton has no type for on this device. sees_ahead: queries may see positions behind their own.
    """

    heads: Heads
    rows: int
    slots: int
    group_size: int
    operand: Any
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    kv_scales: str
    float8_as_bits: bool
    sees_ahead: bool = False


# ---- attend --------------------------------------------------------------------------------------


@triton.jit
def paged_attend(
    items, tables, sinks, k, v, k_scales, v_scales, ends, begun, out, part, top, total, table_width, layer: tl.constexpr
):
    """Attend from one item's queries: write outputs, or a partial result when the item is not all of its tile.

    Grid (I, K). Shapes: items [I, 11], tables [R, table_width], sinks [N], out [T, N, H], k and v [B, K, S, H], their
    scales [B, K, S] or [K], None without; part [parts, K, X, H], top and total [parts, K, X]. out has the queries: a
    program alone reads those whose outputs it writes. ends: visible_end [T] if the layer sees ahead, or None. begun:
    what spans that rows share have left of each query, ([T, N, H], [T, N]) as `paged_merge_spans` writes it, or None.
    """
    fact = items + tl.program_id(0) * NUM_COLUMNS
    head = tl.program_id(1)
    num_queries = tl.load(fact + NUM_QUERIES)
    if num_queries == 0:
        return
    first = tl.load(fact + POSITION)
    query_X, head_X, real_X = query_tile(head, num_queries, layer)
    row_X = query_rows(tl.load(fact + TOKEN), query_X, head_X, layer)
    end_X = ends_of(ends, tl.load(fact + TOKEN) + query_X, real_X, layer)
    q_XP = load_pieces(out + row_X, real_X, layer.heads)
    context = tables + tl.load(fact + ROW).to(tl.int64) * table_width
    cache = (k, v, k_scales, v_scales)
    top_X, total_X, out_XP = attend(
        tl.load(fact + BEGIN),
        tl.load(fact + END),
        first,
        tl.load(fact + LAST),
        first + query_X,
        end_X,
        q_XP,
        head,
        context,
        cache,
        layer,
    )
    number = tl.load(fact + PART)
    if number == NOT_SPLIT:
        begun_X = real_X & (query_X * 0 + tl.load(fact + BEGUN) > 0)
        finish(out, row_X, top_X, total_X, out_XP, sinks + head_X, real_X, begun, begun_X, layer)
    else:
        store_part(part, top, total, number, head, top_X, total_X, out_XP, real_X, layer)


@triton.jit
def paged_attend_spans(
    items,
    tables,
    tokens,
    positions,
    ends,
    q,
    k,
    v,
    k_scales,
    v_scales,
    part,
    top,
    total,
    table_width,
    layer: tl.constexpr,
):
    """Attend from queries of rows that share a span: leave a partial result for the whole tile.

    Grid (I, K). Shapes as in `paged_attend`; tokens, positions and ends [Y] of the queries in their order.
    """
    fact = items + tl.program_id(0) * NUM_COLUMNS
    head = tl.program_id(1)
    end_query = tl.load(fact + NUM_QUERIES)
    if end_query == 0:
        return
    query_X, head_X, mine_X = query_tile(head, end_query, layer)
    mine_X = mine_X & (query_X >= tl.load(fact + FIRST_QUERY))
    place_X = tl.load(fact + TOKEN) + query_X
    position_X = tl.load(positions + place_X, mask=mine_X, other=-1)
    row_X = query_rows(tl.load(tokens + place_X, mask=mine_X, other=0), 0, head_X, layer)
    end_X = ends_of(ends, place_X, mine_X, layer)
    q_XP = load_pieces(q + row_X, mine_X, layer.heads)
    context = tables + tl.load(fact + ROW).to(tl.int64) * table_width
    top_X, total_X, out_XP = attend(
        tl.load(fact + BEGIN),
        tl.load(fact + END),
        tl.load(fact + POSITION),
        tl.load(fact + LAST),
        position_X,
        end_X,
        q_XP,
        head,
        context,
        (k, v, k_scales, v_scales),
        layer,
    )
    out_XP = [tl.where(mine_X[:, None], x, 0.0) for x in out_XP]
    top_X, total_X = tl.where(mine_X, top_X, LOWEST), tl.where(mine_X, total_X, 0.0)
    every_X = tl.arange(0, layer.rows) >= 0
    store_part(part, top, total, tl.load(fact + PART), head, top_X, total_X, out_XP, every_X, layer)


@triton.jit
def ends_of(ends, place_X, mask_X, layer: tl.constexpr):
    """One past the last position that each query sees; None if that is its own."""
    if layer.sees_ahead:
        return tl.load(ends + place_X, mask=mask_X, other=0)
    else:
        return None


@triton.jit
def store_part(part, top, total, number, head, top_X, total_X, out_XP, mask_X, layer: tl.constexpr):
    """Keep a softmax state as partial result `number`."""
    state_X = (number * layer.heads.num_kv_heads + head) * layer.rows + tl.arange(0, layer.rows)
    store_pieces(part + state_X.to(tl.int64) * layer.heads.head_dim, out_XP, mask_X, layer.heads)
    tl.store(top + state_X, top_X, mask=mask_X)
    tl.store(total + state_X, total_X, mask=mask_X)


@triton.jit
def query_tile(head, num_queries, layer: tl.constexpr):
    """(query in the tile, query head, whether there is a query) of each row: token by token, all heads of `head`."""
    row_X = tl.arange(0, layer.rows)
    query_X = row_X // layer.group_size
    return query_X, head * layer.group_size + row_X % layer.group_size, query_X < num_queries


@triton.jit
def query_rows(token, query_X, head_X, layer: tl.constexpr):
    """Where in [T, N, H] the rows of a query tile are."""
    num_heads: tl.constexpr = layer.heads.num_kv_heads * layer.group_size
    return ((token + query_X).to(tl.int64) * num_heads + head_X) * layer.heads.head_dim


@triton.jit
def finish(out, row_X, top_X, total_X, out_XP, sink_X, real_X, begun, begun_X, layer: tl.constexpr):
    """Write weighted values over the sum of weights. A sink is one more weight, and so is what was begun."""
    other_X = sink_exponents(sink_X, real_X, layer)
    if begun is not None:
        other_X = tl.where(begun_X, tl.load(begun[1] + row_X // layer.heads.head_dim, mask=begun_X, other=0.0), other_X)
    highest_X = tl.maximum(top_X, other_X)
    fade_X = tl.exp2(top_X - highest_X)
    other_X = tl.exp2(other_X - highest_X)
    scale_X = 1 / (total_X * fade_X + other_X)
    if begun is not None:
        begun_XP = load_pieces(begun[0] + row_X, begun_X, layer.heads)
        merged_XP = ()
        for i in tl.static_range(len(layer.heads.pieces)):
            merged_XP = merged_XP + (out_XP[i] * fade_X[:, None] + begun_XP[i] * other_X[:, None],)
        store_pieces(out + row_X, [x * scale_X[:, None] for x in merged_XP], real_X, layer.heads)
    else:
        store_pieces(out + row_X, [x * (fade_X * scale_X)[:, None] for x in out_XP], real_X, layer.heads)


@triton.jit
def sink_exponents(sink_X, real_X, layer: tl.constexpr):
    """What a sink, one more weight, is a power of 2 of; nothing where the layer has none."""
    if layer.has_sinks:
        return tl.load(sink_X, mask=real_X, other=0.0) * LOG2_E
    else:
        return tl.full((layer.rows,), LOWEST, tl.float32)


@triton.jit
def nothing(layer: tl.constexpr):
    """The softmax state over no slots at all: (top [X], total [X], pieces of weighted values [X, P])."""
    out_XP = ()
    for i in tl.static_range(len(layer.heads.pieces)):
        out_XP = out_XP + (tl.zeros((layer.rows, layer.heads.pieces[i][1]), tl.float32),)
    return tl.full((layer.rows,), LOWEST, tl.float32), tl.zeros((layer.rows,), tl.float32), out_XP


@triton.jit
def attend(begin, end, first, last, position_X, end_X, q_XP, head, context, cache, layer: tl.constexpr):
    """The softmax state of queries at [first, last] over slots [begin, end); scores are in units of log2."""
    seen = (last, end, position_X, end_X)
    begin = begin // layer.slots
    end = tl.maximum(tl.cdiv(end, layer.slots), begin)
    state = nothing(layer)
    # Between these two iterations every query of the tile sees every slot.
    full_begin, lowest = begin, 0
    if layer.window is not None:
        lowest = tl.maximum(first - layer.window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(last - layer.window + 1, 0), layer.slots)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        state = walk(begin, full_begin, state, True, lowest, seen, q_XP, head, context, cache, layer)
    full_end = tl.minimum(tl.maximum((first + 1) // layer.slots, full_begin), end)
    state = walk(full_begin, full_end, state, False, lowest, seen, q_XP, head, context, cache, layer)
    return walk(full_end, end, state, True, lowest, seen, q_XP, head, context, cache, layer)


@triton.jit
def walk(
    begin,
    end,
    state,
    masked: tl.constexpr,
    lowest,
    seen,
    q_XP,
    head,
    context,
    cache,
    layer: tl.constexpr,
):
    """`state` with the slots of iterations [begin, end); none of them is hidden from any query unless `masked`.

    seen: (the last query's place, the end of the item's slots, where queries are, one past what each sees or None).
    """
    last, stop, position_X, end_X = seen
    for iteration in tl.range(begin, end):
        position_C = iteration * layer.slots + tl.arange(0, layer.slots)
        needed_C = None
        visible_XC = None
        if masked:
            if layer.sees_ahead:
                needed_C = (position_C >= lowest) & (position_C < stop)
                visible_XC = position_C[None, :] < end_X[:, None]
            else:
                needed_C = (position_C >= lowest) & (position_C <= last)
                visible_XC = position_C[None, :] <= position_X[:, None]
            if layer.window is not None:
                visible_XC = visible_XC & (position_C[None, :] > position_X[:, None] - layer.window)
        state = add_slots(state, q_XP, head, position_C, needed_C, visible_XC, context, cache, layer)
    return state


@triton.jit
def add_slots(state, q_XP, head, position_C, needed_C, visible_XC, context, cache, layer: tl.constexpr):
    """The softmax state with C more slots, those not needed being zero and those not visible without weight."""
    top_X, total_X, out_XP = state
    k, v, k_scales, v_scales = cache
    slot_C = slots_of(head, position_C, needed_C, context, layer)
    k_CP = load_pieces(k + slot_C * layer.heads.head_dim, needed_C, layer.heads)
    v_CP = load_pieces(v + slot_C * layer.heads.head_dim, needed_C, layer.heads)
    score_XC = tl.zeros((layer.rows, layer.slots), tl.float32)
    for i in tl.static_range(len(layer.heads.pieces)):
        score_XC = dot(q_XP[i].to(layer.operand), tl.trans(operand(k_CP[i], layer)), score_XC)
    if layer.kv_scales != "none":
        score_XC = score_XC * load_scales(k_scales, head, slot_C, needed_C, layer)
    if layer.soft_cap is None:
        score_XC = score_XC * (layer.scale * LOG2_E)
    else:
        # cap * tanh(score / cap), through the one transcendental function that the hardware is fast at
        power_XC = tl.exp2(score_XC * (layer.scale * 2 * LOG2_E / layer.soft_cap))
        score_XC = (layer.soft_cap - 2 * layer.soft_cap / (power_XC + 1)) * LOG2_E
    if visible_XC is not None:
        score_XC = tl.where(visible_XC, score_XC, -float("inf"))
    highest_X = tl.maximum(top_X, tl.max(score_XC, axis=1))
    weight_XC = tl.exp2(score_XC - highest_X[:, None])
    fade_X = tl.exp2(top_X - highest_X)
    total_X = total_X * fade_X + tl.sum(weight_XC, axis=1)
    if layer.kv_scales != "none":
        weight_XC = weight_XC * load_scales(v_scales, head, slot_C, needed_C, layer)
    new_XP = ()
    for i in tl.static_range(len(layer.heads.pieces)):
        v_piece_CP = operand(v_CP[i], layer)
        new_XP = new_XP + (dot(weight_XC.to(layer.operand), v_piece_CP, out_XP[i] * fade_X[:, None]),)
    return highest_X, total_X, new_XP


@triton.jit
def slots_of(head, position_C, needed_C, context, layer: tl.constexpr):
    """The numbers in [B, K, S] of a row's slots; that of a slot that is not needed is in block 0."""
    column_C = position_C // layer.heads.block_size
    if needed_C is None:
        block_C = tl.load(context + column_C)
    else:
        block_C = tl.load(context + column_C, mask=needed_C, other=0)
    offset_C = position_C % layer.heads.block_size
    return (block_C.to(tl.int64) * layer.heads.num_kv_heads + head) * layer.heads.block_size + offset_C


@triton.jit
def load_scales(scales, head, slot_C, needed_C, layer: tl.constexpr):
    """What the slots' numbers are multiples of: one scale for each, [1, C], or for the head."""
    if layer.kv_scales == "head":
        return tl.load(scales + head)
    elif needed_C is None:
        return tl.load(scales + slot_C)[None, :]
    else:
        return tl.load(scales + slot_C, mask=needed_C, other=0.0)[None, :]


@triton.jit
def operand(x, layer: tl.constexpr):
    """`x` of the cache in the type of the products."""
    if layer.float8_as_bits:
        # The bits of a float16 whose exponent is too small by 8: its bias is 15, not 7. Holds for subnormals too.
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256).to(layer.operand)
    return x.to(layer.operand)


@triton.jit
def dot(a, b, c):
    """a @ b + c in float32; of float32 operands in three passes, which lose about as little as float32 does."""
    return tl.dot(a, b, c, input_precision="tf32x3")


# ---- merge ---------------------------------------------------------------------------------------


@triton.jit
def paged_merge(tiles, sinks, part, top, total, begun, out, layer: tl.constexpr):
    """Put the partial results of one tile together and write its outputs. Grid (E, K); shapes as in `paged_attend`."""
    fact = tiles + tl.program_id(0) * NUM_COLUMNS
    head = tl.program_id(1)
    num_queries = tl.load(fact + NUM_QUERIES)
    if num_queries == 0:
        return
    query_X, head_X, real_X = query_tile(head, num_queries, layer)
    top_X, total_X, out_XP = merged(fact, head, part, top, total, real_X, layer)
    row_X = query_rows(tl.load(fact + TOKEN), query_X, head_X, layer)
    begun_X = real_X & (query_X * 0 + tl.load(fact + BEGUN) > 0)
    finish(out, row_X, top_X, total_X, out_XP, sinks + head_X, real_X, begun, begun_X, layer)


@triton.jit
def paged_merge_spans(tiles, sinks, tokens, part, top, total, begun_out, begun_top, layer: tl.constexpr):
    """Put the partial results of one tile of queries that share spans together.

    Grid (E, K). Leaves of each query its weighted values over the sum of weights, [T, N, H], and the power of 2 that
    this sum is, [T, N]. A sink is in there.
    """
    fact = tiles + tl.program_id(0) * NUM_COLUMNS
    head = tl.program_id(1)
    num_queries = tl.load(fact + NUM_QUERIES)
    if num_queries == 0:
        return
    query_X, head_X, real_X = query_tile(head, num_queries, layer)
    top_X, total_X, out_XP = merged(fact, head, part, top, total, real_X, layer)
    sink_X = sink_exponents(sinks + head_X, real_X, layer)
    highest_X = tl.maximum(top_X, sink_X)
    fade_X = tl.exp2(top_X - highest_X)
    total_X = total_X * fade_X + tl.exp2(sink_X - highest_X)
    token_X = tl.load(tokens + tl.load(fact + TOKEN) + query_X, mask=real_X, other=0)
    row_X = query_rows(token_X, 0, head_X, layer)
    store_pieces(begun_out + row_X, [x * (fade_X / total_X)[:, None] for x in out_XP], real_X, layer.heads)
    tl.store(begun_top + row_X // layer.heads.head_dim, highest_X + tl.log2(total_X), mask=real_X)


@triton.jit
def merged(fact, head, part, top, total, real_X, layer: tl.constexpr):
    """The softmax state of all parts of one tile."""
    top_X, total_X, out_XP = nothing(layer)
    first = tl.load(fact + PART)
    for number in tl.range(first, first + tl.load(fact + NUM_PARTS)):
        state_X = (number * layer.heads.num_kv_heads + head) * layer.rows + tl.arange(0, layer.rows)
        new_top_X = tl.load(top + state_X, mask=real_X, other=LOWEST)
        new_total_X = tl.load(total + state_X, mask=real_X, other=0.0)
        new_XP = load_pieces(part + state_X.to(tl.int64) * layer.heads.head_dim, real_X, layer.heads)
        highest_X = tl.maximum(top_X, new_top_X)
        fade_X = tl.exp2(top_X - highest_X)
        weight_X = tl.exp2(new_top_X - highest_X)
        total_X = total_X * fade_X + new_total_X * weight_X
        merged_XP = ()
        for i in tl.static_range(len(layer.heads.pieces)):
            merged_XP = merged_XP + (out_XP[i] * fade_X[:, None] + new_XP[i] * weight_X[:, None],)
        top_X, out_XP = highest_X, merged_XP
    return top_X, total_X, out_XP


# ---- write ---------------------------------------------------------------------------------------


@triton.jit
def paged_kv_write(block, offset, new, caches, num_tokens, num_blocks, tokens: tl.constexpr, heads: tl.constexpr):
    """Put what is new of `tokens` tokens and one head into their slots, if their blocks are in the pool.

    Grid (T / tokens, K). Shapes: block and offset [T]; `new` are keys and values [T, K, H] for caches [B, K, S, H],
    then scales [T, K] for caches [B, K, S] if tokens have them.
    """
    head = tl.program_id(1)
    token_X = tl.program_id(0) * tokens + tl.arange(0, tokens)
    block_X = tl.load(block + token_X, mask=token_X < num_tokens, other=num_blocks)
    offset_X = tl.load(offset + token_X, mask=token_X < num_tokens, other=0)
    wanted_X = (block_X >= 0) & (block_X < num_blocks)
    from_X = token_X.to(tl.int64) * heads.num_kv_heads + head
    to_X = (block_X.to(tl.int64) * heads.num_kv_heads + head) * heads.block_size + offset_X
    for i in tl.static_range(len(new)):
        if i < 2:
            values = load_pieces(new[i] + from_X * heads.head_dim, wanted_X, heads)
            store_pieces(caches[i] + to_X * heads.head_dim, values, wanted_X, heads)
        else:
            tl.store(caches[i] + to_X, tl.load(new[i] + from_X, mask=wanted_X, other=0.0), mask=wanted_X)
