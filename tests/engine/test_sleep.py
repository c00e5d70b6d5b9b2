"""An engine that sleeps computes nothing, loses no request, and says the same afterwards."""

import pytest

from jaxpaged import LLM, PoolingParams, SamplingParams
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import CollectiveRpc
from jaxpaged.engine.sleep import MODES, SleepRecord
from jaxpaged.errors import CheckpointError, ConflictError, UsageError
from jaxpaged.messages import EngineCoreRequest
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config, make_engine, run_to_end
from tests.engine.fake_pooling import make_pooling_engine

VOCAB = 100
LEVELS = (0, 1, 2)


def make(**options):
    executor = FakeExecutor(counting_model(VOCAB), VOCAB)
    return EngineCore(make_config(**options), executor), executor


def request(name, prompt=(10,), max_tokens=12, **params):
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 1, **params})
    return EngineCoreRequest(name, list(prompt), params, arrival_time=0.0)


class Heard:
    """What was heard of every request: its tokens, and why it ended."""

    def __init__(self, core):
        self.core, self.tokens, self.ends = core, {}, {}

    def step(self, times=1):
        for _ in range(times):
            for output in self.core.step().outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason
            self.core._scheduler.check_integrity()
        return self

    def to_end(self):
        while self.core.has_work():
            self.step()
        return self


def crowd():
    """Greedy and drawn, longer than a step, more than there are rows."""
    return [
        request(f"r{i}", range(20, 21 + 5 * i), 6 + 5 * i, temperature=i % 2 * 1.0, seed=i, repetition_penalty=1.2)
        for i in range(6)
    ]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_requests_that_are_kept_go_on_with_the_same_tokens(level, num_steps, asynchronous):
    def tokens(sleeps):
        core, _ = make(max_num_seqs=4, async_scheduling=asynchronous, num_scheduler_steps=2)
        for each in crowd():
            core.add_request(each)
        heard = Heard(core).step(num_steps)
        if sleeps:
            core.sleep(level, "keep")
            heard.step(3)
            core.wake_up()
        return heard.to_end()

    expected, heard = tokens(False), tokens(True)
    assert (heard.tokens, heard.ends) == (expected.tokens, expected.ends)
    assert len(heard.ends) == 6


def test_aborted_requests_say_what_they_had_and_that_they_were_aborted():
    core, executor = make()
    core.add_request(request("r"))
    heard = Heard(core).step(3)
    core.sleep(1)
    assert core.has_work(), "there is something to be said"
    heard.step()
    assert heard.ends == {"r": "abort"} and heard.tokens["r"] == list(range(11, 15))
    assert not core.has_work() and core.unfinished() == frozenset()
    assert executor.parts == set()


def test_requests_are_finished_before_an_engine_sleeps_that_waits():
    core, executor = make()
    core.add_request(request("r", max_tokens=9))
    core.sleep(1, "wait")
    assert executor.parts == set()
    heard = Heard(core).step()
    assert heard.ends == {"r": "length"} and heard.tokens["r"] == list(range(11, 20))


@pytest.mark.parametrize("level", LEVELS)
def test_requests_that_come_while_it_sleeps_wait(level):
    core, executor = make()
    core.sleep(level)
    core.add_request(request("r", max_tokens=3))
    assert not core.has_work()
    assert Heard(core).step(5).tokens == {} and executor.executed == []
    assert core.stats().num_waiting_reqs == 1 and core.stats().sleep_level == level
    core.sleep(level, "abort")
    core.wake_up()
    assert Heard(core).to_end().tokens == {"r": [11, 12, 13]}, "a second sleep ends nobody"


@pytest.mark.parametrize(("level", "parts"), [(0, {"weights", "kv_cache"}), (1, set()), (2, set())])
def test_a_level_frees_what_it_says(level, parts):
    core, executor = make()
    core.sleep(level)
    assert executor.parts == parts
    assert executor.discarded == (level == 2)
    core.wake_up()
    assert executor.parts == {"weights", "kv_cache"}


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_it_is_awake_when_the_last_part_is(order):
    core, executor = make()
    core.sleep(1, "keep")
    core.add_request(request("r"))
    for tag in ("scheduling", order[0], order[0]):
        core.wake_up([tag])
        assert core.sleep_level == 1 and not core.has_work()
    assert executor.parts == {order[0]}
    core.wake_up([order[1]])
    assert core.sleep_level is None and core.has_work()


