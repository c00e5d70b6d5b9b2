"""Products with group-wise quantised weights on a TPU: weights are converted in VMEM, on their way into the product.

Layout: values [F, D] as they are; scales and zeros [C, F], so that a group's lie along lanes, as the outputs do.

Grid: (tiles of tokens, tiles of outputs, tiles of inputs); the last accumulates into one tile of outputs.

Skipping: none.

Requires: bfloat16 or float16 tokens; groups of a multiple of 128 inputs, the lanes of a register; more than one group
or zeros, since XLA does as well without either.

Padding: tokens and outputs beyond the last tile are garbage in and out, and stay in their rows and columns.

Numerics: values are exact in x's type. Each group's product is summed in float32, then scaled, then added.

Cost: reads the quantised weights once for each `TOKENS` tokens; XLA reads them, writes them dequantised, and reads
those. Not measured.

Knows nothing of checkpoints.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import ceil_div, largest_divisor

TOKENS, OUTPUTS, INPUTS = 512, 256, 2048  # a tile of each, at most: 5 MiB with double buffering
SUBLANES = 32  # a tile of tokens is a multiple of this many rows, whatever the type
LANES = 128


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """Groups must be whole registers, and worth it."""
    D, C = x_TD.shape[1], weight.scale_CF.shape[0]
    if str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16"
    if C == 1 and weight.zero_CF is None:
        return "the weight has one group without zeros; accepted are more, XLA's own product is as good for one"
    return f"groups have {D // C} inputs; accepted are multiples of {LANES}" if D // C % LANES else None


def quantized_matmul(x_TD: jax.Array, weight: Any, *, activations: Any, interpret: Any) -> jax.Array:
    """See `quantized_matmul.quantized_matmul`; `activations` is None."""
    (T, D), (F, _), C = x_TD.shape, weight.values_FD.shape, weight.scale_CF.shape[0]
    tokens = min(TOKENS, ceil_div(T, SUBLANES) * SUBLANES)
    outputs, inputs = min(OUTPUTS, F), inputs_per_tile(D, D // C)
    of_group = pl.BlockSpec((C, outputs), lambda t, f, d: (0, f))
    scales = [weight.scale_CF] if weight.zero_CF is None else [weight.scale_CF, weight.zero_CF]
    return pl.pallas_call(
        functools.partial(_kernel, group=D // C),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(ceil_div(T, tokens), ceil_div(F, outputs), D // inputs),
            in_specs=[
                pl.BlockSpec((tokens, inputs), lambda t, f, d: (t, d)),
                pl.BlockSpec((outputs, inputs), lambda t, f, d: (f, d)),
                *[of_group] * len(scales),
            ],
            out_specs=pl.BlockSpec((tokens, outputs), lambda t, f, d: (t, f)),
            scratch_shapes=[pltpu.VMEM((tokens, outputs), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="quantized_matmul",
    )(x_TD, weight.values_FD, *scales)


def inputs_per_tile(num_inputs: int, group: int) -> int:
    """The most inputs, whole groups and no more than `INPUTS` unless a group has more, that divide all inputs."""
    return group * largest_divisor(num_inputs // group, INPUTS // group)


def _kernel(x_TD, values_FD, scale_CF, *refs, group: int):
    *zero_CF, out_TF, sum_TF = refs
    tile, groups_per_tile = pl.program_id(2), x_TD.shape[1] // group

    @pl.when(tile == 0)
    def _():
        sum_TF[...] = jnp.zeros_like(sum_TF)

    for i in range(groups_per_tile):
        inputs = slice(i * group, (i + 1) * group)
        which = pl.ds(tile * groups_per_tile + i, 1)
        x_Td = x_TD[:, inputs]
        part_TF = lax.dot_general(
            x_Td, values_FD[:, inputs].astype(x_Td.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if zero_CF:
            part_TF -= jnp.sum(x_Td.astype(jnp.float32), axis=1, keepdims=True) * zero_CF[0][which, :]
        sum_TF[...] += part_TF * scale_CF[which, :]

    @pl.when(tile == pl.num_programs(2) - 1)
    def _():
        out_TF[...] = sum_TF[...].astype(out_TF.dtype)
