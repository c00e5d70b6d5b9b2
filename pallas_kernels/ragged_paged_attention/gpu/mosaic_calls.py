"""The launch of Mosaic GPU's kernel for prompts, with the signature of `calls.attend`.

This module knows nothing of who asks (mosaic.py says for which layers it was timed), and of how the kernel works.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.gpu import calls, mosaic_kernels
from pallas_kernels.ragged_paged_attention.gpu.items import NUM_QUERIES, Items, Sizes
from pallas_kernels.ragged_paged_attention.gpu.mosaic import ROWS, MosaicTiles
from pallas_kernels.ragged_paged_attention.gpu.mosaic_kernels import GROUPS, Arrays, Layer, Shared
from pallas_kernels.ragged_paged_attention.gpu.statics import LOG2_E, LayerRule
from pallas_kernels.ragged_paged_attention.gpu.tiles import device_kind, num_cores

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # as products read two-byte numbers


def attend(
    rule: LayerRule,
    tiles: MosaicTiles,
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
    """See `calls.attend`; there are neither `scales` nor what was `begun`."""
    (_, N, H), (_, K, S, _) = q_TNH.shape, kv[0].shape
    shape = {"group_size": N // K, "num_kv_heads": K, "head_dim": H, "block_size": S}
    what = {"scale": rule.scale, "window": rule.window, "soft_cap": rule.soft_cap, "has_sinks": rule.has_sinks}
    how = {"slots": tiles.slots, "stages": tiles.stages, "takes_turns": tiles.takes_turns, "interpreted": interpret}
    layer = Layer(**shape, **what, **how, programs=num_cores(device_kind(interpret)))
    sinks = (sinks_of_rows(sinks_N, layer),) if rule.has_sinks else ()

    def kernel(items_ref, num_items_ref, seq_lens_ref, tables_ref, *refs, **shared):
        read_refs, part_refs = refs[:-3], refs[-3:]
        sinks_ref, (k_ref, v_ref, out_ref) = read_refs[0] if sinks else None, read_refs[len(sinks) :]
        where = items_ref, num_items_ref, seq_lens_ref, tables_ref
        arrays = Arrays(*where, sinks_ref, k_ref, v_ref, out_ref, *part_refs)
        mosaic_kernels.attend_kernel(arrays, Shared(**shared), layer)

    state = (sizes.num_parts, K, GROUPS * ROWS)
    launch = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*state, H), state, state)],
        scratch_types=scratch(layer, q_TNH.dtype),
        grid=(layer.programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="paged_attend_mosaic",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),
    )
    out_ref = jax.new_ref(q_TNH)  # what is written takes the place of what was read
    rows_of_cache = (x.reshape(-1, H) for x in kv)
    num_items = jnp.sum(items.items_I[:, NUM_QUERIES] > 0, dtype=jnp.int32)[None]
    where = items.items_I, num_items, metadata.seq_lens_R, metadata.block_tables_RM
    parts = launch(*where, *sinks, *rows_of_cache, out_ref)
    rows = calls.layer_of(rule, tiles, sizes, q_TNH, K, interpret)
    return calls.merge(dataclasses.replace(rows, in_halves=True), items, sinks_N, parts, out_ref[...], K, interpret)


def sinks_of_rows(sinks_N: jax.Array, layer: Layer) -> jax.Array:
    """What sinks are powers of 2 of, for the rows of a warp group, [K, X]."""
    sinks_KX = jnp.repeat(sinks_N.reshape(layer.num_kv_heads, -1) * LOG2_E, layer.queries, axis=1)
    return jnp.pad(sinks_KX, ((0, 0), (0, ROWS - sinks_KX.shape[1])))


def scratch(layer: Layer, dtype: Any) -> dict[str, Any]:
    """The shared memory and barriers of `Shared`; an arrival is that of a copy, or of a warp group."""
    tiled = functools.partial(plgpu.SMEM, dtype=dtype, transforms=TILED)
    rows, slots = (GROUPS, ROWS, layer.head_dim), (layer.stages, layer.slots, layer.head_dim)
    barrier, runs = plgpu.Barrier, layer.slots // layer.run
    return {
        "queries": plgpu.SMEM(rows, dtype),
        "outputs": plgpu.SMEM(rows, dtype),
        "q": tiled(rows),
        "k": tiled(slots),
        "v": tiled(slots),
        "q_ready": barrier(num_arrivals=layer.group_size, num_barriers=GROUPS),
        "k_ready": barrier(num_arrivals=runs, num_barriers=layer.stages),
        "v_ready": barrier(num_arrivals=runs, num_barriers=layer.stages),
        "k_free": barrier(num_arrivals=GROUPS, num_barriers=layer.stages),
        "v_free": barrier(num_arrivals=GROUPS, num_barriers=layer.stages),
        "turn": barrier(num_arrivals=GROUPS),
        **({"weights": tiled((GROUPS, ROWS, layer.slots))} if layer.interpreted else {}),
    }
