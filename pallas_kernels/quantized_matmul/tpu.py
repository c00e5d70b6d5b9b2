"""Products with group-wise quantised weights on a TPU: weights are converted in VMEM, on their way into the product.

Layout: values [F, D] as they are; scales and zeros [C, F], so that a group's lie along lanes, as the outputs do.

Grid: (tiles of tokens, tiles of outputs, tiles of inputs); the last accumulates into one tile of outputs. What is added
is in `groups.py`.

Skipping: none.

Requires: bfloat16 or float16 tokens; groups of a multiple of 128 inputs, the lanes of a register, or of 16, 32 and 64;
of float4 the latter. More than one group or zeros, since XLA does as well without either.

Padding: tokens and outputs beyond the last tile are garbage in and out, and stay in their rows and columns.

Numerics: values are exact in x's type. Each group's product is summed in float32, then scaled, then added. Weights in
small groups are dequantised in float32 and rounded to x's type.

Cost: reads the quantised weights once for each `TOKENS` tokens; XLA reads them, writes them dequantised, and reads
those. Not measured.

Knows nothing of checkpoints.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.groups import LANES, SMALLEST_GROUP, add_by_group, add_dequantized
from pallas_kernels.shapes import ceil_div, largest_divisor

TOKENS, OUTPUTS, INPUTS = 512, 256, 2048  # a tile of each, at most: 5 MiB with double buffering
TOKENS_OF_LONG_TILES, MOST_INPUTS = 128, 16384  # where a tile must have all inputs
MOST_ROWS = 128  # tokens times the groups in a register's lanes, where products of groups are scaled
VMEM_LIMIT_BYTES = 48 * 2**20
SUBLANES = 16  # a tile of tokens is a multiple of this many rows, whatever the type
FLOAT4 = "float4_e2m1fn"


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """Groups must be whole registers, or a part of one, and worth it."""
    D, C = x_TD.shape[1], weight.scale_CF.shape[0]
    if str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16"
    if weight.is_packed:
        return f"values_FD is {weight.values_FD.dtype}; accepted is int4"
    if C == 1 and weight.zero_CF is None:
        return "the weight has one group without zeros; accepted are more, XLA's own product is as good for one"
    return why_no_groups(D, D // C, weight.values_FD.dtype)


def quantized_matmul(x_TD: jax.Array, weight: Any, *, activations: Any, interpret: Any) -> jax.Array:
    """See `quantized_matmul.quantized_matmul`; `activations` is None."""
    (T, D), (F, _), C = x_TD.shape, weight.values_FD.shape, weight.scale_CF.shape[0]
    group, values_FD, is_float4 = D // C, weight.values_FD, str(weight.values_FD.dtype) == FLOAT4
    if is_float4:
        values_FD = lax.bitcast_convert_type(values_FD, jnp.int4)
    inputs = inputs_per_tile(D, group)
    tokens = min(TOKENS if inputs <= INPUTS else TOKENS_OF_LONG_TILES, ceil_div(T, SUBLANES) * SUBLANES)
    outputs = min(OUTPUTS, F)
    scales = [x_CF for x_CF in (weight.scale_CF, weight.zero_CF) if x_CF is not None]
    of_scales = pl.BlockSpec((C, outputs), lambda t, f, d: (0, f))
    if group % LANES:
        of_scales = pl.BlockSpec((inputs // group, outputs), lambda t, f, d: (d, f))
    add_tile = add_dequantized if is_dequantized(tokens, group) else add_by_group
    return pl.pallas_call(
        functools.partial(_kernel, functools.partial(add_tile, group=group, are_codes=is_float4)),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(ceil_div(T, tokens), ceil_div(F, outputs), D // inputs),
            in_specs=[
                pl.BlockSpec((tokens, inputs), lambda t, f, d: (t, d)),
                pl.BlockSpec((outputs, inputs), lambda t, f, d: (f, d)),
                *[of_scales] * len(scales),
            ],
            out_specs=pl.BlockSpec((tokens, outputs), lambda t, f, d: (t, f)),
            scratch_shapes=[pltpu.VMEM((tokens, outputs), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(x_TD, values_FD, *scales)


def why_no_groups(num_inputs: int, group: int, dtype: Any) -> str | None:
    """Why weights cannot have such groups, or None."""
    is_float4 = str(dtype) == FLOAT4
    if group % LANES == 0 and not is_float4:
        return None
    accepted = f"{SMALLEST_GROUP}, 32, 64" + ("" if is_float4 else f" and multiples of {LANES}")
    if group not in (SMALLEST_GROUP, 32, 64):
        return f"groups have {group} inputs; accepted are {accepted} for {dtype}"
    if num_inputs % LANES:
        return f"there are {num_inputs} inputs in groups of {group}; accepted are multiples of {LANES}"
    if inputs_per_tile(num_inputs, group) <= MOST_INPUTS:
        return None
    accepted = f"at most {MOST_INPUTS}, or multiples of {8 * group}"
    return f"there are {num_inputs} inputs in groups of {group}; accepted are {accepted}"


def inputs_per_tile(num_inputs: int, group: int) -> int:
    """The most inputs, whole groups and no more than `INPUTS` unless a group has more, that divide all inputs. Of small
    groups eight together, a tile of scales; or all inputs."""
    if group % LANES == 0:
        return group * largest_divisor(num_inputs // group, INPUTS // group)
    unit = math.lcm(8 * group, LANES)
    return unit * largest_divisor(num_inputs // unit, INPUTS // unit) if num_inputs % unit == 0 else num_inputs


def is_dequantized(num_tokens: int, group: int) -> bool:
    """Whether a tile's weights are dequantised, or products of each group scaled: these are `LANES // group` times as
    many numbers as the tile has outputs, while weights are as many whatever the tokens."""
    return group % LANES > 0 and num_tokens * LANES > MOST_ROWS * group


def _kernel(add_tile: Any, x_TD, values_FD, scale_CF, *refs):
    *zero_CF, out_TF, sum_TF = refs
    tile = pl.program_id(2)

    @pl.when(tile == 0)
    def _():
        sum_TF[...] = jnp.zeros_like(sum_TF)

    add_tile(sum_TF, x_TD, values_FD, scale_CF, *zero_CF, tile=tile)

    @pl.when(tile == pl.num_programs(2) - 1)
    def _():
        out_TF[...] = sum_TF[...].astype(out_TF.dtype)
