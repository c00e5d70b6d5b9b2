"""Products of few rows on an NVIDIA GPU (Pallas, Triton lowering): weights stream past rows that stay.

It is there where it was timed and found faster than cuBLAS: `tuned.json`, which scripts/tune_products.py writes, has
tiles for devices, numbers of rows and shapes. All else is XLA's.

Grid: (tiles of rows, tiles of outputs, parts of the inputs); a program walks over its part of the inputs, a piece at a
time. Where there are several parts, their sums are added by XLA.

Skipping: none.

Requires: bfloat16 operands, and an entry of `tuned.json`.

Padding: rows, outputs and inputs beyond the last are not read; what stands for them is zero, or is not written.

Numerics: products are exact in float32, and summed there, part by part.

Letters: X numbers of an output's weights, D of them, or twice as many where it has a gate too; C parts.

Knows nothing of models.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu.tiles import device_kind
from pallas_kernels.shapes import ceil_div

TUNED = Path(__file__).with_name("tuned.json")
TUNED_ROWS = (8, 16, 32, 64, 128, 256)
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


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes what it is known to be faster with."""
    if not str(x_TD.dtype) == str(weight_FD.dtype) == "bfloat16":
        return f"x_TD is {x_TD.dtype} and the weight {weight_FD.dtype}; accepted is bfloat16"
    if tiles_for(len(x_TD), *weight_FD.shape) is None:
        return f"no tiles are known with which {describe(len(x_TD), *weight_FD.shape)} is faster than by XLA"
    return None


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`."""
    return product(x_TD, weight_FD, dtype, tiles_for(len(x_TD), *weight_FD.shape))


def cannot_gate(x_TD: Any, weight_F2D: Any) -> str | None:
    """Why `gated_matmul` does not take such operands, or None."""
    if not str(x_TD.dtype) == str(weight_F2D.dtype) == "bfloat16":
        return f"x_TD is {x_TD.dtype} and the weight {weight_F2D.dtype}; accepted is bfloat16"
    F, _, D = weight_F2D.shape
    if tiles_for(len(x_TD), 2 * F, D, is_gated=True) is None:
        return f"no tiles are known with which {describe(len(x_TD), 2 * F, D, True)} is faster than by XLA"
    return None


def gated_matmul(x_TD: jax.Array, weight_F2D: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.gated_matmul`."""
    F, _, D = weight_F2D.shape
    return gated_product(x_TD, weight_F2D, dtype, tiles_for(len(x_TD), 2 * F, D, is_gated=True))


def tiles_for(num_rows: int, num_outputs: int, num_inputs: int, is_gated: bool = False) -> Tiles | None:
    """Tiles that are faster than cuBLAS on the device that the program being traced is for, or None."""
    rows = next((rows for rows in TUNED_ROWS if num_rows <= rows), None)
    if rows is None or not tuned():
        return None
    return tuned().get(f"{device_kind(interpret=False)}, {describe(rows, num_outputs, num_inputs, is_gated)}")


def describe(num_rows: int, num_outputs: int, num_inputs: int, is_gated: bool = False) -> str:
    """What a product is called in `tuned.json`, behind the kind of device."""
    return f"{num_rows} rows, {num_outputs} x {num_inputs}{', gated' if is_gated else ''}"


@functools.cache
def tuned() -> dict[str, Tiles]:
    """Every entry of `tuned.json`."""
    if not TUNED.exists():
        return {}
    entries = json.loads(TUNED.read_text(encoding="utf-8"))
    return {key: Tiles(**entry["tiles"]) for key, entry in entries.items()}


def product(x_TD: jax.Array, weight_FD: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """x times the transposed weight, in `dtype`."""
    sums_CTF = call(x_TD, weight_FD, jnp.float32 if tiles.parts > 1 else dtype, tiles, interpret)
    return functools.reduce(jnp.add, sums_CTF).astype(dtype)  # which XLA fuses with what reads it


def gated_product(
    x_TD: jax.Array, weight_F2D: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False
) -> jax.Array:
    """silu(gate) * up of products with a weight that has both of each output; of a single part."""
    F, _, D = weight_F2D.shape
    return call(x_TD, weight_F2D.reshape(F, 2 * D), dtype, tiles, interpret)[0]


def call(x_TD: jax.Array, weight_FX: jax.Array, dtype: Any, tiles: Tiles, interpret: Any) -> jax.Array:
    """[C, T, F]: sums of C parts of the inputs."""
    T, F = len(x_TD), len(weight_FX)
    rows = min(MOST_ROWS, max(FEWEST_ROWS, pl.next_power_of_2(T)))
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, rows=rows),
        out_shape=jax.ShapeDtypeStruct((tiles.parts, T, F), dtype),
        grid=(ceil_div(T, rows), ceil_div(F, tiles.outputs), tiles.parts),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="few_rows_matmul",
    )(x_TD, weight_FX)


def _kernel(x_TD, weight_FX, out_CTF, *, tiles: Tiles, rows: int):
    (T, D), (F, num_weights) = x_TD.shape, weight_FX.shape
    pieces = ceil_div(D, tiles.inputs)
    of_part = ceil_div(pieces, tiles.parts)
    first_row, first, part = pl.program_id(0) * rows, pl.program_id(1) * tiles.outputs, pl.program_id(2)
    tile_t, tile_f = pl.ds(first_row, rows), pl.ds(first, tiles.outputs)
    in_t = None if T % rows == 0 else first_row + jnp.arange(rows) < T
    in_f = None if F % tiles.outputs == 0 else first + jnp.arange(tiles.outputs) < F
    is_whole = D % tiles.inputs == 0

    def weights(first_column, in_d):
        mask, ref = both(in_f, in_d), weight_FX.at[tile_f, pl.ds(first_column, tiles.inputs)]
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0, eviction_policy="evict_first")

    def add_piece(i, sums):
        start = i * tiles.inputs
        tile_d, in_d = pl.ds(start, tiles.inputs), None if is_whole else start + jnp.arange(tiles.inputs) < D
        mask = both(in_t, in_d)
        x_td = plgpu.load(x_TD.at[tile_t, tile_d], mask=mask, other=None if mask is None else 0)
        both_fd = [weights(which * D + start, in_d) for which in range(len(sums))]
        if tiles.weight_first:
            return tuple(sum + plgpu.dot(w_fd, x_td, trans_b=True) for sum, w_fd in zip(sums, both_fd))
        return tuple(sum + plgpu.dot(x_td, w_fd, trans_b=True) for sum, w_fd in zip(sums, both_fd))

    shape = (tiles.outputs, rows) if tiles.weight_first else (rows, tiles.outputs)
    zeros = tuple(jnp.zeros(shape, jnp.float32) for _ in range(num_weights // D))
    end = jnp.minimum((part + 1) * of_part, pieces) if pieces % tiles.parts else (part + 1) * of_part
    sums = lax.fori_loop(part * of_part, end, add_piece, zeros)
    result = sums[0] * jax.nn.sigmoid(sums[0]) * sums[1] if len(sums) > 1 else sums[0]
    result_tf = result.T if tiles.weight_first else result
    plgpu.store(out_CTF.at[part, tile_t, tile_f], result_tf.astype(out_CTF.dtype), mask=both(in_t, in_f))


def both(in_rows: jax.Array | None, in_columns: jax.Array | None) -> jax.Array | None:
    """Where rows and columns of a tile are inside, None for everywhere."""
    if in_rows is None:
        return None if in_columns is None else in_columns[None, :]
    return in_rows[:, None] if in_columns is None else in_rows[:, None] & in_columns[None, :]
