"""The calls of one layer: write the new tokens, attend from each class of query tiles, merge what was cut.

This is the only module that says how Pallas launches a kernel; triton_calls.py, which can take over, offers the same
`write` and `attend`. It knows nothing of who asks, and of how kernels work.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu import kernels
from pallas_kernels.ragged_paged_attention.gpu.items import Items, Sizes
from pallas_kernels.ragged_paged_attention.gpu.statics import LayerRule
from pallas_kernels.ragged_paged_attention.gpu.tiles import Tiles, device_kind, reads_float8
from pallas_kernels.ragged_paged_attention.shared_tiles import SharedQueries
from pallas_kernels.shapes import ceil_div

WRITE_TOKENS = 16
# Merging: as many programs as start at once; the least columns of a head for one, which are a line of memory; and how
# many numbers a warp loads at a time, which are 64 registers of a thread.
MERGING_PROGRAMS, MIN_COLUMNS, NUMBERS_OF_A_WARP = 1024, 32, 2048
# Products of float32 numbers: three passes through the tensor cores, which lose about as little as float32 does. Plain
# float32 products would take all of a thread's registers. XLA:CPU, and so the interpreter, has no such passes.
PRECISION = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
INTERPRETED_PRECISION = lax.Precision.HIGHEST


def write(
    new: tuple[jax.Array, ...], caches: tuple[jax.Array, ...], plan: Any, interpret: bool
) -> tuple[jax.Array, ...]:
    """The caches with what is new, in place when they are donated: x_TKH for [B, K, S, H], x_TK for [B, K, S]."""
    T, K = new[0].shape[:2]
    first = 2 + len(new)
    return pl.pallas_call(
        functools.partial(kernels.write_kernel, tokens=WRITE_TOKENS),
        grid=(ceil_div(T, WRITE_TOKENS), K),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches),
        input_output_aliases={first + i: i for i in range(len(caches))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_kv_write",
    )(plan.slot_block_T, plan.slot_offset_T, *new, *caches)


def attend(
    rule: LayerRule,
    tiles: Tiles,
    sizes: Sizes,
    items: Items,
    metadata: Any,
    sinks_N: jax.Array,
    q_TNH: jax.Array,
    kv: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    begun: tuple[jax.Array, ...],
    interpret: bool,
) -> jax.Array:
    """`q_TNH` with outputs in place of the queries of the items' tokens, which nobody else reads. `begun` is what
    `attend_spans` has left, if it was asked."""
    K = kv[0].shape[1]
    layer = layer_of(rule, tiles, sizes, q_TNH, K, interpret, begins=bool(begun))
    settings = _settings(tiles, interpret)
    ends = (metadata.visible_end_T,) if rule.sees_ahead else ()
    out_struct = jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)
    out_TNH, *parts = pl.pallas_call(
        functools.partial(kernels.attend_kernel, layer=layer),
        grid=(len(items.items_I), K),
        out_shape=[out_struct, *_parts(sizes.num_parts, K, layer)],
        input_output_aliases={3: 0},
        name="paged_attend",
        **settings,
    )(items.items_I, metadata.block_tables_RM, sinks_N, q_TNH, *kv, *scales, *ends, *begun)
    return merge(layer, items, sinks_N, parts, out_TNH, K, interpret, begun)


def merge(
    layer: kernels.Layer,
    items: Items,
    sinks_N: jax.Array,
    parts: Sequence[jax.Array],
    out_TNH: jax.Array,
    num_kv_heads: int,
    interpret: bool,
    begun: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """`out_TNH` with the outputs of tiles that were cut into parts."""
    merger, grid, settings = _merger(layer, len(items.tiles_E), num_kv_heads, interpret)
    return pl.pallas_call(
        functools.partial(kernels.merge_kernel, layer=layer, merger=merger),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(out_TNH.shape, out_TNH.dtype),
        input_output_aliases={5: 0},
        name="paged_merge",
        **settings,
    )(items.tiles_E, sinks_N, *parts, out_TNH, *begun)


def attend_spans(
    rule: LayerRule,
    tiles: Tiles,
    sizes: Sizes,
    items: Items,
    queries: SharedQueries,
    metadata: Any,
    sinks_N: jax.Array,
    q_TNH: jax.Array,
    kv: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Attention to spans that rows share: (out_TNH, top_TN), float32, as `kernels.Begun` has it; of others anything."""
    K = kv[0].shape[1]
    layer, settings = layer_of(rule, tiles, sizes, q_TNH, K, interpret), _settings(tiles, interpret)
    where = items.items_I, metadata.block_tables_RM, queries.token_Y, queries.position_Y
    ends = (queries.end_Y,) if rule.sees_ahead else ()
    parts = pl.pallas_call(
        functools.partial(kernels.attend_spans_kernel, layer=layer),
        grid=(len(items.items_I), K),
        out_shape=_parts(len(items.items_I), K, layer),
        name="paged_attend_spans",
        **settings,
    )(*where, q_TNH, *kv, *scales, *ends)
    merger, grid, settings = _merger(layer, len(items.tiles_E), K, interpret)
    return tuple(
        pl.pallas_call(
            functools.partial(kernels.merge_spans_kernel, layer=layer, merger=merger),
            grid=grid,
            out_shape=[jax.ShapeDtypeStruct(x, jnp.float32) for x in (q_TNH.shape, q_TNH.shape[:2])],
            name="paged_merge_spans",
            **settings,
        )(items.tiles_E, sinks_N, queries.token_Y, *parts)
    )


