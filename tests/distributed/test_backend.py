"""Starting jax: who says how much of a GPU it takes, and what to do when a platform is not there."""

import os
import subprocess
import sys

import pytest

from jaxpaged.distributed import backend
from jaxpaged.distributed.backend import SHARE_VARIABLES, given_share, has_started, start_backend, usable_share_of_pool
from jaxpaged.errors import ConfigError


@pytest.fixture
def clean(monkeypatch):
    for variable in SHARE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_the_share_is_set_before_the_backend_starts_and_never_against_the_environment(clean):
    clean.setattr(backend, "has_started", lambda: False)
    for variable in SHARE_VARIABLES:
        clean.setenv(variable, "0.4")
        start_backend(0.9)
        assert given_share() == (variable, 0.4)
        clean.delenv(variable)
    clean.setenv(SHARE_VARIABLES[0], "")  # restored after the test
    start_backend(0.8)
    assert given_share() == (SHARE_VARIABLES[0], 0.8)


def test_a_backend_that_runs_already_keeps_its_share(clean):
    start_backend()
    assert has_started()
    start_backend(0.9)
    assert given_share() is None


@pytest.mark.parametrize("given", [None, "0.25", "0.75", "0.9", "1.0"])
@pytest.mark.parametrize("utilization", [0.1, 0.75, 0.9, 1.0])
def test_an_engine_gets_its_share_of_the_whole_memory_or_all_that_jax_took(clean, caplog, given, utilization):
    if given:
        clean.setenv(SHARE_VARIABLES[1], given)
    took = float(given or 0.75)
    assert usable_share_of_pool(utilization) * took == pytest.approx(min(utilization, took))
    assert ("that holds, not gpu_memory_utilization" in caplog.text) == (took < utilization)


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan"])
def test_a_share_that_is_no_share_is_refused(clean, text):
    clean.setenv(SHARE_VARIABLES[0], text)
    with pytest.raises(ConfigError, match=rf"XLA_CLIENT_MEM_FRACTION is '{text}'\. Set it to a number"):
        given_share()


PROGRAM = """
import os, sys
os.environ.pop("TPU_LIBRARY_PATH", None)  # importing an installed libtpu, as jax does, sets it
for module in ("libtpu", "jax_plugins.xla_cuda13"):
    sys.modules[module] = None
from jaxpaged.entrypoints.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("platforms", "extra"), [("cuda", "'.[gpu]'"), ("tpu", "'.[tpu]'")])
def test_a_platform_whose_extra_is_missing_is_a_line_that_names_it(platforms, extra):
    run = command(platforms, "generate", "hello", "--max-tokens", "1")
    assert run.returncode == 2
    line = run.stderr.splitlines()[-1]  # libtpu, if another test needs it here, says something before
    assert line.startswith("jaxpaged generate: error: ") and extra in line and f"'{platforms}'" in line
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("platforms", "installed", "words"),
    [
        ("gpu", False, "pip install -e '.[gpu]'"),
        ("cuda,cpu", False, "pip install -e '.[gpu]'"),
        ("cuda", True, "needs an NVIDIA GPU with its driver, which was not found"),
        ("tpu", True, "needs a TPU, which was not found"),
        ("rocm", False, "Set JAX_PLATFORMS=cpu"),
        ("", False, "Set JAX_PLATFORMS=cpu"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(monkeypatch, platforms, installed, words):
    monkeypatch.setattr(backend, "is_installed", lambda module: installed)
    assert words in backend.why_not(platforms, AssertionError())


def test_a_plan_for_a_tpu_without_its_compiler_names_the_extra():
    run = command("cpu", "plan", "demo", "--target", "v6e:1x1")
    assert run.returncode == 2
    assert "pip install -e '.[aot-tpu]'" in run.stderr and "--no-compile" in run.stderr
    assert command("cpu", "plan", "demo", "--target", "v6e:1x1", "--no-compile").returncode == 0


def command(platforms, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False
    )
