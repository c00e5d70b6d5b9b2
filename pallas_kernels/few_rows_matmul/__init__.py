"""Products of a few rows with a weight as checkpoints store it, [outputs, inputs]: what decoding is made of.

Validates, picks a backend, and says why others were refused. `reference` is XLA, and as good as any on TPUs. On GPUs
`gpu` is faster for some shapes.
On a CPU XLA reads the weights of such products at half the speed of memory; `cpu` reads each once, as fast as it comes.
Where a CPU multiplies bfloat16 or bytes by itself, `cpu` takes any number of rows.
Weights of 8 and 4 bits with scales (`scaled.ScaledWeight`) are multiplied with bfloat16 rows, on a GPU as they are.
Letters: T rows (tokens), D inputs, F outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing
from pallas_kernels.few_rows_matmul.scaled import ScaledWeight, check

_OP, _BACKENDS = "few_rows_matmul", ("reference", "cpu", "gpu")
SUMS = {"bfloat16": "float32", "int8": "int32", "int16": "float32"}
"""Type of x -> type of the sums."""
WEIGHTS = {"bfloat16": "bfloat16", "int8": "int8", "int16": "int8"}
"""Type of x -> type of the weight."""
TILE_ROWS = 6
"""Rows that `cpu` multiplies at once with outputs' weights: two outputs, so that of 16 registers 12 are sums, or four
where there are 32. With 8 rows and one output, bfloat16 took 1.1 to 1.6 times as long."""
BLOCK_ROWS = 16
"""Rows whose inputs share a register of 64 bytes in `cpu`."""
LARGEST = 127
"""The largest whole number of a plane: -128 is left out."""
LOW_STEPS = 2 * LARGEST
"""Steps of the low plane in one of the high plane: what rounding leaves is at most half a high step."""


def backends(platform: str, x_TD: Any = None, weight_FD: Any = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if weight_FD is None else [x_TD, weight_FD]))


def choose_backend(name: str, platform: str, x_TD: Any = None, weight_FD: Any = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if weight_FD is None else [x_TD, weight_FD]))


def most_of_int16(num_inputs: int) -> int:
    """The largest number that rows of int16 may have, so that 32 bits hold the sum of every eighth product."""
    return min(2**15 - 1, (2**31 - 1) // (128 * -(-num_inputs // 8)))


def few_rows_matmul(
    x_TD: jax.Array, weight_FD: jax.Array | ScaledWeight, *, backend: str, dtype: Any = None
) -> jax.Array:
    """x times the transposed weight: float32 sums_TF of bfloat16 operands, or of int16 rows and an int8 weight; int32
    sums of int8 ones, which are exact. Rows of int16 are at most `most_of_int16` large. Rows of a `ScaledWeight` are
    bfloat16. `dtype`: bfloat16 for sums of bfloat16 rows that are rounded once.

    Raises ValueError for other operands, and for another type.
    """
    types = WEIGHTS
    if isinstance(weight_FD, ScaledWeight):
        check(weight_FD)
        types = {"bfloat16": str(weight_FD.dtype)}
    wanted = types.get(str(x_TD.dtype))
    for name, x, fits in (
        ("x_TD", x_TD, wanted is not None),
        ("weight_FD", weight_FD, str(weight_FD.dtype) == wanted),
    ):
        if len(x.shape) != 2 or not fits or x.shape[1] != x_TD.shape[1]:
            accepted = " or ".join(
                f"{row}[rows, inputs] and {weight}[outputs, inputs]" for row, weight in types.items()
            )
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; accepted are {accepted}.")
    sums = SUMS[str(x_TD.dtype)]
    dtype = str(jnp.dtype(dtype or sums))
    if dtype != sums and not dtype == x_TD.dtype == jnp.bfloat16:
        raise ValueError(f"dtype is {dtype}; sums of {x_TD.dtype} are {sums}, or bfloat16 of bfloat16.")
    return choosing.require(_OP, _BACKENDS, backend, x_TD, weight_FD).few_rows_matmul(x_TD, weight_FD, dtype)


def adds(backend: str, x_TD: Any, weight_FD: Any) -> bool:
    """Whether a backend has `added_matmul` for such operands."""
    return backend == "gpu" and choosing.require(_OP, _BACKENDS, backend).cannot_take(x_TD, weight_FD) is None


def added_matmul(
    x_TD: jax.Array, weight_FD: jax.Array | ScaledWeight, added_TF: jax.Array, *, backend: str
) -> jax.Array:
    """added + x times the transposed weight, in added's type. Sums are float32, and rounded once. For operands that the
    backend takes (`adds`)."""
    return choosing.require(_OP, _BACKENDS, backend).added_matmul(x_TD, weight_FD, added_TF)


def gates(backend: str, x_TD: Any, weight_F2D: Any) -> bool:
    """Whether a backend has `gated_matmul` for such operands."""
    return backend == "gpu" and choosing.require(_OP, _BACKENDS, backend).cannot_gate(x_TD, weight_F2D) is None


def gated_matmul(x_TD: jax.Array, weight_F2D: jax.Array | ScaledWeight, *, backend: str) -> jax.Array:
    """silu(gate) * up, in x's type, where a weight has a gate and an up for each of F outputs. Sums are float32, and
    rounded once. For operands that the backend takes (`gates`)."""
    return choosing.require(_OP, _BACKENDS, backend).gated_matmul(x_TD, weight_F2D, str(x_TD.dtype))


def two_plane_matmul(
    x_TD: jax.Array, weight_FD: jax.Array, scale_F: jax.Array, *, dtype: Any, backend: str
) -> jax.Array:
    """x of a float type times the transposed int8 weight times an output's scale in float32 -> [T, F] in `dtype`.

    A row of x is taken as step * (high + low / 254), whole numbers of 8 bits: step = largest |x| of the row / 127, so x
    is at most step / 508 away, and sums are exact. A row with a number that is not finite has no finite results.
    """
    if x_TD.ndim != 2 or not jnp.issubdtype(x_TD.dtype, jnp.floating):
        raise ValueError(f"x_TD is {x_TD.dtype}{list(x_TD.shape)}; accepted are [rows, inputs] of a float type.")
    F, D = weight_FD.shape[0], x_TD.shape[1]
    for name, operand, wanted, shape in (
        ("weight_FD", weight_FD, "int8", (F, D)),
        ("scale_F", scale_F, "float32", (F,)),
    ):
        if operand.dtype != wanted or operand.shape != shape:
            raise ValueError(f"{name} is {operand.dtype}{list(operand.shape)}; accepted is {wanted}{list(shape)}.")
    return choosing.require(_OP, _BACKENDS, backend).two_plane_matmul(x_TD, weight_FD, scale_F, str(jnp.dtype(dtype)))