def layer_of(
    rule: LayerRule,
    tiles: Tiles,
    sizes: Sizes,
    q_TNH: jax.Array,
    num_kv_heads: int,
    interpret: bool,
    begins: bool = False,
) -> kernels.Layer:
    """What is static of the kernels."""
    group_size, head_dim = q_TNH.shape[1] // num_kv_heads, q_TNH.shape[2]
    return kernels.Layer(
        sizes.queries,
        tiles.rows_for(group_size),
        sizes.slots,
        group_size,
        head_dim,
        **dataclasses.asdict(rule),
        precision=INTERPRETED_PRECISION if interpret else PRECISION,
        reads_float8=reads_float8(device_kind(interpret)),
        begins=begins,
        interpreted=interpret,
    )


def _settings(tiles: Tiles, interpret: bool) -> dict[str, Any]:
    """How a kernel with these tiles is launched."""
    params = plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    return {"compiler_params": params, "interpret": interpret}


def _merger(
    layer: kernels.Layer, num_tiles: int, num_kv_heads: int, interpret: bool
) -> tuple[kernels.Merger, tuple[int, ...], dict[str, Any]]:
    """(how parts are put together, the grid, how the kernel is launched). Where tiles are few, each head is cut into
    columns, since one program for 66 parts would take a third of the time that they took (an H200, 1 x 131,072)."""
    width = 1 << (layer.head_dim - 1).bit_length()
    cuts = MERGING_PROGRAMS // (num_tiles * num_kv_heads)
    columns = max(min(width, MIN_COLUMNS), width >> max(cuts, 1).bit_length() - 1)
    warps = 4 if layer.rows * columns <= 4096 else 8
    merger = kernels.Merger(columns, max(1, NUMBERS_OF_A_WARP * warps // (layer.rows * columns)))
    params = plgpu.CompilerParams(num_warps=warps, num_stages=1)
    grid = (num_tiles, num_kv_heads, ceil_div(layer.head_dim, columns))
    return merger, grid, {"compiler_params": params, "interpret": interpret}


def _parts(num_parts: int, num_kv_heads: int, layer: kernels.Layer) -> list[jax.ShapeDtypeStruct]:
    """Partial results: part, top and total."""
    state = (num_parts, num_kv_heads, layer.rows)
    return [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*state, layer.head_dim), state, state)]
