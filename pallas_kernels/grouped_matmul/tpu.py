"""Each token times its expert's weight, on a TPU: quantised weights are converted in VMEM, on their way into the
product.

Layout: values [E, F, D] as they are; scales [E, C, F], so that a group's lie along lanes, as the outputs do.

Grid: (tiles of outputs, items, tiles of inputs). An item is a tile of tokens with one expert; items that share a tile
follow each other, and its outputs stay in VMEM between them.

Skipping: experts without tokens have no item. Items of padding tokens, and those that only fill the list, read
nothing new and multiply nothing.

Requires: groups of a multiple of 128 inputs, the lanes of a register, or of 16, 32 and 64; of float4 the latter;
without scales, all inputs
are one group. With scales, bfloat16 or float16 tokens.

Padding: tokens beyond the last group give zeros, those beyond the last tile are garbage that stays in its rows.

Numerics: values are exact in x's type. Each group's product is summed in float32, then scaled, then added. Weights in
small groups are dequantised in float32 and rounded to x's type where a tile has many tokens
(`quantized_matmul/groups.py`).

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
from pallas_kernels.quantized_matmul.groups import LANES, add_by_group, add_dequantized
from pallas_kernels.quantized_matmul.tpu import (
    FLOAT4,
    INPUTS,
    SUBLANES,
    VMEM_LIMIT_BYTES,
    inputs_per_tile,
    is_dequantized,
    why_no_groups,
)
from pallas_kernels.shapes import ceil_div, largest_divisor

TOKENS, OUTPUTS = 128, 256  # a tile of each, at most


def cannot_take(x_TD: Any, weights: Any) -> str | None:
    """Groups must be whole registers, or a part of one."""
    if weights.scale_ECF is not None and str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16, or weights without scales"
    D = x_TD.shape[1]
    return why_no_groups(D, D // _num_groups(weights), weights.values_EFD.dtype)


def grouped_matmul(x_TD: jax.Array, weights: Any, group_sizes_E: jax.Array, *, interpret: Any) -> jax.Array:
    """See `grouped_matmul.grouped_matmul`."""
    (T, D), (E, F, _), C = x_TD.shape, weights.values_EFD.shape, _num_groups(weights)
    values_EFD, is_float4 = weights.values_EFD, str(weights.values_EFD.dtype) == FLOAT4
    if is_float4:
        values_EFD = lax.bitcast_convert_type(values_EFD, jnp.int4)
    tokens, outputs = min(TOKENS, ceil_div(T, SUBLANES) * SUBLANES), min(OUTPUTS, F)
    group, is_small = D // C, D // C % LANES > 0
    piece = group if is_small else LANES * largest_divisor(group // LANES, INPUTS // LANES)
    inputs = inputs_per_tile(D, piece)
    items = make_items(group_sizes_E, T, tokens, aligned=True)
    last_used = jnp.max(jnp.where(group_sizes_E > 0, jnp.arange(E, dtype=jnp.int32), 0))
    weight_I = jnp.where(items.expert_I < E, items.expert_I, last_used)

    def of_tokens(f, i, d, tile_I, *_):
        return tile_I[i], d

    def of_weight(f, i, d, tile_I, weight_I, expert_I, *_):
        return weight_I[i], f, jnp.where(expert_I[i] < E, d, D // inputs - 1)

    def of_small_groups(f, i, d, tile_I, weight_I, expert_I, *_):
        return weight_I[i], jnp.where(expert_I[i] < E, d, D // inputs - 1), f

    scales = [x_ECF for x_ECF in (weights.scale_ECF, weights.zero_ECF) if x_ECF is not None]
    of_scales = pl.BlockSpec((1, C, outputs), lambda f, i, d, tile_I, weight_I, *_: (weight_I[i], 0, f))
    add_tile = functools.partial(_add_pieces, piece=piece, group=group)
    if is_small:
        of_scales = pl.BlockSpec((1, inputs // group, outputs), of_small_groups)
        add = add_dequantized if is_dequantized(tokens, group) else add_by_group
        add_tile = functools.partial(_add_small_groups, functools.partial(add, group=group, are_codes=is_float4))
    return pl.pallas_call(
        functools.partial(_kernel, add_tile, num_experts=E),
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
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(
        items.first_I // tokens,
        weight_I,
        items.expert_I,
        items.start_I,
        items.end_I,
        x_TD,
        values_EFD,
        *scales,
    )


def _num_groups(weights: Any) -> int:
    return 1 if weights.scale_ECF is None else weights.scale_ECF.shape[1]


def _kernel(add_tile: Any, tile_I, _, expert_I, start_I, end_I, x_TD, values_1FD, *refs, num_experts: int):
    *scales, out_TF, sum_TF = refs
    item, tile = pl.program_id(1), pl.program_id(2)

    @pl.when(tile == 0)
    def _():
        sum_TF[...] = jnp.zeros_like(sum_TF)

    @pl.when(expert_I[item] < num_experts)
    def _():
        add_tile(sum_TF, x_TD, values_1FD, *scales, tile=tile)

    @pl.when(tile == pl.num_programs(2) - 1)
    def _():
        token_T = tile_I[item] * sum_TF.shape[0] + lax.broadcasted_iota(jnp.int32, sum_TF.shape, 0)
        mine_TF = (token_T >= start_I[item]) & (token_T < end_I[item])
        begun = (item > 0) & (tile_I[jnp.maximum(item - 1, 0)] == tile_I[item])
        others_TF = jnp.where(begun, out_TF[...], jnp.zeros_like(out_TF))
        out_TF[...] = jnp.where(mine_TF, sum_TF[...].astype(out_TF.dtype), others_TF)


def _add_small_groups(add: Any, sum_TF: Any, x_TD: Any, *of_expert: Any, tile: jax.Array) -> None:
    add(sum_TF, x_TD, *(x_1.at[0] for x_1 in of_expert), tile=tile)


def _add_pieces(
    sum_TF: Any,
    x_TD: Any,
    values_1FD: Any,
    scale_1CF: Any = None,
    zero_1CF: Any = None,
    *,
    tile: jax.Array,
    piece: int,
    group: int,
) -> None:
    """Where a piece of inputs lies in one group, of whole registers; there may be no scales."""
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    pieces_per_tile = x_TD.shape[1] // piece
    for i in range(pieces_per_tile):
        inputs = slice(i * piece, (i + 1) * piece)
        x_Td = x_TD[:, inputs]
        values_Fd = values_1FD[0, :, inputs].astype(x_Td.dtype)
        part_TF = lax.dot_general(
            x_Td, values_Fd, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        which = pl.ds(lax.div((tile * pieces_per_tile + i) * piece, group), 1)
        if zero_1CF is not None:
            part_TF -= jnp.sum(x_Td.astype(jnp.float32), axis=1, keepdims=True) * zero_1CF[0, which, :]
        if scale_1CF is not None:
            part_TF *= scale_1CF[0, which, :].astype(jnp.float32)
        sum_TF[...] += part_TF
