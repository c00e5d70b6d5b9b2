"""Hits of full attention and window groups against a search of all lengths."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.kv_cache.block_pool import BlockPool
from jaxpaged.core.kv_cache.coordinator import KVCacheCoordinator, SlidingWindowGroup
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheGroup

BLOCK_SIZE = 4
HASHES = [bytes([i]) * 32 for i in range(10)]


def make_coordinator(windows, num_blocks=80, budget=8) -> KVCacheCoordinator:
    groups = [KVCacheGroup(AttentionSpec(BLOCK_SIZE, 1, 8, 4, w), (g,)) for g, w in enumerate(windows)]
    return KVCacheCoordinator(groups, BlockPool(num_blocks), budget)


def cache(pool: BlockPool, group: int, block_idxs) -> None:
    for block_idx in block_idxs:
        (block,) = pool.get_new_blocks(1)
        pool.cache(block, HASHES[block_idx] + group.to_bytes(4, "big"))


def readable(window, cached: set[int], length: int) -> bool:
    """Whether the query after `length` blocks finds all that it sees."""
    first = 0 if window is None else max(length * BLOCK_SIZE - window + 1, 0)
    return all(position // BLOCK_SIZE in cached for position in range(first, length * BLOCK_SIZE))


@given(
    st.lists(st.sampled_from([None, 1, 2, 4, 5, 6, 9, 13, 100]), min_size=1, max_size=3),
    st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3),
    st.integers(0, 10),
)
def test_the_longest_beginning_that_every_group_can_read_is_found(windows, cached, max_blocks):
    coordinator = make_coordinator(windows)
    pool = coordinator.groups[0]._pool
    for g in range(len(windows)):
        cache(pool, g, cached[g])
    tables = coordinator.find_longest_hit(HASHES, max_blocks)
    lengths = [n for n in range(max_blocks + 1) if all(readable(w, cached[g], n) for g, w in enumerate(windows))]
    assert [len(table) for table in tables] == [max(lengths)] * len(windows)
    for g, (window, table) in enumerate(zip(windows, tables)):
        first = 0 if window is None else max(max(lengths) * BLOCK_SIZE - window + 1, 0)
        for block_idx, block in enumerate(table):
            if block is pool.null_block:
                assert (block_idx + 1) * BLOCK_SIZE <= first, "a block that is read must be there"
            else:
                assert block.cache_key == HASHES[block_idx] + g.to_bytes(4, "big")


@given(st.integers(1, 20), st.integers(0, 60))
def test_skipped_blocks_are_those_that_no_later_query_reads(window, num_computed):
    group = SlidingWindowGroup(0, BlockPool(2), window, BLOCK_SIZE)
    first_read = max(num_computed - window + 1, 0)
    assert group.num_skipped_blocks(num_computed) == first_read // BLOCK_SIZE


def test_full_attention_skips_nothing():
    assert make_coordinator([None]).groups[0].num_skipped_blocks(1000) == 0


@given(st.sampled_from([(None,), (5,), (None, 7), (3, 1)]), st.integers(1, 60), st.integers(1, 12), st.data())
def test_max_blocks_is_enough_for_any_chunks(windows, num_tokens, budget, data):
    coordinator = make_coordinator(windows, budget=budget)
    computed, peak = 0, 0
    while computed < num_tokens:
        chunk = data.draw(st.integers(1, min(budget, num_tokens - computed)))
        ends = -(-(computed + chunk) // BLOCK_SIZE)
        peak = max(peak, sum(ends - group.num_skipped_blocks(computed) for group in coordinator.groups))
        computed += chunk
    assert peak <= coordinator.max_blocks(num_tokens)
