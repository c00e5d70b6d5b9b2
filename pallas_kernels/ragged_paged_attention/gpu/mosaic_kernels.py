"""The body of the kernel for prompts on Hopper, in Pallas for Mosaic GPU.

There are as many programs as cores, and each takes items until there are no more. It has three warp groups. One
fetches: its first warp keys, its second values, block by block through TMA, as many iterations ahead as there are
stages, the next item's included. The other two attend, each from half of a tile's queries. They take turns with the
tensor cores: while one multiplies, the other takes powers.

The rows of a warp group are its tokens for the first query head of the kv head, then those for the second, and so on,
since TMA fetches the same columns of neighbouring tokens at once. A last tile's outputs are written token by token, as
what lies behind them is somebody else's.

What no query of the row sees of the blocks that are read may be NaN. As keys it is masked; values are replaced by zeros
in shared memory, which both groups do, with the same result.

This module knows nothing of how the work was cut (items.py), nor of how a program is launched (mosaic_calls.py).

Letters beside the package's: X the 64 rows of a warp group, C slots of one iteration, Q tokens of a warp group.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.gpu import items as at
from pallas_kernels.ragged_paged_attention.gpu import kernels
from pallas_kernels.ragged_paged_attention.gpu.mosaic import ROWS
from pallas_kernels.ragged_paged_attention.gpu.statics import LOWEST

GROUPS, FETCHER = 2, 2  # those that attend, and the one that comes after them
REGISTERS_TO_ATTEND, REGISTERS_TO_FETCH = 232, 40
CLEARED = 64  # slots whose values are replaced at a time
MATRIX, VECTOR = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is static of a layer. slots: C. programs: as many as run at once. takes_turns: whether a warp group waits
    with its products until the other one's are done. interpreted: whether products take both operands from shared
    memory."""

    slots: int
    stages: int
    group_size: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    programs: int
    takes_turns: bool
    interpreted: bool

    @property
    def queries(self) -> int:
        """Tokens of a warp group."""
        return ROWS // self.group_size

    @property
    def run(self) -> int:
        """Slots that lie together: a block, or what an iteration needs of one."""
        return min(self.block_size, self.slots)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """References to arrays: items [I, 11], of which the first num_items [1] are used, seq_lens [R], tables [R, M],
    sinks [K, X] in powers of 2 or None, k and v [B * K * S, H], out [T, N, H], which holds the queries, and partial
    results: part [parts, K, 2 * X, H], top and total [parts, K, 2 * X]."""

    items: Any
    num_items: Any
    seq_lens: Any
    tables: Any
    sinks: Any
    k: Any
    v: Any
    out: Any
    part: Any
    top: Any
    total: Any


@dataclasses.dataclass(frozen=True)
class Shared:
    """References to shared memory and its barriers. queries and outputs [2, X, H]: as they come and go. q, k, v: as
    products want them, [2, X, H] and [stages, C, H]. weights [2, X, C], if products take nothing from registers.
    turn: whose products are next."""

    queries: Any
    outputs: Any
    q: Any
    k: Any
    v: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    weights: Any = None


@dataclasses.dataclass(frozen=True)
class Walk:
    """Which iterations an item takes, [begin, end); those before `full_begin` and from `full_end` on are masked. Its
    queries see slots from `lowest` on of row `row`, which holds those up to `held`. done: iterations that the program
    took for other items."""

    row: jax.Array
    lowest: jax.Array
    held: jax.Array
    begin: jax.Array
    full_begin: jax.Array
    full_end: jax.Array
    end: jax.Array
    done: jax.Array

    def number(self, iteration: jax.Array) -> jax.Array:
        """Of an iteration among all of the program's."""
        return self.done + iteration - self.begin

    def stage(self, layer: Layer, iteration: jax.Array) -> jax.Array:
        return lax.rem(self.number(iteration), jnp.int32(layer.stages))

    @property
    def after(self) -> jax.Array:
        """`done` of the program's next item."""
        return self.done + self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Work:
    """The items of a program, one a round.

    Items are sorted: of each round of as many as there are programs, the first one has the most work, so every other
    round is handed out from behind.
    """

    layer: Layer
    arrays: Arrays

    @property
    def rounds(self) -> jax.Array:
        num_places, programs = self.arrays.num_items[0] * self.layer.num_kv_heads, jnp.int32(self.layer.programs)
        whole, rest = lax.div(num_places, programs), lax.rem(num_places, programs)
        return jnp.where(self.turned(whole) < rest, whole + 1, whole)

    def turned(self, round: jax.Array) -> jax.Array:
        program = lax.axis_index("program")
        return jnp.where(lax.rem(round, jnp.int32(2)) == 0, program, self.layer.programs - 1 - program)

    def item(self, round: jax.Array) -> tuple[jax.Array, Callable]:
        """(kv head, the item's facts by their columns)."""
        place, heads = round * self.layer.programs + self.turned(round), jnp.int32(self.layer.num_kv_heads)
        index = lax.div(place, heads)
        return lax.rem(place, heads), lambda column: self.arrays.items[index, column]

    def walk(self, fact: Callable, done: jax.Array) -> Walk:
        """As Triton's kernels walk: between the masked iterations every query of the tile sees every slot."""
        slots, window, row = jnp.int32(self.layer.slots), self.layer.window, fact(at.ROW)
        above = lambda position: lax.div(position + (self.layer.slots - 1), slots)
        # No `zeros_like`: with a mesh of explicit axes it asks for a sharding.
        lowest_of = lambda position: jnp.int32(0) if window is None else jnp.maximum(position - (window - 1), 0)
        begin = lax.div(fact(at.BEGIN), slots)
        end = jnp.maximum(begin, above(fact(at.END)))
        full_begin = jnp.minimum(jnp.maximum(above(lowest_of(fact(at.LAST))), begin), end)
        full_end = jnp.minimum(jnp.maximum(lax.div(fact(at.POSITION) + 1, slots), full_begin), end)
        lowest, held = lowest_of(fact(at.POSITION)), self.arrays.seq_lens[row] - 1
        return Walk(row, lowest, held, begin, full_begin, full_end, end, done)


