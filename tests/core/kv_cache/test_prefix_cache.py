"""What requests share through the prefix cache, and what routers are told of it."""

import msgspec
import pytest

from jaxpaged.core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from tests.core.simulation import Engine, adapter, picture, prompt_of

SEES = EncoderCacheConfig(num_pages=8, page_size=2, max_step_embeds=16)
ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


def hit_of(engine: Engine, request_id: str, prompt, **options) -> int:
    """Tokens that a new request finds; the request runs to its end."""
    engine.add(request_id, prompt, **options)
    hit = engine.dispatch().new_requests[-1].num_computed_tokens
    engine.run()
    return hit


def warm(engine: Engine, prompt, **options) -> None:
    engine.add("warm", prompt, **{"max_tokens": 1, **options})
    engine.run()


@pytest.mark.parametrize(("length", "hit"), [(16, 12), (17, 16), (19, 16), (4, 0), (5, 4), (3, 0)])
def test_whole_blocks_are_found_but_never_the_last_token(length, hit):
    engine = Engine(max_num_batched_tokens=24)
    warm(engine, prompt_of(20))
    assert hit_of(engine, "a", prompt_of(20)[:length]) == hit


def test_output_is_found_by_the_next_turn():
    engine = Engine(max_num_batched_tokens=24, depth=2)
    warm(engine, prompt_of(6), max_tokens=11, **ENDLESS)
    turn = prompt_of(6) + engine.tokens["warm"] + prompt_of(3, 5)
    # 17 tokens, of which the last was sampled and never computed: 4 whole blocks.
    assert hit_of(engine, "a", turn) == 16


def test_without_prefix_caching_nothing_is_found():
    engine = Engine(enable_prefix_caching=False)
    warm(engine, prompt_of(12))
    assert hit_of(engine, "a", prompt_of(12)) == 0
    assert engine.scheduler.make_stats().prefix_cache_hits == 0


@pytest.mark.parametrize("option", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}])
def test_some_requests_write_the_cache_and_do_not_read_it(option):
    engine = Engine()
    warm(engine, prompt_of(12), **option)
    assert hit_of(engine, "reader", prompt_of(12)) == 8
    assert hit_of(engine, "writer", prompt_of(12), **option) == 0


@pytest.mark.parametrize(("start", "hit"), [(1, 0), (4, 0), (5, 4), (9, 8), (99, 8)])
def test_what_comes_before_the_first_scored_token_is_found(start, hit):
    engine = Engine()
    warm(engine, prompt_of(12))
    assert hit_of(engine, "scored", prompt_of(12), prompt_logprobs=0, prompt_logprob_start=start) == hit


@pytest.mark.parametrize(
    "option", [{"cache_salt": "s"}, {"lora": adapter("l")}, {"mm_features": [picture("image", 1, 3)]}]
)
def test_salt_adapter_and_images_separate_requests(option):
    engine = Engine(encoder=SEES, max_loras=1)
    engine.load(adapter("l"))
    warm(engine, prompt_of(12), **option)
    assert hit_of(engine, "other", prompt_of(12)) == 0
    assert hit_of(engine, "same", prompt_of(12), **option) == 8


def test_a_step_does_not_read_what_it_writes_itself():
    engine = Engine(max_num_batched_tokens=40)
    engine.add("a", prompt_of(12))
    engine.add("b", [*prompt_of(8), *prompt_of(9, 5)])  # the greater part is its own
    assert [new.num_computed_tokens for new in engine.dispatch().new_requests] == [0, 0]
    engine.add("c", prompt_of(12))
    assert engine.dispatch().new_requests[0].num_computed_tokens == 8, "a step in flight counts as done"
    engine.run()


def test_shared_blocks_are_shared():
    engine = Engine(max_num_batched_tokens=40)
    warm(engine, prompt_of(12))
    engine.add("a", prompt_of(12))
    engine.add("b", prompt_of(12))
    tables = [new.block_ids[0] for new in engine.dispatch().new_requests]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    engine.run()


def test_a_window_needs_only_its_last_blocks():
    engine = Engine(windows=(5,), num_blocks=12, max_num_batched_tokens=4)
    warm(engine, prompt_of(24))
    engine.add("a", prompt_of(24))
    new = engine.dispatch().new_requests[0]
    assert new.num_computed_tokens == 20
    assert new.block_ids[0][:4] == [0, 0, 0, 0], "blocks before the window are the null block"
    assert 0 not in new.block_ids[0][4:]
    engine.run()


