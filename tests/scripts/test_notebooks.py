"""The notebooks, executed from top to bottom in a kernel of their own, as a reader would."""

from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "scripts" / "notebooks"


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """`executed("quickstart")`: the notebook with its outputs. It runs in `tmp_path`, away from the user's settings."""
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))

    def execute(name):
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        resources = {"metadata": {"path": str(tmp_path)}}
        return NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()

    return execute


def html_of(notebook, beginning):
    """What the first cell whose code begins so shows in a notebook."""
    cell = next(cell for cell in notebook.cells if cell.source.startswith(beginning))
    return "".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)


@pytest.mark.slow
def test_the_quickstart_runs_and_everything_shows_itself(executed, tmp_path):
    notebook = executed("quickstart")
    assert html_of(notebook, "greedy = ").count("tokens in") == 3
    assert "tokens in" in html_of(notebook, "story = ")
    assert "Once upon a time" in printed_by(notebook, "for chunk in llm.stream")
    assert "shared by several requests" in html_of(notebook, "rules = ")
    assert "data:image/png;base64" in html_of(notebook, "llm.timeline()")
    assert "0 recompiles" in html_of(notebook, "llm.stats()")
    assert {"timeline.png", "trace.json", "steps.jsonl"} <= {path.name for path in tmp_path.iterdir()}


def printed_by(notebook, beginning):
    """What the first cell whose code begins so prints."""
    cell = next(cell for cell in notebook.cells if cell.source.startswith(beginning))
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.slow
def test_keys_and_values_survive_a_restart_and_travel_to_another_server(executed):
    notebook = executed("keys_and_values")
    assert "the same answer" in printed_by(notebook, "llm.shutdown()")
    loaded = printed_by(notebook, "told = ")
    assert int(loaded.split()[0]) > 500 and "blocks copied off the device" in loaded
    kept = printed_by(notebook, "import sys")
    assert "demo" in kept and "damaged" not in kept
    assert "[2, 2, 32, 2, 64] BF16" in printed_by(notebook, "from safetensors")
    words = printed_by(notebook, "def sample").split()
    assert int(words[words.index("fetched") + 1]) > 500


@pytest.mark.exhaustive  # `test_grpo.py` runs the script that it shows
def test_grpo_learns_and_draws_reward_staleness_and_difference(executed):
    notebook = executed("grpo")
    lines = [line.split() for line in printed_by(notebook, "STEPS = ").splitlines() if line.startswith("step")]
    rewards, staleness = ([float(line[at].strip(",")) for line in lines] for at in (3, 5))
    assert staleness == [0] * 4 + [1] * 4 and np.mean(rewards[-2:]) > np.mean(rewards[:2])
    shown = next(cell for cell in notebook.cells if cell.source.startswith("import matplotlib"))
    assert any("image/png" in output.get("data", {}) for output in shown.outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_uses_what_its_readers_would(path):
    """Nobody steps an engine by hand where `LLM` has a method."""
    code = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    assert "llm_engine" not in code and ".step()" not in code
