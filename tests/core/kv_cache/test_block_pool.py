"""The pool: order of reuse, reference counts, content."""

from collections import Counter

import pytest

from jaxpaged.core.kv_cache.block_pool import BlockPool
from jaxpaged.core.kv_cache.events import AllBlocksCleared, BlockRemoved
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup


def key(name: str, group: int = 0) -> bytes:
    return name.encode() + group.to_bytes(4, "big")


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_given_out():
    pool = BlockPool(5)
    assert pool.num_free_blocks == pool.num_usable_blocks == 4
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    assert pool.num_held_blocks == 4


def test_asking_for_more_than_is_free_breaks_an_invariant():
    with pytest.raises(AssertionError, match="3 blocks asked, 2 free"):
        BlockPool(3).get_new_blocks(3)


def test_blocks_without_content_are_reused_first_and_others_from_the_end_of_their_chain():
    pool = BlockPool(7)
    blocks = pool.get_new_blocks(4)
    for name, block in zip("ab", blocks):
        pool.cache(block, key(name))
    pool.free_blocks(blocks)
    # 3 and 4 hold nothing and go to the front; 5 and 6 were never used; 2 is the end of the cached chain.
    assert ids(pool.get_new_blocks(6)) == [3, 4, 5, 6, 2, 1]


def test_content_is_found_until_its_block_is_given_out_again():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache(blocks[0], key("a"))
    pool.free_blocks(blocks)
    assert pool.get_cached_block(key("a")) is blocks[0]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key("a")) is blocks[0]
    pool.get_new_blocks(1)
    assert pool.get_cached_block(key("a")) is None


def test_a_hit_takes_a_block_out_of_the_free_list_and_counts_owners():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, key("a"))
    pool.free_blocks([block])
    pool.touch([block, pool.null_block])
    pool.touch([block])
    assert block.ref_cnt == 2
    assert pool.num_free_blocks == 2
    pool.free_blocks([block])
    assert pool.num_free_blocks == 2
    pool.check_integrity(Counter({block.block_id: 1}))
    pool.free_blocks([block])
    assert pool.num_free_blocks == 3
    pool.check_integrity(Counter())


def test_freeing_a_block_that_nobody_owns_breaks_an_invariant():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="nobody owns it"):
        pool.free_blocks(blocks)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_equal_content_is_found_while_any_copy_is_left(order):
    pool = BlockPool(4, record_events=True)
    blocks = pool.get_new_blocks(3)
    assert [pool.cache(block, key("a")) for block in blocks] == [True, False, False]
    for count, i in enumerate(order):
        assert pool.get_cached_block(key("a")) is not None
        assert pool.events == []
        pool.uncache(blocks[i])
        pool.check_integrity(Counter(ids(blocks)))
        assert (pool.get_cached_block(key("a")) is None) == (count == 2)
    assert pool.events == [BlockRemoved(block_hashes=[b"a"], group_idx=0)]


def test_groups_do_not_find_each_others_content():
    pool = BlockPool(4, record_events=True)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, key("a", 3))
    assert pool.get_cached_block(key("a", 2)) is None
    assert pool.get_cached_block(key("a", 3)) is block
    pool.uncache(block)
    assert pool.events == [BlockRemoved(block_hashes=[b"a"], group_idx=3)]


def test_content_is_found_until_it_is_lost_whoever_holds_its_blocks():
    config = KVCacheConfig((4,), (KVCacheGroup(AttentionSpec(4, 1, 8, 4), (0,)),))
    manager = KVCacheManager(config, max_num_batched_tokens=8, enable_prefix_caching=True, enable_kv_cache_events=True)
    [pool] = manager.pools
    blocks = pool.get_new_blocks(2)
    pool.cache(blocks[0], key("a"))
    pool.cache(blocks[1], key("a"))
    assert manager.usage and pool.get_cached_block(key("a")) is not None
    pool.free_blocks(blocks)
    assert not manager.usage
    manager.lose_content()
    assert pool.get_cached_block(key("a")) is None
    assert pool.events == [AllBlocksCleared()]
    pool.check_integrity(Counter())


def test_integrity_notices_a_lost_and_a_doubly_owned_block():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="stands in 0 tables"):
        pool.check_integrity(Counter())
    with pytest.raises(AssertionError, match="stands in 2 tables"):
        pool.check_integrity(Counter({block.block_id: 2}))