def test_a_window_group_holds_no_more_blocks_than_its_window_touches():
    engine = Engine(windows=(6,), max_num_batched_tokens=4, max_model_len=44)
    engine.add("a", prompt_of(20), max_tokens=20, **ENDLESS)
    most = 0
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        pool = engine.scheduler.kv_cache_manager.pools[0]
        most = max(most, pool.num_usable_blocks - pool.num_free_blocks)
    assert most <= 4


def test_full_attention_and_windows_agree_on_a_hit():
    engine = Engine(windows=(None, 5), num_blocks=60, max_num_batched_tokens=24)
    warm(engine, prompt_of(24))
    manager = engine.scheduler.kv_cache_manager
    # Without the window's block 4 no hit of 20 tokens is left; 16 tokens need block 3.
    key = next(k for k in manager.pools[0]._cached if k == manager_key(engine, 4, group=1))
    manager.pools[0].uncache(manager.pools[0].get_cached_block(key))
    assert hit_of(engine, "a", prompt_of(24)) == 16


def manager_key(engine: Engine, block_idx: int, group: int) -> bytes:
    """The cache key of a block of `prompt_of(24)`."""
    engine.add("probe", prompt_of(24))
    request = engine.scheduler.requests["probe"]
    engine.scheduler.kv_cache_manager.get_computed_blocks(request)
    engine.abort("probe")
    return request.block_hashes[block_idx] + group.to_bytes(4, "big")


def test_the_cache_can_be_reset_when_nobody_runs():
    engine = Engine()
    engine.add("a", prompt_of(12))
    engine.dispatch()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert hit_of(engine, "b", prompt_of(12)) == 0


class TestEvents:
    def engine(self, **options) -> Engine:
        engine = Engine(enable_kv_cache_events=True, max_num_batched_tokens=24, encoder=SEES, max_loras=1, **options)
        engine.load(adapter("l"))
        return engine

    def test_blocks_are_reported_when_they_are_stored(self):
        engine = self.engine()
        warm(engine, prompt_of(10), lora=adapter("l"), cache_salt="s", mm_features=[picture("image", 6, 2)])
        (event,) = engine.scheduler.kv_cache_manager.take_events()
        assert len(event.block_hashes) == 2
        lora = ["l", "/adapters/l", "0"]
        assert event == BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=None,
            token_ids=prompt_of(8),
            block_size=4,
            lora_id=1,
            lora_name="l",
            extra_keys=[[lora, "s"], [lora, [b"image".ljust(32, b".").hex(), 2]]],
        )
        assert engine.scheduler.kv_cache_manager.take_events() == []

    def test_events_name_the_weights_once_there_are_others(self):
        engine = self.engine()
        warm(engine, prompt_of(6))
        engine.scheduler.change_weights("first.1", "first")
        warm(engine, prompt_of(6))
        engine.scheduler.change_weights("", None)
        warm(engine, prompt_of(6))
        events = engine.scheduler.kv_cache_manager.take_events()
        stored = [msgspec.to_builtins(event) for event in events if isinstance(event, BlockStored)]
        assert [each.pop("weight_version", None) for each in stored] == [None, "first", None]
        assert {each["type"] for each in stored} == {"BlockStored"}
        assert stored[0].keys() == stored[1].keys() and stored[0]["block_hashes"] != stored[1]["block_hashes"]

    def test_later_blocks_name_their_parent(self):
        engine = self.engine()
        warm(engine, prompt_of(10), max_tokens=8, **ENDLESS)
        first, *others = engine.scheduler.kv_cache_manager.take_events()
        assert [e.parent_block_hash for e in others] == [first.block_hashes[-1], others[0].block_hashes[-1]]
        tokens = [token for e in (first, *others) for token in e.token_ids]
        assert tokens == (prompt_of(10) + engine.tokens["warm"])[:16]

    def test_groups_are_told_apart(self):
        engine = self.engine(windows=(None, 20))
        warm(engine, prompt_of(10))
        full, window = engine.scheduler.kv_cache_manager.take_events()
        assert (full.group_idx, full.kv_cache_spec_kind) == (0, "full_attention")
        assert full.kv_cache_spec_sliding_window is None
        assert (window.group_idx, window.kv_cache_spec_kind) == (1, "sliding_window")
        assert window.kv_cache_spec_sliding_window == 20
        assert full.block_hashes == window.block_hashes

    def test_a_follower_of_the_events_knows_what_is_cached(self):
        engine = self.engine(windows=(None, 6), num_blocks=24, depth=2, max_num_seqs=3)
        known: set[tuple[bytes, int]] = set()
        for i in range(30):
            engine.add(f"r{i}", prompt_of(6, i % 3) + prompt_of(1 + i % 7, i), max_tokens=1 + i % 9)
            for _ in range(i % 4):
                engine.step()
            for event in engine.scheduler.kv_cache_manager.take_events():
                keys = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
                if isinstance(event, BlockStored):
                    assert not keys & known, "a second copy is no news"
                    known |= keys
                else:
                    assert isinstance(event, BlockRemoved)
                    assert keys <= known
                    known -= keys
            cached = engine.scheduler.kv_cache_manager.pools[0]._cached
            assert known == {(key[:-4], int.from_bytes(key[-4:], "big")) for key in cached}
        engine.run()
        engine.scheduler.kv_cache_manager.take_events()
        assert engine.scheduler.reset_prefix_cache()
        assert engine.scheduler.kv_cache_manager.take_events() == [AllBlocksCleared()]

    def test_events_travel_as_maps_with_a_type(self):
        engine = self.engine()
        warm(engine, prompt_of(10))
        (event,) = engine.scheduler.kv_cache_manager.take_events()
        encoded = msgspec.msgpack.encode(event)
        assert msgspec.msgpack.decode(encoded)["type"] == "BlockStored"
        assert msgspec.msgpack.decode(encoded, type=KVCacheEvent) == event

    def test_nothing_is_recorded_unless_asked_for(self):
        engine = Engine()
        warm(engine, prompt_of(10))
        assert engine.scheduler.reset_prefix_cache()
        assert engine.scheduler.kv_cache_manager.take_events() == []


