"""The calls of one layer through jax-triton: what calls.py does through Pallas, with the same arguments.

It needs nothing of Pallas, whose Triton lowering is deprecated, but the packages jax-triton and triton; interpreted,
triton alone. It knows nothing of who asks, and of how kernels work.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.gpu import triton_kernels as kernels
from pallas_kernels.ragged_paged_attention.gpu.items import Items, Sizes
from pallas_kernels.ragged_paged_attention.gpu.statics import LayerRule, pieces
from pallas_kernels.ragged_paged_attention.gpu.tiles import Tiles, device_kind, reads_float8
from pallas_kernels.ragged_paged_attention.quantized import is_quantized
from pallas_kernels.ragged_paged_attention.shared_tiles import SharedQueries
from pallas_kernels.shapes import ceil_div

WRITE_TOKENS = 16
PTX_VERSION = 90  # what CUDA 13.0 assembles; Triton would write for its own assembler, which may be newer than XLA's


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel is launched. name: its name in triton_kernels.py. warps, stages: Triton's."""

    name: str
    grid: tuple[int, int]
    warps: int
    stages: int


def write(
    new: tuple[jax.Array, ...], caches: tuple[jax.Array, ...], plan: Any, interpret: bool
) -> tuple[jax.Array, ...]:
    """The caches with what is new, in place when they are donated: x_TKH for [B, K, S, H], x_TK for [B, K, S]."""
    T, K = new[0].shape[:2]
    types = [x.dtype for x in caches]
    new, caches = (tuple(as_bytes(x) for x in arrays) for arrays in (new, caches))
    how = Launch("paged_kv_write", (ceil_div(T, WRITE_TOKENS), K), warps=4, stages=1)
    written = launch(
        how,
        interpret,
        {"caches": caches},
        {},
        block=plan.slot_block_T,
        offset=plan.slot_offset_T,
        new=new,
        num_tokens=T,
        num_blocks=len(caches[0]),
        tokens=WRITE_TOKENS,
        heads=heads_of(caches[0]),
    )["caches"]
    return tuple(lax.bitcast_convert_type(x, dtype) for x, dtype in zip(written, types))


