"""Requests that go on over keys and values of older weights, which nobody else ever finds."""

import pytest

from jaxpaged.kv_cache_spec import EncoderCacheConfig
from tests.core.kv_transfer.test_pieces import Sharing
from tests.core.simulation import Engine, adapter, illustrated, prompt_of, states

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


def under_way(windows=(None,), num_drawn=5, **options):
    """An engine whose request "old" has drawn some tokens of 30."""
    engine = Engine(windows=windows, num_blocks=60, max_num_batched_tokens=16, depth=2, max_model_len=80, **options)
    engine.add("old", prompt_of(18), max_tokens=30, **ENDLESS)
    while len(engine.tokens["old"]) < num_drawn:
        engine.step()
    return engine


def found_by(engine, prompt, name):
    """How many tokens of a prompt the prefix cache has."""
    engine.add(name, prompt, max_tokens=2, **ENDLESS)
    while name not in engine.ends:
        engine.step()
    return engine.ends[name].num_cached_tokens


@pytest.mark.parametrize("windows", [(None,), (None, 6), (None, states(4))], ids=str)
def test_nothing_of_a_request_is_computed_anew_and_nothing_of_it_is_found(windows):
    engine = under_way(windows)
    assert found_by(engine, prompt_of(18), "before") == 16
    engine.change_weights(keeps=True)
    start = len(engine.tokens["old"])
    assert engine.dispatch().num_scheduled_tokens == [1]
    assert found_by(engine, prompt_of(18), "first") == 0
    assert found_by(engine, prompt_of(18), "second") == 16, "the first one's"
    engine.run()
    old = [*prompt_of(18), *engine.tokens["old"]]
    assert found_by(engine, [*old, 3], "goes on") == 16, "nothing behind the prompt, which others computed"
    (request,) = [each for each in engine.books if each.request_id == "old"]
    assert request.num_preemptions == 0 and request.old_kv_from == start
    assert request.weight_spans == [(0, ""), (start, "weights 1")]
    assert engine.books[-1].old_kv_from is None


def test_a_request_that_is_preempted_afterwards_begins_anew_and_is_found():
    engine = under_way()
    engine.change_weights(keeps=True)
    engine.step()
    while engine.in_flight:
        engine.receive()
    engine.scheduler.preempt_all()
    assert engine.dispatch().num_scheduled_tokens == [16]
    engine.run()
    assert found_by(engine, [*prompt_of(18), *engine.tokens["old"], 3], "goes on") == 44
    (request,) = [each for each in engine.books if each.request_id == "old"]
    assert request.old_kv_from is not None, "some of its tokens were drawn so"


def test_nobody_waits_for_what_a_prompt_under_way_will_not_leave():
    engine = Engine(num_blocks=60, max_num_batched_tokens=16)
    engine.add("old", prompt_of(40), max_tokens=3, **ENDLESS)
    engine.step()
    request, manager = engine.books[0], engine.scheduler.kv_cache_manager
    assert len(manager.hashes_filled(request, 24)) == 6
    engine.change_weights(keeps=True)
    assert manager.hashes_filled(request, 24) == []
    engine.run()


def test_pictures_that_old_weights_saw_are_seen_anew():
    engine = Engine(num_blocks=60, max_num_batched_tokens=8, encoder=EncoderCacheConfig(9, 1, 9))
    prompt, features = illustrated(prompt_of(20), (2, "x", (3,)), (12, "y", (4,)))
    engine.add("seeing", prompt, mm_features=features, max_tokens=4, **ENDLESS)
    engine.add("reading", prompt_of(4, 3), max_tokens=9, **ENDLESS)
    engine.step()
    engine.change_weights(keeps=True)
    assert [request.request_id for request in engine.scheduler.running] == ["reading"]
    engine.run()
    assert engine.runner.num_encoded == 3, "x twice"


def test_adapters_stay_in_the_slots_that_requests_read():
    engine = Engine(num_blocks=60, max_loras=1)
    engine.load(info := adapter("a"))
    for name in ("old", "new"):
        engine.add(name, prompt_of(9), lora=info, max_tokens=9, **ENDLESS)
        engine.step()
        engine.change_weights(keeps=True)
    engine.run()
    assert engine.scheduler.make_stats().lora.num_loads == 1


def test_what_found_no_room_to_be_saved_is_never_saved():
    """Not even when a block of it, which has got new content too short for a page, is given out."""
    store = {}
    engine = Sharing(store, 4, (None,), num_blocks=8)
    engine.half.gathers.room = 0
    engine.answers([prompt_of(24)])
    assert len(engine.half.saves)
    engine.change_weights(keeps=True)
    engine.answers([prompt_of(14, 3)], max_tokens=1)
    engine.half.gathers.room = 1 << 30
    engine.answers([prompt_of(24, 2)])
    told = [tuple(prompt_of(24, 2)[start : start + 8]) for start in (0, 8, 16)]
    assert {page.token_ids for page, _ in store.values()} == set(told)
