"""Each token times its expert's weight, on an NVIDIA GPU (Pallas, Triton lowering).

Layout: values [E, F, D] as they are; int4 and float4 as bytes [E, F, D / 2] of two neighbouring inputs, for which even
and odd inputs of x are separated beforehand.

Grid: (items, tiles of outputs). An item is a tile of one expert's tokens, beginning where they do; a program walks
over all inputs, a piece of one group at a time.

Skipping: experts without tokens have no item. Items of padding tokens write zeros, those that only fill the list
nothing.

Requires: bfloat16 or float16 tokens; groups of a multiple of 32 inputs (all inputs, where there are no scales).
float8 needs a GPU that has it (Ada, Hopper or later).

Padding: tokens beyond the last group give zeros. Tokens and outputs beyond an item's are not read or stay in their
rows and columns, which are not written.

Numerics: values are exact in x's type. Each piece's product is summed in float32, then scaled, then added.

Cost: reads an expert's weights once for each of its tiles of tokens; work is that of the tokens that exist, where
`jax.lax.ragged_dot` multiplies each with every expert. Not measured.

Knows nothing of routing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.grouped_matmul.items import make_items
from pallas_kernels.quantized_matmul.gpu import (
    FEWEST_INPUTS,
    FEWEST_TOKENS,
    inputs_per_piece,
    is_float4,
    lacks_type,
    packed,
    scale_of,
    times_transposed,
    unpacked,
)
from pallas_kernels.shapes import ceil_div

TOKENS, OUTPUTS = 64, 64  # a tile of each, at most


def cannot_take(x_TD: Any, weights: Any) -> str | None:
    """Groups must be whole tiles."""
    if str(x_TD.dtype) not in ("bfloat16", "float16"):
        return f"x_TD is {x_TD.dtype}; accepted are bfloat16 and float16"
    if lacks_type(weights.values_EFD):
        return f"values_EFD is {weights.values_EFD.dtype}, which this GPU lacks; accepted are other types"
    if is_float4(weights.values_EFD) and weights.zero_ECF is not None:
        return f"values_EFD is {weights.values_EFD.dtype} with zeros; accepted is None"
    group = x_TD.shape[1] // (1 if weights.scale_ECF is None else weights.scale_ECF.shape[1])
    return f"groups have {group} inputs; accepted are multiples of {FEWEST_INPUTS}" if group % FEWEST_INPUTS else None


def grouped_matmul(x_TD: jax.Array, weights: Any, group_sizes_E: jax.Array, *, interpret: Any) -> jax.Array:
    """See `grouped_matmul.grouped_matmul`."""
    (T, D), (E, F, _) = x_TD.shape, weights.values_EFD.shape
    group = D if weights.scale_ECF is None else D // weights.scale_ECF.shape[1]
    tokens = min(TOKENS, max(FEWEST_TOKENS, pl.next_power_of_2(ceil_div(T, E))))
    items = make_items(group_sizes_E, T, tokens, aligned=False)
    parts_TD, values_fD = packed(x_TD, weights.values_EFD.reshape(E * F, D))
    scales = [x_ECF for x_ECF in (weights.scale_ECF, weights.zero_ECF) if x_ECF is not None]
    kernel = functools.partial(
        _kernel,
        num_parts=len(parts_TD),
        tokens=tokens,
        inputs=inputs_per_piece(group),
        group=group,
        are_codes=is_float4(weights.values_EFD),
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((T, F), x_TD.dtype),
        grid=(len(items.expert_I), ceil_div(F, OUTPUTS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_matmul",
    )(items.expert_I, items.first_I, items.end_I, values_fD.reshape(E, F, -1), *scales, *parts_TD)


def _kernel(
    expert_I,
    first_I,
    end_I,
    values_EFD,
    *refs,
    num_parts: int,
    tokens: int,
    inputs: int,
    group: int,
    are_codes: bool,
):
    *scale_ECF, out_TF = refs[: -num_parts - 1] + refs[-1:]
    parts_TD = refs[-num_parts - 1 : -1]
    item, (E, F, num_columns) = pl.program_id(0), values_EFD.shape
    real = expert_I[item] < E
    expert = jnp.minimum(expert_I[item], E - 1)
    tile_t, tile_f = pl.ds(first_I[item], tokens), pl.ds(pl.program_id(1) * OUTPUTS, OUTPUTS)
    mine_t = first_I[item] + jnp.arange(tokens) < end_I[item]
    in_f = pl.program_id(1) * OUTPUTS + jnp.arange(OUTPUTS) < F
    columns = inputs // num_parts

    def add_piece(i, sum_tf):
        tile_d = pl.ds(i * columns, columns)
        x_td = [plgpu.load(part_TD.at[tile_t, tile_d], mask=mine_t[:, None]) for part_TD in parts_TD]
        stored_fd = plgpu.load(values_EFD.at[expert, tile_f, tile_d], mask=in_f[:, None])
        values_fd = unpacked(stored_fd, num_parts, are_codes)
        part_tf = sum(times_transposed(x, values) for x, values in zip(x_td, values_fd))
        if len(scale_ECF) > 1:
            total_t = sum(jnp.sum(x.astype(jnp.float32), axis=1) for x in x_td)
            zero_f = plgpu.load(scale_ECF[1].at[expert, i * inputs // group, tile_f], mask=in_f)
            part_tf -= total_t[:, None] * zero_f[None, :]
        if scale_ECF:
            scale_f = plgpu.load(scale_ECF[0].at[expert, i * inputs // group, tile_f], mask=in_f)
            part_tf *= scale_of(scale_f, are_codes)[None, :]
        return sum_tf + part_tf

    num_pieces = num_columns // columns * real.astype(jnp.int32)
    sum_tf = lax.fori_loop(0, num_pieces, add_piece, jnp.zeros((tokens, OUTPUTS), jnp.float32))
    plgpu.store(out_TF.at[tile_t, tile_f], sum_tf.astype(out_TF.dtype), mask=mine_t[:, None] & in_f[None, :])
