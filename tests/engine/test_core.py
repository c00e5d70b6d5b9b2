import pytest

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import ExecutorStats
from jaxpaged.errors import EngineDeadError, RequestError
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.engine.fake_engine import Done, FakeExecutor, counting_model, make_config

VOCAB = 100


def make(**options):
    executor = FakeExecutor(counting_model(VOCAB), VOCAB)
    return EngineCore(make_config(**options), executor), executor


def request(name, prompt=(10,), max_tokens=4, **params):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1, **params)
    return EngineCoreRequest(name, list(prompt), params, arrival_time=0.0)


def run(core, limit=200):
    """Tokens, finish reason and error of every request."""
    tokens, ends, idle = {}, {}, 0
    for _ in range(limit):
        outputs = core.step().outputs
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = (output.finish_reason, output.error)
        idle = 0 if outputs else idle + 1
        if idle > 5:
            return tokens, ends
    raise AssertionError("the core does not come to rest")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("step_size", [4, 16])
def test_tokens_are_those_of_the_model(asynchronous, step_size):
    core, _ = make(async_scheduling=asynchronous, max_num_batched_tokens=step_size, max_num_seqs=4)
    prompts = {f"r{i}": [20 + i] * (1 + 3 * i) for i in range(6)}
    for name, prompt in prompts.items():
        core.add_request(request(name, prompt, max_tokens=5))
    tokens, ends = run(core)
    assert tokens == {name: [prompt[-1] + 1 + i for i in range(5)] for name, prompt in prompts.items()}
    assert set(ends.values()) == {("length", None)}


def test_the_next_step_is_dispatched_before_the_last_one_is_awaited():
    for asynchronous, ahead in ((True, 1), (False, 0)):
        core, executor = make(async_scheduling=asynchronous)
        core.add_request(request("r", max_tokens=8))
        for step in range(1, 5):
            outputs = core.step().outputs
            assert [o.new_token_ids for o in outputs] == [[10 + step]]
            assert len(executor.executed) == step + ahead


@pytest.mark.parametrize("depth", [3, 6])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_any_number_of_steps_may_be_in_flight(depth, num_steps):
    core, executor = make(num_scheduler_steps=num_steps, max_num_seqs=2)
    core._in_flight.depth, execute, pending = depth, executor.execute_model, []
    executor.execute_model = lambda scheduled: pending.append(len(core._in_flight)) or execute(scheduled)
    expected = {}
    for i, max_tokens in enumerate((4, 30, 23)):
        core.add_request(request(f"r{i}", [20 + i] * 5, max_tokens, stop_token_ids=[40]))
        expected[f"r{i}"] = list(range(21 + i, 41))[:max_tokens]
    assert run(core)[0] == expected
    assert max(pending) == depth - 1
    core._scheduler.check_integrity()


def test_a_stop_token_ends_a_request_though_the_next_step_is_under_way():
    core, executor = make()
    core.add_request(request("r", max_tokens=50, stop_token_ids=[13]))
    tokens, ends = run(core)
    assert (tokens, ends) == ({"r": [11, 12, 13]}, {"r": ("stop", None)})
    assert len(executor.executed) == 4, "one step was in vain"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_runs_of_decode_steps_give_the_same_tokens_in_fewer_dispatches(asynchronous):
    answers = []
    for num_steps in (1, 5):
        core, executor = make(async_scheduling=asynchronous, num_scheduler_steps=num_steps)
        for i, max_tokens in enumerate((4, 9, 23)):
            core.add_request(request(f"r{i}", [20 + i] * 3, max_tokens, logprobs=1, stop_token_ids=[40]))
        answers.append(run(core))
    assert answers[0] == answers[1]
    assert len(executor.executed) < 10
    assert max(scheduled.num_steps for scheduled in executor.executed) == 5


def test_a_new_request_starts_after_the_runs_in_flight():
    core, executor = make(num_scheduler_steps=5)
    core.add_request(request("a", max_tokens=40))
    for _ in range(3):
        core.step()
    core.add_request(request("b"))
    num_executed = len(executor.executed)
    core.step()
    assert [new.request_id for new in executor.executed[num_executed].new_requests] == ["b"]


def test_runs_wait_for_their_program():
    core, executor = make(num_scheduler_steps=5)
    executor.longest_run = 1
    core.add_request(request("a", max_tokens=12))
    core.step()
    assert {scheduled.num_steps for scheduled in executor.executed} == {1}
    executor.longest_run = 3
    run(core)
    assert max(scheduled.num_steps for scheduled in executor.executed) == 3


def test_a_core_that_is_not_told_otherwise_runs_single_steps_until_it_has_measured():
    core, executor = make()
    core.add_request(request("a", max_tokens=10))
    run(core)
    assert {scheduled.num_steps for scheduled in executor.executed} == {1}


def test_an_idle_core_executes_nothing():
    core, executor = make()
    assert core.step().outputs == []
    assert executor.executed == []


def test_aborted_requests_say_no_more_and_their_rows_are_freed():
    core, executor = make()
    for name in "ab":
        core.add_request(request(name, max_tokens=20))
    core.step()
    core.abort_requests(["a", "unknown"])
    tokens, ends = run(core)
    assert list(ends) == ["b"]
    assert len(tokens["b"]) == 19
    core.add_request(request("c"))
    run(core)
    assert set(executor.rows) <= {"c"}


