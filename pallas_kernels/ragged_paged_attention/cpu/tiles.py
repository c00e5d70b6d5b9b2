"""The instructions of attention by tiles of queries over pages, as LLVM IR: one kernel for each shape of heads.

Queries stand in places, one after the other, and sources say what they read: each is some neighbouring places and a
range of one row's context. A chunk of work is the queries of `places_of` neighbouring places that belong to one kv
head, which go through every source that has some of them. So no two threads ever have the same query, though one may
have several sources.

Of a source `SLOTS` slots are read at a time: keys are turned, so that a register holds several slots, and values
copied. Then come scores, weights and weighted values, tile by tile of as many queries as registers hold sums for.
Products are of float32, or of pairs of bfloat16 where the CPU multiplies them, for which weights are rounded: an
instruction then adds two products to each lane, and nothing is converted. Queries of a tile that do not belong to the
source, and slots that a query does not see, have weight 0; what lies in slots that no query sees is not touched, since
0 times NaN is NaN.
"""

import contextlib
from collections.abc import Callable, Iterator

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, I32, Builder, splat, whole
from pallas_kernels.llvm.functions import exp, float32s, lane_max, spread, turned
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.ragged_paged_attention.cpu.heads import Heads
from pallas_kernels.ragged_paged_attention.numerics import LOWEST

Q, KEYS, VALUES, TOKENS, SEEN, SOURCES, TABLES, BEGUN, SETTINGS = range(9)
"""Operands: q_TKGH, k_BKSH, v_BKSH, token_X of each place, seen_T2 the first and the last slot that a token sees,
sources_6L, block_tables_RM, states [T, K, G, H + 2] to begin with, (scale, soft cap)."""
NUM_LINES = 6
"""Lines of sources, (first, last, row, begin, end, begins): places [first, last), none if that is empty, read slots
[begin, end) of a row. `begins`: not 0 where their queries begin with what BEGUN says."""
SLOTS = 64
ROWS = 96
"""The most rows of scores of a chunk: queries of the heads of a group."""


def places_of(group_size: int) -> int:
    """Places of a chunk."""
    return ROWS // group_size


def kernel(heads: Heads) -> ir.Module:
    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.mul(num_blocks(b, frame, heads), frame.extent(KEYS, 1))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        Chunk(b, frame, heads, i).emit()

    return kernel_module(num_chunks, chunk)


def num_blocks(b: Builder, frame: Frame, heads: Heads) -> ir.Value:
    """How many blocks of places have sources."""
    sources, places = frame.operand(SOURCES), whole(places_of(heads.group_size))
    num_sources = frame.extent(SOURCES, 1)
    with b.counting(whole(0), num_sources, whole(1), [whole(0)]) as (source, now):
        first, last, *_ = _source(b, sources, num_sources, source)
        now[0] = b.select(b.icmp_signed("<", first, last), b.larger(now[0], last), now[0])
    return b.udiv(b.add(now[0], b.sub(places, whole(1))), places)


def _source(b: Builder, sources: ir.Value, num_sources: ir.Value, source: ir.Value) -> list[ir.Value]:
    """What all lines say of one."""
    return [b.integer(sources, b.add(b.mul(whole(line), num_sources), source)) for line in range(NUM_LINES)]