def test_who_comes_with_the_same_beginning_waits_for_the_step_that_computes_it():
    engine = Engine(max_num_batched_tokens=200, max_num_seqs=8, num_blocks=80, depth=2)
    for i in range(6):
        engine.add(f"r{i}", [*prompt_of(20), 3 + i, 9, 10], max_tokens=4, **ENDLESS)
    first, second = engine.dispatch(), engine.dispatch()
    assert first.request_ids == ["r0"] and first.total_num_scheduled_tokens == 23
    assert [new.num_computed_tokens for new in second.new_requests] == [20] * 5
    assert second.total_num_scheduled_tokens == 1 + 5 * 3
    engine.run()


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_of_a_prompt_in_chunks_only_one_computes_each(windows):
    engine = Engine(max_num_batched_tokens=16, num_blocks=100, windows=windows)
    for i in range(3):
        engine.add(f"r{i}", [*prompt_of(40), 3 + i], max_tokens=2, **ENDLESS)
    computed = 0
    while engine.scheduler.has_unfinished_requests():
        computed += engine.dispatch().total_num_scheduled_tokens
        engine.receive()
    assert computed == 40 + 3 + 3  # of each request its own token of the prompt, and one that it sampled


@pytest.mark.parametrize(
    ("own", "option"),
    [(21, {}), (3, {"cache_salt": "s"}), (3, {"skip_reading_prefix_cache": True}), (3, {"prompt_logprobs": 0})],
)
def test_nobody_waits_for_the_smaller_part_nor_for_what_it_may_not_find(own, option):
    engine = Engine(max_num_batched_tokens=200)
    engine.add("leader", prompt_of(20))
    engine.add("other", [*prompt_of(20), *prompt_of(own, 7)], **option)
    assert engine.dispatch().request_ids == ["leader", "other"]
    engine.run()


def test_who_waited_computes_all_when_the_step_fails():
    engine = Engine(max_num_batched_tokens=200)
    for name in ("leader", "other"):
        engine.add(name, [*prompt_of(20), 3], max_tokens=2, **ENDLESS)
    step = engine.scheduler.schedule()
    assert step.request_ids == ["leader"]
    engine.record(engine.scheduler.fail_requests(step, "the step failed"))
    engine.runner.hears_removals_again = True
    assert engine.dispatch().new_requests[0].num_computed_tokens == 0
    engine.run()
