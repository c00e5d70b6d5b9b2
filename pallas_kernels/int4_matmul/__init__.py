"""Products of rows with a weight in 4 bits, packed two to a byte, with a scale for every group of 32 inputs.

Validates, picks a backend, and says why others were refused. `reference` is XLA, which writes the weight in the type of
x before it multiplies. `cpu` reads the packed weight and nothing else, for as many rows as that is faster.

A weight of F outputs and D inputs is `(value - 8) * scale`, with values from 0 to 15. A group is 16 bytes: the lower
four bits of a byte are a value of its first half, the upper four the value 16 inputs later.

This module knows nothing of checkpoints. Letters: T rows (tokens), D inputs, F outputs, B bytes of an output, C groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "int4_matmul", ("reference", "cpu")
_FLOATS = ("bfloat16", "float16", "float32")
GROUP = 32
"""Inputs that share a scale."""
INPUTS = 64
"""The number of inputs is a multiple of it."""
ZERO = 8
"""The value that stands for zero."""
TILE_ROWS = 8
"""Rows of x that `cpu` multiplies at once with an output's weights."""
RECORDS = {"pairs": 2, "quads": 4}
"""Records that `cpu` makes of bfloat16 rows, in place of a type, and how many groups each has."""


def backends(platform: str, x_TD: Any = None, packed_FB: Any = None, scale_FC: Any = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if packed_FB is None else [x_TD, packed_FB, scale_FC]))


def choose_backend(name: str, platform: str, x_TD: Any = None, packed_FB: Any = None, scale_FC: Any = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if packed_FB is None else [x_TD, packed_FB, scale_FC]))


def int4_matmul(x_TD: jax.Array, packed_FB: jax.Array, scale_FC: jax.Array, *, backend: str) -> jax.Array:
    """x times the transposed weight: float32 sums_TF. packed_FB: uint8; scale_FC: bfloat16; x: a float type.

    Raises ValueError for other operands.
    """
    if x_TD.ndim != 2 or str(x_TD.dtype) not in _FLOATS or x_TD.shape[1] % INPUTS:
        accepted = f"{' or '.join(_FLOATS)}[rows, inputs] with a multiple of {INPUTS} inputs"
        raise ValueError(f"x_TD is {_spelled(x_TD)}; accepted is {accepted}.")
    F, D = packed_FB.shape[0], x_TD.shape[1]
    for name, x, dtype, shape in (
        ("packed_FB", packed_FB, "uint8", (F, D // 2)),
        ("scale_FC", scale_FC, "bfloat16", (F, D // GROUP)),
    ):
        if x.shape != shape or str(x.dtype) != dtype:
            raise ValueError(f"{name} is {_spelled(x)}; accepted is {dtype}{list(shape)}, for these inputs.")
    return choosing.require(_OP, _BACKENDS, backend, x_TD, packed_FB, scale_FC).int4_matmul(x_TD, packed_FB, scale_FC)


def unpack(packed_FB: jax.Array, scale_FC: jax.Array) -> jax.Array:
    """The weight [F, D] in float32."""
    (F, B), C = packed_FB.shape, scale_FC.shape[1]
    value_FC32 = unpack_values(packed_FB).reshape(F, C, -1).astype(jnp.float32) - ZERO
    return (value_FC32 * scale_FC.astype(jnp.float32)[..., None]).reshape(F, 2 * B)


def unpack_values(packed: jax.Array) -> jax.Array:
    """uint8 [..., D]: values from 0 to 15 in the order of their inputs, of bytes [..., B]."""
    groups = packed.reshape(*packed.shape[:-1], -1, GROUP // 2)
    return jnp.concatenate([groups & 15, groups >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