class Chunk:
    """The queries of some places and one kv head, in the function that `b` writes.

    On the stack, of rows x, which are the queries of a place one after the other: `q` [x, H], `acc` sums of weighted
    values [x, H], `totals` sums of weights [x, lanes], `tops` [x], `fades` [x] what to scale sums by, `lows` and
    `highs` [x] the slots that are seen, none but where a source is read; of slots `keys` [H, SLOTS], `values`
    [SLOTS, H], and `weights` [x, SLOTS], which are scores first. What is multiplied has `depth` numbers in a lane,
    neighbours in what is summed over: d for `q` and `keys`, slots for `values` and `weights`.
    """

    def __init__(self, b: Builder, frame: Frame, heads: Heads, index: ir.Value):
        self.b, self.frame, self.heads = b, frame, heads
        G, H, L = heads.group_size, heads.head_dim, heads.lanes
        self.kind, self.bits = float32s(L), ir.VectorType(I32, L)
        self.depth = heads.depth
        self.tile = 6 if heads.num_registers == 16 else 12
        assert ROWS % self.tile == 0 and SLOTS % (2 * L) == 0 and H % (self.depth * L) == 0
        self.num_heads = frame.extent(KEYS, 1)
        blocks = num_blocks(b, frame, heads)
        # The last places first: of a prompt they see most.
        block = b.sub(b.sub(blocks, whole(1)), b.udiv(index, self.num_heads))
        self.head = b.urem(index, self.num_heads)
        self.place = b.mul(block, whole(places_of(G)))
        sizes = (ROWS * H, ROWS * H, ROWS * L, ROWS, ROWS, ROWS, ROWS, H * SLOTS, SLOTS * H, ROWS * SLOTS)
        (
            self.q,
            self.acc,
            self.totals,
            self.tops,
            self.fades,
            self.lows,
            self.highs,
            self.keys,
            self.values,
            self.weights,
        ) = map(b.floats, sizes)
        self.scale, self.cap = heads.settings(b, frame.operand(SETTINGS))

    def emit(self) -> None:
        b, frame = self.b, self.frame
        self._begin()
        num_sources, stop = frame.extent(SOURCES, 1), b.add(self.place, whole(places_of(self.heads.group_size)))
        with b.counting(whole(0), num_sources, whole(1)) as (source, _):
            first, last, row, begin, end, begins = _source(b, frame.operand(SOURCES), num_sources, source)
            first, last = b.larger(first, self.place), b.smaller(last, stop)
            with b.if_then(b.icmp_signed("<", first, last)):
                with b.if_then(b.icmp_signed("!=", begins, whole(0))):
                    self._continue(first, last)
                self._read(first, last, row, begin, end)
                self._write(first, last)

    def _begin(self) -> None:
        """Nothing is summed, and no row sees anything."""
        b, heads = self.b, self.heads
        nothing, lanes = ir.Constant(self.kind, None), whole(heads.lanes)
        for room, size in ((self.acc, heads.head_dim), (self.totals, heads.lanes), (self.q, heads.head_dim)):
            with b.counting(whole(0), whole(ROWS * size), lanes) as (i, _):
                b.write(nothing, room, b.mul(i, whole(4)), align=4)
        with b.counting(whole(0), whole(ROWS), whole(1)) as (x, _):
            at = b.mul(x, whole(4))
            b.write(ir.Constant(F32, LOWEST), self.tops, at, align=4)
            self._see(x, ir.Constant(I32, 1), ir.Constant(I32, 0))

    def _see(self, x: ir.Value, low: ir.Value, high: ir.Value) -> None:
        at = self.b.mul(x, whole(4))
        self.b.write(low, self.lows, at, align=4)
        self.b.write(high, self.highs, at, align=4)

    def _continue(self, first: ir.Value, last: ir.Value) -> None:
        """Begin the queries of places with what was made of them before."""
        b, H, L = self.b, self.heads.head_dim, self.heads.lanes
        with self._queries(first, last) as (x, query):
            start = b.mul(query, whole(4 * (H + 2)))
            with b.counting(whole(0), whole(4 * H), whole(4 * L)) as (i, _):
                sums = b.read(self.kind, self.frame.operand(BEGUN), b.add(start, i), align=4)
                b.write(sums, self.acc, b.add(b.mul(x, whole(4 * H)), i), align=4)
            total, top = (
                b.read(F32, self.frame.operand(BEGUN), b.add(start, whole(4 * i)), align=4) for i in (H, H + 1)
            )
            lanes = b.insert_element(ir.Constant(self.kind, None), total, ir.Constant(I32, 0))
            b.write(lanes, self.totals, b.mul(x, whole(4 * L)), align=4)
            b.write(top, self.tops, b.mul(x, whole(4)), align=4)

    def _write(self, first: ir.Value, last: ir.Value) -> None:
        """What the queries of places have come to."""
        b, H, L, out = self.b, self.heads.head_dim, self.heads.lanes, self.frame.result(0)
        with self._queries(first, last) as (x, query):
            start = b.mul(query, whole(4 * (H + 2)))
            with b.counting(whole(0), whole(4 * H), whole(4 * L)) as (i, _):
                sums = b.read(self.kind, self.acc, b.add(b.mul(x, whole(4 * H)), i), align=4)
                b.write(sums, out, b.add(start, i), align=4)
            total = b.lane_sum(b.read(self.kind, self.totals, b.mul(x, whole(4 * L)), align=4))
            b.write(total, out, b.add(start, whole(4 * H)), align=4)
            b.write(b.read(F32, self.tops, b.mul(x, whole(4)), align=4), out, b.add(start, whole(4 * H + 4)), align=4)

    @contextlib.contextmanager
    def _queries(self, first: ir.Value, last: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """A loop over the queries of places: (their row x, which of all queries of the step it is)."""
        b, G = self.b, whole(self.heads.group_size)
        with b.counting(first, last, whole(1)) as (place, _):
            token = b.integer(self.frame.operand(TOKENS), place)
            x, query = (b.mul(i, G) for i in (b.sub(place, self.place), b.add(b.mul(token, self.num_heads), self.head)))
            with b.counting(whole(0), G, whole(1)) as (g, _):
                yield b.add(x, g), b.add(query, g)

    # ---- one source ----

    def _read(self, first: ir.Value, last: ir.Value, row: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Add what places [first, last) see of slots [begin, end) of a row."""
        b, heads = self.b, self.heads
        G, lines, L = heads.group_size, heads.head_dim // self.depth, heads.lanes
        least, most = self._look(first, last, begin, end)
        with self._queries(first, last) as (x, query), b.counting(whole(0), whole(lines), whole(L)) as (d, _):
            at = b.mul(b.add(b.mul(query, whole(lines)), d), whole(self.depth * heads.size))
            factors = heads.factors(b, self.frame.operand(Q), at)
            b.write(factors, self.q, b.mul(b.add(b.mul(x, whole(lines)), d), whole(4)), align=4)
        tile = whole(self.tile)
        first_x, last_x = (b.mul(b.sub(place, self.place), whole(G)) for place in (first, last))
        first_x = b.mul(b.udiv(first_x, tile), tile)
        self.table = b.mul(row, self.frame.extent(TABLES, 1))
        with b.counting(b.and_(least, whole(-SLOTS)), b.add(most, whole(1)), whole(SLOTS)) as (slot, _):
            self._gather(slot, least, most)
            self._score(first_x, last_x)
            self._weigh(first_x, last_x, slot)
            self._add_values(first_x, last_x)
        with self._queries(first, last) as (x, _):
            self._see(x, ir.Constant(I32, 1), ir.Constant(I32, 0))

    def _look(self, first: ir.Value, last: ir.Value, begin: ir.Value, end: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Note which slots each row sees: (the first, the last one that any row does)."""
        b, G = self.b, self.heads.group_size
        seen, tokens = self.frame.operand(SEEN), self.frame.operand(TOKENS)
        with b.counting(first, last, whole(1), [end, whole(-1)]) as (place, now):
            at = b.mul(b.integer(tokens, place), whole(2))
            low, high = (b.integer(seen, b.add(at, whole(i))) for i in range(2))
            low, high = b.larger(low, begin), b.smaller(high, b.sub(end, whole(1)))
            x = b.mul(b.sub(place, self.place), whole(G))
            with b.counting(whole(0), whole(G), whole(1)) as (g, _):
                self._see(b.add(x, g), b.trunc(low, I32), b.trunc(high, I32))
            sees = b.icmp_signed("<=", low, high)
            now[0] = b.select(sees, b.smaller(now[0], low), now[0])
            now[1] = b.select(sees, b.larger(now[1], high), now[1])
        return now[0], now[1]

    def _gather(self, slot: ir.Value, least: ir.Value, most: ir.Value) -> None:
        """Keys, turned, and values of `SLOTS` slots from `slot` on; of slots that nobody sees values are 0."""
        b, heads = self.b, self.heads
        H, L, S = heads.head_dim, heads.lanes, whole(heads.block_size)
        keys, value_line = self.frame.operand(KEYS), whole(4 * H // self.depth)
        with b.counting(whole(0), whole(SLOTS), whole(L)) as (j, _):
            here = b.add(slot, j)
            seen = b.and_(b.icmp_signed("<=", here, most), b.icmp_signed(">", b.add(here, whole(L)), least))
            values_at = b.mul(j, value_line)
            with b.if_else(seen) as (then, otherwise):
                with then:
                    block = b.integer(self.frame.operand(TABLES), b.add(self.table, b.udiv(here, S)))
                    slot_at = b.mul(b.urem(here, S), whole(H * heads.size))
                    place = b.add(heads.part(b, block, self.num_heads, self.head), slot_at)
                    with b.counting(whole(0), whole(H // self.depth), whole(L)) as (d, _):
                        at = b.add(place, b.mul(d, whole(self.depth * heads.size)))
                        rows = [heads.factors(b, keys, b.add(at, whole(i * H * heads.size))) for i in range(L)]
                        for i, column in enumerate(turned(b, rows)):
                            key_at = b.mul(b.add(b.mul(b.add(d, whole(i)), whole(SLOTS)), j), whole(4))
                            b.write(column, self.keys, key_at, align=4)
                    with b.counting(whole(0), whole(L), whole(self.depth)) as (i, _):
                        self._copy_values(here, i, place, values_at, least, most)
                with otherwise, b.counting(whole(0), b.mul(whole(L), value_line), whole(4 * L)) as (i, _):
                    b.write(ir.Constant(self.kind, None), self.values, b.add(values_at, i), align=4)

    def _copy_values(
        self, start: ir.Value, i: ir.Value, place: ir.Value, values_at: ir.Value, least: ir.Value, most: ir.Value
    ) -> None:
        """A line of values, of the slots from start + i on that a lane holds."""
        b, heads = self.b, self.heads
        H, L = heads.head_dim, heads.lanes
        slots = [b.add(i, whole(n)) for n in range(self.depth)]
        is_seen = lambda now: b.and_(b.icmp_signed(">=", now, least), b.icmp_signed("<=", now, most))
        seen = [spread(b, is_seen(b.add(start, slot)), L) for slot in slots]
        line_at = b.add(values_at, b.mul(i, whole(4 * H // self.depth)))
        with b.counting(whole(0), whole(H), whole(L)) as (d, _):
            places = [b.add(place, b.mul(b.add(b.mul(slot, whole(H)), d), whole(heads.size))) for slot in slots]
            numbers = [
                b.select(mask, heads.numbers(b, self.frame.operand(VALUES), at), ir.Constant(self.kind, None))
                for mask, at in zip(seen, places)
            ]
            b.write(heads.joined(b, numbers), self.values, b.add(line_at, b.mul(d, whole(4))), align=4)

    def _score(self, first_x: ir.Value, last_x: ir.Value) -> None:
        """Products of queries and keys, as `weights`."""
        b, H, L = self.b, self.heads.head_dim, self.heads.lanes
        tiles = b.counting(first_x, last_x, whole(self.tile))
        with b.counting(whole(0), whole(SLOTS), whole(2 * L)) as (j, _), tiles as (x, _):
            zeros = [ir.Constant(self.kind, None)] * (2 * self.tile)
            rows = [b.mul(b.add(x, whole(i)), whole(4 * H // self.depth)) for i in range(self.tile)]
            sums = self._tile_product(
                zeros, H, lambda d: b.mul(b.add(b.mul(d, whole(SLOTS)), j), whole(4)), self.keys, self.q, rows, 2
            )
            for i in range(self.tile):
                at = b.mul(b.add(b.mul(b.add(x, whole(i)), whole(SLOTS)), j), whole(4))
                for c in range(2):
                    b.write(sums[2 * i + c], self.weights, b.add(at, whole(4 * c * L)), align=4)

    def _tile_product(
        self,
        sums: list[ir.Value],
        length: int,
        place: Callable[[ir.Value], ir.Value],
        columns: ir.Value,
        factors: ir.Value,
        rows: list[ir.Value],
        width: int,
    ) -> list[ir.Value]:
        """sums + factors [rows, length] times columns [length, width registers]. `place(d)`: where line d begins in
        `columns`, of as many numbers as a lane holds; `rows`: where rows do in `factors`."""
        b, L = self.b, self.heads.lanes
        with b.counting(whole(0), whole(length // self.depth), whole(2), sums) as (d, now):
            for step in range(2):  # the loop's own work once for two
                line = b.add(d, whole(step))
                at = place(line)
                numbers = [b.read(self.kind, columns, b.add(at, whole(4 * c * L)), align=4) for c in range(width)]
                for i, row in enumerate(rows):
                    factor = spread(b, b.read(F32, factors, b.add(row, b.mul(line, whole(4))), align=4), L)
                    for c in range(width):
                        now[width * i + c] = self.heads.add_products(b, numbers[c], factor, now[width * i + c])
        return now

    def _weigh(self, first_x: ir.Value, last_x: ir.Value, slot: ir.Value) -> None:
        """Scores become weights, and `fades` what sums so far are scaled by."""
        b, L, tile = self.b, self.heads.lanes, whole(self.tile)
        end = b.mul(b.udiv(b.add(last_x, whole(self.tile - 1)), tile), tile)
        lane, lowest, nothing = (
            ir.Constant(self.bits, list(range(L))),
            splat(self.kind, LOWEST),
            ir.Constant(self.kind, None),
        )
        start = b.add(spread(b, b.trunc(slot, I32), L), lane)
        with b.counting(first_x, end, whole(1)) as (x, _):
            at, total_at, weights_at = (b.mul(x, whole(4 * size)) for size in (1, L, SLOTS))
            low, high = (spread(b, b.read(I32, room, at, align=4), L) for room in (self.lows, self.highs))
            largest, scores, sees = lowest, [], []
            for c in range(SLOTS // L):
                position = b.add(start, splat(self.bits, c * L))
                seen = b.and_(b.icmp_signed(">=", position, low), b.icmp_signed("<=", position, high))
                score = b.read(self.kind, self.weights, b.add(weights_at, whole(4 * c * L)), align=4)
                score = self.heads.scores(b, score, self.scale, self.cap)
                score = b.select(seen, score, lowest)
                largest = b.select(b.fcmp_ordered(">", score, largest), score, largest)
                scores.append(score)
                sees.append(seen)
            before, here = b.read(F32, self.tops, at, align=4), lane_max(b, largest)
            top = b.select(b.fcmp_ordered(">", here, before), here, before)
            b.write(top, self.tops, at, align=4)
            fade = exp(b, spread(b, b.fsub(before, top), L))
            b.write(b.extract_element(fade, ir.Constant(I32, 0)), self.fades, at, align=4)
            top = spread(b, top, L)
            total = b.fmul(b.read(self.kind, self.totals, total_at, align=4), fade)
            for c, (score, seen) in enumerate(zip(scores, sees)):
                weight = b.select(seen, exp(b, b.fsub(score, top)), nothing)
                written, weight = self.heads.rounded(b, weight)
                b.write(written, self.weights, b.add(weights_at, whole(4 * c * L // self.depth)), align=4)
                total = b.fadd(total, weight)
            b.write(total, self.totals, total_at, align=4)

    def _add_values(self, first_x: ir.Value, last_x: ir.Value) -> None:
        b, H, L = self.b, self.heads.head_dim, self.heads.lanes
        width = 2 if H % (2 * L) == 0 else 1
        tiles = b.counting(first_x, last_x, whole(self.tile))
        with b.counting(whole(0), whole(H), whole(width * L)) as (d, _), tiles as (x, _):
            sums, places = [], []
            for i in range(self.tile):
                row = b.add(x, whole(i))
                fade = spread(b, b.read(F32, self.fades, b.mul(row, whole(4)), align=4), L)
                at = b.mul(b.add(b.mul(row, whole(H)), d), whole(4))
                for c in range(width):
                    places.append(b.add(at, whole(4 * c * L)))
                    sums.append(b.fmul(b.read(self.kind, self.acc, places[-1], align=4), fade))
            rows = [b.mul(b.add(x, whole(i)), whole(4 * SLOTS)) for i in range(self.tile)]
            sums = self._tile_product(
                sums,
                SLOTS,
                lambda j: b.mul(b.add(b.mul(j, whole(H)), d), whole(4)),
                self.values,
                self.weights,
                rows,
                width,
            )
            for total, at in zip(sums, places):
                b.write(total, self.acc, at, align=4)
