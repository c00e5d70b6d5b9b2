"""scripts/compile_seconds.py: which programs a start compiles, and how seconds of few layers become those of all."""

import importlib

import pytest

from jaxpaged.tools.planning.targets import parse_target
from jaxpaged.worker.programs.engine_programs import NUM_FIRST


def script():
    return importlib.import_module("compile_seconds")


def test_a_start_compiles_what_the_first_token_needs_first():
    of = script()
    planner = of.planner_of(*of.model_of("tiny"), parse_target("h100", compile=False), 2)
    kinds = [str(key.kind) for key in of.starting(planner)]
    assert set(kinds[:NUM_FIRST]) == {"zeros", "forward", "sample"}
    assert not {"decode", "sample_full", "prompt_logprobs"} & set(kinds), "these come when something asks for them"
    assert len(kinds) < len(planner.compiler.builders)


def test_what_a_layer_adds_is_added_for_the_others():
    few, more = {"traced": 1.0, "compiled": 5.0}, {"traced": 0.9, "compiled": 9.0}
    assert script().at_depth(few, more, (1, 3), 32) == {"traced": 0.9, "compiled": pytest.approx(9 + 29 * 2)}
    assert script().at_depth(more, more, (3, 3), 3) == more