@pytest.mark.parametrize("where", ["dispatch", "result"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("number", range(7))
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(where, asynchronous, number):
    core, executor = make(async_scheduling=asynchronous, max_num_seqs=2)
    executor.fail_at[number] = where
    for name in "abcd":
        core.add_request(request(name, [ord(name) - 50] * 9))
    tokens, ends = run(core)
    failed = [name for name, (reason, error) in ends.items() if reason == "error"]
    assert set(ends) == set("abcd")
    assert 1 <= len(failed) <= 2
    assert all("the device is on fire" in ends[name][1] for name in failed)
    for name in set("abcd") - set(failed):
        assert tokens[name] == [ord(name) - 49 + i for i in range(4)]
    assert executor.recoveries == 1
    core.add_request(request("later"))
    assert run(core)[1] == {"later": ("length", None)}


def test_an_interrupt_while_waiting_loses_nothing(monkeypatch):
    core, executor = make()
    core.add_request(request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(Done, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert run(core) == ({"a": [11, 12, 13, 14]}, {"a": ("length", None)})
    assert executor.recoveries == 0


def test_an_interrupt_while_dispatching_fails_the_step(monkeypatch):
    core, executor = make(max_num_seqs=1)
    for name in "ab":
        core.add_request(request(name))
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute_model", interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert run(core)[1] == {"a": ("error", "the step failed: KeyboardInterrupt"), "b": ("length", None)}


def interrupt(*_):
    raise KeyboardInterrupt


def test_running_requests_that_had_no_part_in_a_failed_step_fail_too(monkeypatch):
    core, executor = make(async_scheduling=False, max_num_seqs=2)
    for name in "abc":
        core.add_request(request(name))
    core.step()
    scheduler, schedule = core._scheduler, core._scheduler.schedule
    (rank,) = scheduler.ranks

    def schedule_without_b(*limits):
        everyone, rank.running = rank.running, rank.running[:1]
        monkeypatch.setattr(rank, "_max_num_seqs", 1)
        scheduled = schedule()
        rank.running = everyone
        monkeypatch.undo()
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", schedule_without_b)
    executor.fail_at[1] = "result"
    _, ends = run(core)
    assert executor.executed[1].request_ids == ["a"]
    assert [ends[name][0] for name in "abc"] == ["error", "error", "length"]
    assert "keys and values were lost" in ends["b"][1]


def test_nothing_computed_before_a_failed_step_is_found_in_the_prefix_cache():
    core, executor = make()
    prompt = list(range(10, 30))
    core.add_request(request("first", prompt))
    run(core)
    core.add_request(request("other", [50]))
    executor.fail_at[len(executor.executed)] = "result"
    assert run(core)[1]["other"][0] == "error"
    core.add_request(request("again", prompt))
    core.step()
    assert executor.executed[-2].new_requests[0].num_computed_tokens == 0


def test_a_request_whose_logits_are_bad_fails_alone():
    core, executor = make()
    executor.bad_requests["a"] = "logits are not numbers"
    for name in "ab":
        core.add_request(request(name))
    _, ends = run(core)
    assert ends == {"a": ("error", "logits are not numbers"), "b": ("length", None)}
    assert executor.recoveries == 0


def test_a_request_that_can_never_fit_is_refused_and_others_go_on():
    executor = FakeExecutor(counting_model(VOCAB), VOCAB, num_blocks=5)
    core = EngineCore(make_config(), executor)
    core.add_request(request("a"))
    with pytest.raises(RequestError, match="KV blocks"):
        core.add_request(request("b", [10] * 20, max_tokens=20))
    assert run(core)[1] == {"a": ("length", None)}


def test_a_broken_scheduler_stops_the_engine_for_good(monkeypatch):
    core, _ = make()
    core.add_request(request("a"))
    monkeypatch.setattr(core._scheduler, "schedule", lambda *limits: 1 / 0)
    with pytest.raises(EngineDeadError, match="division by zero"):
        core.step()
    for call in (core.step, lambda: core.add_request(request("b")), lambda: core.abort_requests(["a"])):
        with pytest.raises(EngineDeadError, match="has stopped.*division by zero"):
            call()


def test_a_device_that_does_not_recover_stops_the_engine(monkeypatch):
    core, executor = make()
    core.add_request(request("a"))
    executor.fail_at[0] = "result"
    monkeypatch.setattr(executor, "recover", lambda: 1 / 0)
    with pytest.raises(EngineDeadError, match="broke down"):
        core.step()


def test_the_prefix_cache_can_be_reset_when_no_request_is_left():
    core, executor = make()
    prompt = list(range(10, 20))
    core.add_request(request("a", prompt, max_tokens=50, stop_token_ids=[23]))
    core.step()
    assert core.reset_prefix_cache() is False
    while not any(output.finish_reason for output in core.step().outputs):
        pass
    assert core.reset_prefix_cache() is True
    for name, num_cached in (("b", 0), ("c", 8)):
        core.add_request(request(name, prompt))
        before = len(executor.executed)
        run(core)
        assert executor.executed[before].new_requests[0].num_computed_tokens == num_cached


def test_tokens_that_came_while_the_cache_was_reset_are_not_lost():
    core, _ = make()
    core.add_request(request("a", max_tokens=6))
    core.step()
    assert core.reset_prefix_cache() is False
    assert run(core)[0]["a"] == [12, 13, 14, 15, 16]


def test_stats_tell_the_queues():
    core, executor = make(max_num_seqs=2)
    for name in "abc":
        core.add_request(request(name))
    stats = core.step().stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    assert core.call(ExecutorStats())["steps"] == len(executor.executed)
    core.shutdown()
    assert not executor.running
