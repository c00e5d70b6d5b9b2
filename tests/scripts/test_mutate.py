"""Deliberate mistakes: that the lists fit the source, and that the script tells killed from survived."""

import dataclasses

import pytest

from scripts import mutate
from scripts.mutate import FAILED, MUTANTS, PASSED, TIMED_OUT, verdict
from tests.mutants import Mutant

SELECTED, ALL = "elsewhere", ""
MUTANT = Mutant(
    "a test",
    "jaxpaged/worker/cache/block_copies.py",
    "fill_value=0",
    "fill_value=1",
    ("tests/worker/test_block_copies.py",),
    SELECTED,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{mutant.module}: {mutant.what}" for mutant in MUTANTS])
def test_a_mutant_applies_to_the_source_and_is_python(mutant):
    text = mutate.mutated(mutant)
    assert text is not None, f"{mutant.original!r} is not once in {mutant.module}; update the mutant."
    compile(text, mutant.module, "exec")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({SELECTED: FAILED}, "killed"),
        ({SELECTED: PASSED, ALL: FAILED}, "killed"),
        ({SELECTED: PASSED, ALL: PASSED}, "SURVIVED"),
        ({SELECTED: 5, ALL: PASSED}, "SURVIVED"),
        ({SELECTED: -6}, "killed"),
        ({SELECTED: 2}, "STALE (2)"),
        ({SELECTED: TIMED_OUT}, "HANGS"),
    ],
)
def test_a_mutant_is_killed_if_any_of_its_tests_fails(statuses, expected):
    asked = []
    assert verdict(MUTANT, lambda _, selection: asked.append(selection) or statuses[selection]) == expected
    assert asked == list(statuses)


def test_a_mutant_that_no_longer_applies_is_stale():
    assert verdict(dataclasses.replace(MUTANT, original="never written"), lambda *_: PASSED) == "STALE"


@pytest.mark.parametrize(("wrong", "status"), [("fill_value=1", FAILED), ("fill_value=-0", PASSED)])
def test_tests_run_against_the_mutant_and_not_against_the_original(wrong, status):
    mutant = dataclasses.replace(MUTANT, wrong=wrong)
    assert mutate.run_tests(mutant, "elsewhere and int8") == status
