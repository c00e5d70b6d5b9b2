"""The engine core with grammars: who waits for whom. Grammars are scripts here, and the test compiles them."""

import contextlib
import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest

from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.input.params_of_model import leaves_open
from jaxpaged.errors import EngineError, RequestError
from jaxpaged.sampling_params.features import Extra
from tests.engine.fake_engine import FakeExecutor, counting_model, make_config
from tests.engine.test_core import request, run

VOCAB = 100


class ScriptMatcher:
    """Allows one token after another; `breaks_at`: as many tokens, then it cannot go on."""

    def __init__(self, script, breaks_at=None):
        self.script, self.breaks_at, self.at, self.error = script, breaks_at, 0, None

    @property
    def is_complete(self):
        return self.at == len(self.script)

    def num_free(self, num_unknown):
        return 0

    def accept(self, token_ids):
        assert list(token_ids) == self.script[self.at : self.at + len(token_ids)]
        self.at += len(token_ids)
        return True

    def fill(self, bits_IW, token_ids=()):
        assert len(bits_IW) == 1 and not token_ids, "nothing is drafted here"
        bits_IW[:] = 0
        if self.at != self.breaks_at:
            token = self.script[self.at]
            bits_IW[0, token // 32] = 1 << (token % 32)


class ScriptGrammars:
    """`choice[0]` is the script, "20 30 40"; it is compiled when the test says so, or at once."""

    num_words = 4

    def __init__(self, at_once=True, breaks_at=None):
        self.at_once, self.breaks_at, self.futures = at_once, breaks_at, []

    def compile(self, params):
        future = Future()
        self.futures.append((future, [int(word) for word in params.choice[0].split()]))
        if self.at_once:
            self.finish()
        return future

    def finish(self):
        for future, script in self.futures:
            future.set_result(script)
        self.futures.clear()

    def matcher_of(self, future):
        return ScriptMatcher(future.result(), self.breaks_at)


class HalfStep:
    """A masked step: only its forward pass has run."""

    def drafts(self):
        raise AssertionError("nothing is drafted here")

    def result(self):
        raise AssertionError("it has not sampled")


class WholeStep:
    """A masked step that has sampled."""

    def __init__(self, executor, scheduled, done):
        self.executor, self.scheduled, self.done = executor, scheduled, done

    def result(self):
        self.executor.note("result", self.scheduled)
        return self.done.result()


class MaskedExecutor(FakeExecutor):
    """A fake device that draws in a second half when a step is masked, and keeps a diary."""

    def __init__(self):
        super().__init__(counting_model(VOCAB), VOCAB)
        self.diary, self.masks, self.interrupt_at = [], {}, None
        self.masks_ready, self.times_asked = True, 0
        self.undrawn = None  # the step whose second half has not come

    def can_run(self, extra):
        self.times_asked += 1
        self.programs[Extra.MASKS] = self.masks_ready
        return super().can_run(extra)

    def note(self, what, scheduled):
        self.diary.append((what, scheduled.step_id))
        if self.interrupt_at == (what, scheduled.step_id):
            self.interrupt_at = None
            raise KeyboardInterrupt

    def recover(self):
        super().recover()
        self.undrawn = None

    def execute_model(self, scheduled):
        assert self.undrawn is None, "a step began before the last one drew"
        if scheduled.masked:
            self.note("forward", scheduled)
            self.undrawn = scheduled
            return HalfStep()
        self.masks, self.mask_W = {}, None
        return super().execute_model(scheduled)

    def sample_tokens(self, masks_SW):
        scheduled, self.undrawn = self.undrawn, None
        self.note("draw", scheduled)
        sampling = [name for name, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens) if most]
        assert masks_SW.shape == (len(sampling), ScriptGrammars.num_words) and masks_SW.dtype == np.uint32
        self.masks = dict(zip(sampling, masks_SW))
        return WholeStep(self, scheduled, super().execute_model(scheduled))

    def _compute(self, request_id, scheduled, i, output, lines):
        self.mask_W = self.masks.get(request_id)
        super()._compute(request_id, scheduled, i, output, lines)

    def _fault(self, request_id):
        nothing_to_draw = self.mask_W is not None and not self.mask_W.any()
        return "no token can be drawn" if nothing_to_draw else super()._fault(request_id)

    def _sample(self, row):
        if self.mask_W is None or not self.mask_W.any():
            return super()._sample(row)
        allowed_V = np.unpackbits(self.mask_W.view(np.uint8), bitorder="little")[:VOCAB]
        return int(np.argmax(np.where(allowed_V, self.model(row.token_ids), -np.inf)))


