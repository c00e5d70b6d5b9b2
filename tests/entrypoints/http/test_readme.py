"""The curl commands of the README, run as they are written, on another port."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.entrypoints.http.live_server import live_server

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^curl (?:.*\\\n)*.*$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def url():
    with live_server() as (url, _):
        yield url


def test_the_readme_shows_how_to_ask_with_curl():
    assert len(COMMANDS) >= 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_curl_command_of_the_readme_is_served(url, command):
    words = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", url))
    done = subprocess.run([*words, "--fail", "--silent", "--show-error"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
