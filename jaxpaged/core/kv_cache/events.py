"""Typed records of what enters and leaves the prefix cache, for routers that follow it.

Encoded by msgspec each is a map with a "type". A hash is reported stored when its first copy is, and removed
when its last copy is gone. Who publishes them, and how, is not known here.
"""

import msgspec

DEVICE_MEDIUM = "GPU"
"""vLLM's word for the memory of the accelerator, of whatever kind; consumers compare against it."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", kw_only=True, frozen=True):
    """Consecutive blocks of one KV group are in the cache, or will be when the step in flight is done.

    `token_ids` are those of all `block_hashes`, `extra_keys[i]` belong to block i (without their tags), and
    `parent_block_hash` is None for the first block of a sequence.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: list[list | None] | None = None
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"  # or "sliding_window", "chunked_local_attention"
    kv_cache_spec_sliding_window: int | None = None


class VersionedBlockStored(BlockStored, tag="BlockStored", tag_field="type", kw_only=True, frozen=True):
    """The same of content that others than the engine's first weights computed. `weight_version`: what outputs call
    them; "" for those that the engine loaded. Its hashes begin with the version."""

    weight_version: str


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", kw_only=True, frozen=True):
    """These blocks of one KV group can no longer be found in the cache."""

    block_hashes: list[bytes]
    medium: str | None = DEVICE_MEDIUM
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type", frozen=True):
    """The cache is empty."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def of_weights(stored: BlockStored, version: str | None) -> BlockStored:
    """The same event of what weights with this name computed; None: the engine's first ones."""
    if version is None:
        return stored
    return VersionedBlockStored(**msgspec.structs.asdict(stored), weight_version=version)
