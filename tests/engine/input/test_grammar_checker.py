"""What cannot be compiled is refused, and the checker outlives it. Child processes are real here."""

import contextlib
import json
import select
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.core.grammar import probe as grammar_probe
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.input.grammar_checker import PATIENCE, Child, GrammarChecker
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from tests.engine import fake_core
from tests.engine.fake_engine import make_engine

pytest.importorskip("llguidance")

LONG_CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"'
CHAIN_OF_REFS = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": {"type": "string"}},
}
GOOD = StructuredOutputsParams(regex="a+")


@pytest.fixture(scope="module")
def checker():
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a", "json": None}, None),
        ({"json": {"not": {"pattern": "x"}}}, "not cannot be followed here"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "no text fits all that it asks for"),
        ({"json": {"$ref": "#"}}, "no text fits"),
        ({"json": {"$ref": "http://127.0.0.1/schema.json"}}, "structured_outputs cannot be used"),
        ({"grammar": "start: oops"}, "structured_outputs cannot be used"),
        ({"grammar": LONG_CHAIN}, "more than 5 s, or more memory"),
        ({"json": CHAIN_OF_REFS}, "more than 5 s, or more memory"),
        ({"choice": ["a", "b"]}, None),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_the_next_is_checked_as_ever(checker, fields, problem):
    params = StructuredOutputsParams(**fields)
    if problem is None:
        checker.check(params)
        return
    with pytest.raises(RequestError, match=problem) as caught:
        checker.check(params)
    assert caught.value.parameter == "structured_outputs"
    checker.check(GOOD)


def test_one_that_computes_may_take_as_long_as_it_needs_and_one_that_does_nothing_is_given_up(monkeypatch):
    """Before, 60 s of waiting ended a check, whatever else the machine had to do."""
    checker, waited, computed = GrammarChecker(), [], []
    checker.check(GOOD)
    real = select.select

    def nothing_yet(reads, *others):
        waited.append(others[-1])
        return ([], [], []) if len(waited) % 4 else real(reads, [], [], 60)

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", nothing_yet)
        patch.setattr(Child, "_computed", lambda child: computed.append(0) or len(computed))
        checker.check(StructuredOutputsParams(regex="b+"))
        assert waited == [PATIENCE] * 4
        patch.setattr(Child, "_computed", lambda child: 7.0)
        with pytest.raises(RequestError, match="Make it simpler"):
            checker.check(StructuredOutputsParams(regex="c+"))
    checker.check(StructuredOutputsParams(regex="c+"))  # that was not its fault, so it is not remembered
    checker.close()


@pytest.mark.parametrize(("regex", "good"), [("x{3}", True), ("(x", False)])
def test_what_was_found_is_remembered_and_no_process_is_asked_again(monkeypatch, regex, good):
    """Before, only the good ones were."""
    checker, asked = GrammarChecker(), []
    send = Child.send
    monkeypatch.setattr(Child, "send", lambda *args: asked.append(1) or send(*args))
    for _ in range(3):
        with contextlib.nullcontext() if good else pytest.raises(RequestError, match="unclosed group"):
            checker.check(StructuredOutputsParams(regex=regex))
    assert asked == [1] and checker.is_known(StructuredOutputsParams(regex=regex))
    checker.close()


def test_one_that_is_too_hard_is_refused_at_once_the_next_time(checker, monkeypatch):
    hard = StructuredOutputsParams(grammar=LONG_CHAIN)
    with pytest.raises(RequestError, match="Make it simpler"):
        checker.check(hard)
    monkeypatch.setattr(Child, "send", None)
    with pytest.raises(RequestError, match="Make it simpler"):
        checker.check(hard)


def test_what_is_remembered_is_bounded_and_holds_no_grammars(monkeypatch):
    monkeypatch.setattr("jaxpaged.engine.input.grammar_checker.MOST_REMEMBERED", 3)
    checker = GrammarChecker()
    for number in range(5):
        checker.check(StructuredOutputsParams(choice=["a" * 1000, str(number)]))
    known = [checker.is_known(StructuredOutputsParams(choice=["a" * 1000, str(i)])) for i in range(5)]
    assert known == [False, False, True, True, True]
    assert {len(key) for key in checker._found} == {32}
    checker.close()


