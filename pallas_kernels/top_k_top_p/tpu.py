"""The least logit that may be drawn, on a TPU: a tile of rows is read into VMEM once and searched there.

Layout: logits [S, V] as they are; limits as columns [S, 1], so that a row's stay in its sublane.

Grid: tiles of `ROWS` rows.

Skipping: a search that no row of the tile wants.

Requires: `ROWS` rows of logits, twice for double buffering, in VMEM: a vocabulary of up to `MAX_VOCABULARY`.

Padding: rows beyond the last are garbage in and out; columns beyond the vocabulary count as -inf.

Numerics: float32; weights relative to the row's largest. A lane sums its own part of the vocabulary first.

Cost: reads the logits once where XLA's search reads them up to 34 times. Inside, each search passes over the tile 16
times at about one register of 1024 logits a cycle. Not measured.

Knows nothing of temperature or of drawing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import ceil_div
from pallas_kernels.top_k_top_p import search

ROWS = 8  # the sublanes of a register
LANES = 512  # columns at a time: four registers for each of three sums, which is what fits beside the loads
MAX_VOCABULARY = 2**19  # two tiles of 16 MiB each; the smallest VMEM holds 64
HEADROOM_BYTES = 2**20


def cannot_take(logits_SV: Any) -> str | None:
    """A tile of rows must fit into VMEM."""
    vocabulary = logits_SV.shape[1]
    too_long = f"logits_SV has {vocabulary} columns; accepted are up to {MAX_VOCABULARY}"
    return too_long if vocabulary > MAX_VOCABULARY else None


def least_logits(
    logits_SV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array, min_p_S: jax.Array, *, interpret: Any
) -> jax.Array:
    """See `top_k_top_p.least_logits`."""
    (S, V), num_tiles = logits_SV.shape, ceil_div(logits_SV.shape[0], ROWS)
    cuts_k_S = (top_k_S > 0) & (top_k_S < V)
    need_k_S = jnp.where(cuts_k_S, top_k_S, V).astype(jnp.float32)
    wanted_2I = jnp.stack([_any_of_tile(cuts_k_S, num_tiles), _any_of_tile(top_p_S < 1.0, num_tiles)])
    column = pl.BlockSpec((ROWS, 1), lambda tile, _: (tile, 0))
    least_S1 = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((S, 1), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles,),
            in_specs=[pl.BlockSpec((ROWS, V), lambda tile, _: (tile, 0)), column, column, column],
            out_specs=column,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=2 * ROWS * ceil_div(V, 128) * 512 + 4 * HEADROOM_BYTES
        ),
        interpret=interpret,
        name="top_k_top_p",
    )(wanted_2I, logits_SV, need_k_S[:, None], top_p_S[:, None], min_p_S[:, None])
    return least_S1[:, 0]


def _any_of_tile(wanted_S: jax.Array, num_tiles: int) -> jax.Array:
    padded_S = jnp.pad(wanted_S, (0, num_tiles * ROWS - len(wanted_S)))
    return jnp.any(padded_S.reshape(num_tiles, ROWS), axis=1).astype(jnp.int32)


def _kernel(wanted_2I, logits_SV, need_k_S1, top_p_S1, min_p_S1, least_S1):
    tile = pl.program_id(0)
    top_S1 = _fold(logits_SV, -jnp.inf, jnp.maximum, lambda x_SW: [x_SW], jnp.max, 1)[0]

    def weight(x_SW):
        return jnp.exp(x_SW - top_S1)

    def above(thresholds_S1, weigh):
        return lambda x_SW: [jnp.where(x_SW >= t_S1, weigh(x_SW), 0.0) for t_S1 in thresholds_S1]

    def total(thresholds_S1: Sequence[jax.Array], weigh=weight) -> Sequence[jax.Array]:
        return _fold(logits_SV, 0.0, jnp.add, above(thresholds_S1, weigh), jnp.sum, len(thresholds_S1))

    def count(thresholds_S1: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return total(thresholds_S1, jnp.ones_like)

    kth_S1 = search.largest_threshold(count, need_k_S1[...], wanted_2I[0, tile] != 0)
    kth_S1 = jnp.where(need_k_S1[...] < logits_SV.shape[1], kth_S1, -jnp.inf)
    floor_S1 = jnp.maximum(kth_S1, top_S1 + jnp.log(min_p_S1[...]))
    need_S1 = top_p_S1[...] * total([floor_S1])[0]
    nucleus_S1 = search.largest_threshold(total, need_S1, wanted_2I[1, tile] != 0)
    nucleus_S1 = jnp.where(top_p_S1[...] < 1.0, nucleus_S1, -jnp.inf)
    least_S1[...] = jnp.maximum(floor_S1, nucleus_S1)


def _fold(logits_SV, start: float, combine, parts_of, reduce, num_parts: int) -> list[jax.Array]:
    """Combine `parts_of` the row's pieces lane by lane, then across lanes: `num_parts` columns [ROWS, 1]."""
    V = logits_SV.shape[1]
    width = min(LANES, V)

    def piece(x_SW, sums_SW):
        return tuple(combine(sum_SW, part_SW) for sum_SW, part_SW in zip(sums_SW, parts_of(x_SW)))

    def step(i, sums_SW):
        return piece(logits_SV[:, pl.ds(pl.multiple_of(i * width, width), width)], sums_SW)

    sums_SW = lax.fori_loop(0, V // width, step, (jnp.full((ROWS, width), start, jnp.float32),) * num_parts)
    columns_S1 = [reduce(sum_SW, axis=1, keepdims=True) for sum_SW in sums_SW]
    if V % width:
        rest_S1 = [reduce(part_SW, axis=1, keepdims=True) for part_SW in parts_of(logits_SV[:, V // width * width :])]
        columns_S1 = [combine(column_S1, rest) for column_S1, rest in zip(columns_S1, rest_S1)]
    return columns_S1
