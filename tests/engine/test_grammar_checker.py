"""What cannot be compiled is refused, and the checker outlives it. Child processes are real here."""

import select
from types import SimpleNamespace

import msgspec
import pytest

from jaxpaged.core import grammar_probe
from jaxpaged.engine.grammar_checker import SECONDS, GrammarChecker
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams

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
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "no text fits"),
        ({"json": {"$ref": "http://127.0.0.1/schema.json"}}, "structured_outputs cannot be used"),
        ({"grammar": "start: oops"}, "structured_outputs cannot be used"),
        ({"grammar": LONG_CHAIN}, "more than 5 s, or more memory"),
        ({"json": CHAIN_OF_REFS}, "more than 5 s, or more memory"),
        ({"choice": ["a", "b"]}, None),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_and_the_next_is_checked_as_ever(checker, fields, problem):
    params = StructuredOutputsParams(**fields)
    if problem is None:
        checker.check(params)
        return
    with pytest.raises(RequestError, match=problem) as caught:
        checker.check(params)
    assert caught.value.parameter == "structured_outputs"
    checker.check(GOOD)


def test_one_that_takes_too_long_is_refused_in_time(checker, monkeypatch):
    checker.check(GOOD)
    waited = []
    with monkeypatch.context() as patch:
        patch.setattr(select, "select", lambda *arguments: waited.append(arguments[-1]) or ([], [], []))
        with pytest.raises(RequestError, match="Make it simpler"):
            checker.check(StructuredOutputsParams(regex="b+"))
        checker.check(GOOD)  # it is remembered
    assert waited == [SECONDS]
    checker.check(StructuredOutputsParams(regex="b+"))


def test_computing_time_is_limited(monkeypatch, capfd):
    """The probe gives every grammar its own seconds, counted from when it came."""
    limits = []
    monkeypatch.setattr(grammar_probe, "limit", lambda name, value: limits.append((name, value)))
    monkeypatch.setattr(grammar_probe.time, "process_time", iter([0.2, 100.0]).__next__)
    lines = [msgspec.json.encode(GOOD) + b"\n"] * 2
    monkeypatch.setattr(grammar_probe.sys, "stdin", SimpleNamespace(buffer=lines))
    grammar_probe.answer_lines()
    assert limits == [("RLIMIT_CPU", 1 + grammar_probe.CPU_SECONDS), ("RLIMIT_CPU", 100 + grammar_probe.CPU_SECONDS)]
    assert capfd.readouterr().out == "null\nnull\n"


def test_a_checker_whose_process_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr("jaxpaged.engine.grammar_checker.sys.executable", "/bin/false")
    with pytest.raises(RequestError, match="did not start"):
        GrammarChecker().check(GOOD)


def test_the_probe_finds_the_same_in_this_process():
    assert grammar_probe.problem_with(GOOD) is None
    assert "unclosed group" in grammar_probe.problem_with(StructuredOutputsParams(regex="(a"))