def make(grammars=None, **options):
    executor = MaskedExecutor()
    return EngineCore(make_config(**options), executor, grammars or ScriptGrammars()), executor


def scripted(name, script, max_tokens=20, prompt=(10,)):
    return request(name, prompt, max_tokens, structured_outputs={"choice": [script]})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_answers_follow_their_grammar_and_end_with_it_and_others_are_not_masked(asynchronous):
    core, _ = make(async_scheduling=asynchronous)
    core.add_request(scripted("a", "50 20 99 0"))
    core.add_request(request("plain", max_tokens=6))
    core.add_request(scripted("b", "33"))
    core.add_request(scripted("cut", "7 8 9", max_tokens=2))
    tokens, ends = run(core)
    assert tokens == {"a": [50, 20, 99, 0], "plain": [11, 12, 13, 14, 15, 16], "b": [33], "cut": [7, 8]}
    assert ends == {"a": ("stop", None), "plain": ("length", None), "b": ("stop", None), "cut": ("length", None)}
    core._scheduler.check_integrity()
    assert not core._scheduler.structured_output_manager.bound, "requests that ended are remembered"


def test_a_step_begins_before_the_last_one_is_awaited_and_draws_after_it():
    core, executor = make(async_scheduling=True)
    core.add_request(scripted("a", "50 51 52 53"))
    run(core)
    masked = [entry for entry in executor.diary if entry[1] <= 4]
    assert masked == [
        ("forward", 1),
        ("draw", 1),
        ("forward", 2),
        ("result", 1),
        ("draw", 2),
        ("forward", 3),
        ("result", 2),
        ("draw", 3),
        ("forward", 4),
        ("result", 3),
        ("draw", 4),
        ("result", 4),
    ]


def test_only_steps_in_which_such_a_request_samples_are_masked():
    core, executor = make(max_num_batched_tokens=4, max_num_seqs=4)
    core.add_request(scripted("a", "50 51", prompt=[10] * 10))
    core.add_request(request("plain", max_tokens=9))
    run(core)
    by_step = {step.step_id: step for step in executor.executed}
    for step in by_step.values():
        samples = [name for name, most in zip(step.request_ids, step.max_sampled_tokens) if most]
        assert step.masked == ("a" in samples)
        assert step.num_steps == 1 or not step.masked
    assert {step.masked for step in by_step.values()} == {True, False}


def test_a_request_waits_for_its_grammar_and_nobody_waits_behind_it():
    grammars = ScriptGrammars(at_once=False)
    core, _ = make(grammars)
    core.add_request(scripted("slow", "50"))
    core.add_request(request("quick", max_tokens=3))
    assert run(core)[0] == {"quick": [11, 12, 13]}
    stats = core.step().stats
    assert (stats.num_waiting_reqs, stats.num_running_reqs) == (1, 0)
    core._scheduler.check_integrity()
    grammars.finish()
    assert run(core) == ({"slow": [50]}, {"slow": ("stop", None)})


def test_with_nothing_to_do_but_to_compile_a_step_sleeps_until_that_is_done():
    grammars = ScriptGrammars(at_once=False)
    core, _ = make(grammars)
    core.add_request(scripted("slow", "50"))
    slept = []
    core._scheduler.structured_output_manager.wait = lambda seconds: (slept.append(seconds), grammars.finish())
    core.step()
    assert len(slept) == 1 and slept[0] > 0
    assert run(core)[0] == {"slow": [50]}
    core, _ = make(grammars)
    core.add_request(request("plain"))
    core._scheduler.structured_output_manager.wait = lambda seconds: pytest.fail(
        "a step slept though there was work to do"
    )
    core.step()


def test_a_grammar_that_is_none_fails_its_own_request():
    grammars = ScriptGrammars(at_once=False)
    core, _ = make(grammars)
    core.add_request(scripted("bad", "50"))
    core.add_request(request("good", max_tokens=2))
    grammars.futures.pop()[0].set_exception(RequestError("structured_outputs cannot be used: no", "structured_outputs"))
    outputs = [output for _ in range(4) for output in core.step().outputs]
    [refused] = [output for output in outputs if output.request_id == "bad"]
    assert (refused.finish_reason, refused.error) == ("error", "structured_outputs cannot be used: no")
    assert refused.error_parameter == "structured_outputs"
    assert [output.new_token_ids for output in outputs if output.request_id == "good"] == [[11], [12]]
    core._scheduler.check_integrity()


