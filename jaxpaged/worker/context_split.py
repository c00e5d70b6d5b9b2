"""Contexts split over devices: which caches can be (`decode_context_parallel_size`), and what lies where then."""

from collections.abc import Sequence
from dataclasses import replace

from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import AttentionSpec, CacheSpec, LatentSpec
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.models.config import DecoderConfig


def split_contexts(
    specs: Sequence[CacheSpec], shards: int, num_devices: int, decoders: Sequence[DecoderConfig]
) -> Sequence[CacheSpec]:
    """The caches of all layers of `decoders`, with the tokens of a block split over `shards` of the devices.

    Devices that would have copies of a head, or of latents, have parts instead. Raises ConfigError, with the numbers,
    for caches that no such devices have.
    """
    if shards == 1:
        return specs
    heads = [decoder.num_kv_heads for decoder in decoders for _ in decoder.layers]
    if len(heads) != len(specs):
        raise ConfigError(refusal(shards, "a head that drafts keeps features, which are not split"))
    return [split_context(spec, shards, num_devices, num_kv_heads) for spec, num_kv_heads in zip(specs, heads)]


def split_context(spec: CacheSpec, shards: int, num_devices: int, num_kv_heads: int) -> CacheSpec:
    """The cache of a layer of a model with `num_kv_heads`. Raises ConfigError."""
    if isinstance(spec, LatentSpec):
        return replace(spec, context_shards=shards)
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(refusal(shards, "recurrent states, which this model has, are not split by tokens"))
    if spec.most_seen is not None:
        seen = f"see {spec.most_seen} tokens only ({spec.kind}), and parts of such contexts are not computed"
        raise ConfigError(refusal(shards, f"layers of this model {seen}"))
    copies = num_devices // num_kv_heads
    if copies == 0 or copies % shards:
        raise ConfigError(
            f"decode_context_parallel_size {shards} must divide the copies of each key-value head: the "
            f"{num_kv_heads} heads of the model have {max(copies, 1)} on tensor_parallel_size {num_devices} devices. "
            "Choose a divisor of these copies, or more devices."
        )
    return replace(spec, num_kv_heads=spec.num_kv_heads // shards, context_shards=shards)


def merging_bytes(decoders: Sequence[DecoderConfig], context: AttentionContext) -> int:
    """Bytes that a device takes for each token of a step while results over parts of contexts are merged."""
    if context.context_shards == 1:
        return 0
    widths = [heads_of_group(decoder, context) * decoder.attended_dim for decoder in decoders]
    return 3 * 4 * round(max(widths))  # float32: the parts, what they are scaled to, and what is sent


def exchanged_bytes(decoders: Sequence[DecoderConfig], context: AttentionContext, itemsize: int) -> int:
    """Bytes that a device sends for each token of a step, in all layers, so that results are merged: its part of the
    queries of all heads of its group, and of their results, which are float32."""
    widths = [heads_of_group(each, context) * each.attended_dim * each.num_layers for each in decoders]
    return round((1 - 1 / context.context_shards) * sum(widths) * (itemsize + 4))


def heads_of_group(decoder: DecoderConfig, context: AttentionContext) -> int:
    """Query heads of the devices that hold a context together."""
    return decoder.num_heads * context.context_shards // context.mesh.size


def refusal(shards: int, reason: str) -> str:
    return f"decode_context_parallel_size is {shards}, but {reason}. Leave it out."
