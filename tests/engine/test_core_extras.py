"""The engine core with requests that need programs which are not there yet: who waits for whom. The fake executor
refuses a step that would have to wait."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import EngineError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import Extra, extras_of
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config, make_engine
from tests.engine.test_core import request, run

NEEDS = {
    "logprobs": ({"logprobs": 1}, Extra.FULL_SAMPLER),
    "penalty": ({"presence_penalty": 0.5}, Extra.FULL_SAMPLER),
    "prompt_logprobs": ({"prompt_logprobs": 1}, Extra.PROMPT_LOGPROBS),
}


def make(*missing, **options):
    executor = FakeExecutor(counting_model(100), 100)
    executor.programs = dict.fromkeys(missing, False)
    return EngineCore(make_config(**options), executor), executor


@pytest.mark.parametrize("need", NEEDS)
def test_a_request_waits_for_its_program_and_nobody_waits_behind_it(need):
    params, extra = NEEDS[need]
    core, executor = make(extra, async_scheduling=True)
    core.add_request(request("slow", max_tokens=2, **params))
    core.add_request(request("quick", max_tokens=3))
    assert run(core)[0] == {"quick": [11, 12, 13]}
    assert core.step().stats.num_waiting_reqs == 1
    core._scheduler.check_integrity()
    executor.programs[extra] = True
    tokens, ends = run(core)
    assert (tokens, ends) == ({"slow": [11, 12]}, {"slow": ("length", None)})


def test_a_request_whose_programs_are_there_keeps_its_place_in_the_queue():
    core, executor = make(max_num_seqs=1)
    core.add_request(request("first", max_tokens=2, logprobs=1))
    core.add_request(request("second", max_tokens=2))
    run(core)
    assert [new.request_id for step in executor.executed for new in step.new_requests] == ["first", "second"]


def test_a_program_that_cannot_be_compiled_fails_those_who_need_it_and_no_others():
    core, executor = make()
    executor.programs[Extra.FULL_SAMPLER] = EngineError("it could not be compiled")
    core.add_request(request("full", logprobs=1))
    core.add_request(request("prompt", max_tokens=1, prompt_logprobs=1))
    core.add_request(request("plain", max_tokens=2))
    tokens, ends = run(core)
    assert ends.pop("full") == ("error", "it could not be compiled")
    assert tokens == {"full": [], "prompt": [11], "plain": [11, 12]}
    core._scheduler.check_integrity()


def test_a_request_may_be_aborted_while_it_waits_for_a_program():
    core, executor = make(Extra.FULL_SAMPLER)
    core.add_request(request("full", logprobs=1))
    core.step()
    core.abort_requests(["full"])
    assert not core._scheduler.has_unfinished_requests()
    executor.programs.clear()
    assert run(core) == ({}, {})


KINDS = st.lists(st.sampled_from([*NEEDS, "plain"]), max_size=3, unique=True)


@given(
    wanted=st.lists(KINDS, min_size=1, max_size=6),
    order=st.permutations([Extra.FULL_SAMPLER, Extra.PROMPT_LOGPROBS]),
    gaps=st.lists(st.integers(0, 3), min_size=2, max_size=2),
)
def test_whenever_programs_become_ready_each_request_runs_as_soon_as_its_own_are_there(wanted, order, gaps):
    core, executor = make(*Extra, max_num_seqs=8)
    for i, names in enumerate(wanted):
        params = {}
        for name in names:
            params |= NEEDS[name][0] if name in NEEDS else {}
        core.add_request(request(str(i), max_tokens=2, **params))
    answered = {}
    for extra, gap in zip(order, gaps):
        for _ in range(gap + 4):
            with mock.patch("jaxpaged.core.structured_output.time.sleep"):  # nothing is compiled meanwhile
                outputs = core.step().outputs
            for output in outputs:
                answered.setdefault(output.request_id, []).extend(output.new_token_ids)
        done = {name for name, tokens in answered.items() if len(tokens) == 2}
        live = core._scheduler.requests.values()
        ready = {extra for extra in Extra if executor.programs[extra]}
        assert not [r for r in live if r.request_id not in done and ready.issuperset(extras_of(r.sampling_params))]
        executor.programs[extra] = True
    for name, tokens in run(core)[0].items():
        answered.setdefault(name, []).extend(tokens)
    assert answered == {str(i): [11, 12] for i in range(len(wanted))}
    core._scheduler.check_integrity()


@given(
    wanted=st.lists(KINDS, min_size=1, max_size=4),
    seconds=st.lists(st.floats(0.1, 10), min_size=len(Extra), max_size=len(Extra)),
    asynchronous=st.booleans(),
)
def test_a_script_that_does_nothing_but_step_leaves_the_processor_to_the_compiler(wanted, seconds, asynchronous):
    """Programs are compiled only while a step sleeps: one that has nothing to compute does."""
    engine, executor = make_engine(async_scheduling=asynchronous)
    executor.programs = dict.fromkeys(Extra, False)
    naps = []

    def nap(duration):
        naps.append(duration)
        executor.programs.update((extra, sum(naps) >= needed) for extra, needed in zip(Extra, seconds))

    for i, names in enumerate(wanted):
        params = {"n": 1 + i % 2}
        for name in names:
            params |= NEEDS[name][0] if name in NEEDS else {}
        engine.add_request(str(i), [9, 8, 7], SamplingParams(max_tokens=2, seed=1, **params))
    num_empty = 0
    with mock.patch("jaxpaged.core.structured_output.time.sleep", nap):
        while engine.has_unfinished_requests():
            num_empty += not engine.step()
            assert num_empty <= len(naps) + len(executor.executed), "it waits without sleeping"