def test_a_request_may_be_aborted_while_its_grammar_is_compiled_or_followed():
    grammars = ScriptGrammars(at_once=False)
    core, _ = make(grammars)
    core.add_request(scripted("a", "50 51 52 53 54"))
    core.abort_requests(["a"])
    grammars.finish()
    assert run(core) == ({}, {})
    grammars.at_once = True
    core.add_request(scripted("a", "50 51 52 53 54"))
    core.step()
    core.abort_requests(["a"])
    assert not core._scheduler.has_unfinished_requests()
    core.add_request(request("next", max_tokens=2))
    tokens, _ = run(core)
    assert tokens["next"] == [11, 12]
    core._scheduler.check_integrity()


def test_a_grammar_that_cannot_be_followed_any_more_fails_its_own_request():
    core, _ = make(ScriptGrammars(breaks_at=2))
    core.add_request(scripted("a", "50 51 52"))
    core.add_request(request("plain", max_tokens=5))
    tokens, ends = run(core)
    assert tokens == {"a": [50, 51], "plain": [11, 12, 13, 14, 15]}
    assert ends["a"] == ("error", "no token can be drawn")


def test_an_engine_without_grammars_refuses_such_requests():
    core = EngineCore(make_config(), MaskedExecutor())
    with pytest.raises(RequestError, match="no tokenizer to compile it for"):
        core.add_request(scripted("a", "50"))
    assert not core._scheduler.has_unfinished_requests()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_draw_that_fails_ends_what_was_running_and_the_engine_goes_on(number):
    core, executor = make(max_num_seqs=2)
    executor.fail_at[number] = "dispatch"  # a masked step is executed when it draws
    for name in ("a", "b", "waits"):
        core.add_request(scripted(name, "50 51 52 53"))
    tokens, ends = run(core)
    failed = {name for name, (reason, _) in ends.items() if reason == "error"}
    assert failed == {"a", "b"} and executor.recoveries == 1
    assert all("the device is on fire" in ends[name][1] for name in failed)
    assert tokens["waits"] == [50, 51, 52, 53]
    core._scheduler.check_integrity()


@pytest.mark.parametrize("what", ["result", "draw", "forward"])
@pytest.mark.parametrize("step", [2, 3])
def test_after_an_interrupt_a_step_that_has_not_drawn_still_does(what, step):
    core, executor = make()
    executor.interrupt_at = (what, step)
    core.add_request(scripted("a", "50 51 52 53"))
    tokens, ends = [], []
    for _ in range(40):
        try:
            outputs = core.step().outputs
        except KeyboardInterrupt:
            continue
        tokens += [token for output in outputs for token in output.new_token_ids]
        ends += [output.finish_reason for output in outputs if output.finish_reason]
    assert ends == (["stop"] if what == "result" else ["error"])
    assert tokens == ([50, 51, 52, 53] if what == "result" else [50, 51, 52, 53][: len(tokens)])
    core._scheduler.check_integrity()
    core.add_request(scripted("b", "60 61"))
    assert run(core)[0]["b"] == [60, 61]


def test_a_step_that_has_not_drawn_is_drawn_before_the_cache_is_reset():
    core, executor = make()
    executor.interrupt_at = ("result", 1)
    core.add_request(scripted("a", "50 51 52 53"))
    while executor.interrupt_at is not None:
        with contextlib.suppress(KeyboardInterrupt):
            core.step()
    assert not core.reset_prefix_cache()  # "a" holds blocks
    assert not core._in_flight
    tokens, _ = run(core)
    assert [50, 51, 52, 53][-len(tokens["a"]) :] == tokens["a"]


def test_a_request_waits_for_the_program_that_masks_and_nobody_waits_behind_it():
    core, executor = make(async_scheduling=True)
    executor.masks_ready = False
    core.add_request(scripted("shaped", "50 51"))
    core.add_request(request("first", max_tokens=3))
    assert run(core)[0] == {"first": [11, 12, 13]}
    core.add_request(request("second", max_tokens=2))
    assert run(core)[0] == {"second": [11, 12]}
    assert not any(step.masked for step in executor.executed)
    assert core.step().stats.num_waiting_reqs == 1
    core._scheduler.check_integrity()
    executor.masks_ready = True
    assert run(core) == ({"shaped": [50, 51]}, {"shaped": ("stop", None)})


def test_the_program_that_masks_is_wanted_while_the_first_grammar_is_compiled_and_not_before():
    grammars = ScriptGrammars(at_once=False)
    core, executor = make(grammars)
    core.add_request(request("plain", max_tokens=3))
    run(core)
    assert executor.times_asked == 0
    core.add_request(scripted("shaped", "50"))
    core.step()
    assert executor.times_asked == 1
    grammars.finish()
    assert run(core)[0] == {"shaped": [50]}