def test_only_sleep_without_a_pause_forgets_the_prefix_cache():
    for level, cached in ((0, 8), (1, 0), (2, 0)):
        core, _ = make()
        core.add_request(request("first", [10] * 9, 1))
        Heard(core).to_end()
        core.sleep(level)
        core.wake_up()
        core.add_request(request("second", [10] * 9, 1))
        Heard(core).to_end()
        assert core.stats().prefix_cache_hits == cached


def test_waking_an_engine_that_is_awake_does_nothing():
    core, executor = make()
    executor.wake_error = AssertionError("nothing is to be woken")
    core.wake_up()
    core.wake_up(["weights"])
    assert core.sleep_level is None


def test_what_cannot_be_taken_back_sleeps_on_and_can_be_tried_again():
    core, executor = make()
    core.add_request(request("r", max_tokens=2))
    core.sleep(2, "keep")
    executor.wake_error = CheckpointError("model.safetensors is gone")
    with pytest.raises(CheckpointError):
        core.wake_up()
    assert core.sleep_level == 2 and executor.parts == set()
    executor.wake_error = None
    core.wake_up()
    assert Heard(core).to_end().tokens == {"r": [11, 12]}


def test_a_step_that_fails_while_falling_asleep_fails_its_requests_only():
    core, executor = make()
    core.add_request(request("r"))
    executor.fail_at = {1: "result"}
    heard = Heard(core).step()
    core.sleep(1, "keep")
    core.add_request(request("next", max_tokens=2))
    core.wake_up()
    heard.to_end()
    assert heard.ends == {"r": "error", "next": "length"} and heard.tokens["next"] == [11, 12]


@pytest.mark.parametrize(
    ("level", "mode", "name"), [(3, "abort", "level"), ("1", "abort", "level"), (1, "doze", "mode"), (1, None, "mode")]
)
def test_a_sleep_that_does_not_exist_is_refused_before_anything_happens(level, mode, name):
    core, executor = make()
    core.add_request(request("r", max_tokens=2))
    with pytest.raises(UsageError, match=f"^{name} is "):
        core.sleep(level, mode)
    assert executor.parts == {"weights", "kv_cache"} and len(core.unfinished()) == 1


@pytest.mark.parametrize("tags", [["bed"], ["weights", "bed"], "weights"])
def test_a_tag_that_does_not_exist_is_refused_by_name(tags):
    core, executor = make()
    core.sleep(1)
    with pytest.raises(UsageError, match="^tags is .*scheduling, weights, kv_cache"):
        core.wake_up(tags)
    assert executor.parts == set()


@pytest.mark.parametrize(
    ("levels", "level", "parts"),
    [
        ([0], 0, {"scheduling"}),
        ([0, 0], 0, {"scheduling"}),
        ([0, 2], 2, {"weights", "kv_cache"}),
        ([2, 1], 2, {"weights", "kv_cache"}),
        ([1, 2], 2, {"weights", "kv_cache"}),
        ([1, 0], 1, {"weights", "kv_cache"}),
    ],
)
def test_what_sleeps_deeper_goes_on_to_do_so(levels, level, parts):
    record = SleepRecord()
    for each in levels:
        record.deepen(each)
    assert (record.level, record.parts) == (level, parts)


def test_weights_that_were_woken_from_level_2_may_sleep_at_level_1():
    record = SleepRecord()
    record.deepen(2)
    record.wake("weights")
    record.deepen(1)
    assert (record.level, record.parts) == (1, {"weights", "kv_cache"})


# ---- engines in front of it


