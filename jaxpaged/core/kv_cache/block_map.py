"""Which request holds which KV block at one moment, to be drawn. The blocks of several pools follow one another.

Letters: B blocks, P pages of the encoder cache.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpaged.core.kv_cache.block_pool import BlockPool
from jaxpaged.core.kv_cache.groups import CacheGroups
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.pictures import Pictures
from jaxpaged.core.request import Request
from jaxpaged.messages import KVBlockMap


def map_blocks(
    caches: Sequence[tuple[KVCacheManager, Sequence[Request]]], most: int | None, pictures: Pictures | None = None
) -> KVBlockMap:
    """Of one cache, or of several, one after the other: each with all requests that hold any block, the oldest first.
    `pictures`: of those of the only cache.

    With `most` the beginning, at least an eighth of `most` and all blocks that were ever used, and if these are
    still more, evenly spaced ones of them.
    """
    pools = [pool for manager, _ in caches for pool in manager.pools]
    blocks = [pools[0].null_block]
    first_of, last_given = {}, 0  # place of the block 0 that a pool would have; place of the last that was ever used
    for pool in pools:
        first_of[pool] = len(blocks) - 1
        last_given = first_of[pool] + pool.last_given if pool.last_given else last_given
        blocks += pool.blocks[1:]
    num_shown, stride = len(blocks) - 1, 1
    if most is not None:
        num_shown = min(num_shown, max(last_given, most // 8))
        stride = max(-(-num_shown // most), 1)
    owner_B = np.full(len(blocks), -1, np.int32)
    running = [(request, manager.groups) for manager, requests in caches for request in requests]
    owners = running + [(hold, manager.groups) for manager, _ in caches for hold in manager.holds]
    for i in reversed(range(len(owners))):
        owner, groups = owners[i]
        for group, table in zip(groups, owner.blocks):
            first = first_of[group.pool]
            owner_B[[first + block.block_id for block in table if block.block_id]] = i
    shown = [blocks[0], *blocks[1 : num_shown + 1 : stride]]
    found = KVBlockMap(
        block_size=caches[0][0].groups.groups[0].block_size,
        request_ids=[request.request_id for request, _ in running],
        owner=np.concatenate([owner_B[:1], owner_B[1 : num_shown + 1 : stride]]),
        num_owners=np.array([block.ref_cnt for block in shown], np.int32),
        cached=np.array([block.cache_key is not None for block in shown]),
        stride=stride,
        holds=[hold.reason for manager, _ in caches for hold in manager.holds],
    )
    if pictures is not None:
        add_pictures(found, pictures, running, first_of, len(blocks))
    return found


def add_pictures(
    found: KVBlockMap,
    pictures: Pictures,
    running: Sequence[tuple[Request, CacheGroups]],
    first_of: Mapping[BlockPool, int],
    num_blocks: int,
) -> None:
    """Say where pictures are: in the blocks of these requests, and in the encoder cache. `first_of`: the place that
    block 0 of a pool would have among `num_blocks`."""
    numbers: dict[bytes, int] = {}
    picture_B = np.full(num_blocks, -1, np.int32)
    for request, groups in running:
        for feature in request.mm_features:
            number = numbers.setdefault(feature.key, len(numbers))
            for group, table in zip(groups, request.blocks):
                first, end = feature.offset // group.block_size, feature.offset + feature.length
                held = [block.block_id for block in table[first : -(-end // group.block_size)] if block.block_id]
                picture_B[np.array(held, np.int64) + first_of[group.pool]] = number
    cache = pictures.cache
    encoder_P, held_P = np.full(cache.num_pages, -1, np.int32), np.zeros(cache.num_pages, bool)
    for encoded in cache.pictures:
        encoder_P[encoded.page_ids] = numbers.setdefault(encoded.key, len(numbers))
        held_P[encoded.page_ids] = encoded.num_users > 0
    num_shown, stride = 1 + (len(found.owner) - 1) * found.stride, found.stride
    found.picture = np.concatenate([picture_B[:1], picture_B[1:num_shown:stride]])
    found.picture_keys, found.encoder_picture, found.encoder_held = list(numbers), encoder_P, held_P
