"""Each token times its expert's weight, on a TPU: quantised weights are converted in VMEM, on their way into the
product.

Layout: values [E, F, D] as they are; scales [E, C, F], so that a group's lie along lanes, as the outputs do.

Grid: (tiles of outputs, items, tiles of inputs). An item is a tile of tokens with one expert; items that share a tile
follow each other, and its outputs stay in VMEM between them.

Skipping: experts without tokens have no item. Items of padding tokens, and those that only fill the list, read
nothing new and multiply nothing.

Requires: groups of a multiple of 128 inputs, the lanes of a register; without scales, all inputs are one group.
With scales, bfloat16 or float16 tokens.

Padding: tokens beyond the last group give zeros, those beyond the last tile are garbage that stays in its rows.

Numerics: values are exact in x's type. Each group's product is summed in float32, then scaled, then added.

Cost: reads an expert's weights once for each of its tiles of tokens; `ragged_dot` would read, dequantise and write
quantised ones of all experts first, and what becomes of others changes with the compiler (README.md). Not measured.

Knows nothing of routing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.items import make_items
from pallas_kernels.quantized_matmul.tpu import INPUTS, LANES, SUBLANES, inputs_per_tile
from pallas_kernels.shapes import ceil_div, largest_divisor

TOKENS, OUTPUTS = 128, 256  # a tile of each, at most


def cannot_take(x_TD: Any, weights: Any) -> str | None:
    """Groups must be whole registers."""
    if weights.scale_ECF is not None and str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16, or weights without scales"
    group = x_TD.shape[1] // _num_groups(weights)
    return f"groups have {group} inputs; accepted are multiples of {LANES}" if group % LANES else None


def grouped_matmul(x_TD: jax.Array, weights: Any, group_sizes_E: jax.Array, *, interpret: Any) -> jax.Array:
    """See `grouped_matmul.grouped_matmul`."""
    (T, D), (E, F, _), C = x_TD.shape, weights.values_EFD.shape, _num_groups(weights)
    tokens, outputs = min(TOKENS, ceil_div(T, SUBLANES) * SUBLANES), min(OUTPUTS, F)
    piece = LANES * largest_divisor(D // C // LANES, INPUTS // LANES)
    inputs = inputs_per_tile(D, piece)
    items = make_items(group_sizes_E, T, tokens, aligned=True)
    last_used = jnp.max(jnp.where(group_sizes_E > 0, jnp.arange(E, dtype=jnp.int32), 0))
    weight_I = jnp.where(items.expert_I < E, items.expert_I, last_used)

    def of_tokens(f, i, d, tile_I, *_):
        return tile_I[i], d

    def of_weight(f, i, d, tile_I, weight_I, expert_I, *_):
        return weight_I[i], f, jnp.where(expert_I[i] < E, d, D // inputs - 1)

    scales = [] if weights.scale_ECF is None else [weights.scale_ECF]
    of_scales = pl.BlockSpec((1, C, outputs), lambda f, i, d, tile_I, weight_I, *_: (weight_I[i], 0, f))
    return pl.pallas_call(
        functools.partial(_kernel, num_experts=E, piece=piece, group=D // C),
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(ceil_div(F, outputs), len(weight_I), D // inputs),
            in_specs=[
                pl.BlockSpec((tokens, inputs), of_tokens),
                pl.BlockSpec((1, outputs, inputs), of_weight),
                *[of_scales for _ in scales],
            ],
            out_specs=pl.BlockSpec((tokens, outputs), lambda f, i, d, tile_I, *_: (tile_I[i], f)),
            scratch_shapes=[pltpu.VMEM((tokens, outputs), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped_matmul",
    )(
        items.first_I // tokens,
        weight_I,
        items.expert_I,
        items.start_I,
        items.end_I,
        x_TD,
        weights.values_EFD,
        *scales,
    )


def _num_groups(weights: Any) -> int:
    return 1 if weights.scale_ECF is None else weights.scale_ECF.shape[1]


def _kernel(tile_I, _, expert_I, start_I, end_I, x_TD, values_1FD, *refs, num_experts: int, piece: int, group: int):
    *scales, out_TF, sum_TF = refs
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    item, tile = pl.program_id(1), pl.program_id(2)
    pieces_per_tile = x_TD.shape[1] // piece

    @pl.when(tile == 0)
    def _():
        sum_TF[...] = jnp.zeros_like(sum_TF)

    @pl.when(expert_I[item] < num_experts)
    def _():
        for i in range(pieces_per_tile):
            inputs = slice(i * piece, (i + 1) * piece)
            x_Td = x_TD[:, inputs]
            values_Fd = values_1FD[0, :, inputs].astype(x_Td.dtype)
            part_TF = lax.dot_general(
                x_Td, values_Fd, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            for scale_1CF in scales:
                which = lax.div((tile * pieces_per_tile + i) * piece, group)
                part_TF *= scale_1CF[0, pl.ds(which, 1), :]
            sum_TF[...] += part_TF

    @pl.when(tile == pl.num_programs(2) - 1)
    def _():
        token_T = tile_I[item] * sum_TF.shape[0] + lax.broadcasted_iota(jnp.int32, sum_TF.shape, 0)
        mine_TF = (token_T >= start_I[item]) & (token_T < end_I[item])
        begun = (item > 0) & (tile_I[jnp.maximum(item - 1, 0)] == tile_I[item])
        others_TF = jnp.where(begun, out_TF[...], jnp.zeros_like(out_TF))
        out_TF[...] = jnp.where(mine_TF, sum_TF[...].astype(out_TF.dtype), others_TF)
