"""Engines that the proxy starts on this machine, and that end with it: one command is enough to try several.

Each is `jaxpaged serve` in a process of its own, on a free port of 127.0.0.1. What it writes to standard error says
where it listens, and is passed on with its name. It ends when its standard input does: with the proxy, however that
ends.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from jaxpaged.errors import UsageError

OWN_FLAGS = ("--host", "--port", "--uds", "--kv-role")
"""What each engine is given here."""
PROGRAM = "from jaxpaged.entrypoints.proxy.local_engines import serve_while_wanted; serve_while_wanted()"
STOP_SECONDS = 30.0
"""How long an engine has to end, before it is killed."""


class LocalEngine:
    """One of them, which is starting. `url` is where it listens, once `wait` has returned."""

    def __init__(self, name: str, role: str, arguments: Sequence[str]):
        self.name, self.url = name, ""
        self._is_told, self._is_stopping = threading.Event(), False
        flags = ["--host", "127.0.0.1", "--port", "0", "--kv-role", role]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments, *flags], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
            process_group=0,  # a terminal's Ctrl-C is for the proxy, whose requests they have
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._pass_on, name=f"log of {name}", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None, "it was asked for"
        for line in self._process.stderr:
            print(f"{self.name}: {line}", end="", file=sys.stderr, flush=True)
            found = re.search(r"served at (https?://[^\s,]+)", line)
            if found and not self.url:
                self.url = found[1].rstrip(".")
                self._is_told.set()
        status = self._process.wait()
        if self.url and not self._is_stopping:
            print(f"{self.name} has ended with status {status}; the others go on.", file=sys.stderr, flush=True)
        self._is_told.set()

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
        self._is_stopping = True
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
        assert self._process.stderr is not None, "it was asked for"
        self._process.stderr.close()


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


def serve_while_wanted() -> None:
    """`jaxpaged serve` with the arguments of this process, until standard input ends, or a signal comes."""
    from jaxpaged.entrypoints.cli import main

    threading.Thread(target=_end_with_input, name="end with input", daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))


def _end_with_input() -> None:
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
