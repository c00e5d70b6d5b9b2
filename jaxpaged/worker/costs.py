"""What a token costs on a device of an engine, or of a stage of it, from the shapes of its weights and its cache."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpaged.kv_cache_spec import KVCacheGroup
from jaxpaged.layers.experts import expert_weights
from jaxpaged.models.seeing import tower_of
from jaxpaged.models.vision.interface import Grid
from jaxpaged.params.sharding import bytes_on_device, elements_on_device, num_ranks
from jaxpaged.worker.context_split import exchanged_bytes
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.memory import looked_up


@dataclass(frozen=True)
class Work:
    """What a token costs on one of `num_shards` devices, or of those of each of `num_ranks` attention ranks.

    weight_bytes: read by a decode step, embeddings that are only looked up left out. params: numbers of one device
    that every token is multiplied with, `head_params` those of the output head; of
    experts, those that a token goes to, `expert_params`. attention_layers: (window or None,
    layers, bytes of a token that one of them caches). heads: query heads x their width of one device.
    reduced_bytes: summed over the devices per token in all layers, `waited_share` of it while nothing else runs.
    steps_per_program: decode steps that are dispatched at once, at most. expert_bytes: those of `weight_bytes` that
    are experts', of which a token goes to `expert_share`, as if by chance. merged_bytes: sent by a device per
    token where contexts lie on several; sent_bytes: to the next stage. kv_itemsize: bytes of a cached number; kv_heads:
    key heads of a device, 0 of latents; block_size: slots of a block.
    """

    num_shards: int
    weight_bytes: int
    params: int
    head_params: int
    attention_layers: tuple[tuple[int | None, int, int], ...]
    heads: int
    reduced_bytes: int
    waited_share: float = 1.0
    steps_per_program: int = 1
    expert_bytes: int = 0
    expert_share: float = 1.0
    merged_bytes: int = 0
    head_bytes: int = 0
    sent_bytes: int = 0
    num_ranks: int = 1
    expert_params: int = 0
    kv_itemsize: int = 2
    kv_heads: int = 0
    block_size: int = 16

    def bytes_read(self, num_tokens: int) -> float:
        """The weights that a step of so many tokens needs: experts to which none of them goes are left alone."""
        return self.weight_bytes - self.expert_bytes * (1 - self.expert_share) ** num_tokens

    @property
    def num_layers(self) -> int:
        return sum(layers for _, layers, _ in self.attention_layers)


def work_of(spec: EngineSpec, waited_share: float = 1.0) -> Work:
    """What a token costs on one device. `waited_share`: of what collectives send, while nothing else runs."""
    decoder, params, shards = spec.decoder, spec.token_params, spec.num_shards
    table_rows, head = looked_up(spec), head_leaves(spec)
    read = [leaf for leaf in jax.tree.leaves(params) if not any(leaf is other for other in table_rows)]
    experts, share = expert_weights(params), decoder.share_of_experts
    met = round(sum(map(elements_on_device, experts)) * share)  # by a token, as if by chance
    return Work(
        num_shards=shards,
        num_ranks=num_ranks(spec.mesh),
        weight_bytes=sum(map(bytes_on_device, jax.tree.leaves(params))) - sum(map(bytes_on_device, table_rows)),
        params=sum(map(elements_on_device, read)) - sum(map(elements_on_device, experts)) + met,
        expert_params=met,
        expert_bytes=sum(map(bytes_on_device, experts)),
        expert_share=share,
        head_params=sum(map(elements_on_device, head)),
        head_bytes=sum(map(bytes_on_device, head)),
        attention_layers=tuple(attention_layers(spec.kv_groups, shards)),
        heads=round(decoder.num_heads * decoder.attended_dim / shards),
        merged_bytes=exchanged_bytes(spec.decoders, spec.kv_groups, spec.attention, spec.dtype),
        reduced_bytes=2 * sum(e.num_layers * e.hidden_size for e in spec.decoders) * spec.dtype.itemsize,
        sent_bytes=0 if spec.is_last else decoder.hidden_size * spec.dtype.itemsize,
        waited_share=waited_share,
        steps_per_program=spec.max_steps,
        kv_itemsize=jnp.dtype(spec.cache_type.dtype).itemsize,
        kv_heads=0 if decoder.latents else -(-decoder.num_kv_heads // shards),
        block_size=spec.config.cache.block_size,
    )


def encode_flops(spec: EngineSpec, grid: Grid) -> float:
    """To encode a picture on all devices together: products with the tower's matrices, tables of positions left out,
    and attention as if each patch saw all others of its item."""
    assert spec.encoder is not None, "the engine sees nothing"
    tower, items = spec.encoder.config, grid[0]
    patches = tower.patches_per_item if tower.is_fixed else tower.size_of(grid) // items
    matrices = [leaf.shape for leaf in jax.tree.leaves(tower_of(spec.param_shapes)) if len(leaf.shape) > 1]
    numbers = sum(math.prod(shape) for shape in matrices if shape != (patches, tower.width))
    attention = 4.0 * tower.num_layers * patches**2 * tower.num_heads * tower.head_dim
    return items * (2.0 * patches * numbers + attention)


def head_leaves(spec: EngineSpec) -> list[jax.ShapeDtypeStruct]:
    """What turns hidden states into logits, where that is done."""
    return jax.tree.leaves(spec.model.head(spec.param_shapes)) if spec.is_last else []


def attention_layers(groups: Sequence[KVCacheGroup], num_shards: int) -> Iterator[tuple[int | None, int, int]]:
    """(window, layers, bytes that a device keeps of a token in one of them) of every group. A recurrent state is no
    attention: it is not as long as the context, and small beside the weights."""
    for group in groups:
        spec = group.spec
        if spec.needs_blocks:
            token_bytes = spec.block_bytes // spec.block_size // (num_shards if spec.is_split else 1)
            yield spec.most_seen, len(group.layer_idxs), token_bytes
