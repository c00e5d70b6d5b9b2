"""What a layer caches, and its bytes per block. Models declare it, core counts it, the worker allocates it.

Layers are put into groups: all layers of a group cache alike and share one block table. Every group has the
same number of layers (the last ones may be padded), so the i-th layers of all groups can share one KV tensor:
a block id belongs to one group at a time, and one pool of blocks serves them all.

This module knows neither arrays nor devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer keeps: keys and values of every token, or of the last `window` tokens only.

    `window` counts the tokens that a query sees, itself included; None means all of them.
    `dtype_bytes` is the size of one cached number, `stored_dim` how many of them a kernel's layout keeps for a head
    of `head_dim`; the same if None.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None
    stored_dim: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer, over all devices: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * (self.stored_dim or self.head_dim) * self.dtype_bytes


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table. `layer_idxs[i]` lives in KV tensor i."""

    spec: AttentionSpec
    layer_idxs: tuple[int, ...]


@dataclass(frozen=True)
class KVCacheConfig:
    """The whole KV cache: `num_tensors` tensors of `num_blocks` blocks each. Block 0 is the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def num_tensors(self) -> int:
        return max(len(group.layer_idxs) for group in self.groups)

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size

    def place_of_layer(self) -> dict[int, tuple[int, int]]:
        """layer index -> (group index, tensor index)."""
        return {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layer_idxs)}


def group_layers(specs: Sequence[AttentionSpec]) -> tuple[KVCacheGroup, ...]:
    """Put layers into groups of equal size, one kind of attention each.

    The size is the smallest number of layers of one kind, so that little is padded. When the kinds are nearly
    even (largest < 1.25 x smallest) the largest is taken: fewer groups, hence fewer tables, for a little padding.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for layer_idx, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer_idx)
    if len({spec.block_bytes for spec in kinds}) > 1:
        raise NotImplementedError(f"layers cache blocks of unequal size: {sorted({s.block_bytes for s in kinds})}")
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups = []
    for spec, layers in kinds.items():
        for first in range(0, len(layers), size):
            groups.append(KVCacheGroup(spec, tuple(layers[first : first + size])))
    return tuple(sorted(groups, key=lambda group: (group.spec.window is not None, group.layer_idxs)))


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return math.ceil(num_tokens / block_size)


def max_blocks_per_request(groups: Sequence[KVCacheGroup], max_model_len: int, max_num_batched_tokens: int) -> int:
    """Blocks that one request of `max_model_len` tokens holds at most, over all groups.

    A window group keeps the blocks that the window touches while one step of up to `max_num_batched_tokens`
    tokens is computed; one more block because neither end needs to lie on a block boundary.
    """
    total = 0
    for group in groups:
        tokens = max_model_len
        extra = 0
        if group.spec.window is not None:
            tokens = min(max_model_len, group.spec.window - 1 + max_num_batched_tokens)
            extra = 1 if tokens < max_model_len else 0
        total += blocks_for_tokens(tokens, group.spec.block_size) + extra
    return total