def as_bytes(x: jax.Array) -> jax.Array:
    """`x`, as integers if it is of 8 bits: Triton has float8 on some devices only. XLA compiles that to nothing."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


def heads_of(cache_BKSH: jax.Array) -> kernels.Heads:
    """The static shape of a cache."""
    _, K, S, H = cache_BKSH.shape
    return kernels.Heads(K, S, H, tuple(pieces(H)))


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
    layer, cache = _layer(rule, tiles, sizes, q_TNH, kv, scales, interpret)
    begun_or_none, K = begun or None, layer.heads.num_kv_heads
    parts = launch(
        Launch("paged_attend", (len(items.items_I), K), tiles.warps, tiles.stages),
        interpret,
        {"out": q_TNH},
        _parts(sizes.num_parts, layer),
        items=items.items_I,
        tables=metadata.block_tables_RM,
        sinks=sinks_N,
        ends=metadata.visible_end_T,
        begun=begun_or_none,
        table_width=metadata.block_tables_RM.shape[1],
        layer=layer,
        **cache,
    )
    changed = {"out": parts.pop("out")}
    how = Launch("paged_merge", (len(items.tiles_E), K), tiles.warps, tiles.stages)
    return launch(
        how, interpret, changed, {}, tiles=items.tiles_E, sinks=sinks_N, begun=begun_or_none, layer=layer, **parts
    )["out"]


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
    """Attention to spans that rows share: (out_TNH, top_TN), see `triton_kernels.paged_merge_spans`; of others
    anything."""
    layer, cache = _layer(rule, tiles, sizes, q_TNH, kv, scales, interpret)
    K, tables_RM = layer.heads.num_kv_heads, metadata.block_tables_RM
    parts = launch(
        Launch("paged_attend_spans", (len(items.items_I), K), tiles.warps, tiles.stages),
        interpret,
        {},
        _parts(len(items.items_I), layer),
        items=items.items_I,
        tables=tables_RM,
        tokens=queries.token_Y,
        positions=queries.position_Y,
        ends=queries.end_Y,
        q=q_TNH,
        table_width=tables_RM.shape[1],
        layer=layer,
        **cache,
    )
    how = Launch("paged_merge_spans", (len(items.tiles_E), K), tiles.warps, tiles.stages)
    shapes = {"begun_out": q_TNH.shape, "begun_top": q_TNH.shape[:2]}
    made = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    begun = launch(
        how, interpret, {}, made, tiles=items.tiles_E, sinks=sinks_N, tokens=queries.token_Y, layer=layer, **parts
    )
    return begun["begun_out"], begun["begun_top"]


def _layer(
    rule: LayerRule,
    tiles: Tiles,
    sizes: Sizes,
    q_TNH: jax.Array,
    kv: tuple[jax.Array, ...],
    scales: tuple[jax.Array, ...],
    interpret: bool,
) -> tuple[kernels.Layer, dict[str, Any]]:
    """(what is static of the kernels, the cache as they take it)."""
    group_size, dtype = q_TNH.shape[1] // kv[0].shape[1], kv[0].dtype
    operand = (q_TNH.dtype if is_quantized(dtype) else dtype).name
    if interpret and operand == "bfloat16":
        operand = "float32"  # the interpreter, being numpy, multiplies the bits of bfloat16 as if they were integers
    as_bits = dtype == jnp.float8_e4m3fn and not reads_float8(device_kind(interpret))
    layer = kernels.Layer(
        heads_of(kv[0]),
        tiles.rows_for(group_size),
        sizes.slots,
        group_size,
        kernels.TYPES[operand],
        **dataclasses.asdict(rule),
        float8_as_bits=as_bits,
    )
    k, v = (as_bytes(x) if as_bits else x for x in kv)
    k_scales, v_scales = scales or (None, None)
    return layer, {"k": k, "v": v, "k_scales": k_scales, "v_scales": v_scales}


def _parts(num_parts: int, layer: kernels.Layer) -> dict[str, jax.ShapeDtypeStruct]:
    """Partial results."""
    state = jax.ShapeDtypeStruct((num_parts, layer.heads.num_kv_heads, layer.rows), jnp.float32)
    part = jax.ShapeDtypeStruct((*state.shape, layer.heads.head_dim), jnp.float32)
    return {"part": part, "top": state, "total": state}


def launch(
    how: Launch, interpret: bool, changed: dict[str, Any], outputs: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """Launch a kernel: `changed` are the arrays that it updates, `outputs` the types of what it makes. Returns both."""
    if interpret:
        from pallas_kernels.ragged_paged_attention.gpu.triton_interpreter import interpreted

        return interpreted(how.name, how.grid, changed, outputs, arguments)
    refs = jax.tree.map(jax.new_ref, changed)
    made = jax_triton_for_this_jax().triton_call(
        kernel=getattr(kernels, how.name),
        name=how.name,
        grid=how.grid,
        num_warps=how.warps,
        num_stages=how.stages,
        backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
        out_type=tuple(outputs.values()),
        **arguments,
        **refs,
    )
    return jax.tree.map(jax.freeze, refs) | dict(zip(outputs, made))


def jax_triton_for_this_jax() -> ModuleType:
    """The package jax-triton, whose rule for dead code is made to fit.

    Release 0.4.1 takes two arguments where jax 0.12 gives three. The rule, that its kernels are never dead, stays.
    """
    import jax_triton
    from jax._src.interpreters import partial_eval

    def never_dead(used_outputs: Any, *live_and_equation: Any) -> tuple[list[bool], Any]:
        equation = live_and_equation[-1]
        return [True] * len(equation.invars), equation

    partial_eval.dce_rules[jax_triton.triton_lib.triton_kernel_call_p] = never_dead
    return jax_triton
