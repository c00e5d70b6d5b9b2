"""`KVCacheManager.block_map` against the tables of the requests themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.merged_results import merged_block_maps
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.tools.pictures.block_map import BlockMap
from tests.core.simulation import Engine, illustrated, prompt_of
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.test_core import VOCAB, request


def make_core(**options):
    return EngineCore(make_config(**options), FakeExecutor(counting_model(VOCAB), VOCAB))


def test_an_idle_cache_is_free():
    blocks = make_core().block_map()
    assert blocks.block_size == 4
    assert blocks.request_ids == []
    assert len(blocks.owner) == 64
    assert (blocks.owner == -1).all()
    assert not blocks.num_owners.any() and not blocks.cached.any()


def test_a_shared_beginning_has_two_owners_and_belongs_to_the_older_request():
    core = make_core()
    core.add_request(request("first", prompt=[20] * 8 + [30], max_tokens=9))
    core.step()
    core.add_request(request("second", prompt=[20] * 8 + [40], max_tokens=9))
    core.step()
    core.step()
    blocks = core.block_map()
    assert blocks.request_ids == ["first", "second"]
    shared = blocks.num_owners == 2
    assert shared.sum() == 2, "two full blocks of four tokens"
    assert (blocks.owner[shared] == 0).all()
    assert blocks.cached[shared].all()
    assert (blocks.owner == 1).any()


def test_what_a_finished_request_leaves_is_cached_and_owned_by_nobody():
    core = make_core()
    core.add_request(request("r", prompt=[20] * 8, max_tokens=1))
    for _ in range(3):
        core.step()
    blocks = core.block_map()
    assert (blocks.owner == -1).all()
    assert blocks.cached.sum() == 2


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8), st.integers(0, 6))
def test_owners_are_those_of_the_tables(traffic, num_steps):
    core = make_core()
    for i, (length, max_tokens) in enumerate(traffic):
        core.add_request(request(f"r{i}", prompt=[20] * length, max_tokens=max_tokens))
    for _ in range(num_steps):
        core.step()
    running = core._scheduler.running
    holders = {b: [] for b in range(64)}
    for i, live in enumerate(running):
        for block in live.blocks[0]:
            holders[block.block_id].append(i)
    blocks = core.block_map()
    assert blocks.owner.tolist() == [min(holders[b], default=-1) for b in range(64)]
    assert np.array_equal(blocks.num_owners, [len(holders[b]) for b in range(64)])


def test_of_too_many_blocks_evenly_spaced_ones_are_shown_and_none_that_were_never_used():
    core = make_core()
    for i in range(4):
        core.add_request(request(f"r{i}", prompt=[20 + i] * 21, max_tokens=8))
    core.step()
    core.step()
    manager, running = core._scheduler.kv_cache_manager, core._scheduler.running
    last = max(block.block_id for request in running for block in request.blocks[0])
    assert manager.pools[0].last_given == last > 8
    whole = core._scheduler.block_map()
    assert whole.stride == 1
    for most, stride in [(63, 1), (last, 1), (last - 1, 2), (last // 3 + 1, 3), (1, last)]:
        some = core._scheduler.block_map(most)
        assert some.stride == stride
        shown = [0, *range(1, last + 1, stride)]
        assert len(shown) <= most + 1
        for name in ("owner", "num_owners", "cached"):
            assert np.array_equal(getattr(some, name), getattr(whole, name)[shown]), name


def test_of_a_new_cache_an_eighth_of_what_may_be_shown_is():
    core = make_core()
    assert len(core._scheduler.block_map(80).owner) == 1 + 10
    assert len(core._scheduler.block_map(4096).owner) == 1 + 63


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_no_block_that_was_ever_used_lies_behind_those_that_are_shown(traffic):
    core = make_core()
    manager, used = core._scheduler.kv_cache_manager, set()
    for i, (length, max_tokens) in enumerate(traffic):
        core.add_request(request(f"r{i}", prompt=[20 + i % 3] * length, max_tokens=max_tokens))
        core.step()
        used |= {block.block_id for live in core._scheduler.running for block in live.blocks[0]}
    while core.has_work():
        core.step()
        used |= {block.block_id for live in core._scheduler.running for block in live.blocks[0]}
    assert max(used, default=0) <= manager.pools[0].last_given
    assert all(block.cache_key is None for block in manager.pools[0].blocks[manager.pools[0].last_given + 1 :])


def test_who_is_no_request_holds_blocks_under_its_own_name_and_may_lose_what_they_hold():
    core = make_core()
    core.add_request(request("first", prompt=[20] * 9, max_tokens=30))
    core.step()
    manager = core._scheduler.kv_cache_manager
    hold = manager.hold("a transfer", [core._scheduler.running[0].blocks[0][1:3]])
    core.abort_requests(["first"])
    assert core.block_map().holds == ["a transfer"]
    drawn = BlockMap(core.block_map())
    assert drawn.counts["a transfer"] == 2 and "held for a transfer: 2 blocks" in drawn.text()
    assert manager.usage == 2 / 63 and not core.reset_prefix_cache() and hold.is_intact
    core._scheduler.check_integrity()
    core.sleep(level=1)
    assert not hold.is_intact and core.block_map().cached.sum() == 0
    core.wake_up()
    core.add_request(request("second", prompt=[20] * 9, max_tokens=3))
    core.step()
    assert core.block_map().num_owners[[block.block_id for block in hold.blocks[0]]].tolist() == [1, 1]
    manager.release(hold)
    core.step()
    core._scheduler.check_integrity()
    assert core.block_map().holds == []


def test_blocks_and_pages_say_which_picture_they_have():
    engine = Engine(encoder=EncoderCacheConfig(8, 2, 16), max_num_batched_tokens=24)
    prompt, features = illustrated(prompt_of(8), (3, "x", (6,)), (8, "y", (3,)))
    engine.add("a", prompt[:-1], mm_features=features[:1])
    engine.run()
    engine.add("b", prompt + [5], mm_features=features)
    engine.dispatch()
    found, (table,) = engine.scheduler.block_map(), engine.scheduler.running[0].blocks
    names = [key[:1].decode() for key in found.picture_keys]
    in_block = {block.block_id: found.picture[block.block_id] for block in table}
    assert [names[number] if number >= 0 else "-" for number in in_block.values()] == ["x", "x", "x", "y", "y"]
    assert (np.delete(found.picture, list(in_block)) == -1).all() and len(found.picture) == len(found.owner)
    assert sorted(names[number] for number in found.encoder_picture if number >= 0) == ["x"] * 3 + ["y"] * 2
    assert (found.encoder_held == (found.encoder_picture == names.index("y"))).all(), "what x gave is cached"
    both = merged_block_maps([found, found])
    assert both.picture_keys == found.picture_keys * 2 and len(both.picture) == len(both.owner)
    assert (both.picture[len(found.picture) :] == np.where(found.picture < 0, -1, found.picture + 2)[1:]).all()
    assert (both.encoder_picture[8:] == np.where(found.encoder_picture < 0, -1, found.encoder_picture + 2)).all()
    engine.run()
    assert Engine().scheduler.block_map().picture is None
