"""What whoever watches an engine is told: it agrees with the engine's books, and has an end however much goes on."""

import pytest

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.observability import snapshot
from jaxpaged.messages import EngineSnapshot
from tests.encoding.test_frames import through
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.test_core import VOCAB, request


@pytest.fixture
def core():
    core = EngineCore(make_config(max_num_seqs=2), FakeExecutor(counting_model(VOCAB), VOCAB))
    for name in "abcd":
        core.add_request(request(name, prompt=[20] * 8 + [30], max_tokens=20))
    core.step()
    core.step()
    return core


def test_requests_steps_and_blocks_are_those_of_the_engine(core):
    seen = core.snapshot()
    assert [each.request_id for each in seen.running] == seen.blocks.request_ids == ["a", "b"]
    assert [each.request_id for each in seen.waiting] == ["c", "d"]
    assert (seen.stats.num_running_reqs, seen.stats.num_waiting_reqs) == (2, 2)
    first, waiting = seen.running[0], seen.waiting[0]
    live = core._scheduler.running[0]
    assert (first.num_prompt_tokens, first.num_output_tokens) == (9, live.num_tokens - 9)
    assert first.num_computed_tokens == live.num_computed_tokens and first.num_cached_tokens == 0
    assert (waiting.num_computed_tokens, waiting.num_cached_tokens) == (0, -1)
    assert seen.steps == core.step_log.read()[0] and seen.num_steps_before == 0
    assert (
        seen.num_blocks == 63
        and (seen.blocks.owner >= 0).sum() == 63 - core._scheduler.kv_cache_manager.pools[0].num_free_blocks
    )
    assert seen.seconds > 0


def test_steps_that_were_told_are_not_told_again(core):
    told = len(core.snapshot().steps)
    core.step()
    seen = core.snapshot(told)
    assert seen.num_steps_before == told and len(seen.steps) == 1


def test_nothing_in_it_grows_without_end(core, monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_REQUESTS", 1)
    monkeypatch.setattr(snapshot, "MOST_STEPS", 1)
    monkeypatch.setattr(snapshot, "MOST_BLOCKS", 4)
    seen = core.snapshot()
    assert len(seen.running) == len(seen.waiting) == len(seen.steps) == 1
    assert 2 <= len(seen.blocks.owner) <= 1 + 4 and seen.num_blocks == 63
    assert seen.blocks.stride == -(-core._scheduler.kv_cache_manager.pools[0].last_given // 4)


def test_it_arrives_as_it_was_sent(core):
    seen = core.snapshot()
    arrived = through(EngineSnapshot, seen)
    assert (arrived.running, arrived.steps, arrived.stats) == (seen.running, seen.steps, seen.stats)
    assert arrived.blocks.owner.tolist() == seen.blocks.owner.tolist()
