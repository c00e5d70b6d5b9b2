"""Products of few rows on an NVIDIA GPU (Pallas, Triton lowering): weights stream past rows that stay.

Grid: (tiles of rows, tiles of outputs, parts of the inputs); a program walks over its part of the inputs, a piece at a
time. Where there are several parts, their sums are added by XLA.

Skipping: none.

Requires: bfloat16 operands.

Padding: rows, outputs and inputs beyond the last are not read; what stands for them is zero, or is not written.

Numerics: products are exact in float32, and summed there, part by part.

Knows nothing of models.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.shapes import ceil_div

TUNED = Path(__file__).with_name("tuned.json")
FEWEST_ROWS = 16  # what a matrix instruction takes
MOST_ROWS = 64  # of a tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Outputs of a program, inputs of a piece, parts of the inputs; warps and stages are Triton's.

    weight_first: rows are the narrow side of the matrix instructions, not the tall one.
    """

    outputs: int
    inputs: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    weight_first: bool = False


def product(x_TD: jax.Array, weight_FD: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """x times the transposed weight, in `dtype`."""
    T, F = len(x_TD), len(weight_FD)
    sums_CTF = call(x_TD, weight_FD, jnp.float32 if tiles.parts > 1 else dtype, tiles, (T, F), False, interpret)
    return jnp.sum(sums_CTF, axis=0).astype(dtype) if tiles.parts > 1 else sums_CTF[0]


def gated_product(x_TD: jax.Array, weight_FD: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """silu(gate) * up, where gate and up are the first and the second half of x times the transposed weight."""
    return call(x_TD, weight_FD, dtype, tiles, (len(x_TD), len(weight_FD) // 2), True, interpret)[0]


def call(
    x_TD: jax.Array,
    weight_FD: jax.Array,
    dtype: Any,
    tiles: Tiles,
    shape: tuple[int, int],
    is_gated: bool,
    interpret: Any,
) -> jax.Array:
    rows = min(MOST_ROWS, max(FEWEST_ROWS, pl.next_power_of_2(len(x_TD))))
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, rows=rows, is_gated=is_gated),
        out_shape=jax.ShapeDtypeStruct((tiles.parts, *shape), dtype),
        grid=(ceil_div(len(x_TD), rows), ceil_div(shape[1], tiles.outputs), tiles.parts),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="few_rows_matmul",
    )(x_TD, weight_FD)


def _kernel(x_TD, weight_FD, out_CTF, *, tiles: Tiles, rows: int, is_gated: bool):
    (T, D), F = x_TD.shape, out_CTF.shape[2]
    pieces = ceil_div(D, tiles.inputs)
    of_part = ceil_div(pieces, tiles.parts)
    first_row, first, part = pl.program_id(0) * rows, pl.program_id(1) * tiles.outputs, pl.program_id(2)
    tile_t, tile_f = pl.ds(first_row, rows), pl.ds(first, tiles.outputs)
    in_t = None if T % rows == 0 else first_row + jnp.arange(rows) < T
    in_f = None if F % tiles.outputs == 0 else first + jnp.arange(tiles.outputs) < F
    is_whole = D % tiles.inputs == 0

    def weights(shift, tile_d, in_d):
        mask = both(in_f, in_d)
        ref = weight_FD.at[pl.ds(first + shift, tiles.outputs), tile_d]
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0, eviction_policy="evict_first")

    def add_piece(i, sums):
        start = i * tiles.inputs
        tile_d, in_d = pl.ds(start, tiles.inputs), None if is_whole else start + jnp.arange(tiles.inputs) < D
        mask = both(in_t, in_d)
        x_td = plgpu.load(x_TD.at[tile_t, tile_d], mask=mask, other=None if mask is None else 0)
        halves = [weights(shift, tile_d, in_d) for shift in ((0, F) if is_gated else (0,))]
        if tiles.weight_first:
            return tuple(sum + plgpu.dot(w_fd, x_td, trans_b=True) for sum, w_fd in zip(sums, halves))
        return tuple(sum + plgpu.dot(x_td, w_fd, trans_b=True) for sum, w_fd in zip(sums, halves))

    shape = (tiles.outputs, rows) if tiles.weight_first else (rows, tiles.outputs)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(2 if is_gated else 1))
    end = jnp.minimum((part + 1) * of_part, pieces) if pieces % tiles.parts else (part + 1) * of_part
    sums = lax.fori_loop(part * of_part, end, add_piece, zeros)
    result = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if is_gated else sums[0]
    result_tf = result.T if tiles.weight_first else result
    plgpu.store(out_CTF.at[part, tile_t, tile_f], result_tf.astype(out_CTF.dtype), mask=both(in_t, in_f))


def both(in_rows: jax.Array | None, in_columns: jax.Array | None) -> jax.Array | None:
    """Where rows and columns of a tile are inside, None for everywhere."""
    if in_rows is None or in_columns is None:
        return (
            in_columns[None, :]
            if in_rows is None and in_columns is not None
            else (None if in_rows is None else in_rows[:, None])
        )
    return in_rows[:, None] & in_columns[None, :]
