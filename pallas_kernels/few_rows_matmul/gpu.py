"""Products of few rows on an NVIDIA GPU (Pallas, Triton lowering): weights stream past rows that stay.

It is there where it was timed and found faster than cuBLAS: `tuned.json`, which scripts/tune_products.py writes, has
tiles for devices, numbers of rows and shapes. All else is XLA's.

Grid: (tiles of rows, tiles of outputs); a program walks over all inputs, a piece at a time.

Folding: few rows fill no matrix instruction, whose wide side takes 64 outputs, with which programs are too few. With
x as [T * folds, D / folds], and weights likewise, both in place, an instruction takes several parts of the inputs of
fewer outputs. It multiplies each part of weights with each part of rows. At the end what belongs together is added.

Skipping: none.

Requires: bfloat16 operands, and an entry of `tuned.json`.

Padding: rows, outputs and inputs beyond the last are not read; what stands for them is zero, or is not written.

Numerics: products are exact in float32, and summed there, part by part.

Letters: X numbers of an output's weights, D of them, or twice as many where it has a gate too; U rows of x that is
folded, and W of weights.

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

from pallas_kernels.ragged_paged_attention.gpu.tiles import device_kind, read_tuned
from pallas_kernels.shapes import ceil_div

TUNED = Path(__file__).with_name("tuned.json")
TUNED_ROWS = (8, 16, 32, 64)
FEWEST_ROWS = 16  # what a matrix instruction takes
MOST_ROWS = 64  # of a tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Outputs of a program, parts of the inputs that are multiplied side by side, inputs of a piece of each; warps and
    stages are Triton's.

    weight_first: rows are the narrow side of the matrix instructions, not the tall one.
    """

    outputs: int
    inputs: int
    folds: int = 1
    warps: int = 4
    stages: int = 4
    weight_first: bool = False


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes what it is known to be faster with."""
    return _refusal(x_TD, weight_FD, weight_FD.shape)


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`."""
    return product(x_TD, weight_FD, dtype, tiles_for(len(x_TD), *weight_FD.shape))


def cannot_gate(x_TD: Any, weight_F2D: Any) -> str | None:
    """Why `gated_matmul` does not take such operands, or None."""
    F, _, D = weight_F2D.shape
    return _refusal(x_TD, weight_F2D, (2 * F, D), is_gated=True)


def _refusal(x_TD: Any, weight: Any, shape: tuple[int, int], is_gated: bool = False) -> str | None:
    """Why a product with a weight of so many outputs and inputs is left to XLA, or None."""
    if not str(x_TD.dtype) == str(weight.dtype) == "bfloat16":
        return f"x_TD is {x_TD.dtype} and the weight {weight.dtype}; accepted is bfloat16"
    if tiles_for(len(x_TD), *shape, is_gated) is None:
        return f"no tiles are known with which {describe(len(x_TD), *shape, is_gated)} is faster than by XLA"
    return None


def added_matmul(x_TD: jax.Array, weight_FD: jax.Array, added_TF: jax.Array) -> jax.Array:
    """See `few_rows_matmul.added_matmul`."""
    return added_product(x_TD, weight_FD, added_TF, tiles_for(len(x_TD), *weight_FD.shape))


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
    return read_tuned(TUNED, Tiles)