def test_no_child_outlives_its_checker_not_even_one_that_was_busy():
    checker = GrammarChecker()
    checker.check(GOOD)
    [idle] = checker._idle
    checker.close()
    assert idle._process.returncode is not None
    busy = []
    send = Child.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "send", lambda child, *question: busy.append(child) or send(child, *question))
        checker.check(StructuredOutputsParams(regex="b+"))  # as if it had been under way
    assert busy[0]._process.returncode is not None and not checker._idle


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_engine()[0],
        lambda: AsyncLLM.from_config(EngineConfig(), factory=fake_core.FACTORY),
    ],
    ids=["LLMEngine", "AsyncLLM"],
)
def test_an_engine_that_is_shut_down_leaves_no_checker_behind(make):
    engine = make()
    checker = engine.input_processor.grammar_checker
    checker.check(GOOD)
    [child] = checker._idle
    engine.shutdown()
    assert child._process.returncode is not None


HARD = {"type": "object", "patternProperties": {f"^[a-z]{{1,40}}-{i}-$": {} for i in range(300)}}


def hard(number):
    return StructuredOutputsParams(json={**HARD, "title": str(number)})


@pytest.fixture
def fresh():
    checker = GrammarChecker()
    yield checker
    checker.close()


def test_a_hard_one_stands_still_between_two_turns_and_computes_no_more_than_it_may(fresh):
    check = fresh.begin(hard(0))
    assert check.run(0.1) is False and check.run(0.2) is False and check.seconds == 0.2
    child = check._child
    threads = list(Path(f"/proc/{child._process.pid}/task").iterdir())
    while any((each / "stat").read_text().rpartition(")")[2].split()[0] != "T" for each in threads):
        time.sleep(0.01)
    before = child._computed()
    fresh.check(GOOD)
    assert child._computed() == before and fresh._num_paused == 1
    with pytest.raises(RequestError, match="more than 5 s"):
        check.run()
    assert check.seconds == grammar_probe.CPU_SECONDS
    assert fresh._num_paused == 0 and child._process.returncode is not None
    with pytest.raises(RequestError, match="more than 5 s"):
        fresh.begin(hard(0)).run(0.2)


def test_what_is_taken_back_ends_whether_it_computes_or_stands_still(fresh):
    waits, runs = fresh.begin(hard(1)), fresh.begin(hard(2))
    assert waits.run(0.1) is False
    child = waits._child
    waits.drop()
    assert child._process.returncode is not None and fresh._num_paused == 0 and waits.run() is True
    found = []
    thread = threading.Thread(target=lambda: found.append(runs.run()))
    thread.start()
    while runs._child is None or runs._child._computed() < runs._child._begun + 0.1:
        time.sleep(0.01)
    runs.drop()
    thread.join()
    assert found == [True] and not fresh.is_known(hard(1)) and not fresh.is_known(hard(2))
    never = fresh.begin(GOOD)
    never.drop()
    assert never.run() is True and not fresh.is_known(GOOD)


def test_only_so_many_stand_still_and_the_others_begin_anew(fresh, monkeypatch):
    monkeypatch.setattr("jaxpaged.engine.input.grammar_checker.MOST_PAUSED", 1)
    first, second = fresh.begin(hard(3)), fresh.begin(hard(4))
    assert first.run(0.1) is False and second.run(0.1) is False
    assert first._child is not None and second._child is None
    first.drop()
    assert fresh._num_paused == 0


@pytest.mark.parametrize(("number", "certain"), [("SIGPROF", True), ("SIGSEGV", True), ("SIGKILL", False)])
def test_a_child_that_somebody_else_killed_says_nothing_of_its_grammar(number, certain):
    child = Child()
    child._process.send_signal(getattr(signal, number))
    assert child.died_of_it() is certain
    child.kill()


def test_computing_is_limited_and_waiting_is_not(monkeypatch, capfd):
    """The probe gives every grammar its own seconds of the processor, counted from when it came."""
    limits = []
    monkeypatch.setattr(grammar_probe.signal, "setitimer", lambda which, seconds: limits.append((which, seconds)))
    lines = [msgspec.json.encode(GOOD) + b"\n"] * 2
    monkeypatch.setattr(grammar_probe.sys, "stdin", SimpleNamespace(buffer=lines))
    grammar_probe.answer_lines()
    assert limits == [(signal.ITIMER_PROF, grammar_probe.CPU_SECONDS), (signal.ITIMER_PROF, 0)] * 2
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [problem for problem, _ in answers] == [None, None] and all(seconds >= 0 for _, seconds in answers)


def test_a_checker_whose_process_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr("jaxpaged.engine.input.grammar_checker.sys.executable", "/bin/false")
    with pytest.raises(RequestError, match="did not start"):
        GrammarChecker().check(GOOD)


def test_the_probe_finds_the_same_in_this_process():
    assert grammar_probe.problem_with(GOOD) is None
    assert "unclosed group" in grammar_probe.problem_with(StructuredOutputsParams(regex="(a"))
