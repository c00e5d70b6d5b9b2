"""The Triton kernel of `gpu.py`: a program multiplies all inputs of some outputs with some rows, a piece at a time.

Letters: X outputs, twice as many where there are gates too, and D inputs; U rows of x that is folded, and W of weights;
B places of a row of weights, which two inputs share where values have 4 bits; C groups.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.few_rows_matmul.scaled import PACKED_GROUP
from pallas_kernels.int4_matmul import ZERO
from pallas_kernels.shapes import ceil_div
from pallas_kernels.triton_bytes import LEAST, SHRUNK, SIGN, multiplied_bytes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Outputs of a program, parts of the inputs that are multiplied side by side, inputs of a piece of each; warps and
    stages are Triton's.

    weight_first: rows are the narrow side of the matrix instructions, not the tall one. parts: programs that share the
    inputs of the same outputs, where pieces are whole parts of them; XLA adds what they leave.
    """

    outputs: int
    inputs: int
    folds: int = 1
    warps: int = 4
    stages: int = 4
    weight_first: bool = False
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel is compiled for. parts: programs that share inputs; their sums are the last of the results, which
    have another axis then. groups: of a row of weights, 0 where there are no scales. is_shrunk: sums are those
    of whole numbers times `SHRUNK`. groups_first: see `ScaledWeight`. interpret: no machine code is there."""

    folds: int
    parts: int = 1
    groups: int = 0
    has_zeros: bool = False
    is_packed: bool = False
    is_shrunk: bool = False
    groups_first: bool = False
    interpret: bool = False


def kernel(x_UD, weight_WB, *refs, tiles: Tiles, rows: int, form: Form):
    """refs: scales [W, C] or, where there is one for each output, [X]; [C, X] of all parts of the inputs where groups
    are first; zeros likewise; what is added; the result."""
    scales, zeros, added_TF, out_TF = apart(refs, form)
    folds, inputs, (T, F), D = form.folds, tiles.inputs, out_TF.shape[-2:], x_UD.shape[1]
    count = ceil_div(D, inputs) // form.parts
    first_piece = pl.program_id(2) * count if form.parts > 1 else 0
    of_output = weight_WB.shape[0] // F  # rows of the view
    first_t, first_f = pl.program_id(0) * rows, pl.program_id(1) * tiles.outputs
    num_u, num_w = rows * folds, tiles.outputs * of_output
    u, tile_w = first_t * folds + jnp.arange(num_u), pl.ds(first_f * of_output, num_w)
    in_u = None if T % rows == 0 else u < T * folds
    in_w = None if F % tiles.outputs == 0 else first_f * of_output + jnp.arange(num_w) < F * of_output
    halves, is_ragged = 1 + form.is_packed, D % inputs > 0
    scales_sums = form.groups > 1 and D // form.groups % inputs == 0

    def of_groups(ref, start):
        """What the groups of a piece have [W, 1], or [W, B]."""
        group = D // form.groups
        if form.groups == 1:
            return load(ref.at[tile_w], in_w)[:, None]
        first, count = lax.div(start, group), max(1, inputs // group)
        in_c = first + jnp.arange(count) < form.groups if is_ragged and count > 1 else None
        if form.groups_first:
            w_w1 = first_f * of_output + jnp.arange(num_w)[:, None]
            c_wc = lax.rem(w_w1, folds) * form.groups + first + jnp.arange(count)[None, :]
            place = (c_wc, jnp.broadcast_to(lax.div(w_w1, folds), c_wc.shape))
        else:
            place = (tile_w, pl.ds(first, count))
        x_wc = load(ref.at[place], both(in_w, in_c))
        if count == 1:
            return x_wc
        spread = (num_w, count, group // halves)
        return jnp.broadcast_to(x_wc[:, :, None], spread).reshape(num_w, inputs // halves)

    def inputs_of(half: int, start):
        """Rows of x at those inputs whose weights a half of the bytes has."""
        b = jnp.arange(inputs // halves)
        if not form.is_packed:
            in_d = start + b < D if is_ragged else None
            return load(x_UD.at[pl.ds(first_t * folds, num_u), pl.ds(start, inputs)], both(in_u, in_d))
        width = PACKED_GROUP // 2
        d = start + lax.div(b, width) * PACKED_GROUP + lax.rem(b, width) + half * width
        return load(x_UD.at[u[:, None], d[None, :]], both(in_u, d < D if is_ragged else None))

    def add_piece(i, sum):
        start = (first_piece + i) * inputs
        b = lax.div(start, halves) + jnp.arange(inputs // halves)
        in_b = b < lax.div(D, halves) if is_ragged else None
        tile_b = pl.ds(lax.div(start, halves), inputs // halves)
        values_wb = load(weight_WB.at[tile_w, tile_b], both(in_w, in_b), eviction_policy="evict_first")
        zero = of_groups(zeros, start) if zeros is not None else None
        scale = of_groups(scales, start) if form.groups > 1 else None
        whole = jnp.zeros_like(sum) if scales_sums else sum
        for half in range(halves):
            w_wd = as_bfloat16(values_wb, zero, None if scales_sums else scale, half, form)
            x_ud = inputs_of(half, start)
            left, right = (w_wd, x_ud) if tiles.weight_first else (x_ud, w_wd)
            whole += plgpu.dot(left, right, trans_b=True)
        if not scales_sums:
            return whole
        scale = scale.astype(jnp.float32)
        return sum + whole * (scale if tiles.weight_first else scale.reshape(1, num_w))

    zero_sums = jnp.zeros((num_w, num_u) if tiles.weight_first else (num_u, num_w), jnp.float32)
    sum_wu = lax.fori_loop(0, count, add_piece, zero_sums)
    sum_wt = unfolded(sum_wu if tiles.weight_first else sum_wu.T, folds)
    if form.is_shrunk:
        sum_wt *= 1 / SHRUNK
    if form.groups == 1:
        num_x = num_w // folds
        first_x = pl.program_id(1) * num_x
        in_x = None if in_w is None else first_x + jnp.arange(num_x) < scales.shape[0]
        sum_wt *= load(scales.at[pl.ds(first_x, num_x)], in_x).astype(jnp.float32)[:, None]
    result_tf = (silu_of_pairs(sum_wt) if of_output > folds else sum_wt).T
    out = (pl.ds(first_t, rows), pl.ds(first_f, tiles.outputs))
    in_t = None if T % rows == 0 else first_t + jnp.arange(rows) < T
    in_f = None if F % tiles.outputs == 0 else first_f + jnp.arange(tiles.outputs) < F
    if added_TF is not None:
        result_tf += load(added_TF.at[out], both(in_t, in_f)).astype(jnp.float32)
    part = (pl.program_id(2),) if form.parts > 1 else ()
    plgpu.store(out_TF.at[(*part, *out)], result_tf.astype(out_TF.dtype), mask=both(in_t, in_f))


def apart(refs: Sequence[Any], form: Form) -> tuple[Any, Any, Any, Any]:
    """(scales, zeros, what is added, the result), None for what there is not."""
    *others, out = refs
    scales = others.pop(0) if form.groups else None
    zeros = others.pop(0) if form.has_zeros else None
    return scales, zeros, others.pop() if others else None, out


def as_bfloat16(values_wb: jax.Array, zero: Any, scale: Any, half: int, form: Form) -> jax.Array:
    """(values - zero) * scale * SHRUNK, of bytes of two values those of a half; without a scale they are exact. Of
    float8 neither zero nor `SHRUNK` are in it, and a weight without groups stays as it is."""
    if not form.groups:
        return values_wb
    if values_wb.dtype == jnp.float8_e4m3fn:
        # Triton's own way to bfloat16 has a slow instruction a value.
        values = values_wb.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
        return values if scale is None else values * scale.astype(jnp.bfloat16)
    scale, zero = (x if x is None else x.astype(jnp.bfloat16) for x in (scale, zero))
    if form.interpret:
        return by_numbers(values_wb, zero, scale, half, form)
    lowest = ZERO if form.is_packed else SIGN
    factor, taken = SHRUNK / LEAST / (16 if half else 1), (0xF0 if half else 0x0F) if form.is_packed else None
    # With zeros that are not powers of two the product with a scale would be rounded twice.
    if zero is not None or scale is None:
        takes_zero = form.is_packed and zero is not None
        values = multiplied_bytes(values_wb, factor, zero * -SHRUNK if takes_zero else -lowest * SHRUNK, taken)
        if zero is not None and not takes_zero:  # 128 more than a zero that is not whole is another one
            values -= zero * SHRUNK
        return values if scale is None else values * scale
    return multiplied_bytes(values_wb, scale * factor, scale * (-lowest * SHRUNK), taken)


def by_numbers(values_wb: jax.Array, zero: Any, scale: Any, half: int, form: Form) -> jax.Array:
    """The same without machine code."""
    values = ((values_wb >> (4 * half)) & 15 if form.is_packed else values_wb).astype(jnp.float32)
    values -= (ZERO if form.is_packed else 0) if zero is None else zero.astype(jnp.float32)
    return (values * SHRUNK * (1 if scale is None else scale.astype(jnp.float32))).astype(jnp.bfloat16)


def load(ref: Any, mask: jax.Array | None, **settings: Any) -> jax.Array:
    """What is there, and zeros elsewhere."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype), **settings)


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
