"""`make-venv` and `demo` over a Python that installs nothing: what they say while they work, and what they hand on."""

import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  -c*version_info*:3*) echo 3.12.1 ;;
  -c*import\\ sys*) echo "$0" ;;
  -c*) ;;
  --version) echo "Python 3.12.1" ;;
  "-m venv"*) mkdir -p "${@: -1}/bin" "${@: -1}/lib/python3/site-packages/pip.dist-info"
              cp "$0" "${@: -1}/bin/python" ;;
  "-m pip"*) echo "Collecting a"; echo "Collecting b"; sleep SECONDS
             echo "Installing collected packages: a, b, c"
             mkdir -p "$(dirname "$0")"/../lib/python3/site-packages/{a,b}.dist-info; sleep SECONDS; exit STATUS ;;
  *) echo "ran: $*" ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    def run(script, *arguments, seconds="0", status="0"):
        python = tmp_path / "python"
        python.write_text(FAKE_PYTHON.replace("SECONDS", seconds).replace("STATUS", status))
        python.chmod(0o755)
        env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "VENV": str(tmp_path / "venv")}
        command = [SCRIPTS / script, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    return run


def test_only_the_path_goes_to_standard_output_and_the_second_time_says_nothing(run, tmp_path):
    first, second = run("make-venv"), run("make-venv")
    assert first.stdout == second.stdout == f"{tmp_path}/venv/bin/python\n"
    assert "minutes" in first.stderr and second.stderr == ""


def test_a_failed_installation_is_told_with_its_log(run, tmp_path):
    done = run("make-venv", status="1")
    assert done.returncode == 1 and "Collecting b" in done.stderr and "jaxpaged-install.log" in done.stderr


@pytest.mark.exhaustive
def test_a_long_installation_says_how_far_it_is(run):
    told = run("make-venv", seconds="16").stderr
    assert re.search("1[5-9] s: 2 packages are found or downloaded", told)
    assert re.search("3[0-4] s: 2 of 3 packages are installed", told)


def test_the_demo_says_what_happens_before_the_first_word(run):
    done = run("demo", "Hello")
    assert done.stdout == "ran: -m jaxpaged generate Hello\n"
    assert "asking the embedded model" in done.stderr.splitlines()[-1]
