"""Adapters in the programs of a step: each token's slot on its way to the linear layers, and an adapter's into a slot.

`AdaptedParams` is what programs of tokens take for parameters in an engine that has adapters. A step takes as many
parts of the stacks as the adapters in it need (`StepLayout.lora_level`), so that one without any computes what an
engine without any does.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxpaged.layers.embedding import AdaptedTable
from jaxpaged.layers.experts import Placement, expert_of
from jaxpaged.layers.linear import XLA, Linear
from jaxpaged.layers.lora import BoundLora, LoraStacks, SlottedLines, TokenSlots, token_slots
from jaxpaged.params.quantized import QuantizedArray, is_quantized
from jaxpaged.params.sharding import expert_axes
from jaxpaged.worker.lora_stacks import LoraSpec


@struct.dataclass
class AdaptedParams:
    """The parameters of a model, or its head, and the stacks of its adapters by path in them."""

    params: Any
    stacks: dict[str, LoraStacks]


def without_adapters(params: Any) -> Any:
    """The parameters of the model alone, of what programs of tokens take."""
    return params.params if isinstance(params, AdaptedParams) else params


def bound_params(adapted: AdaptedParams, spec: LoraSpec, slot_T: jax.Array, level: int) -> Any:
    """The parameters of the model, whose linear layers add what the adapters in these slots make of tokens."""
    slots = token_slots(slot_T, spec.max_loras)

    def of_node(path: Any, node: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if name not in spec.linears:
            return node
        lora = bound(adapted, spec, name, slots, level)
        return node.replace(lora=lora) if isinstance(node, Linear) else AdaptedTable(node, lora)

    is_whole = lambda node: isinstance(node, Linear) or is_quantized(node)
    return jax.tree_util.tree_map_with_path(of_node, adapted.params, is_leaf=is_whole)


def bound_tower(adapted: AdaptedParams, spec: LoraSpec, slot: jax.Array, num_patches: int, num_embeds: int) -> Any:
    """The parameters of a tower, whose linear layers add what the adapter in a slot makes of all of a batch."""
    own_slot = lambda stack: jax.lax.dynamic_slice_in_dim(stack, jnp.maximum(slot - 1, 0), 1)
    of_patches, of_embeds = (token_slots(jnp.full(n, slot > 0, jnp.int32), 1) for n in (num_patches, num_embeds))

    def of_node(path: Any, node: Any) -> Any:
        if (name := jax.tree_util.keystr(path)) not in spec.tower:
            return node
        linear = spec.linears[spec.tower[name]]
        slots = of_embeds if linear.reads_embeds else of_patches
        return node.replace(
            lora=BoundLora(jax.tree.map(own_slot, adapted.stacks[name]), slots, linear.split(spec.mesh))
        )

    return jax.tree_util.tree_map_with_path(of_node, adapted.params, is_leaf=lambda node: isinstance(node, Linear))


def bound(adapted: AdaptedParams, spec: LoraSpec, name: str, slots: TokenSlots, level: int) -> BoundLora:
    """The stacks of a path with the slots of tokens."""
    stacks = adapted.stacks[name]
    if level < spec.num_levels:
        stacks = LoraStacks(stacks.parts[:level])
    return BoundLora(stacks, slots, spec.linears[name].split(spec.mesh))


def bound_head(head: Any, spec: LoraSpec, slot_S: jax.Array, level: int) -> Any:
    """The output head, which adds what the adapters in these slots make of hidden states. One that came without stacks
    is as it is."""
    if not isinstance(head, AdaptedParams):
        return head
    assert spec.head is not None, "only an engine with adapters of the head has stacks of it"
    return AdaptedTable(head.params, bound(head, spec, spec.head, token_slots(slot_S, spec.max_loras), level))


def slotted_scores(scores: Callable[..., jax.Array], adapted: AdaptedParams, pooled: SlottedLines) -> jax.Array:
    """Float32 scores [S, Y], each line's by the classifier of its own adapter. `scores(head, vectors)` are those of one
    classifier."""
    base_SY = scores(adapted.params, pooled.lines)
    of_slots = jax.vmap(lambda head: scores(head, pooled.lines))(own_heads(adapted))
    own_SY = of_slots[jnp.maximum(pooled.slots - 1, 0), jnp.arange(len(pooled.slots))]
    return jnp.where(pooled.slots[:, None] > 0, own_SY, base_SY)


def own_heads(adapted: AdaptedParams) -> Any:
    """The classifiers of all slots, with slots as the first axis: the base's where an adapter has none of its own."""

    def of_leaf(path: Any, leaf: Any) -> jax.Array:
        stack = adapted.stacks[f".score{jax.tree_util.keystr(path)}"]
        is_own = stack.is_own.reshape(-1, *[1] * (stack.values.ndim - 1)) > 0
        return jnp.where(is_own, stack.values, in_floats(leaf))

    heads = jax.tree_util.tree_map_with_path(of_leaf, adapted.params, is_leaf=is_quantized)
    is_linear = lambda node: isinstance(node, Linear)
    by_xla = lambda node: node.replace(backend=XLA) if is_linear(node) else node
    return jax.tree.map(by_xla, heads, is_leaf=is_linear)