def attend_kernel(arrays: Arrays, shared: Shared, layer: Layer) -> None:
    """Attend from the items that are this program's: write outputs, or a partial result when an item is not all of its
    tile. Grid (programs,), three threads."""
    group, work = lax.axis_index("group"), Work(layer, arrays)

    @pl.when(group == FETCHER)
    def _():
        plgpu.set_max_registers(REGISTERS_TO_FETCH, action="decrease")
        fetch(work, shared)

    @pl.when(group < FETCHER)
    def _():
        plgpu.set_max_registers(REGISTERS_TO_ATTEND, action="increase")
        rounds = work.rounds
        pl.when(rounds > 0)(lambda: load_queries(work, jnp.int32(0), shared, group))

        def attend_item(round, done):
            head, fact = work.item(round)
            walk = work.walk(fact, done)
            place_queries(shared, group)
            pl.when(round + 1 < rounds)(lambda: load_queries(work, round + 1, shared, group))
            state = attend(layer, walk, fact, shared, group)
            pl.when(group == 0)(lambda: give_turn(layer, shared))

            @pl.when(fact(at.PART) == at.NOT_SPLIT)
            def _():
                store_outputs(layer, fact, arrays, shared, head, group, state)

            @pl.when(fact(at.PART) != at.NOT_SPLIT)
            def _():
                store_part(layer, fact, arrays, head, group, state)

            pl.when(group == 0)(lambda: await_turn(layer, shared))
            return walk.after

        lax.fori_loop(0, rounds, attend_item, jnp.int32(0))


# ---- fetch ---------------------------------------------------------------------------------------


def fetch(work: Work, shared: Shared) -> None:
    """Copy the slots of all iterations to shared memory, as stages become free. A warp for keys, one for values."""
    layer, arrays = work.layer, work.arrays

    def load(source: Any, target: Any, ready: Any, free: Any) -> None:
        def load_item(round, done):
            head, fact = work.item(round)
            walk = work.walk(fact, done)

            def step(iteration, places):
                stage = walk.stage(layer, iteration)

                @pl.when(walk.number(iteration) >= layer.stages)
                def _():
                    plgpu.barrier_wait(free.at[stage])

                for number, place in enumerate(places):
                    where = target.at[stage, pl.ds(number * layer.run, layer.run)]
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(place, layer.run)], where, ready.at[stage])
                # Blocks are looked up an iteration ahead.
                return places_of(layer, walk, arrays.tables, head, jnp.minimum(iteration + 1, walk.end - 1))

            @pl.when(walk.begin < walk.end)
            def _():
                lax.fori_loop(walk.begin, walk.end, step, places_of(layer, walk, arrays.tables, head, walk.begin))

            return walk.after

        lax.fori_loop(0, work.rounds, load_item, jnp.int32(0))

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(lambda: load(arrays.k, shared.k, shared.k_ready, shared.k_free))
        pl.when(warp == 1)(lambda: load(arrays.v, shared.v, shared.v_ready, shared.v_free))


