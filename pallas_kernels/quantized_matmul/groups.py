"""Products of tokens with a tile of weights that have a scale for a group of inputs, in the VMEM of a TPU.

Of few tokens each group's product is scaled; a group of less than a register's 128 lanes is multiplied with tokens that
are zero beside it, all groups of these lanes at once, one behind the other. Of many tokens small groups are dequantised
before: scales are spread over their groups by a product with a matrix of zeros and ones, in which each output has one
term, so that float32 numbers lose nothing as three bfloat16 parts. Knows no grid.

Values are int8, float8, int4, or int4 that are codes of float4_e2m1fn, which only the newest TPUs convert.

Letters: f outputs, d inputs of a piece, n groups of these; T tokens, F outputs and D inputs of a tile, C groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

SMALLEST_GROUP = 16
LANES = 128
PIECE = 1024
"""Inputs that are dequantised at once, at most, and multiplied together."""
_DOUBLED_MAGNITUDES = sum(x << 4 * i for i, x in enumerate((0, 1, 2, 3, 4, 6, 8, 12))) - 2**32
"""Twice the magnitudes of float4_e2m1fn, four bits each, in the order of their codes."""


def add_by_group(
    sum_TF: Any,
    x_TD: Any,
    values_FD: Any,
    scale_CF: Any,
    zero_CF: Any = None,
    *,
    tile: jax.Array,
    group: int,
    are_codes: bool,
) -> None:
    """Add the product to `sum_TF`. Scales and zeros of groups of whole registers are those of all inputs, of which
    this is the `tile`; of smaller ones those of the tile."""
    T, inputs = x_TD.shape
    at_once = max(group, LANES)
    first_group = tile * (inputs // group) if group % LANES == 0 else 0
    for first in range(0, inputs, at_once):
        x_Td, value_Fd = x_TD[:, first : first + at_once], values_FD[:, first : first + at_once]
        value_Fd = (doubled_numbers(value_Fd) if are_codes else value_Fd).astype(x_Td.dtype)
        apart_nd, added_TF = _apart(x_Td, group), 0.0
        part_nF = _times_transposed(apart_nd, value_Fd)
        for i in range(at_once // group):
            which, rows = pl.ds(first_group + first // group + i, 1), slice(i * T, (i + 1) * T)
            part_TF, scale_1F = part_nF[rows], scale_CF[which, :].astype(jnp.float32)
            if zero_CF is not None:
                total_T1 = jnp.sum(apart_nd[rows].astype(jnp.float32), axis=1, keepdims=True)
                part_TF -= total_T1 * zero_CF[which, :] * (2 if are_codes else 1)
            added_TF += part_TF * (scale_1F * 0.5 if are_codes else scale_1F)
        sum_TF[...] += added_TF


def add_dequantized(
    sum_TF: Any,
    x_TD: Any,
    values_FD: Any,
    scale_CF: Any,
    zero_CF: Any = None,
    *,
    tile: jax.Array,
    group: int,
    are_codes: bool,
) -> None:
    """The same. Groups are small, and scales and zeros the tile's."""
    inputs = x_TD.shape[1]
    for first in range(0, inputs, PIECE):
        piece = slice(first, min(first + PIECE, inputs))
        groups = slice(piece.start // group, piece.stop // group)
        number_Fd = doubled_numbers(values_FD[:, piece]) if are_codes else values_FD[:, piece].astype(jnp.float32)
        if zero_CF is not None:
            number_Fd = number_Fd - _spread(zero_CF[groups] * (2 if are_codes else 1), group)
        scale_nF = scale_CF[groups].astype(jnp.float32)
        weight_Fd = number_Fd * _spread(scale_nF * 0.5 if are_codes else scale_nF, group)
        sum_TF[...] += _times_transposed(x_TD[:, piece], weight_Fd.astype(x_TD.dtype))


def _apart(x_Td: jax.Array, group: int) -> jax.Array:
    """The tokens once for each group, zero beside it, one group behind the other."""
    if group >= x_Td.shape[1]:
        return x_Td
    input_1d = lax.broadcasted_iota(jnp.int32, (1, x_Td.shape[1]), 1)
    firsts = range(0, x_Td.shape[1], group)
    of_groups = [(input_1d >= first) & (input_1d < first + group) for first in firsts]
    return jnp.concatenate([jnp.where(mine_1d, x_Td, jnp.zeros_like(x_Td)) for mine_1d in of_groups], axis=0)


def _times_transposed(x_Td: jax.Array, weight_Fd: jax.Array) -> jax.Array:
    return lax.dot_general(x_Td, weight_Fd, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def doubled_numbers(code_fd: jax.Array) -> jax.Array:
    """Twice the numbers of float4_e2m1fn that are given as int4."""
    code_fd = code_fd.astype(jnp.int32)
    place_fd = (code_fd & 7) << 2
    magnitude_fd = lax.shift_right_logical(jnp.full_like(code_fd, _DOUBLED_MAGNITUDES), place_fd) & 15
    return jnp.where(code_fd < 0, -magnitude_fd, magnitude_fd).astype(jnp.float32)


def _spread(x_nf: jax.Array, group: int) -> jax.Array:
    """[f, d] in float32: of each group in all of its inputs."""
    (n, _), parts = x_nf.shape, []
    for _ in range(3):
        parts.append(x_nf.astype(jnp.bfloat16).astype(jnp.float32))
        x_nf = x_nf - parts[-1]
    input_nd, first_nd = (lax.broadcasted_iota(jnp.int32, (n, n * group), axis) for axis in (1, 0))
    first_nd = first_nd * group
    mine_nd = jnp.where((input_nd >= first_nd) & (input_nd < first_nd + group), 1.0, 0.0)
    one, other = (jnp.concatenate(x, axis=0).astype(jnp.bfloat16) for x in (parts, [mine_nd] * len(parts)))
    return lax.dot_general(one, other, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
