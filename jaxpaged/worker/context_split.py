"""Contexts split over devices: which caches are (`decode_context_parallel_size`), and what merging results takes.

Layers that attend to all tokens are split. What others cache, of a window, a chunk, or as a state, is as much for a
long context as for a short one: it stays whole, in a pool of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheGroup
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import DecoderConfig


def split_contexts(
    specs: Sequence[CacheSpec], shards: int, num_devices: int, decoders: Sequence[DecoderConfig]
) -> Sequence[CacheSpec]:
    """The caches of all layers of `decoders`, with the tokens of a block split over `shards` of the devices.

    Devices that would have copies of a head, or of latents, have parts instead. What drafts stays whole where its heads
    have no such copies. Raises ConfigError, with the numbers, where the model itself has none, or nothing to split.
    """
    if shards == 1:
        return specs
    drafts_begin = decoders[0].num_caches
    split = list(specs)
    for i, spec in enumerate(specs):
        copies = spec.context_copies(num_devices)
        if copies:
            if copies % shards == 0:
                split[i] = spec.with_context_shards(shards)
            elif i < drafts_begin:
                raise ConfigError(
                    f"decode_context_parallel_size {shards} must divide the copies of each key-value head: the "
                    f"{spec.num_model_heads} heads of the model have {copies} on tensor_parallel_size {num_devices} "
                    "devices. Choose a divisor of these copies, or more devices."
                )
    if all(spec.context_shards == 1 for spec in split[:drafts_begin]):
        raise ConfigError(
            f"decode_context_parallel_size is {shards}, but no layer of the model caches all tokens "
            f"({', '.join(sorted({spec.kind for spec in specs}))}), so there is nothing to split. Leave it out."
        )
    return split


def merging_bytes(decoders: Sequence[DecoderConfig], context: AttentionContext) -> int:
    """Bytes that a device takes for each token of a step while results over parts of contexts are merged."""
    if context.context_shards == 1:
        return 0
    # float32: the parts, what they are scaled to, and what is sent
    return 3 * 4 * round(max(merged_numbers(decoder, context) for decoder in decoders))


def exchanged_bytes(
    decoders: Sequence[DecoderConfig], groups: Sequence[KVCacheGroup], context: AttentionContext, dtype: Any
) -> int:
    """Bytes that a device sends for each token of a step, in all layers, so that results are merged: its part of the
    queries of all heads of its group, and of their results, which are float32."""
    numbers = [merged_numbers(decoder, context) for decoder in decoders for _ in decoder.layers]
    split = [layer for group in groups if group.spec.context_shards > 1 for layer in group.layer_idxs]
    sent = sum(numbers[layer] for layer in split) * (1 - 1 / context.context_shards)
    return round(sent * (jnp.dtype(dtype).itemsize + 4))


def merged_numbers(decoder: DecoderConfig, context: AttentionContext) -> float:
    """Of a token and layer: a result of each query head of the devices that hold a context together."""
    return decoder.num_heads * context.context_shards // context.mesh.size * decoder.attended_dim
