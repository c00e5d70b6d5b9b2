"""Products with group-wise quantised weights on an NVIDIA GPU (Pallas, Triton lowering): converted in registers.

Layout: values [F, D] as they are; int4 and float4 as bytes [F, D / 2] of two neighbouring inputs, for which even and
odd inputs of x are separated beforehand. So are the halves of 32 inputs for bytes in the order of `int4_matmul`.

Grid: (tiles of tokens, tiles of outputs); a program walks over all inputs, a piece of one group at a time.

Skipping: none.

Requires: bfloat16 or float16 tokens; groups of a multiple of 32 inputs; more than one group, zeros, or two
values to a byte, since XLA does as well without these. float8 needs a GPU that has it (Ada, Hopper or later).

Padding: tokens and outputs beyond the last are not read; what stands for them stays in its rows and columns, which
are not written.

Numerics: values are exact in x's type; those of float4 are 2^14 times smaller there, since so their bits are a
float16's, and scales as much larger. Each piece's product is summed in float32, then scaled, then added.

Cost: reads the quantised weights once for each tile of tokens; XLA reads them, writes them dequantised, and reads
those. Not measured.

Knows nothing of checkpoints.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.int4_matmul import GROUP as PACKED_GROUP
from pallas_kernels.int4_matmul import ZERO
from pallas_kernels.shapes import ceil_div

TOKENS, OUTPUTS, INPUTS = 64, 64, 128  # a tile of each, at most
FEWEST_TOKENS = 16  # what a matrix instruction takes
FIRST_WITH_FLOAT8 = (8, 9)  # Ada
FEWEST_INPUTS = 32  # the same, where a byte holds two of them
SCALES = ("float32", "bfloat16")
FLOAT4 = "float4_e2m1fn"
FLOAT4_SCALE = 2.0**14  # by which float4 is larger than the float16 with its bits behind the sign's


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """Groups must be whole tiles, and worth it."""
    D, C = x_TD.shape[1], weight.scale_CF.shape[0]
    if str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16"
    if lacks_type(weight.values_FD):
        return f"values_FD is {weight.values_FD.dtype}, which this GPU lacks; accepted are int8 and int4"
    if C == 1 and weight.zero_CF is None and not weight.is_packed:
        return "the weight has one group without zeros; accepted are more, XLA's own product is as good for one"
    if is_float4(weight.values_FD) and weight.zero_CF is not None:
        return f"values_FD is {weight.values_FD.dtype} with zeros; accepted is None"
    if str(weight.scale_CF.dtype) not in SCALES:
        return f"scale_CF is {weight.scale_CF.dtype}; accepted are {' and '.join(SCALES)}"
    return f"groups have {D // C} inputs; accepted are multiples of {FEWEST_INPUTS}" if D // C % FEWEST_INPUTS else None


def quantized_matmul(x_TD: jax.Array, weight: Any, *, activations: Any, interpret: Any) -> jax.Array:
    """See `quantized_matmul.quantized_matmul`; `activations` is None."""
    (T, D), F, C = x_TD.shape, len(weight.values_FD), weight.scale_CF.shape[0]
    tokens = min(TOKENS, max(FEWEST_TOKENS, pl.next_power_of_2(T)))
    parts_TD, values_FD = packed(x_TD, weight.values_FD)
    scales = [weight.scale_CF] if weight.zero_CF is None else [weight.scale_CF, weight.zero_CF]
    return pl.pallas_call(
        functools.partial(
            _kernel,
            num_parts=len(parts_TD),
            tokens=tokens,
            inputs=inputs_per_piece(D // C),
            group=D // C,
            are_codes=is_float4(weight.values_FD),
            none=ZERO if weight.is_packed else 0,
        ),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        grid=(ceil_div(T, tokens), ceil_div(F, OUTPUTS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="quantized_matmul",
    )(values_FD, *scales, *parts_TD)


def lacks_type(values: Any) -> bool:
    """Whether the GPU at hand, if there is one, is too old to convert such values."""
    device = jax.devices()[0]
    if device.platform != "gpu" or not str(values.dtype).startswith("float8"):
        return False
    return tuple(int(part) for part in device.compute_capability.split(".")) < FIRST_WITH_FLOAT8


def inputs_per_piece(group: int) -> int:
    """The largest power of two that divides a group, up to `INPUTS`."""
    return min(INPUTS, group & -group)


def packed(x_TD: jax.Array, values_FD: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """For 4 bits those inputs apart that bytes have in their lower bits, and those in the upper ones; x and values as
    they are otherwise."""
    if str(values_FD.dtype) == "uint8":
        halves_TC = x_TD.reshape(len(x_TD), -1, 2, PACKED_GROUP // 2)
        return [halves_TC[:, :, half].reshape(len(x_TD), -1) for half in range(2)], values_FD
    if is_float4(values_FD):
        values_FD = lax.bitcast_convert_type(values_FD, jnp.int4)
    if str(values_FD.dtype) != "int4":
        return [x_TD], values_FD
    F, D = values_FD.shape
    return [x_TD[:, 0::2], x_TD[:, 1::2]], lax.bitcast_convert_type(values_FD.reshape(F, D // 2, 2), jnp.int8)


def _kernel(
    values_FD, scale_CF, *refs, num_parts: int, tokens: int, inputs: int, group: int, are_codes: bool, none: int
):
    *zero_CF, out_TF = refs[: -num_parts - 1] + refs[-1:]
    parts_TD = refs[-num_parts - 1 : -1]
    (T, num_columns), F = parts_TD[0].shape, values_FD.shape[0]
    token_t = pl.program_id(0) * tokens + jnp.arange(tokens)
    output_f = pl.program_id(1) * OUTPUTS + jnp.arange(OUTPUTS)
    in_t1, in_f, in_f1 = (token_t < T)[:, None], output_f < F, (output_f < F)[:, None]
    tile_t = pl.ds(pl.program_id(0) * tokens, tokens)
    tile_f = pl.ds(pl.program_id(1) * OUTPUTS, OUTPUTS)
    columns = inputs // num_parts

    def add_piece(i, sum_tf):
        tile_d, which = pl.ds(i * columns, columns), i * inputs // group
        x_td = [plgpu.load(part_TD.at[tile_t, tile_d], mask=in_t1) for part_TD in parts_TD]
        values_fd = unpacked(plgpu.load(values_FD.at[tile_f, tile_d], mask=in_f1), num_parts, are_codes)
        part_tf = sum(times_transposed(x, values) for x, values in zip(x_td, values_fd))
        if zero_CF:
            total_t = sum(jnp.sum(x.astype(jnp.float32), axis=1) for x in x_td)
            part_tf -= total_t[:, None] * (plgpu.load(zero_CF[0].at[which, tile_f], mask=in_f) - none)[None, :]
        return sum_tf + part_tf * scale_of(plgpu.load(scale_CF.at[which, tile_f], mask=in_f), are_codes)[None, :]

    sum_tf = lax.fori_loop(0, num_columns // columns, add_piece, jnp.zeros((tokens, OUTPUTS), jnp.float32))
    plgpu.store(out_TF.at[tile_t, tile_f], sum_tf.astype(out_TF.dtype), mask=in_t1 & in_f[None, :])


def unpacked(values_fd: jax.Array, num_parts: int, are_codes: bool) -> list[jax.Array]:
    """The values in the lower and in the upper bits of bytes, of int4, of numbers from 0 on less `int4_matmul.ZERO`,
    or of codes of float4; or the values as they are."""
    if num_parts == 1:
        return [values_fd]
    if values_fd.dtype == jnp.uint8:
        values_fd = lax.bitcast_convert_type(values_fd ^ jnp.uint8(16 * ZERO + ZERO), jnp.int8)
    if not are_codes:
        return [(values_fd << 4) >> 4, values_fd >> 4]
    return [small_floats(values_fd.astype(jnp.int32)), small_floats(values_fd.astype(jnp.int32) >> 4)]


def small_floats(code_fd: jax.Array) -> jax.Array:
    """Float32 of the last four bits, as codes of float4_e2m1fn: 2^14 times smaller. Exponents of two bits are the
    last of a float16's, and so is the one bit behind them."""
    bits_fd = ((code_fd & 8) << 12) | ((code_fd & 7) << 9)
    return lax.bitcast_convert_type(bits_fd.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def scale_of(scale_f: jax.Array, are_codes: bool) -> jax.Array:
    """In float32, of the numbers that `unpacked` gives."""
    return scale_f.astype(jnp.float32) * FLOAT4_SCALE if are_codes else scale_f.astype(jnp.float32)


def is_float4(values: Any) -> bool:
    return str(values.dtype) == FLOAT4


def times_transposed(x_td: jax.Array, values_fd: jax.Array) -> jax.Array:
    """A product in x's type, summed in float32."""
    return plgpu.dot(x_td, values_fd.astype(x_td.dtype), trans_b=True)