def in_floats(leaf: Any) -> jax.Array:
    """Float32 values of a parameter."""
    if not isinstance(leaf, QuantizedArray):
        return leaf.astype(jnp.float32)
    scales = leaf.scales.reshape(*leaf.scales.shape, *[1] * (leaf.values.ndim - leaf.scales.ndim))
    return leaf.values.astype(jnp.float32) * scales


def load_adapter(
    spec: LoraSpec,
    stacks: Any,
    uploads: tuple[jax.Array, ...],
    slot: jax.Array,
    placements: Mapping[str, Placement] = MappingProxyType({}),
) -> Any:
    """The stacks with an adapter in a slot, int32 from 1 on. `uploads`: see `LoraSpec.upload`. `placements`: where
    experts are now, by the path of their block, if they move."""
    leaves, structure = jax.tree.flatten(stacks)

    def on_device(
        leaves: list[jax.Array], uploads: tuple[jax.Array, ...], slot: jax.Array, placements: Mapping[str, Placement]
    ) -> list[jax.Array]:
        lines = {name: upload[0] for name, upload in zip(spec.dtypes, uploads, strict=True)}
        parts = [lines[piece.dtype][piece.place].reshape(piece.shape) for piece in spec.pieces]
        if placements:
            axes, own = expert_axes(spec.mesh), [placements.get(piece.block) for piece in spec.pieces]
            parts = [part if each is None else where_experts_are(part, each, axes) for part, each in zip(parts, own)]
        return [
            jax.lax.dynamic_update_index_in_dim(leaf, part, slot - 1, piece.axis)
            for leaf, part, piece in zip(leaves, parts, spec.pieces, strict=True)
        ]

    if spec.mesh.size > 1:
        of_leaves = [leaf.sharding.spec for leaf in jax.tree.leaves(spec.shapes)]
        of_uploads = tuple(each.sharding.spec for each in spec.upload)
        in_specs = (of_leaves, of_uploads, PartitionSpec(), PartitionSpec())
        on_device = jax.shard_map(on_device, mesh=spec.mesh, in_specs=in_specs, out_specs=of_leaves, check_vma=False)
    return structure.unflatten(on_device(leaves, uploads, jnp.asarray(slot), dict(placements)))


def where_experts_are(part: jax.Array, placement: Placement, axes: Any) -> jax.Array:
    """This device's places of all experts, the first axis, from those that devices have when weights are loaded."""
    all_e = jax.lax.all_gather(part, axes, tiled=True)
    first = jax.lax.axis_index(axes) * len(part)
    return all_e[jax.lax.dynamic_slice_in_dim(expert_of(placement), first, len(part))]
