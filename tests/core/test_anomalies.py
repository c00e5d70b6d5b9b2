"""Refuse the n-th allocation for every n; abort, and fail, at every step. Then everything is accounted for."""

import itertools

import pytest

from tests.core.simulation import Engine, prompt_of

SHAPES = [(None,), (None, 6)]


def make_engine(windows, **options) -> Engine:
    """Four requests that share a beginning, in too few blocks for all of them."""
    engine = Engine(windows=windows, num_blocks=1 + 12 * len(windows), max_num_batched_tokens=9, **options)
    for i, (length, max_tokens) in enumerate([(13, 9), (9, 14), (17, 3), (6, 12)]):
        prompt = prompt_of(5) + prompt_of(length - 5, i)
        engine.add(f"r{i}", prompt, float(i), max_tokens=max_tokens, priority=i % 2, ignore_eos=True)
    return engine


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("windows", SHAPES, ids=str)
def test_any_allocation_may_be_refused(windows, policy):
    for n in itertools.count():
        engine = make_engine(windows, depth=2, scheduling_policy=policy)
        manager = engine.scheduler.kv_cache_manager
        allocate, calls = manager.allocate_slots, itertools.count()
        manager.allocate_slots = lambda *args: None if next(calls) == n else allocate(*args)  # noqa: B023
        engine.run()
        assert all(end.finish_reason in ("stop", "length") for end in engine.ends.values())
        assert len(engine.ends) == 4
        if next(calls) <= n:
            break
    assert n > 10, "hardly any allocation was made"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", SHAPES, ids=str)
def test_any_request_may_be_aborted_at_any_step(windows, depth):
    for request_id in ("r0", "r1", "r3"):
        for n in itertools.count():
            engine = make_engine(windows, depth=depth)
            for _ in range(n):
                if engine.scheduler.has_unfinished_requests():
                    engine.step()
            ended_before = request_id in engine.ends
            engine.abort(request_id)
            engine.run()
            assert len(engine.ends) == 4
            if ended_before:
                break
            assert engine.ends[request_id].finish_reason == "abort"


@pytest.mark.parametrize("windows", SHAPES, ids=str)
def test_any_step_may_fail(windows):
    """The requests of a failed step, and of those in flight after it, end; later requests get right answers."""
    for n in itertools.count():
        engine = make_engine(windows, depth=2)
        for _ in range(n):
            if engine.scheduler.has_unfinished_requests():
                engine.step()
        if not engine.scheduler.has_unfinished_requests():
            break
        while len(engine.in_flight) < 2:
            engine.dispatch()
        wreck_oldest_step(engine)
        for i in range(4):
            engine.add(f"later{i}", prompt_of(5) + prompt_of(3 + i, i), max_tokens=6)
        engine.run()
    assert n > 10


def wreck_oldest_step(engine: Engine) -> None:
    """Fail the oldest step in flight; the runner loses what the failed steps wrote."""
    failed, _ = engine.in_flight[0]
    lost = [scheduled for scheduled, _ in engine.in_flight]
    for scheduled in lost:
        for request_id, first, n in zip(
            scheduled.request_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
        ):
            for table in engine.runner.rows[request_id].tables if request_id in engine.runner.rows else ():
                for position in range(first, first + n):
                    engine.runner.memory.pop((0, table[position // 4], position % 4), None)
    engine.in_flight.clear()
    engine.runner.hears_removals_again = True
    alive = {r for scheduled in lost for r in scheduled.request_ids if r in engine.scheduler.requests}
    outputs = engine.record(engine.scheduler.fail_requests(failed, "lost"))
    assert {output.request_id for output in outputs} == alive
    assert all(output.finish_reason == "error" and output.error == "lost" for output in outputs)


@pytest.mark.parametrize("windows", SHAPES, ids=str)
def test_a_single_request_may_fail_at_any_step(windows):
    for n in itertools.count():
        engine = make_engine(windows, depth=2)
        for _ in range(n):
            if engine.scheduler.has_unfinished_requests():
                engine.step()
        if not engine.scheduler.has_unfinished_requests():
            break
        while len(engine.in_flight) < 2:
            engine.dispatch()
        _, output = engine.in_flight[0]
        output.failed = dict.fromkeys(output.request_ids[:1], "not a number")
        engine.run()
        assert [r for r, end in engine.ends.items() if end.finish_reason == "error"] in ([], output.request_ids[:1])
    assert n > 10