def places_of(layer: Layer, walk: Walk, tables: Any, head: jax.Array, iteration: jax.Array) -> tuple[jax.Array, ...]:
    """Where the runs of an iteration lie in the cache; of those that no query of a row sees, where another one does."""
    S, places = jnp.int32(layer.block_size), []
    for number in range(layer.slots // layer.run):
        position = iteration * layer.slots + number * layer.run
        is_needed = (position + layer.run > walk.lowest) & (position <= walk.held)
        position = jnp.where(is_needed, position, walk.lowest)
        block = tables[walk.row, lax.div(position, S)]
        offset = lax.div(lax.rem(position, S), jnp.int32(layer.run)) * layer.run
        places.append((block * layer.num_kv_heads + head) * S + offset)
    return tuple(places)


# ---- attend --------------------------------------------------------------------------------------


def load_queries(work: Work, round: jax.Array, shared: Shared, group: jax.Array) -> None:
    """Begin to load a warp group's queries of this round. What lies behind the tile's is loaded and ignored."""
    (head, fact), layer, Q = work.item(round), work.layer, work.layer.queries
    token = fact(at.TOKEN) + group * Q
    for member in range(layer.group_size):
        source = work.arrays.out.at[pl.ds(token, Q), head * layer.group_size + member]
        plgpu.copy_gmem_to_smem(source, shared.queries.at[group, pl.ds(member * Q, Q)], shared.q_ready.at[group])


def place_queries(shared: Shared, group: jax.Array) -> None:
    """Bring a warp group's queries to where products read them."""
    plgpu.barrier_wait(shared.q_ready.at[group])
    shared.q[group] = plgpu.load(shared.queries.at[group], layout=MATRIX, optimized=False)
    plgpu.commit_smem()


def attend(layer: Layer, walk: Walk, fact: Any, shared: Shared, group: jax.Array) -> tuple[jax.Array, ...]:
    """(weighted values [X, H], top [X], total [X]) of one item; tops are scores as they come out of the product."""
    state = (
        plgpu.layout_cast(jnp.zeros((ROWS, layer.head_dim), jnp.float32), MATRIX),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), VECTOR),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), VECTOR),
    )
    first = fact(at.POSITION) + group * layer.queries
    add = functools.partial(add_slots, layer, walk, first, shared, group)
    pl.when(group == 1)(lambda: pass_turn(layer, shared))  # it begins when the other one is done with its first product
    if layer.window is not None:
        state = lax.fori_loop(walk.begin, walk.full_begin, functools.partial(add, masked=True), state)
    state = lax.fori_loop(walk.full_begin, walk.full_end, functools.partial(add, masked=False), state)
    return lax.fori_loop(walk.full_end, walk.end, functools.partial(add, masked=True), state)


def pass_turn(layer: Layer, shared: Shared) -> None:
    """Let the other warp group multiply, and wait until it does the same."""
    give_turn(layer, shared)
    await_turn(layer, shared)


def give_turn(layer: Layer, shared: Shared) -> None:
    if layer.takes_turns:
        plgpu.barrier_arrive(shared.turn)


def await_turn(layer: Layer, shared: Shared) -> None:
    if layer.takes_turns:
        plgpu.barrier_wait(shared.turn)


def add_slots(
    layer: Layer,
    walk: Walk,
    first: jax.Array,
    shared: Shared,
    group: jax.Array,
    iteration: jax.Array,
    state: tuple[jax.Array, ...],
    *,
    masked: bool,
) -> tuple[jax.Array, ...]:
    """The softmax state with the C slots of an iteration."""
    out_XH, top_X, total_X = state
    stage, factor = walk.stage(layer, iteration), kernels.factor(layer)
    plgpu.barrier_wait(shared.k_ready.at[stage])

    def multiply_keys(ref):
        plgpu.wgmma(ref, shared.q.at[group], shared.k.at[stage].T)
        pass_turn(layer, shared)
        return ref[...]

    score_XC = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, layer.slots), jnp.float32))
    plgpu.barrier_arrive(shared.k_free.at[stage])
    if layer.soft_cap is not None:
        score_XC = kernels.soft_cap(score_XC * layer.scale, layer.soft_cap)
    if masked:
        score_XC = jnp.where(visible(layer, first, iteration), score_XC, -jnp.inf)
    highest_X = jnp.maximum(top_X, jnp.max(score_XC, axis=1))
    fade_X = jnp.exp2((top_X - highest_X) * factor)
    weight_XC = jnp.exp2(score_XC * factor - wide(highest_X * factor, score_XC.shape))
    total_X = total_X * fade_X + jnp.sum(weight_XC, axis=1)
    # All of this is done before it is the other group's turn to do the same.
    out_XH, highest_X, total_X, weight_XC = lax.optimization_barrier(
        (out_XH * wide(fade_X, out_XH.shape), highest_X, total_X, weight_XC.astype(shared.v.dtype))
    )
    give_turn(layer, shared)
    plgpu.barrier_wait(shared.v_ready.at[stage])
    if masked:
        clear_values(layer, walk, shared.v, stage, iteration)
    if layer.interpreted:
        shared.weights[group] = weight_XC
        plgpu.commit_smem()
        weight_XC = shared.weights.at[group]
    await_turn(layer, shared)
    out_XH = plus_product(layer, out_XH, weight_XC, shared.v.at[stage])
    plgpu.barrier_arrive(shared.v_free.at[stage])
    return out_XH, highest_X, total_X


