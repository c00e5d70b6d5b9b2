"""`KVCacheManager.block_map` against the tables of the requests themselves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.core import EngineCore
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
