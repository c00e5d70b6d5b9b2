"""The instructions of attention by single queries over pages, as LLVM IR: one kernel for each shape of heads.

A chunk of work is the queries of one token that belong to some neighbouring kv heads, and a range of its context. It
goes through the range block by block, through a block head by head, and there in tiles of as many slots as a register
has lanes: scores of a tile are one register for each query, and so are its weights. Sums of values stay in the nearest
caches; they are scaled down only where a score exceeds all before.

Blocks lie anywhere, and a head's part of one is only a page of memory or less. So heads whose parts are neighbours are
read one after the other, `PART_BYTES` of keys and as many of values: memory that gives 18 to 22 GB/s of pieces of 16
KiB and more gives 12 of 4 KiB (two threads of an AMD EPYC of 2021). While a tile is read the next one is asked for.
"""

from collections.abc import Callable, Iterator

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, I32, LINE_BYTES, Builder, splat, whole
from pallas_kernels.llvm.functions import exp, float32s, lane_max, spread, sums_of_each, turned
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.ragged_paged_attention.cpu.heads import Heads
from pallas_kernels.ragged_paged_attention.numerics import LOWEST

Q, KEYS, VALUES, RANGES, ROWS, TABLES, SETTINGS = range(7)
"""Operands: q_TKGH, k_BKSH, v_BKSH, ranges_PT2, row_T, block_tables_RM, (scale, soft cap). A token without a row, -1,
is left alone."""
OUT, TOTAL, TOP = range(3)
"""Results: weighted sums out_PTKGH, and total and top [P, T, K, G], as `numerics.Softmax` has them."""
PART_BYTES = 16 << 10


