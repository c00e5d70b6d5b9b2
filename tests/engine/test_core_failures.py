"""Every call that the core makes to its executor fails once, in worlds with too few blocks, runs, masks and pooling.

Whatever fails, and however: every request ends exactly once, nothing is held by anybody afterwards, and the engine
serves the next one.
"""

import contextlib
import functools
import itertools

import pytest

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import ExecutorStats, StartProfile, StopProfile, WaitForPrograms
from jaxpaged.errors import CapacityError, ConflictError, EngineDeadError, EngineError, ProgramError, RequestError
from jaxpaged.pooling import PoolingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.fake_pooling import FakePoolingExecutor
from tests.engine.test_core import request
from tests.engine.test_core_masked import MaskedExecutor, ScriptGrammars

VOCAB = 100
ERRORS = (
    RuntimeError("the device is on fire"),
    EngineError("it failed"),
    CapacityError("memory is full"),
    RequestError("it is to blame", "prompt"),
    ConflictError("not now"),
    MemoryError(),
    StopIteration(),
    KeyboardInterrupt(),
    SystemExit(3),
)


class Failing:
    """`inner`, whose `number`-th call of `method` raises `error`: before it does anything, or when it has done it."""

    def __init__(self, inner, method=None, number=0, error=None, late=False):
        self.inner, self.method, self.left, self.error, self.late = inner, method, number, error, late
        self.num_calls = {}

    @property
    def workers(self):
        return self

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        return functools.partial(self.call, name, value) if callable(value) else value

    def call(self, name, function, *arguments, **options):
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        fails = name == self.method and self.left == 0
        if name == self.method:
            self.left -= 1
        if fails and not self.late:
            raise self.error
        value = function(*arguments, **options)
        if fails:
            raise self.error
        return FailingStep(self, value) if name in ("execute_model", "sample_tokens") else value


class FailingStep:
    """A dispatched step, whose result counts and fails like the methods of the executor."""

    def __init__(self, executor, step):
        self.executor, self.step = executor, step

    def result(self):
        return self.executor.call("result", self.step.result)


def plain_requests():
    # Tokens come 4 at a time and blocks are few: the youngest are preempted, with tokens in flight for them.
    return [request(f"r{i}", [20 + i] * (3 + i), 12 + i, prompt_logprobs=2 if i == 2 else None) for i in range(5)]


def masked_requests():
    shape = StructuredOutputsParams(choice=["20 30 40 50 60 70 80"])
    return [request(f"r{i}", [20 + i] * (3 + i), 12, structured_outputs=shape if i % 2 else None) for i in range(5)]


def pooled_requests():
    requests = [request(f"r{i}", list(range(10, 19 + i)), 1) for i in range(5)]
    for each in requests:
        each.pooling_params = PoolingParams()
    return requests


def counting(num_blocks):
    return FakeExecutor(counting_model(VOCAB), VOCAB, num_blocks=num_blocks)


def masked(num_blocks):
    executor = MaskedExecutor()
    executor.kv_cache_config = counting(num_blocks).kv_cache_config
    return executor


WORLDS = {
    "single steps": (lambda: counting(9), plain_requests, {}),
    "one step at a time": (lambda: counting(9), plain_requests, {"async_scheduling": False}),
    "runs": (lambda: counting(14), plain_requests, {"num_scheduler_steps": 4}),
    "by priority": (lambda: counting(9), plain_requests, {"scheduling_policy": "priority"}),
    "masks": (lambda: masked(9), masked_requests, {}),
    "masks and runs": (lambda: masked(9), masked_requests, {"num_scheduler_steps": 4}),
    "pooling": (lambda: FakePoolingExecutor(num_blocks=9), pooled_requests, {"runner": "pooling"}),
}


class World:
    """A core over an executor that may fail, and the record of what its clients hear."""

    def __init__(self, name, *failure):
        make, self.requests, options = WORLDS[name]
        self.executor = Failing(make(), *failure)
        self.core = EngineCore(make_config(**options), self.executor, ScriptGrammars())
        self.tokens, self.ends = {}, {}

    def serve(self, requests):
        """Run until nothing is left to do. Interrupts pass, and the next step is asked for."""
        for each in requests:
            self.core.add_request(each)
        for _ in range(400):
            if not self.core.has_work():
                return
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.hear(self.core.step().outputs)
            self.core._scheduler.check_integrity()
        raise AssertionError(f"the core does not come to rest: {self.core._scheduler.requests}")

    def hear(self, outputs):
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} had ended"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def check_rest(self):
        scheduler = self.core._scheduler
        scheduler.check_integrity()
        assert not scheduler.requests and not scheduler._in_flight and not self.core._in_flight
        pool = scheduler.kv_cache_manager.pools[0]
        assert pool.num_free_blocks == pool.num_usable_blocks


def undisturbed(name):
    world = World(name)
    world.serve(world.requests())
    world.check_rest()
    return world


