import subprocess
import sys
import types
from typing import ClassVar

import pytest

from jaxpaged.entrypoints import batch_progress
from jaxpaged.entrypoints.batch_progress import BatchProgress, in_notebook
from jaxpaged.messages import CompletionOutput, RequestOutput, StepRecord


class Bar:
    made: ClassVar[list] = []

    def __init__(self, **options):
        Bar.made.append(options)

    def close(self):
        pass

    def set_postfix_str(self, text, refresh):
        Bar.said = text

    def update(self, count):
        pass


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(batch_progress, "bar_class", lambda: Bar)
    return Bar.made


def pretend(monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_a_kernel_of_jupyter_gets_a_bar_though_it_is_no_terminal(bars, monkeypatch):
    pretend(monkeypatch, types.SimpleNamespace(kernel=object()))
    assert in_notebook()
    with BatchProgress(3, True):
        pass
    assert bars[0]["total"] == 3


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()])
def test_ipython_without_a_kernel_is_no_notebook(bars, monkeypatch, shell):
    pretend(monkeypatch, shell)
    with BatchProgress(3, True):
        pass
    assert bars == []


def test_rates_leave_out_waits_for_programs(bars, monkeypatch):
    """Eight of the ten seconds of a batch are a wait: the rates are those of the other two."""
    pretend(monkeypatch, types.SimpleNamespace(kernel=object()))
    now = [1000.0]
    monkeypatch.setattr(batch_progress.time, "time", lambda: now[0])
    monkeypatch.setattr(batch_progress.time, "perf_counter", lambda: now[0] - 900.0)  # a clock of its own
    waiting = step_record(program_wait=8.0, schedule_end=101.0)
    with BatchProgress(1, True, step_records=lambda: ([waiting], 0)) as progress:
        now[0] += 10.0
        sequence = CompletionOutput(0, "", [1] * 20, None, None, "length")
        progress.advance(RequestOutput("0", None, [1] * 30, None, [sequence], True))
    assert Bar.said == "in 15 tok/s, out 10 tok/s"


def step_record(**fields):
    values = dict.fromkeys(StepRecord.__struct_fields__, 0)
    return StepRecord(**{**values, **fields})


def test_false_asks_for_none_in_a_notebook_too(bars, monkeypatch):
    pretend(monkeypatch, types.SimpleNamespace(kernel=object()))
    with BatchProgress(3, False):
        pass
    assert bars == []


def test_without_widgets_the_bar_is_text_and_nobody_is_warned():
    program = """
import sys, types, warnings
warnings.simplefilter("error")
sys.modules["ipywidgets"] = None
shell = types.SimpleNamespace(kernel=object(), config={"IPKernelApp": {}})
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell, __version__="8.0", version_info=(8,))
sys.modules["IPython.display"] = types.SimpleNamespace(display=None, HTML=str)
from jaxpaged.entrypoints.batch_progress import BatchProgress
with BatchProgress(2, True) as progress:
    print(type(progress._bar).__module__, progress._bar.total)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "notebook" not in done.stdout.split()[0]
    assert "Warning" not in done.stderr
    assert "0/2" in done.stderr
