"""Products of few rows on a CPU, in machine code of our own (`pallas_kernels/llvm`), in two forms.

Layout: both operands as they are, rows of inputs; a row of the weight is read along memory. Up to a dozen rows, and
what does not fill blocks of 16, are read so as well, and a register holds inputs of one row (`tiles.py`). Of blocks of
16 rows a register holds two or four inputs of each row (`lanes.py`), as a kernel before lays them.

Grid: chunks of 64 outputs, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512. Blocks of rows require AVX512-BF16 or, of int8, VNNI, in registers of 64 bytes.
Without them at most 64 rows of bfloat16, and 128 of int8; any number of int16 where bytes are not multiplied by fours
(VNNI): there it is the best form of products with int8 weights.

Padding: inputs beyond the last whole register are added one by one; beyond the last output nothing is read or written.

Numerics: an output is summed by one thread, lane by lane and then over lanes, or in blocks of rows input by input, so
its bits depend on its own row and column and on the form only: not on other rows, nor on threads. AVX512-BF16 adds
pairs of products at once, and takes denormal numbers for zero. Sums of int8 are exact, and so are those of int16 in a
lane, which are rounded to float32 then.

Cost: reads the weight once, whatever the number of rows, a few of which at a time meet a chunk, which stays in the
nearest caches; XLA's product of one row writes it in float32 first, and its product of two waits for memory
(`scripts/bench_products.py`). All products of a model with 110M parameters (AMD EPYC of 2023, two cores, bfloat16): of
32 rows by tiles 1.10 times as long as by blocks, XLA 1.5 times; of 512 rows XLA 1.05 times, 1.08 where it rounds.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul import BLOCK_ROWS, TILE_ROWS, reference
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_dot, has_pairs, this_machine
from pallas_kernels.shapes import ceil_div, same_rest

OP = "few_rows_matmul"
MOST_ROWS = {"bfloat16": 64, "int8": 128, "int16": math.inf}
"""For tiles. Where there are no blocks it is XLA that multiplies more, and is as good: those are bound by arithmetic.
Of int8 a token has two."""
WORDS, PLANES = "words", "planes"
"""In place of a type of results: the kernels that lay the inputs of rows in words, as they are or in two planes."""
PLANE_ROWS = "plane_rows"
"""In place of a number of rows: the kernel that makes rows of two planes for tiles."""
BLOCK_FORMS = {"bfloat16": (WORDS, "float32", "bfloat16"), "int8": (WORDS, "int32", PLANES, "float32", "bfloat16")}
"""Of kernels for blocks of rows; those of int8 with float results are of planes."""
_WORD_BYTES = 4


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes few rows where there are no blocks, but any number of int16."""
    dtype, num_rows, machine = str(x_TD.dtype), x_TD.shape[0], this_machine()
    if op.WEIGHTS.get(dtype) != str(weight_FD.dtype):
        accepted = " and ".join(f"{row} with {weight}" for row, weight in op.WEIGHTS.items())
        return f"x_TD is {dtype} and weight_FD {weight_FD.dtype}; accepted are {accepted}"
    if dtype == "int16" and has_dot(machine):
        return "this CPU multiplies bytes by fours, so planes of int8 are faster than x_TD in int16"
    most = math.inf if has_blocks(dtype, machine) else MOST_ROWS[dtype]
    return None if 0 < num_rows <= most else f"x_TD has {num_rows} rows; accepted are 1 to {most} of {dtype}"


def has_blocks(dtype: str, machine: Machine) -> bool:
    """Whether rows of a type may lie in the lanes of registers."""
    multiplies = {"bfloat16": has_pairs, "int8": has_dot}.get(dtype, lambda machine: False)
    return machine.lanes == BLOCK_ROWS and multiplies(machine)


