"""Products of few rows on an NVIDIA GPU (Pallas, Triton lowering): weights stream past rows that stay.

It is there where it was timed and found faster than XLA's way, which is cuBLAS for weights of bfloat16: `tuned.json`,
which scripts/tune_products.py writes, has tiles for devices, numbers of rows, shapes, and kinds of weights. All else is
XLA's, but for weights of checkpoints in groups (`ScaledWeight.groups_first`): XLA would write them to memory in 16
bits, so there are `default_tiles` for them.

Grid: (tiles of rows, tiles of outputs, parts of inputs); a program walks over all its inputs, a piece at a time.

Folding: few rows fill no matrix instruction, whose wide side takes 64 outputs, with which programs are too few. With
x as [T * folds, D / folds], and weights likewise, both in place, an instruction takes several parts of the inputs of
fewer outputs. It multiplies each part of weights with each part of rows. At the end what belongs together is added.

Skipping: none.

Requires: bfloat16 rows, weights in bfloat16 or a `ScaledWeight` whose groups are of 32, 64, 128, ... inputs; up to 64
rows, and an entry of `tuned.json` or default tiles.

Padding: rows, outputs and inputs beyond the last are not read; what stands for them is zero, or is not written.

Numerics: products are exact in float32, and summed there, part by part. Values of 8 and 4 bits less their zeros are
exact in bfloat16, to which zeros are rounded that are not whole. A scale of each output multiplies sums. One of a group
multiplies the sum of a piece where pieces lie within groups; otherwise it multiplies values, both in bfloat16, as XLA's
way rounds them.

Knows nothing of models.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.few_rows_matmul.gpu_kernel import Form, Tiles, kernel
from pallas_kernels.few_rows_matmul.scaled import BITS, PACKED_GROUP, ScaledWeight
from pallas_kernels.ragged_paged_attention.gpu.tiles import device_kind, read_tuned, reads_float8
from pallas_kernels.shapes import ceil_div

TUNED = Path(__file__).with_name("tuned.json")
TUNED_ROWS = (8, 16, 32, 64)
FEWEST_ROWS = 16  # what a matrix instruction takes
MOST_ROWS = 64  # of a tile
MOST_INPUTS_WITH_ZEROS = 256  # of a piece: of more, zeros and scales spill
MANY_PROGRAMS = 264  # several for each core of a GPU
DEFAULT = {
    True: (
        (16, Tiles(64, 256, stages=4, weight_first=True)),
        (32, Tiles(128, 256, stages=3)),
        (64, Tiles(128, 128, stages=3)),
    ),
    False: ((32, Tiles(64, 128, warps=2, weight_first=True)), (64, Tiles(128, 128, stages=3))),
}
"""Whether two values share a byte -> (most rows, tiles)."""


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """It takes what it is known to be faster with: a weight [F, D], or a `ScaledWeight`."""
    return _refusal(x_TD, weight, is_gated=False)


def few_rows_matmul(x_TD: jax.Array, weight: Any, dtype: str) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`."""
    return product(x_TD, weight, dtype, tiles_of(x_TD, weight))


def cannot_gate(x_TD: Any, weight: Any) -> str | None:
    """Why `gated_matmul` does not take such operands, or None."""
    return _refusal(x_TD, weight, is_gated=True)


def _refusal(x_TD: Any, weight: Any, is_gated: bool) -> str | None:
    """Why a product is left to XLA, or None."""
    if x_TD.dtype != jnp.bfloat16 or kind_of(weight) is None:
        return f"x_TD is {x_TD.dtype} and the weight {weight.dtype}; accepted is bfloat16"
    if isinstance(weight, ScaledWeight) and (reason := odd_groups(weight) or lacks_type(weight)):
        return reason
    if tiles_of(x_TD, weight, is_gated) is None:
        what = describe(len(x_TD), *sizes_of(weight), is_gated, kind_of(weight) or "")
        return f"no tiles are known with which {what} is faster than by XLA"
    return None


def added_matmul(x_TD: jax.Array, weight: Any, added_TF: jax.Array) -> jax.Array:
    """See `few_rows_matmul.added_matmul`."""
    return added_product(x_TD, weight, added_TF, tiles_of(x_TD, weight))


def gated_matmul(x_TD: jax.Array, weight: Any, dtype: str) -> jax.Array:
    """See `few_rows_matmul.gated_matmul`."""
    return product(x_TD, weight, dtype, tiles_of(x_TD, weight, is_gated=True))


def kind_of(weight: Any) -> str | None:
    """What a weight is called in `tuned.json`: nothing where it is bfloat16. None for what there is no kernel for."""
    if isinstance(weight, ScaledWeight):
        return f"{weight.bits} bits" if str(weight.dtype) in BITS else None
    return "" if weight.dtype == jnp.bfloat16 else None


def sizes_of(weight: Any) -> tuple[int, int]:
    """(outputs, gates being such too; inputs)."""
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def tiles_of(x_TD: Any, weight: Any, is_gated: bool = False) -> Tiles | None:
    """Tiles that are faster than XLA's way on the device that the program being traced is for, or None."""
    num_rows, (num_outputs, num_inputs), kind = len(x_TD), sizes_of(weight), kind_of(weight) or ""
    tiles = tiles_for(num_rows, num_outputs, num_inputs, is_gated, kind)
    if not isinstance(weight, ScaledWeight):
        return tiles
    if tiles is None and weight.groups_first:
        tiles = default_tiles(num_rows, num_outputs, num_inputs, weight.is_packed, is_gated)
    if tiles is None or weight.zeros is None:
        return tiles
    return dataclasses.replace(tiles, inputs=min(tiles.inputs, MOST_INPUTS_WITH_ZEROS))


