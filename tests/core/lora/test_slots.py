"""Requests wait for slots, hold nobody up, and none waits for ever."""

import pytest

from jaxpaged.core.lora.slots import MOST_PASSED
from jaxpaged.errors import RequestError
from tests.core.simulation import Engine, adapter, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}
A, B, C = (adapter(name, digest=f"of {name}", number=i) for i, name in enumerate("abc", 1))


def engine_of(*adapters, **options) -> Engine:
    engine = Engine(**{"max_loras": 1, "max_cpu_loras": 8, "num_blocks": 200, "max_model_len": 400, **options})
    for each in adapters:
        engine.load(each)
    return engine


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def test_adapters_beyond_the_slots_wait_and_are_no_barrier():
    engine = engine_of(A, B, max_num_seqs=8)
    engine.add("a", prompt_of(5), lora=A, max_tokens=6, **ENDLESS)
    engine.add("b", prompt_of(5), lora=B, max_tokens=2, **ENDLESS)
    engine.add("base", prompt_of(5), max_tokens=6, **ENDLESS)
    engine.add("a too", prompt_of(5), lora=A, max_tokens=6, **ENDLESS)
    engine.step()
    engine.step()
    assert names(engine.scheduler.running) == ["a", "base", "a too"]
    assert names(engine.scheduler.waiting) == ["b"]
    stats = engine.scheduler.make_stats().lora
    assert (stats.max_loras, stats.running, stats.waiting) == (1, {"a": 2}, {"b": 1})
    engine.run()
    assert engine.scheduler.make_stats().lora.num_loads == 2


def test_hundreds_that_wait_for_slots_hold_nobody_up():
    engine = engine_of(A, B, max_num_seqs=4)
    engine.add("a", prompt_of(5), lora=A, max_tokens=30, **ENDLESS)
    engine.step()
    for i in range(200):
        engine.add(f"b{i}", prompt_of(5), lora=B, max_tokens=1)
    engine.add("base", prompt_of(3), max_tokens=2, **ENDLESS)
    engine.step()
    assert names(engine.scheduler.running) == ["a", "base"]
    engine.abort(*(f"b{i}" for i in range(190)))
    engine.run()


def test_a_load_goes_with_the_first_step_that_needs_it():
    engine = engine_of(A, B, max_loras=2)
    engine.add("gone", prompt_of(5), lora=A)
    engine.abort("gone")
    engine.add("b", prompt_of(5), lora=B, max_tokens=3, **ENDLESS)
    loads = []
    while engine.scheduler.has_unfinished_requests():
        loads.append(engine.dispatch().lora_loads)
        engine.receive()
    assert loads[0] == [(1, 2)] or loads[0] == [(2, 2)]
    assert not any(loads[1:])
    engine.add("b again", prompt_of(5), lora=B)
    assert not engine.dispatch().lora_loads


def test_the_slot_that_was_used_last_longest_ago_is_given_away():
    engine = engine_of(A, B, C, max_loras=2)
    for name, each in (("a", A), ("b", B), ("a again", A), ("c", C), ("and a", A)):
        engine.add(name, prompt_of(5), lora=each, max_tokens=2)
        engine.run()
    assert engine.scheduler.make_stats().lora.num_loads == 3


@pytest.mark.parametrize("depth", [1, 3])
def test_preempted_requests_come_back_in_another_slot(depth):
    engine = engine_of(A, B, max_loras=2, depth=depth, num_blocks=8, max_model_len=24)
    engine.add("a", prompt_of(6), lora=A, max_tokens=16, **ENDLESS)
    engine.add("b", prompt_of(7, 1), lora=B, max_tokens=16, **ENDLESS)
    engine.run()
    assert engine.scheduler.make_stats().num_preemptions
    engine.add("b", prompt_of(7, 1), lora=B, max_tokens=3, **ENDLESS)
    for _ in range(2):
        engine.step()
    engine.lose_everything()  # with it the slots
    engine.add("a", prompt_of(6), lora=A, max_tokens=3, **ENDLESS)
    engine.run()


@pytest.mark.parametrize("num_rare", [1, 3])
def test_nobody_waits_for_ever_behind_a_popular_adapter(num_rare):
    """The slot of an adapter that always has requests is closed: the bound of `slots.py`."""
    engine = engine_of(A, max_num_seqs=3, max_num_batched_tokens=30)
    rare = [adapter(f"rare{i}", f"of rare{i}", 10 + i) for i in range(num_rare)]
    longest, count = 6, 0
    for each in rare:
        engine.load(each)

    def step() -> None:
        nonlocal count
        while len(engine.scheduler.requests) < 6 + num_rare:
            engine.add(f"a{count}", prompt_of(3 + count % 3), lora=A, max_tokens=2 + count % longest, **ENDLESS)
            count += 1
        engine.step()

    for _ in range(4):
        step()
    for each in rare:
        engine.add(each.lora_name, prompt_of(4), lora=each, max_tokens=2, **ENDLESS)
    before, steps, served = engine.adapters.slots.num_admitted, 0, []
    while len(served) < num_rare:
        step()
        steps += 1
        for each in rare:
            if each.lora_name in names(engine.scheduler.running) and each.lora_name not in served:
                served.append(each.lora_name)
                admitted = engine.adapters.slots.num_admitted - before
                assert admitted <= MOST_PASSED + 3 * 4 * len(served), "it waited for more than it must"
        assert steps < 1000
    assert served == [each.lora_name for each in rare]
    engine.abort(*engine.scheduler.requests)


def test_a_slot_opens_again_when_nobody_waits_for_it():
    engine = engine_of(A, B, max_num_seqs=2)
    for i in range(MOST_PASSED + 8):
        engine.add(f"a{i}", prompt_of(3), lora=A, max_tokens=4, **ENDLESS)
        if i == 1:
            engine.add("b", prompt_of(3), lora=B)
    engine.step()
    popular = engine.scheduler.running[0]
    while popular.adapter.closes_before is None:
        engine.step()
    assert not popular.adapter.queued and names(engine.scheduler.waiting)[0] == "b"
    engine.abort("b")
    assert popular.adapter.queued and popular.adapter.closes_before is None
    engine.run()


def test_two_ranks_share_the_slots():
    engine = Engine(num_ranks=2, max_loras=1, max_cpu_loras=2)
    for each in (A, B):
        engine.load(each)
    scheduler = engine.scheduler
    for i, each in enumerate((A, A, B, B)):
        engine.add(f"r{i}", prompt_of(4), lora=each, max_tokens=1, **ENDLESS)
    scheduled = scheduler.schedule()
    assert scheduled.lora_loads == [(1, 1)] and scheduled.ranks[0].lora_loads == scheduled.ranks[1].lora_loads == []
    assert sorted(scheduled.request_ids) == ["r0", "r1"]
    assert [new.lora_slot for part in scheduled.parts for new in part.new_requests] == [1, 1]
    scheduler.check_integrity()
    scheduler.abort_requests(["r0", "r1"])
    assert scheduler.schedule().lora_loads == [(1, 2)]
    scheduler.check_integrity()


def test_what_cannot_be_had_is_refused():
    engine = engine_of(A)
    with pytest.raises(RequestError, match="'b' of request 'r' is not loaded"):
        engine.add("r", prompt_of(3), lora=B)
    with pytest.raises(RequestError, match="takes none. Set enable_lora") as error:
        Engine().add("r", prompt_of(3), lora=A)
    assert error.value.parameter == "lora_request"
