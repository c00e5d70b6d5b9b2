"""Which request holds which KV block at one moment, to be drawn. The blocks of several pools follow one another."""

from collections.abc import Sequence

import numpy as np

from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.request import Request
from jaxpaged.messages import KVBlockMap


def map_blocks(caches: Sequence[tuple[KVCacheManager, Sequence[Request]]], most: int | None) -> KVBlockMap:
    """Of one cache, or of several, one after the other: each with all requests that hold any block, the oldest first.

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
    return KVBlockMap(
        block_size=caches[0][0].groups.groups[0].block_size,
        request_ids=[request.request_id for request, _ in running],
        owner=np.concatenate([owner_B[:1], owner_B[1 : num_shown + 1 : stride]]),
        num_owners=np.array([block.ref_cnt for block in shown], np.int32),
        cached=np.array([block.cache_key is not None for block in shown]),
        stride=stride,
        holds=[hold.reason for manager, _ in caches for hold in manager.holds],
    )