def default_tiles(
    num_rows: int, num_outputs: int, num_inputs: int, is_packed: bool, is_gated: bool = False
) -> Tiles | None:
    """Tiles for weights of 8 or 4 bits of any size: those of `tuned.json` for sizes like theirs. None for more rows."""
    tiles = next((tiles for rows, tiles in DEFAULT[is_packed] if num_rows <= rows), None)
    if tiles is None:
        return None
    if is_gated:
        return dataclasses.replace(tiles, outputs=tiles.outputs // 2)
    is_filled = ceil_div(num_outputs, tiles.outputs) >= MANY_PROGRAMS
    wholes = [] if is_filled else [parts for parts in (4, 2) if num_inputs % (parts * tiles.inputs) == 0]
    return dataclasses.replace(tiles, parts=max(wholes, default=1))


def tiles_for(num_rows: int, num_outputs: int, num_inputs: int, is_gated: bool = False, kind: str = "") -> Tiles | None:
    """Those that `tuned.json` has for this device, by numbers and by a kind of weight."""
    rows = next((rows for rows in TUNED_ROWS if num_rows <= rows), None)
    if rows is None or not tuned():
        return None
    return tuned().get(f"{device_kind(interpret=False)}, {describe(rows, num_outputs, num_inputs, is_gated, kind)}")


def describe(num_rows: int, num_outputs: int, num_inputs: int, is_gated: bool = False, kind: str = "") -> str:
    """What a product is called in `tuned.json`, behind the kind of device."""
    return f"{num_rows} rows, {num_outputs} x {num_inputs}{', gated' if is_gated else ''}{kind and f', {kind}'}"


@functools.cache
def tuned() -> dict[str, Tiles]:
    """Every entry of `tuned.json`."""
    return read_tuned(TUNED, Tiles)


def product(x_TD: jax.Array, weight: Any, dtype: Any, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """x times the transposed weight, in `dtype`; silu(gate) * up where a weight has both of each output."""
    return call(x_TD, weight, None, dtype, tiles, interpret)


def added_product(x_TD: jax.Array, weight: Any, added_TF: jax.Array, tiles: Tiles, interpret: Any = False) -> jax.Array:
    """added + x times the transposed weight, in added's type, rounded once."""
    return call(x_TD, weight, added_TF, added_TF.dtype, tiles, interpret)


def call(
    x_TD: jax.Array, weight: Any, added_TF: jax.Array | None, dtype: Any, tiles: Tiles, interpret: Any
) -> jax.Array:
    T, (X, _), is_scaled = len(x_TD), sizes_of(weight), isinstance(weight, ScaledWeight)
    values, of_groups = (weight.values, (weight.scales, weight.zeros)) if is_scaled else (weight, ())
    F, form = len(values), form_of(weight, tiles, bool(interpret))
    fewest = FEWEST_ROWS // 2 if is_scaled and tiles.weight_first else FEWEST_ROWS
    rows = min(MOST_ROWS, max(fewest // form.folds, pl.next_power_of_2(T)))
    views = [x_TD.reshape(T * form.folds, -1), values.reshape(X * form.folds, -1)]
    of_groups_shape = (X,) if form.groups <= 1 else (-1, X) if form.groups_first else (X * form.folds, -1)
    views += [x.reshape(of_groups_shape) for x in of_groups if x is not None]
    is_whole = form.parts == 1
    out = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, rows=rows, form=form),
        out_shape=jax.ShapeDtypeStruct((T, F) if is_whole else (form.parts, T, F), dtype if is_whole else jnp.float32),
        grid=(ceil_div(T, rows), ceil_div(F, tiles.outputs), *([] if is_whole else [form.parts])),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="few_rows_matmul",
    )(*views, *([added_TF] if is_whole and added_TF is not None else []))
    if is_whole:
        return out
    sum_TF = jnp.sum(out, axis=0)
    return (sum_TF if added_TF is None else sum_TF + added_TF.astype(jnp.float32)).astype(dtype)


def form_of(weight: Any, tiles: Tiles, interpret: bool) -> Form:
    """What the kernel must know of a weight. Its inputs are neither folded nor shared where parts would not be whole
    groups and pieces, and those of gates are not shared."""
    D, folds, is_scaled = weight.shape[-1], tiles.folds, isinstance(weight, ScaledWeight)
    units = D
    if is_scaled:
        units = D // PACKED_GROUP if weight.is_packed else D
        if weight.num_groups > 1 or weight.zeros is not None:
            units = weight.num_groups
    folds = folds if units % folds == 0 and units > folds else 1
    is_shared = len(weight.shape) == 2 and D // folds % (tiles.parts * tiles.inputs) == 0
    parts = tiles.parts if is_shared else 1
    if not is_scaled:
        return Form(folds, parts, interpret=interpret)
    groups = weight.num_groups // folds if weight.num_groups > 1 else 1
    has_zeros, is_shrunk = weight.zeros is not None, weight.dtype != jnp.float8_e4m3fn
    return Form(folds, parts, groups, has_zeros, weight.is_packed, is_shrunk, weight.groups_first, interpret)


def odd_groups(weight: ScaledWeight) -> str | None:
    """Why pieces of the inputs cannot be whole groups, or parts of one, or None."""
    D, C = weight.shape[-1], weight.num_groups
    group = D // C
    is_fit = C == 1 or (group >= PACKED_GROUP and group & (group - 1) == 0)
    return None if is_fit else f"groups have {group} inputs; accepted are powers of two from {PACKED_GROUP} on"


def lacks_type(weight: ScaledWeight) -> str | None:
    """Why the device that the program being traced is for cannot convert the values, or None."""
    if weight.dtype != jnp.float8_e4m3fn or reads_float8(device_kind(interpret=False)):
        return None
    return f"values are {weight.dtype}, which {device_kind(interpret=False)} lacks"
