"""The change that a script for vLLM needs is made to imports and models only."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_vllm_examples.py"
spec = importlib.util.spec_from_file_location("run_vllm_examples", SCRIPT)
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

SOURCE = """\
from vllm import LLM, EngineArgs
from vllm.sampling_params import (
    SamplingParams,
    RequestOutputKind,
)
from vllm.utils.print_utils import print_embeddings
llm = LLM(model="facebook/opt-125m", seed=3)
"""


def test_imports_and_models_change_and_nothing_else():
    source, missing = runner.changed(SOURCE, "demo")
    assert missing == []
    assert "vllm" not in source
    assert "from jaxpaged import SamplingParams, RequestOutputKind" in source
    assert source.endswith("llm = LLM(model='demo', seed=3)\n")


def test_names_that_are_not_there_are_the_reason():
    assert runner.changed("from vllm.lora.request import LoRARequest\n", "demo")[1] == ["LoRARequest"]


def test_a_script_runs_or_says_why_not(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("from vllm import EngineArgs\nassert EngineArgs(model='x').model == 'demo'\n")
    bad.write_text("from vllm import EngineArgs\nEngineArgs(model='x', nonsense=1)\n")
    assert runner.verdict(good, "demo", 60) == "unchanged"
    assert "unknown option 'nonsense'" in runner.verdict(bad, "demo", 60)