@functools.cache
def calls_of(name):
    """(method, number) of every call that computing makes, in a world where none fails."""
    world = undisturbed(name)
    counts = world.executor.num_calls
    assert counts["execute_model"] == counts["result"]
    if name != "pooling":
        assert world.core.stats().num_preemptions > 0, "the world is too easy"
    if name.startswith("masks"):
        assert counts["sample_tokens"] > 4 and counts["can_run"] > 0
    if name.endswith("runs"):
        assert counts["max_decode_steps"] > 1
    return [(method, number) for method, count in counts.items() for number in range(count)], world.tokens


def check_failure(name, method, number, error, late):
    """One call fails: the others are served as if it had not, and so is who comes later."""
    if method == "can_run" and not isinstance(error, Exception):
        return set()  # no interrupt is accepted there, see test_interrupts.py
    everything = calls_of(name)[1]
    world = World(name, method, number, error, late)
    world.serve(world.requests())
    assert world.executor.left < 0, "it did not fail"
    world.check_rest()
    assert set(world.ends) == {each.request_id for each in world.requests()}
    failed = {request_id for request_id, end in world.ends.items() if end.error is not None}
    for request_id, tokens in world.tokens.items():
        whole = everything[request_id]
        assert tokens == (whole[: len(tokens)] if request_id in failed else whole)
    assert all(end.error and end.finish_reason == "error" for end in map(world.ends.get, failed))
    later = world.requests()
    for each in later:
        each.request_id = f"later {each.request_id}"
    world.serve(later)
    world.check_rest()
    assert {world.ends[each.request_id].error for each in later} == {None}
    return failed


@pytest.mark.parametrize("name", WORLDS)
def test_a_call_that_fails_costs_some_requests_and_every_one_ends_once(name):
    for place, (method, number) in enumerate(calls_of(name)[0]):
        error = ERRORS[place % len(ERRORS)]
        check_failure(name, method, number, error, late=bool(place % 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_a_call_that_fails_in_any_way_costs_some_requests(name):
    ways = itertools.product(calls_of(name)[0], ERRORS, (False, True))
    for (method, number), error, late in itertools.islice(ways, 0, None, 67):  # coprime to 18, so every kind comes
        check_failure(name, method, number, error, late)


def test_who_was_preempted_with_a_token_in_flight_goes_on_when_the_next_dispatch_fails():
    """It loses that token, and draws it again."""
    calls = [number for method, number in calls_of("single steps")[0] if method == "execute_model"]
    error = RuntimeError("the device is on fire")
    failed = [check_failure("single steps", "execute_model", number, error, False) for number in calls]
    assert max(map(len, failed)) < 5


@pytest.mark.parametrize("error", [RuntimeError("it is gone"), RequestError("no"), ConflictError("not now")], ids=repr)
def test_a_device_that_does_not_recover_stops_the_engine_whatever_it_says(error):
    world = World("single steps", "recover", 0, error)
    world.executor.inner.fail_at[3] = "result"
    with pytest.raises(EngineDeadError, match="broke down"):
        world.serve(world.requests())
    with pytest.raises(EngineDeadError, match="has stopped"):
        world.core.step()


def test_a_program_that_can_never_be_compiled_stops_the_engine_with_its_own_words():
    world = World("single steps", "execute_model", 1, ProgramError("forward of size 8 cannot be compiled: no."))
    with pytest.raises(ProgramError, match="^forward of size 8 cannot be compiled: no.$"):
        world.serve(world.requests())
    with pytest.raises(EngineDeadError, match="has stopped.*forward of size 8"):
        world.core.step()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_engine_that_failed_to_sleep_sleeps_until_it_is_woken(error, late):
    world = World("single steps", "sleep", 0, error, late)
    for each in world.requests():
        world.core.add_request(each)
    for _ in range(5):
        world.hear(world.core.step().outputs)
    with pytest.raises(type(error)):
        world.core.sleep(1, "keep")
    assert world.core.sleep_level == 1
    world.core.wake_up()
    world.serve([])
    world.check_rest()
    assert world.tokens == calls_of("single steps")[1]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_engine_that_failed_to_wake_can_be_woken_again(error, number):
    world = World("single steps", "wake_up", number, error)
    for each in world.requests():
        world.core.add_request(each)
    for _ in range(5):
        world.hear(world.core.step().outputs)
    world.core.sleep(1, "keep")
    with pytest.raises(type(error)):
        world.core.wake_up()
    assert not world.core.step().outputs or world.core.sleep_level == 1
    world.core.wake_up()
    world.serve([])
    world.check_rest()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("stats", ExecutorStats()),
        ("start_profile", StartProfile()),
        ("stop_profile", StopProfile()),
        ("wait_for_programs", WaitForPrograms()),
    ],
)
def test_a_question_that_fails_disturbs_nobody(method, call):
    for error in ERRORS:
        world = World("single steps", method, 0, error)
        for each in world.requests():
            world.core.add_request(each)
        world.core.step()
        with pytest.raises(type(error)):
            world.core.call(call)
        world.tokens.clear()
        world.serve([])
        world.check_rest()
        assert not any(end.error for end in world.ends.values())