def product(x_TD: jax.Array, weight_FD: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """x times the transposed weight, in `dtype`."""
    return call(x_TD, weight_FD, None, dtype, tiles, interpret)


def added_product(
    x_TD: jax.Array, weight_FD: jax.Array, added_TF: jax.Array, tiles: Tiles, interpret: Any = False
) -> jax.Array:
    """added + x times the transposed weight, in added's type, rounded once."""
    return call(x_TD, weight_FD, added_TF, added_TF.dtype, tiles, interpret)


def gated_product(
    x_TD: jax.Array, weight_F2D: jax.Array, dtype: Any, tiles: Tiles, interpret: Any = False
) -> jax.Array:
    """silu(gate) * up of products with a weight that has both of each output."""
    return call(x_TD, weight_F2D.reshape(len(weight_F2D), -1), None, dtype, tiles, interpret)


def call(
    x_TD: jax.Array, weight_FX: jax.Array, added_TF: jax.Array | None, dtype: Any, tiles: Tiles, interpret: Any
) -> jax.Array:
    (T, D), F, folds = x_TD.shape, len(weight_FX), tiles.folds if x_TD.shape[1] % tiles.folds == 0 else 1
    rows = min(MOST_ROWS, max(FEWEST_ROWS // folds, pl.next_power_of_2(T)))
    views = x_TD.reshape(T * folds, -1), weight_FX.reshape(-1, D // folds)
    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, rows=rows, folds=folds),
        out_shape=jax.ShapeDtypeStruct((T, F), dtype),
        grid=(ceil_div(T, rows), ceil_div(F, tiles.outputs)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="few_rows_matmul",
    )(*views, *([] if added_TF is None else [added_TF]))


def _kernel(x_UD, weight_WD, *refs, tiles: Tiles, rows: int, folds: int):
    *added_TF, out_TF = refs
    (T, F), D = out_TF.shape, x_UD.shape[1]
    of_output = weight_WD.shape[0] // F  # rows of the view
    first_t, first_f = pl.program_id(0) * rows, pl.program_id(1) * tiles.outputs
    tile_u = pl.ds(first_t * folds, rows * folds)
    tile_w = pl.ds(first_f * of_output, tiles.outputs * of_output)
    in_u = None if T % rows == 0 else first_t * folds + jnp.arange(rows * folds) < T * folds
    in_w = None
    if F % tiles.outputs:
        in_w = first_f * of_output + jnp.arange(tiles.outputs * of_output) < F * of_output

    def add_piece(i, sum):
        start = i * tiles.inputs
        tile_d = pl.ds(start, tiles.inputs)
        in_d = None if D % tiles.inputs == 0 else start + jnp.arange(tiles.inputs) < D
        x_ud = load(x_UD.at[tile_u, tile_d], both(in_u, in_d))
        w_wd = load(weight_WD.at[tile_w, tile_d], both(in_w, in_d), eviction_policy="evict_first")
        return sum + (
            plgpu.dot(w_wd, x_ud, trans_b=True) if tiles.weight_first else plgpu.dot(x_ud, w_wd, trans_b=True)
        )

    shape = (tiles.outputs * of_output, rows * folds)
    zeros = jnp.zeros(shape if tiles.weight_first else shape[::-1], jnp.float32)
    sum_wu = lax.fori_loop(0, ceil_div(D, tiles.inputs), add_piece, zeros)
    sum_wt = unfolded(sum_wu if tiles.weight_first else sum_wu.T, folds)
    result_tf = (silu_of_pairs(sum_wt) if of_output > folds else sum_wt).T
    out = (pl.ds(first_t, rows), pl.ds(first_f, tiles.outputs))
    in_t = None if T % rows == 0 else first_t + jnp.arange(rows) < T
    in_f = None if F % tiles.outputs == 0 else first_f + jnp.arange(tiles.outputs) < F
    for ref in added_TF:
        result_tf += load(ref.at[out], both(in_t, in_f)).astype(jnp.float32)
    plgpu.store(out_TF.at[out], result_tf.astype(out_TF.dtype), mask=both(in_t, in_f))


def load(ref: Any, mask: jax.Array | None, **settings: Any) -> jax.Array:
    """What is there, and zeros elsewhere."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0, **settings)


def unfolded(sum_wu: jax.Array, folds: int) -> jax.Array:
    """Sums over all inputs, of sums of each part of weights with each part of rows: what belongs together is added."""
    if folds == 1:
        return sum_wu
    (w, u), part_wu = sum_wu.shape, lambda axis: lax.broadcasted_iota(jnp.int32, sum_wu.shape, axis) % folds
    sum_wu = jnp.where(part_wu(0) == part_wu(1), sum_wu, jnp.float32(0))
    sum_wu = jnp.sum(sum_wu.reshape(w // folds, folds, u), axis=1)
    return jnp.sum(sum_wu.reshape(w // folds, u // folds, folds), axis=2)


def silu_of_pairs(sum_wt: jax.Array) -> jax.Array:
    """silu(gate) * up of neighbours."""
    w, t = sum_wt.shape
    sum_f2t = sum_wt.reshape(w // 2, 2, t)
    is_up = lax.broadcasted_iota(jnp.int32, sum_f2t.shape, 1) > 0
    gate_ft = jnp.sum(jnp.where(is_up, jnp.float32(0), sum_f2t), axis=1)
    up_ft = jnp.sum(jnp.where(is_up, sum_f2t, jnp.float32(0)), axis=1)
    return gate_ft * jax.nn.sigmoid(gate_ft) * up_ft


def both(in_rows: jax.Array | None, in_columns: jax.Array | None) -> jax.Array | None:
    """Where rows and columns of a tile are inside, None for everywhere."""
    if in_rows is None:
        return None if in_columns is None else in_columns[None, :]
    return in_rows[:, None] if in_columns is None else in_rows[:, None] & in_columns[None, :]