def plus_product(layer: Layer, out_XH: jax.Array, weight_XC: Any, values: Any) -> jax.Array:
    """out + weight @ values, in the same registers; the interpreter knows only products by themselves."""
    if not layer.interpreted:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weight_XC, values))(plgpu.ACC.init(out_XH))

    def product(ref):
        plgpu.wgmma(ref, weight_XC, values)
        return ref[...]

    return out_XH + pl.run_scoped(product, plgpu.ACC(out_XH.shape, jnp.float32))


def wide(x_X: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_X, shape, [0])


def visible(layer: Layer, first: jax.Array, iteration: jax.Array) -> jax.Array:
    """Whether each query sees each slot, [X, C]; the first query's position is `first`."""
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, layer.slots), layout=MATRIX)
    query_XC = lax.rem(iota(0), jnp.int32(layer.queries)) + (first - iteration * layer.slots)
    slot_XC = iota(1)
    visible_XC = slot_XC <= query_XC
    return visible_XC if layer.window is None else visible_XC & (slot_XC > query_XC - layer.window)


def clear_values(layer: Layer, walk: Walk, values: Any, stage: jax.Array, iteration: jax.Array) -> None:
    """Have zeros for the values of slots that no query of the row sees: zero times what they hold may be NaN."""
    begin = iteration * layer.slots

    @pl.when((begin < walk.lowest) | (begin + layer.slots > walk.held + 1))
    def _():
        for offset in range(0, layer.slots, CLEARED):
            here = values.at[stage, pl.ds(offset, CLEARED)]
            value_CH = plgpu.load(here, layout=MATRIX)
            position_CH = plgpu.broadcasted_iota(jnp.int32, value_CH.shape, 0, layout=MATRIX) + (begin + offset)
            is_seen_CH = (position_CH >= walk.lowest) & (position_CH <= walk.held)
            here[...] = jnp.where(is_seen_CH, value_CH, jnp.zeros(value_CH.shape, value_CH.dtype))
        plgpu.commit_smem()


# ---- store ---------------------------------------------------------------------------------------


def store_outputs(
    layer: Layer,
    fact: Any,
    arrays: Arrays,
    shared: Shared,
    head: jax.Array,
    group: jax.Array,
    state: tuple[jax.Array, ...],
) -> None:
    """Write weighted values over the sum of weights, to which a sink adds."""
    out_XH, top_X, total_X = state
    if layer.has_sinks:
        top_X = top_X * kernels.factor(layer)
        sink_X = plgpu.load(arrays.sinks.at[head], layout=VECTOR, optimized=False)
        highest_X = jnp.maximum(top_X, sink_X)
        weight_X = jnp.exp2(top_X - highest_X)
        scale_X = weight_X / (total_X * weight_X + jnp.exp2(sink_X - highest_X))
    else:
        scale_X = 1 / total_X
    rows, Q = shared.outputs.at[group], layer.queries
    store(rows, (out_XH * wide(scale_X, out_XH.shape)).astype(shared.outputs.dtype))
    plgpu.commit_smem()
    token, left = fact(at.TOKEN) + group * Q, fact(at.NUM_QUERIES) - group * Q
    column = lambda member: head * layer.group_size + member

    @pl.when(left >= Q)
    def _():
        for member in range(layer.group_size):
            target = arrays.out.at[pl.ds(token, Q), column(member)]
            plgpu.copy_smem_to_gmem(rows.at[pl.ds(member * Q, Q)], target)

    @pl.when(left < Q)
    def _():
        @pl.loop(0, jnp.maximum(left, 0))
        def _(query):
            for member in range(layer.group_size):
                plgpu.copy_smem_to_gmem(rows.at[member * Q + query], arrays.out.at[token + query, column(member)])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_part(
    layer: Layer, fact: Any, arrays: Arrays, head: jax.Array, group: jax.Array, state: tuple[jax.Array, ...]
) -> None:
    """Keep a softmax state as a partial result; what it holds of rows without a query is ignored."""
    out_XH, top_X, total_X = state
    where = fact(at.PART), head, pl.ds(group * ROWS, ROWS)
    store(arrays.part.at[where], out_XH)
    store(arrays.top.at[where], jnp.where(total_X > 0, top_X * kernels.factor(layer), LOWEST))
    store(arrays.total.at[where], total_X)
    plgpu.commit_smem()  # all warps of the group are here before the next queries take the place of these


def store(ref: Any, value: jax.Array) -> None:
    """Store to where rows are not tiled. jax 0.11 has no function for it, and does not look for bank conflicts."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
