"""Every command and program of the README and the guides runs, on the embedded model.

A guide's shell blocks run in their order, and its Python is one program, run where its last piece stands. What a guide
keeps in /tmp is in the test's folder, and ports are free ones. `jaxpaged serve` stays until another server takes its
port (`guide_command.py`), so that guides which ask the same server share it: they come first.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.guides import guide_command
from tests.guides.guide_blocks import GUIDES, ROOT, Block, blocks_of, commands_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="needs bash and curl"),
]
PORTS = re.compile(r"((?:127\.0\.0\.1|localhost):|--(?:grpc-|admin-)?port )(\d{4,5})\b")
SERVE = ["jaxpaged", "serve"]
PRELUDE = 'set -eo pipefail\ncurl() { command curl --fail --silent --show-error --max-time 120 "$@"; }\n'


def runnable(guide: Path) -> list[Block]:
    """Blocks to run, those in Python as one."""
    blocks = [block for block in blocks_of(guide) if block.reason is None and block.language in ("sh", "python")]
    *earlier, last = [None, *(block for block in blocks if block.language == "python")]
    program = "\n".join(block.text for block in blocks if block.language == "python")
    return [Block("python", program, None) if block is last else block for block in blocks if block not in earlier]


def servers_of(guide: Path) -> list[list[str]]:
    commands = (command for block in runnable(guide) if block.language == "sh" for command in commands_of(block.text))
    return [command for command in commands if command[1] in ("serve", "proxy")]


def starts_others(guide: Path) -> bool:
    """Whether it has a server other than that of all guides."""
    return any(command != SERVE for command in servers_of(guide))


class Runner:
    """Runs blocks in a folder, with ports and servers that outlast a guide."""

    def __init__(self, folder: Path):
        self.servers = folder / "servers"
        self.servers.mkdir()
        commands = folder / "bin"
        commands.mkdir()
        for name, program in (("jaxpaged", guide_command.__file__), ("python", "")):
            command = commands / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n', encoding="utf-8")
            command.chmod(0o755)
        self.ports: dict[str, str] = defaultdict(self.free_port)
        self.environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GUIDE_SERVERS": str(self.servers),
            "GUIDE_PORT": self.ports["8000"],
        }

    @staticmethod
    def free_port() -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return str(free.getsockname()[1])

    def run(self, block: Block, folder: Path) -> None:
        text = PORTS.sub(lambda found: found[1] + self.ports[found[2]], block.text).replace("/tmp/", f"{folder}/")
        command = ["bash", "-c", PRELUDE + text] if block.language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    def stop(self) -> None:
        for kept in self.servers.glob("*.json"):
            guide_command.stop(kept)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    made = Runner(tmp_path_factory.mktemp("guides"))
    yield made
    made.stop()


# Those that are long to run, and whose commands other tests start too.
LONG = ("kv_cache_dtype", "measuring", "models", "operations", "several_devices", "speculative_decoding", "training")


@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(guide, id=guide.stem, marks=pytest.mark.exhaustive if guide.stem in LONG else ())
        for guide in sorted(GUIDES, key=starts_others)
    ],
)
def test_what_a_guide_shows_runs(runner, guide, tmp_path):
    blocks = runnable(guide)
    if any("127.0.0.1:8000" in block.text for block in blocks) and not servers_of(guide):
        runner.run(Block("sh", "jaxpaged serve\n", None), tmp_path)
    for block in blocks:
        runner.run(block, tmp_path)
    if starts_others(guide):
        runner.stop()