def heads_of_chunk(heads: Heads) -> int:
    """The most kv heads of a chunk."""
    return max(1, PART_BYTES // heads.part_bytes)


def kernel(heads: Heads) -> ir.Module:
    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.mul(b.mul(frame.extent(RANGES, 0), frame.extent(RANGES, 1)), num_teams(b, frame, heads))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        work = Chunk(b, frame, heads, i)
        with b.if_then(b.icmp_signed(">=", work.row, whole(0))):
            work.emit()

    return kernel_module(num_chunks, chunk)


def num_teams(b: Builder, frame: Frame, heads: Heads) -> ir.Value:
    """How many chunks share a token and a range: each has other kv heads."""
    return b.udiv(b.add(frame.extent(KEYS, 1), whole(heads_of_chunk(heads) - 1)), whole(heads_of_chunk(heads)))


class Chunk:
    """One token's queries of some kv heads and a range of its context, in the function that `b` writes.

    On the stack, of N = kv heads times G queries: `acc` sums of weighted values [N, H], `totals` sums of weights
    [N, lanes], `tops` [N]; of the G queries of a head and a tile `weights` [G, lanes] and `products` [G, lanes, lanes].
    `_query` is the first query of the head that is looked at, `_ahead` how many bytes its next tile is from this one.
    """

    def __init__(self, b: Builder, frame: Frame, heads: Heads, index: ir.Value):
        self.b, self.frame, self.heads = b, frame, heads
        self.kind, self.bits = float32s(heads.lanes), ir.VectorType(I32, heads.lanes)
        teams, num_tokens = num_teams(b, frame, heads), frame.extent(RANGES, 1)
        self.num_heads = frame.extent(KEYS, 1)
        part, first_head = b.udiv(index, teams), b.mul(b.urem(index, teams), whole(heads_of_chunk(heads)))
        token = b.urem(part, num_tokens)
        G, H, L, most = heads.group_size, heads.head_dim, heads.lanes, heads_of_chunk(heads)
        self.first_head = first_head
        self.heads_here = b.smaller(whole(most), b.sub(self.num_heads, first_head))
        self.first_q, self.first_out = (
            b.mul(b.add(b.mul(i, self.num_heads), first_head), whole(G)) for i in (token, part)
        )
        self.begin, self.end = (self._integer(RANGES, b.add(b.mul(part, whole(2)), whole(x))) for x in (0, 1))
        self.row = self._integer(ROWS, token)
        self.table = b.mul(self.row, frame.extent(TABLES, 1))
        sizes = (most * G * H, most * G * L, most * G, G * L, G * L * L)
        self.acc, self.totals, self.tops, self.weights, self.products = map(b.floats, sizes)
        self.q, self.k, self.v = (frame.operand(i) for i in (Q, KEYS, VALUES))
        self.scale, self.cap = heads.settings(b, frame.operand(SETTINGS))

    def emit(self) -> None:
        b, heads, L, S = self.b, self.heads, whole(self.heads.lanes), whole(self.heads.block_size)
        self._begin()
        first_tile, one = b.and_(self.begin, whole(-heads.lanes)), whole(1)
        first, last = b.udiv(self.begin, S), b.udiv(b.sub(self.end, one), S)
        stop = b.select(b.icmp_signed("<", self.begin, self.end), b.add(last, one), first)
        with b.counting(first, stop, one) as (block, _):
            here, there = self._place(block), self._place(b.smaller(b.add(block, one), last))
            start, slot_bytes = b.mul(block, S), whole(heads.head_dim * heads.size)
            first_slot, stop_slot = b.larger(start, first_tile), b.smaller(b.add(start, S), self.end)
            offset = b.mul(b.sub(first_slot, start), slot_bytes)
            with b.counting(whole(0), self.heads_here, one) as (head, _):
                self._query = b.mul(head, whole(heads.group_size))
                place = b.add(b.add(here, b.mul(head, whole(heads.part_bytes))), offset)
                is_last = b.icmp_signed("==", b.add(head, one), self.heads_here)
                next_part = b.select(is_last, there, b.add(place, whole(heads.part_bytes)))
                with b.counting(first_slot, stop_slot, L, [place]) as (slot, now):
                    after = b.add(now[0], whole(heads.lanes * heads.head_dim * heads.size))
                    ahead = b.select(b.icmp_signed("<", b.add(slot, L), stop_slot), after, next_part)
                    self._ahead = b.sub(ahead, now[0])
                    self._weigh(slot, now[0])
                    self._add_values(slot, now[0])
                    now[0] = after
        self._finish()

    def _begin(self) -> None:
        b, heads, L = self.b, self.heads, self.heads.lanes
        nothing, num_queries = ir.Constant(self.kind, None), b.mul(self.heads_here, whole(heads.group_size))
        with b.counting(whole(0), b.mul(num_queries, whole(heads.head_dim)), whole(L)) as (i, _):
            b.write(nothing, self.acc, b.mul(i, whole(4)), align=4)
        with b.counting(whole(0), num_queries, whole(1)) as (n, _):
            b.write(nothing, self.totals, b.mul(n, whole(4 * L)), align=4)
            b.write(ir.Constant(F32, LOWEST), self.tops, b.mul(n, whole(4)), align=4)

    def _weigh(self, slot: ir.Value, place: ir.Value) -> None:
        """The weights of a tile's slots for each query; 0 outside of the range, whatever lies there."""
        b, L = self.b, self.heads.lanes
        lane = ir.Constant(self.bits, list(range(L)))
        position = b.add(spread(b, b.trunc(slot, I32), L), lane)
        begin, end = (spread(b, b.trunc(x, I32), L) for x in (self.begin, self.end))
        seen = b.and_(b.icmp_signed(">=", position, begin), b.icmp_signed("<", position, end))
        products = self._products(place)
        with b.counting(whole(0), whole(self.heads.group_size), whole(1)) as (g, _):
            score = self.heads.scores(b, products(g), self.scale, self.cap)
            score = b.select(seen, score, splat(self.kind, LOWEST))
            n = b.add(self._query, g)
            top_at, total_at = b.mul(n, whole(4)), b.mul(n, whole(4 * L))
            before, tile_top = b.read(F32, self.tops, top_at, align=4), lane_max(b, score)
            with b.if_then(b.fcmp_ordered(">", tile_top, before)):
                self._fade(n, exp(b, spread(b, b.fsub(before, tile_top), L)))
                b.write(tile_top, self.tops, top_at, align=4)
            top = spread(b, b.read(F32, self.tops, top_at, align=4), L)
            weight = b.select(seen, exp(b, b.fsub(score, top)), ir.Constant(self.kind, None))
            written, weight = self.heads.rounded(b, weight)
            b.write(written, self.weights, b.mul(g, whole(4 * L)), align=4)
            total = b.fadd(b.read(self.kind, self.totals, total_at, align=4), weight)
            b.write(total, self.totals, total_at, align=4)

    def _fade(self, n: ir.Value, fade: ir.Value) -> None:
        """Scale down what query n has summed."""
        b, heads = self.b, self.heads
        total_at = b.mul(n, whole(4 * heads.lanes))
        b.write(b.fmul(b.read(self.kind, self.totals, total_at, align=4), fade), self.totals, total_at, align=4)
        start = b.mul(n, whole(4 * heads.head_dim))
        with b.counting(whole(0), whole(4 * heads.head_dim), whole(4 * heads.lanes)) as (i, _):
            at = b.add(start, i)
            b.write(b.fmul(b.read(self.kind, self.acc, at, align=4), fade), self.acc, at, align=4)

    def _products(self, place: ir.Value) -> Callable[[ir.Value], ir.Value]:
        """The queries of a head times the keys of a tile: query g -> a register with a slot in each lane.

        A register of keys meets all queries, so many slots at a time as registers hold sums. Sums over lanes are dearer
        than products then, so for many queries keys are turned instead, once for all.
        """
        b, heads = self.b, self.heads
        G, L = heads.group_size, heads.lanes
        if heads.turns_keys:
            for i, total in enumerate(self._turned_sums(place)):
                b.write(total, self.products, whole(4 * L * i), align=4)
            return lambda g: b.read(self.kind, self.products, b.mul(g, whole(4 * L)), align=4)
        slots = min(L, 1 << (max(1, heads.num_registers // 2 // G).bit_length() - 1))
        if slots == L and G == 1:
            sums = self._sums(place, 0, slots)
            return lambda g: sums_of_each(b, sums)
        for first in range(0, L, slots):
            for i, total in enumerate(self._sums(place, first, slots)):
                g, j = divmod(i, slots)
                b.write(total, self.products, whole(4 * L * (g * L + first + j)), align=4)

        def of_query(g: ir.Value) -> ir.Value:
            start = b.mul(g, whole(4 * L * L))
            lines = [b.read(self.kind, self.products, b.add(start, whole(4 * L * j)), align=4) for j in range(L)]
            return sums_of_each(b, lines)

        return of_query

    def _sums(self, place: ir.Value, first: int, count: int) -> list[ir.Value]:
        """Of each query and of slots [first, first + count) of a tile, the sums of their products in each lane."""
        b, heads = self.b, self.heads
        line, place = heads.head_dim * heads.size, b.add(place, whole(first * heads.head_dim * heads.size))
        zeros = [ir.Constant(self.kind, None)] * (heads.group_size * count)
        with b.counting(whole(0), self._num_pieces, whole(1), zeros) as (piece, sums):
            for d, k_at in self._registers(place, piece, count):
                keys = [heads.factors(b, self.k, b.add(k_at, whole(j * line))) for j in range(count)]
                for g in range(heads.group_size):
                    q = b.read(self.kind, self.q, self._q_at(g, d), align=2)
                    for i, key in enumerate(keys, g * count):
                        sums[i] = heads.add_products(b, key, q, sums[i])
        return sums

    def _turned_sums(self, place: ir.Value) -> list[ir.Value]:
        """Of each query a register with a slot of the tile in each lane."""
        b, heads, L = self.b, self.heads, self.heads.lanes
        line, zeros = heads.head_dim * heads.size, [ir.Constant(self.kind, None)] * heads.group_size
        with b.counting(whole(0), self._num_pieces, whole(1), zeros) as (piece, sums):
            for d, k_at in self._registers(place, piece, L):
                rows = [heads.factors(b, self.k, b.add(k_at, whole(j * line))) for j in range(L)]
                for i, column in enumerate(turned(b, rows)):
                    for g in range(heads.group_size):
                        q = spread(b, b.read(F32, self.q, self._q_at(g, b.add(d, whole(i))), align=2), L)
                        sums[g] = heads.add_products(b, column, q, sums[g])
        return sums

    @property
    def _num_pieces(self) -> ir.Value:
        """Of a key: what a line of a cache holds, if that are whole registers."""
        return whole(self.heads.head_dim * self.heads.size // self.heads.piece_bytes)

    def _registers(self, place: ir.Value, piece: ir.Value, num_slots: int) -> Iterator[tuple[ir.Value, ir.Value]]:
        """(lanes before it in a query, where it is in the first key) of each register of a piece of some slots' keys.
        On the way the same pieces of the next tile are asked for."""
        b, heads = self.b, self.heads
        start = b.add(place, b.mul(piece, whole(heads.piece_bytes)))
        for j in range(num_slots):
            self._ask_ahead(self.k, b.add(start, whole(j * heads.head_dim * heads.size)), heads.piece_bytes)
        register_bytes = heads.lanes * heads.depth * heads.size
        for i in range(heads.piece_bytes // register_bytes):
            lane = b.add(b.mul(piece, whole(heads.piece_bytes // heads.depth // heads.size)), whole(i * heads.lanes))
            yield lane, b.add(start, whole(i * register_bytes))

    def _q_at(self, g: int, d: ir.Value) -> ir.Value:
        """Where lane d of a query of the head is: queries come as they are multiplied."""
        b, query_lanes = self.b, whole(self.heads.head_dim // self.heads.depth)
        query = b.add(b.add(self.first_q, self._query), whole(g))
        return b.mul(b.add(b.mul(query, query_lanes), d), whole(4))

    def _add_values(self, slot: ir.Value, place: ir.Value) -> None:
        """Add the weighted values of a tile: of those in the range only, since 0 times NaN is NaN. The other slot of a
        lane at an end of the range has weight 0, and counts as the one beside it."""
        b, heads = self.b, self.heads
        G, H, L, depth = heads.group_size, heads.head_dim, heads.lanes, heads.depth
        first = b.larger(b.sub(self.begin, slot), whole(0))
        last = b.smaller(b.sub(self.end, slot), whole(L))
        final = b.sub(last, whole(1))
        most = max(1, heads.num_registers // 2 // G)
        columns = next(n for n in range(most, 0, -1) if (H // L) % n == 0)
        with b.counting(whole(0), whole(H), whole(columns * L)) as (d, _):
            sums_at = b.add(b.mul(self._query, whole(4 * H)), b.mul(d, whole(4)))
            at = [b.add(sums_at, whole(4 * (g * H + c * L))) for g in range(G) for c in range(columns)]
            sums = [b.read(self.kind, self.acc, offset, align=4) for offset in at]
            start = b.add(place, b.mul(d, whole(heads.size)))
            with b.counting(b.and_(first, whole(-depth)), last, whole(depth), sums) as (j, now):
                slots = [b.larger(b.smaller(b.add(j, whole(n)), final), first) for n in range(depth)]
                rows = [b.add(start, b.mul(row, whole(H * heads.size))) for row in slots]
                for row in rows:
                    self._ask_ahead(self.v, row, columns * L * heads.size)
                numbers = lambda row, c: heads.numbers(b, self.v, b.add(row, whole(c * L * heads.size)))
                values = [heads.joined(b, [numbers(row, c) for row in rows]) for c in range(columns)]
                for g in range(G):
                    weight_at = b.add(b.mul(j, whole(4 // depth)), whole(4 * g * L))
                    weight = spread(b, b.read(F32, self.weights, weight_at, align=2), L)
                    for c in range(columns):
                        i = g * columns + c
                        now[i] = heads.add_products(b, values[c], weight, now[i])
            for offset, total in zip(at, now):
                b.write(total, self.acc, offset, align=4)

    def _finish(self) -> None:
        b, heads = self.b, self.heads
        out, total, top = (self.frame.result(i) for i in (OUT, TOTAL, TOP))
        num_queries, head_bytes = b.mul(self.heads_here, whole(heads.group_size)), whole(4 * heads.head_dim)
        start = b.mul(self.first_out, head_bytes)
        with b.counting(whole(0), b.mul(num_queries, head_bytes), whole(4 * heads.lanes)) as (i, _):
            b.write(b.read(self.kind, self.acc, i, align=4), out, b.add(start, i), align=4)
        with b.counting(whole(0), num_queries, whole(1)) as (n, _):
            at = b.mul(b.add(self.first_out, n), whole(4))
            lanes = b.read(self.kind, self.totals, b.mul(n, whole(4 * heads.lanes)), align=4)
            b.write(b.lane_sum(lanes), total, at, align=4)
            b.write(b.read(F32, self.tops, b.mul(n, whole(4)), align=4), top, at, align=4)

    def _place(self, block: ir.Value) -> ir.Value:
        """The offset in the cache, in bytes, of the first head's part of a block of the context."""
        block_id = self._integer(TABLES, self.b.add(self.table, block))
        return self.heads.part(self.b, block_id, self.num_heads, self.first_head)

    def _ask_ahead(self, base: ir.Value, place: ir.Value, num_bytes: int) -> None:
        """Ask for what the next tile has in the place of these bytes. A few lines at a time: to ask for a tile at once
        is more than a core can wait for, and took as long as not to ask."""
        for line in range(0, num_bytes, LINE_BYTES):
            self.b.prefetch(base, self.b.add(self.b.add(place, whole(line)), self._ahead))

    def _integer(self, operand: int, index: ir.Value) -> ir.Value:
        """An int32 of an operand."""
        return self.b.integer(self.frame.operand(operand), index)
