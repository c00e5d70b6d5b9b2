"""Hits on which groups of any kind and block size agree, against a search of all lengths, and which snapshots exist."""

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.kv_cache.block_pool import BlockPool
from jaxpaged.core.kv_cache.groups import CacheGroups
from jaxpaged.kv_cache_spec import AttentionSpec, CacheSpec, StateSpec, pool_layouts
from tests.core.simulation import Engine, groups_of, latents, prompt_of, states

NUM_TOKENS = 40
KINDS = [None, 1, 2, 4, 5, 6, 9, 13, 100, latents(2), latents(6), states(4), states(8), states(12)]


def make_groups(kinds, num_blocks=80, budget=8) -> CacheGroups:
    groups = groups_of(tuple(kinds))
    return CacheGroups(groups, [BlockPool(num_blocks) for _ in pool_layouts(groups)], budget)


def hashes_of(groups: CacheGroups) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(NUM_TOKENS // groups.unit)]


def readable(spec: CacheSpec, cached: set[int], length: int) -> bool:
    """Whether the query after `length` tokens finds all that it sees."""
    return all(block_idx in cached for block_idx in needed(spec, length))


def needed(spec: CacheSpec, length: int) -> set[int]:
    """The blocks that the query after `length` tokens reads, which may as well end in the middle of a block."""
    if isinstance(spec, StateSpec):
        return {length // spec.block_size - 1} if length else set()
    window = spec.window if isinstance(spec, AttentionSpec) else None
    first = 0 if window is None else max(length - window + 1, 0)
    return {position // spec.block_size for position in range(first, length)}


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.lists(st.sets(st.integers(0, 19)), min_size=3, max_size=3),
    st.integers(0, NUM_TOKENS),
)
def test_the_longest_beginning_that_every_group_can_read_is_found(kinds, cached, max_tokens):
    groups = make_groups(kinds)
    hashes = hashes_of(groups)
    for group, block_idxs in zip(groups, cached):
        for block_idx in block_idxs:
            if (block_idx + 1) * group.block_size <= NUM_TOKENS:
                (block,) = group.pool.get_new_blocks(1)
                group.pool.cache(block, hashes[(block_idx + 1) * group.units - 1] + group.suffix)
    tables, branch = groups.find_longest_hit(hashes, max_tokens)
    alignment = math.lcm(*[group.block_size for group in groups])
    lengths = range(0, max_tokens + 1, alignment)
    longest = max(n for n in lengths if all(readable(g.spec, cached[i], n) for i, g in enumerate(groups)))
    assert [len(table) * group.block_size for table, group in zip(tables, groups)] == [longest] * len(kinds)
    others = [(i, g) for i, g in enumerate(groups) if g.needs_blocks]
    assert longest <= branch <= max(n for n in range(max_tokens + 1) if n in (longest, *lengths))
    if not others or len(others) == len(groups):
        assert branch == (max(lengths) if not others else longest)
    for group, table in zip(groups, tables):
        for block_idx, block in enumerate(table):
            if block is group.pool.null_block:
                assert block_idx not in needed(group.spec, longest), "a block that is read must be there"
            else:
                assert block.cache_key == hashes[(block_idx + 1) * group.units - 1] + group.suffix


@given(st.sampled_from([4, 8, 12]), st.integers(1, 60), st.integers(0, 60), st.integers(1, 12))
def test_a_chunk_is_given_back_when_it_is_over(chunk, num_tokens, num_computed, budget):
    spec = AttentionSpec(4, 1, 8, 4, chunk=chunk)
    assert spec.num_skipped_blocks(num_computed) == num_computed // chunk * chunk // 4
    held = [-(-min(n + budget, num_tokens) // 4) - spec.num_skipped_blocks(n) for n in range(num_tokens)]
    assert max(held) <= spec.max_blocks(num_tokens, budget)
    hit = make_groups([spec])
    assert hit.groups[0].spec.num_read_blocks == chunk // 4 - 1


@given(st.sampled_from([kind for kind in KINDS if not isinstance(kind, StateSpec)]), st.integers(0, 60))
def test_skipped_blocks_are_those_that_no_later_query_reads(kind, num_computed):
    spec = groups_of((kind,))[0].spec
    window = getattr(spec, "window", None)
    first_read = 0 if window is None else max(num_computed - window + 1, 0)
    assert spec.num_skipped_blocks(num_computed) == first_read // spec.block_size


@given(st.sampled_from([4, 8]), st.integers(0, 60))
def test_a_snapshot_is_skipped_when_the_step_that_reads_it_is_not_the_next(size, num_computed):
    kept = (states(size).num_skipped_blocks(num_computed) + 1) * size
    assert num_computed <= kept or num_computed == 0
    assert kept - size < max(num_computed, 1)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.integers(1, 60), st.integers(1, 12), st.data())
def test_max_blocks_is_enough_for_any_chunks(kinds, num_tokens, budget, data):
    groups = make_groups(kinds, budget=budget)
    computed, peaks = 0, [0] * len(groups.groups_of_pool)
    while computed < num_tokens:
        chunk = data.draw(st.integers(1, min(budget, num_tokens - computed)))
        for p, members in enumerate(groups.groups_of_pool):
            attending = [groups.groups[g] for g in members if groups.groups[g].needs_blocks]
            ends = [-(-(computed + chunk) // group.block_size) for group in attending]
            skipped = [group.spec.num_skipped_blocks(computed) for group in attending]
            peaks[p] = max(peaks[p], sum(ends) - sum(skipped))
        computed += chunk
    assert all(peak <= most for peak, most in zip(peaks, groups.max_blocks(num_tokens)))


# ---- snapshots of recurrent states ---------------------------------------------------------------


def snapshots(engine: Engine) -> int:
    """How many are cached; the pool of states is the last."""
    return sum(block.cache_key is not None for block in engine.scheduler.kv_cache_manager.pools[-1].blocks)


def test_the_end_of_a_prompt_and_the_newest_place_in_its_answer_have_snapshots():
    engine = Engine(windows=(None, states(4)), max_num_batched_tokens=48)
    engine.add("a", prompt_of(22), max_tokens=20, ignore_eos=True, stop_token_ids=[])
    engine.run()
    assert snapshots(engine) == 2  # after 20 tokens of the prompt, and after 40 of 41 that are computed
    engine.add("same", prompt_of(22))
    assert engine.dispatch().new_requests[0].num_computed_tokens == 20
    engine.add("next", [*prompt_of(22), *engine.tokens["a"], 5])
    assert engine.dispatch().new_requests[0].num_computed_tokens == 40
    engine.run()


def test_where_a_prompt_leaves_what_is_cached_gets_a_snapshot_for_the_third_that_begins_alike():
    engine = Engine(windows=(None, states(4)), max_num_batched_tokens=48)
    beginning, found = prompt_of(13), []
    for i in range(3):
        engine.add(f"r{i}", [*beginning, *prompt_of(20, seed=i + 1)], max_tokens=2)
        found.append(engine.dispatch().new_requests[0].num_computed_tokens)
        engine.run()
    assert found == [0, 0, 12]


def test_without_a_free_block_there_is_no_snapshot_and_nobody_waits_for_one():
    engine = Engine(windows=(None, states(4)), num_blocks=(40, 2), max_num_batched_tokens=64)
    for i in range(3):
        engine.add(f"r{i}", prompt_of(17, seed=i), max_tokens=9)
    assert len(engine.step()) == 3
    engine.scheduler.check_integrity()
    engine.run()
    assert snapshots(engine) == 1 and engine.scheduler.make_stats().num_preemptions == 0