def test_prompts_are_refused_while_nobody_could_wake_the_engine():
    engine, _ = make_engine()
    llm = LLM.from_engine(engine)
    llm.sleep()
    assert llm.is_sleeping()
    with pytest.raises(ConflictError, match=r"sleeps.*wake_up\(\) first"):
        llm.generate("the cat", use_tqdm=False)
    assert not engine.has_unfinished_requests()
    llm.wake_up()
    assert llm.generate("the cat", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_is_stepped_by_its_user_sleeps_in_every_way(mode):
    engine, _ = make_engine()
    engine.add_request("r", "the cat", SamplingParams(max_tokens=20, n=2, seed=1))
    engine.step()
    engine.sleep(1, mode)
    gauges = {m.labels["sleep_state"]: m.value for m in engine.get_metrics() if m.name == "vllm:engine_sleep_state"}
    assert gauges == {"awake": 0.0, "weights_offloaded": 1.0, "discard_all": 0.0}
    outputs = engine.step()
    assert engine.has_unfinished_requests() == (mode == "keep")
    engine.wake_up()
    outputs += run_to_end(engine).get("r", [])
    reasons = {"abort": "abort", "wait": "length", "keep": "length"}
    assert {completion.finish_reason for completion in outputs[-1].outputs} == {reasons[mode]}
    assert len(outputs[-1].outputs) == 2


def test_a_pooling_engine_sleeps_in_the_middle_of_a_prompt():
    vectors = []
    for sleeps in (False, True):
        engine, _ = make_pooling_engine()  # 16 tokens a step
        engine.add_request("r", list(range(5, 55)), PoolingParams())
        engine.step()
        if sleeps:
            engine.sleep(2, "keep")
            engine.wake_up()
        vectors.append(run_to_end(engine)["r"][-1].outputs.data.tolist())
    assert vectors[0] == vectors[1]


def test_one_profile_is_recorded_at_a_time():
    engine, executor = make_engine()
    llm = LLM.from_engine(engine)
    llm.start_profile("there")
    assert executor.recorded_to == ["there"]
    with pytest.raises(ConflictError):
        llm.start_profile()
    llm.stop_profile()
    with pytest.raises(ConflictError):
        llm.stop_profile()


# ---- other weights -------------------------------------------------------------------------------


def cached_hashes(core):
    return {key[:-4] for pool in core._scheduler.kv_cache_manager.pools for key in pool._cached}


@pytest.mark.parametrize("way", ["wake", "call"])
@pytest.mark.parametrize("in_flight", [0, 5])
def test_what_other_weights_computed_is_never_found_again(way, in_flight):
    """Neither by new requests nor by those that wait or run meanwhile; in an outer store neither, since no hash is the
    same."""
    core, executor = make()
    heard = Heard(core)
    core.add_request(request("old", range(20, 40)))
    heard.to_end()
    before = cached_hashes(core)
    for name in ("a", "b", "c", "d", "e"):
        core.add_request(request(name, range(20, 40), 30))
    heard.step(in_flight)

    def replace(worker=None):
        executor.weights_version = "others"

    if way == "wake":
        core.sleep(level=2, mode="keep")
        replace()
        core.wake_up()
    else:
        executor.collective_rpc = lambda method, args, kwargs: [method(*args)]
        core.call(CollectiveRpc(replace))
    assert not cached_hashes(core)
    heard.to_end()
    assert cached_hashes(core) and not cached_hashes(core) & before
    assert {name: len(tokens) for name, tokens in heard.tokens.items()} == {"old": 12} | dict.fromkeys("abcde", 30)


def test_the_same_weights_keep_what_they_computed_findable():
    core, executor = make()
    executor.collective_rpc = lambda method, args, kwargs: [method(*args)]
    heard = Heard(core)
    core.add_request(request("old", range(20, 40)))
    heard.to_end()
    before = cached_hashes(core)
    core.call(CollectiveRpc(lambda: None))
    assert cached_hashes(core) == before
    core.sleep(level=2)
    core.wake_up()
    core.add_request(request("new", range(20, 40)))
    heard.to_end()
    assert cached_hashes(core) == before, "hashes are those that routers compute"
