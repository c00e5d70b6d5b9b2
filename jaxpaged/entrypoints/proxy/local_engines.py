"""Engines that the proxy starts on this machine, and that end with it: one command is enough to try several.

Each is `jaxpaged serve` in a process of its own, on a free port of 127.0.0.1. What it writes to standard error says
where it listens, and is passed on with its name. One that has served and ends is started again at the same port. It
ends when its standard input does: with the proxy, however that ends.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from jaxpaged.errors import UsageError

OWN_FLAGS = ("--host", "--port", "--uds", "--kv-role")
"""What each engine is given here."""
PROGRAM = """
import sys
from jaxpaged.entrypoints.cli import main
from jaxpaged.entrypoints.proxy.local_engines import end_with_input

end_with_input()
sys.exit(main(["serve", *sys.argv[1:]]))
"""
STOP_SECONDS = 90.0
"""How long an engine has to end, before it is killed."""
RESTART_SECONDS, MOST_RESTART_SECONDS = 1.0, 60.0
"""After which an engine is started again that has ended, longer each time that it ends before it serves."""


class LocalEngine:
    """One of them, which is starting. `url` is where it listens, once `wait` has returned."""

    def __init__(self, name: str, role: str, arguments: Sequence[str]):
        self.name, self.url = name, ""
        self._role, self._arguments = role, arguments
        self._is_told, self._is_stopping, self._starting = threading.Event(), threading.Event(), threading.Lock()
        self._process = self._started(port=0)
        self._thread = threading.Thread(target=self._keep_up, name=f"log of {name}", daemon=True)
        self._thread.start()

    def _started(self, port: int) -> "subprocess.Popen[str]":
        flags = ["--host", "127.0.0.1", "--port", str(port), "--kv-role", self._role]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *self._arguments, *flags],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # a terminal's Ctrl-C is for the proxy, whose requests they have
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )

    def _keep_up(self) -> None:
        """Pass on what it says, and start it again where it has served and ends, until it is told to stop."""
        pause = RESTART_SECONDS
        while True:
            served = self._pass_on()
            status = self._process.wait()
            if not self.url or self._is_stopping.is_set():
                break
            pause = RESTART_SECONDS if served else min(2 * pause, MOST_RESTART_SECONDS)
            self._say(f"has ended with status {status}; it is started again in {pause:g} s, and the others go on.")
            if self._is_stopping.wait(pause):
                break
            port = urlsplit(self.url).port
            assert port is not None, "it was told with one"
            with self._starting:
                if self._is_stopping.is_set():
                    break
                self._close()
                self._process = self._started(port)
        self._is_told.set()

    def _say(self, what: str) -> None:
        print(f"{self.name} {what}", file=sys.stderr, flush=True)

    def _pass_on(self) -> bool:
        """Print what a process says, to its end. Whether it has served."""
        assert self._process.stderr is not None, "it was asked for"
        served = False
        for line in self._process.stderr:
            print(f"{self.name}: {line}", end="", file=sys.stderr, flush=True)
            if found := re.search(r"served at (https?://[^\s,]+)", line):
                served, self.url = True, self.url or found[1].rstrip(".")
                self._is_told.set()
        return served

    def wait(self) -> str:
        """Its address, once it serves. Raises UsageError if it ends before."""
        self._is_told.wait()
        if not self.url:
            raise UsageError(
                f"{self.name} ended with status {self._process.wait()} before it served. Its own lines above say why."
            )
        return self.url

    def stop(self) -> None:
        """Tell it to end."""
        with self._starting:
            self._is_stopping.set()
            assert self._process.stdin is not None, "it was asked for"
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """Wait until it has, or kill it."""
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def numbers_of(kinds: str) -> tuple[int, int]:
    """How many engines that compute prompts, and that generate, XPYD stands for. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,2})p([1-9]\d?)d", kinds.lower())
    if found is None:
        raise UsageError(
            f"--start is {kinds!r}; it must be such as 1p1d: one engine for prompts, and one that generates."
        )
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def local_engines(kinds: str, arguments: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The addresses of engines for prompts and of engines that generate, which serve until the end of the context.
    `arguments` are those of `jaxpaged serve`. Raises UsageError where one does not start."""
    num_prefill, num_decode = numbers_of(kinds)
    if own := [each for each in arguments if each.partition("=")[0] in OWN_FLAGS]:
        raise UsageError(f"{own[0]} is given for the engines, and each gets its own. Leave it out.")
    engines: list[LocalEngine] = []
    try:
        for role, name, count in (("kv_producer", "prefill", num_prefill), ("kv_consumer", "decode", num_decode)):
            engines += [LocalEngine(f"{name} engine {number}", role, arguments) for number in range(count)]
        urls = [engine.wait() for engine in engines]
        yield urls[:num_prefill], urls[num_prefill:]
    finally:
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.end()


# ---- in the process of an engine -------------------------------------------------------------------


def end_with_input() -> None:
    """Send this process SIGTERM when its standard input ends."""

    def wait() -> None:
        while os.read(0, 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end with input", daemon=True).start()