def test_with_only_the_program_to_wait_for_a_step_sleeps(monkeypatch):
    core, executor = make()
    executor.masks_ready = False
    core.add_request(scripted("shaped", "50"))
    slept = []
    monkeypatch.setattr("jaxpaged.core.structured_output.time.sleep", slept.append)
    core.step()
    assert len(slept) == 1 and slept[0] > 0


def test_without_a_program_that_masks_only_those_who_need_it_fail():
    core, executor = make()
    executor.masks_ready = EngineError("it could not be compiled")
    core.add_request(scripted("shaped", "50"))
    core.add_request(request("plain", max_tokens=2))
    tokens, ends = run(core)
    assert tokens == {"shaped": [], "plain": [11, 12]}
    assert ends["shaped"] == ("error", "it could not be compiled")
    core._scheduler.check_integrity()


def test_a_request_may_be_aborted_while_it_waits_for_the_program_that_masks():
    core, executor = make()
    executor.masks_ready = False
    core.add_request(scripted("shaped", "50"))
    core.step()
    core.abort_requests(["shaped"])
    assert not core._scheduler.has_unfinished_requests()
    executor.masks_ready = True
    assert run(core) == ({}, {})


# ---- thinking that may not be too long: the model counts, from the token that begins to think to the one that ends it

START, END = 12, 90


def thinking(name, budget, max_tokens=12, prompt=(10,), **params):
    is_thinking = leaves_open(prompt, START, END)
    params = {
        "thinking_token_budget": budget,
        "thinking_token_ids": (START, END),
        "is_thinking": is_thinking,
        **params,
    }
    return request(name, prompt, max_tokens, **params)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("num_scheduler_steps", [1, 8])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 60])
def test_thinking_ends_when_its_budget_is_used(asynchronous, num_scheduler_steps, budget):
    core, _ = make(async_scheduling=asynchronous, num_scheduler_steps=num_scheduler_steps)
    core.add_request(thinking("a", budget))
    core.add_request(thinking("open", budget, prompt=(START, 13)))
    core.add_request(request("plain", max_tokens=7))
    tokens, _ = run(core)
    used = [11, 12, *range(13, 13 + budget), END, 91, 92, 93, 94, 95, 96, 97, 98, 99]
    assert tokens["a"] == used[:12]
    assert tokens["open"] == [*range(14, 14 + budget), END, 91, 92, 93, 94, 95, 96, 97, 98, 99, 5, 6][:12]
    assert tokens["plain"] == [11, 12, 13, 14, 15, 16, 17]
    core._scheduler.check_integrity()


def test_steps_in_which_thinking_cannot_be_too_long_have_no_mask_and_may_be_runs():
    core, executor = make(async_scheduling=True, num_scheduler_steps=8)
    core.add_request(thinking("a", 20, max_tokens=40))
    tokens, _ = run(core)
    assert tokens["a"][:23] == [*range(11, 33), END]
    assert sum(step.masked for step in executor.executed) <= 3
    assert any(step.num_steps > 1 for step in executor.executed)
    core, executor = make(async_scheduling=True)
    core.add_request(thinking("a", 5, prompt=(20,), max_tokens=30))  # it never thinks
    run(core)
    assert not any(step.masked for step in executor.executed)


def test_a_budget_and_a_grammar_bind_together():
    core, _ = make()
    core.add_request(thinking("a", 2, structured_outputs={"choice": ["12 50 51 90 33"]}))
    core.add_request(thinking("b", 1, structured_outputs={"choice": ["12 50 51 52"]}))  # its grammar knows no end
    assert run(core)[0] == {"a": [12, 50, 51, 90, 33], "b": [12, 50, 51, 52]}


def test_preemption_does_not_change_where_thinking_ends():
    executor = MaskedExecutor()
    executor.kv_cache_config = dataclasses.replace(executor.kv_cache_config, num_blocks=(9,))
    core = EngineCore(make_config(async_scheduling=True), executor, ScriptGrammars())
    for name in "abc":
        core.add_request(thinking(name, 3, max_tokens=16))
    tokens, _ = run(core)
    expected = [11, 12, 13, 14, 15, END, 91, 92, 93, 94, 95, 96, 97, 98, 99, 5]
    assert tokens == dict.fromkeys("abc", expected)
    assert core.stats().num_preemptions