def in_blocks(num_rows: int, dtype: str) -> bool:
    """Whether blocks are the faster form: of 24 rows, whose second block is half empty, tiles took 0.9 of the time, of
    16 1.1, but of int8 0.9; of 48 of int8 1.08."""
    missing = -num_rows % BLOCK_ROWS
    is_few = dtype == "int8" and num_rows <= BLOCK_ROWS
    return num_rows > MOST_ROWS["bfloat16"] or (8 * missing <= num_rows and not is_few)


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, dtype: str, machine: Machine | None = None) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`. `machine`: a CPU with less than this one has, in tests."""
    x_dtype, (T, D), F = str(x_TD.dtype), x_TD.shape, weight_FD.shape[0]
    machine = machine or this_machine()
    if has_blocks(x_dtype, machine) and in_blocks(T, x_dtype):
        shape = (ceil_div(T, BLOCK_ROWS), ceil_div(D * x_TD.dtype.itemsize, _WORD_BYTES), BLOCK_ROWS)
        words = jax.ffi.ffi_call(kernel(x_dtype, WORDS, machine=machine), jax.ShapeDtypeStruct(shape, jnp.int32))(x_TD)
        name = kernel(x_dtype, dtype, machine=machine)
        return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((T, F), dtype))(words, weight_FD)
    if x_dtype == "bfloat16" and not has_pairs(machine):
        x_TD = x_TD.astype(jnp.float32)  # what the kernel makes of the weights
    name = kernel(x_dtype, same_rest(T, TILE_ROWS), machine=machine)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((T, F), op.SUMS[x_dtype]))(x_TD, weight_FD).astype(dtype)


def two_plane_matmul(x_TD: jax.Array, weight_FD: jax.Array, scale_F: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.two_plane_matmul`."""
    (T, D), machine, is_bfloat16 = x_TD.shape, this_machine(), x_TD.dtype == jnp.bfloat16
    steps_of = lambda num_rows: jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    is_in_blocks = has_blocks("int8", machine) and in_blocks(T, "bfloat16")
    if is_bfloat16 and is_in_blocks and dtype in BLOCK_FORMS["int8"]:
        blocks = ceil_div(T, BLOCK_ROWS)
        words = jax.ShapeDtypeStruct((2 * blocks, ceil_div(D, _WORD_BYTES), BLOCK_ROWS), jnp.int32)
        planes = jax.ffi.ffi_call(kernel("int8", PLANES, machine=machine), (words, steps_of(BLOCK_ROWS * blocks)))
        scaled = jax.ffi.ffi_call(
            kernel("int8", dtype, machine=machine), jax.ShapeDtypeStruct((T, weight_FD.shape[0]), dtype)
        )
        of_x, steps_of_x = planes(x_TD)
        return scaled(of_x, weight_FD, steps_of_x, scale_F)
    rows = jax.ShapeDtypeStruct((2 * T, D), jnp.int8)
    few = cannot_take(rows, weight_FD) is None
    if few and is_bfloat16:
        planes_PD, step_T = jax.ffi.ffi_call(kernel("int8", PLANE_ROWS, machine=machine), (rows, steps_of(T)))(x_TD)
    else:
        planes_PD, step_T = reference.in_planes(x_TD)
    multiply = few_rows_matmul if few else reference.few_rows_matmul
    return reference.joined(multiply(planes_PD, weight_FD, "int32"), step_T, scale_F, dtype)


def kernel(dtype: str, form: int | str, *, machine: Machine) -> str:
    """What XLA calls the kernel; from now on it is known. `form`: a number of rows, of which 6 to 11 stand for all with
    the same rest by 6; for rows in blocks the type of the results, or `WORDS` or `PLANES` for what lays them so; or
    `PLANE_ROWS`. Raises ValueError where there is none."""
    if (dtype, form) == ("int8", PLANE_ROWS):
        return register(OP, _emit_plane_rows, dtype, form, machine=machine)
    if form in BLOCK_FORMS.get(dtype, ()):
        if not has_blocks(dtype, machine):
            raise ValueError(f"there is no kernel for blocks of rows of {dtype} on this CPU.")
        return register(OP, _emit_blocks, dtype, form, machine=machine)
    most = 2 * TILE_ROWS - 1 if dtype in op.SUMS else 0
    if not str(form).isdecimal() or not 0 < int(form) <= most:
        raise ValueError(f"there is no kernel for {form} rows of {dtype}; there are for 1 to {most}.")
    return register(OP, _emit_tiles, dtype, int(form), machine=machine)


def _emit_tiles(dtype: str, num_rows: int, machine: Machine) -> Any:
    from pallas_kernels.few_rows_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, num_rows, machine)


def _emit_plane_rows(dtype: str, form: str, machine: Machine) -> Any:
    from pallas_kernels.few_rows_matmul.cpu import planes  # needs llvmlite

    return planes.planes_in_rows()


def _emit_blocks(dtype: str, form: str, machine: Machine) -> Any:
    from pallas_kernels.few_rows_matmul.cpu import lanes, planes  # these need llvmlite

    if form == PLANES:
        return planes.planes_in_blocks()
    return lanes.words_of_rows(dtype) if form == WORDS else lanes.kernel(dtype, form)
