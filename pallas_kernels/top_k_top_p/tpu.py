"""The least logit that may be drawn, on a TPU: a tile of rows is read into VMEM once and searched there.

Layout: logits [S, V] as they are; limits as columns [S, 1], so that a row's stay in its sublane.

Grid: tiles of `ROWS` rows.

Skipping: a search that no row of the tile wants.

Requires: `ROWS` rows of logits, twice for double buffering, and their weights in VMEM: a vocabulary of up to
`MAX_VOCABULARY`.

Padding: rows beyond the last are garbage in and out; columns beyond the vocabulary count as -inf.

Numerics: float32; weights relative to the row's largest. A lane sums its own part of the vocabulary first, in an order
that follows from the vocabulary's size alone: a row's limit is the same bits in every tile and beside every other row.

Cost: reads the logits once where XLA's search reads them up to 34 times. Inside, each search passes over the tile 16
times, for top_p over its weights too, which are computed once. Compiled for a v6e: 26 bundles for 8 registers of logits
for top_k, 28 for top_p; 256 rows of 128,256 in 1.8 million bundles for top_k, 2.1 for top_p, 3.8 for both. Not timed.

Knows nothing of drawing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import ceil_div
from pallas_kernels.top_k_top_p import search

ROWS = 8  # the sublanes of a register
LANES = 128
UNROLL = 8  # registers at a time, so that what a loop costs is shared by many
MAX_VOCABULARY = 2**19  # three tiles of 16 MiB; the smallest VMEM holds 64
HEADROOM_BYTES = 2**20


def cannot_take(logits_SV: Any) -> str | None:
    """A tile of rows must fit into VMEM."""
    vocabulary = logits_SV.shape[1]
    too_long = f"logits_SV has {vocabulary} columns; accepted are up to {MAX_VOCABULARY}"
    return too_long if vocabulary > MAX_VOCABULARY else None


def least_logits(
    logits_SV: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    temperature_S: jax.Array,
    *,
    interpret: Any,
) -> jax.Array:
    """See `top_k_top_p.least_logits`."""
    (S, V), num_tiles = logits_SV.shape, ceil_div(logits_SV.shape[0], ROWS)
    cuts_k_S = (top_k_S > 0) & (top_k_S < V)
    need_k_S = jnp.where(cuts_k_S, top_k_S, V).astype(jnp.float32)
    wanted_2I = jnp.stack([_any_of_tile(cuts_k_S, num_tiles), _any_of_tile(top_p_S < 1.0, num_tiles)])
    column = pl.BlockSpec((ROWS, 1), lambda tile, _: (tile, 0))
    tile_bytes = ROWS * ceil_div(V, LANES) * LANES * 4
    least_S1 = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((S, 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles,),
            in_specs=[pl.BlockSpec((ROWS, V), lambda tile, _: (tile, 0)), column, column, column, column],
            out_specs=column,
            scratch_shapes=[pltpu.VMEM((ROWS, V), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=3 * tile_bytes + 4 * HEADROOM_BYTES
        ),
        interpret=interpret,
        name="top_k_top_p",
    )(wanted_2I, logits_SV, need_k_S[:, None], top_p_S[:, None], min_p_S[:, None], temperature_S[:, None])
    return least_S1[:, 0]


def _any_of_tile(wanted_S: jax.Array, num_tiles: int) -> jax.Array:
    padded_S = jnp.pad(wanted_S, (0, num_tiles * ROWS - len(wanted_S)))
    return jnp.any(padded_S.reshape(num_tiles, ROWS), axis=1).astype(jnp.int32)


def _kernel(wanted_2I, logits_SV, need_k_S1, top_p_S1, min_p_S1, temperature_S1, least_S1, weights_SV):
    tile, V = pl.program_id(0), logits_SV.shape[1]
    top_S1 = _fold(V, -jnp.inf, jnp.maximum, lambda at: [logits_SV[at]], jnp.max, 1)[0]
    top_SL, share_SL = _broadcast(top_S1), _broadcast(1.0 / temperature_S1[...])

    def weigh(at) -> None:
        x_SW = logits_SV[at]
        weights_SV[at] = jnp.exp((x_SW - top_SL[:, : x_SW.shape[1]]) * share_SL[:, : x_SW.shape[1]])

    def above(thresholds_S1: Sequence[jax.Array], weight_at: Callable[[Any], Any]) -> Sequence[jax.Array]:
        thresholds_SL = [_broadcast(t_S1) for t_S1 in thresholds_S1]

        def parts(at):
            x_SW, weight_SW = logits_SV[at], weight_at(at)
            return [jnp.where(x_SW >= t_SL[:, : x_SW.shape[1]], weight_SW, 0.0) for t_SL in thresholds_SL]

        return _fold(V, 0.0, jnp.add, parts, jnp.sum, len(thresholds_S1))

    def count(thresholds_S1: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return above(thresholds_S1, lambda at: 1.0)

    def total(thresholds_S1: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return above(thresholds_S1, lambda at: weights_SV[at])

    kth_S1 = search.largest_threshold(count, need_k_S1[...], wanted_2I[0, tile] != 0)
    kth_S1 = jnp.where(need_k_S1[...] < V, kth_S1, -jnp.inf)
    floor_S1 = jnp.maximum(kth_S1, top_S1 + jnp.log(min_p_S1[...]) * temperature_S1[...])
    least_S1[...] = floor_S1

    @pl.when(wanted_2I[1, tile] != 0)
    def _nucleus():
        _for_pieces(V, weigh)
        nucleus_S1 = search.largest_threshold(total, top_p_S1[...] * total([floor_S1])[0])
        nucleus_S1 = jnp.where(top_p_S1[...] < 1.0, nucleus_S1, -jnp.inf)
        least_S1[...] = jnp.maximum(floor_S1, nucleus_S1)


def _broadcast(x_S1: jax.Array) -> jax.Array:
    """To all lanes of a register, which a loop would do for each of its trips."""
    return jnp.broadcast_to(x_S1, (ROWS, LANES))


def _for_pieces(V: int, visit: Callable[[Any], None]) -> None:
    """`visit` every piece of the columns: where it lies, a register wide but for the last."""

    def step(i, _):
        for j in range(UNROLL):
            visit((slice(None), pl.ds(pl.multiple_of(i * UNROLL * LANES, LANES) + j * LANES, LANES)))
        return _

    num_whole = V // LANES
    lax.fori_loop(0, num_whole // UNROLL, step, None)
    for start in range(num_whole // UNROLL * UNROLL * LANES, V, LANES):
        visit((slice(None), slice(start, min(start + LANES, V))))


def _fold(V: int, start: float, combine, parts_at, reduce, num_parts: int) -> list[jax.Array]:
    """Combine `parts_at` all pieces of the columns lane by lane, then across lanes: `num_parts` columns [ROWS, 1].

    Two sums take turns, since an addition waits for the one before.
    """

    def add(sums_2W, turn, at):
        new_W = [combine(sum_SL, part_SL) for sum_SL, part_SL in zip(sums_2W[turn % 2], parts_at(at))]
        return (new_W, sums_2W[1]) if turn % 2 == 0 else (sums_2W[0], new_W)

    def step(i, sums_2W):
        first = pl.multiple_of(i * UNROLL * LANES, LANES)
        for j in range(UNROLL):
            sums_2W = add(sums_2W, j, (slice(None), pl.ds(first + j * LANES, LANES)))
        return sums_2W

    num_whole = V // LANES
    zeros_W = [jnp.full((ROWS, LANES), start, jnp.float32)] * num_parts
    sums_2W = lax.fori_loop(0, num_whole // UNROLL, step, (zeros_W, zeros_W))
    for register in range(num_whole // UNROLL * UNROLL, num_whole):
        sums_2W = add(sums_2W, register, (slice(None), slice(register * LANES, (register + 1) * LANES)))
    columns_S1 = [reduce(combine(*pair), axis=1, keepdims=True) for pair in zip(*sums_2W)]
    if V % LANES:
        rest_S1 = [reduce(part, axis=1, keepdims=True) for part in parts_at((slice(None), slice(num_whole * LANES, V)))]
        columns_S1 = [combine(column_S1, rest) for column_S1, rest in zip(columns_S1, rest_S1)]
    return columns_S1
