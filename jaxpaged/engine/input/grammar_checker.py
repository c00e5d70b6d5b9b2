"""Whether what a request asks of its answer can be compiled, found out where a crash or a hang hurts nobody.

A child process compiles it first, under limits of computing time, memory and stack: grammars come from clients, and
some make the compiler overflow its stack, which no `except` catches. This module knows no vocabulary and no engine.
"""

import contextlib
import hashlib
import json
import logging
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from jaxpaged.core.grammar.probe import CPU_SECONDS
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds after which a child is looked at: one that has computed meanwhile may go on, since its own limit counts what
it computes, however busy the machine is."""
START_SECONDS = 300.0
"""To wait for a child process to start."""
TOO_HARD = (
    f"structured_outputs cannot be used: compiling it takes more than {CPU_SECONDS} s, or more memory or longer chains "
    "of rules than are allowed. Make it simpler."
)
MOST_CHILDREN = 4
MOST_REMEMBERED = 4096
DYING_SECONDS = 5.0
"""For a child whose output has ended to end itself."""


class GrammarChecker:
    """Checks in child processes, which start when they are needed. Threads may share it; each takes a child.

    What was found of a grammar is remembered, good or bad, so that asking again costs nothing.
    """

    def __init__(self, patience: float = PATIENCE):
        self.patience = patience
        self._lock = threading.Lock()  # for the three below
        self._idle: list[Child] = []
        self._closed = False
        self._found: OrderedDict[bytes, str | None] = OrderedDict()  # by digest; the ones asked for last come last
        self._places = threading.BoundedSemaphore(MOST_CHILDREN)

    def check(self, params: StructuredOutputsParams) -> float:
        """Raise RequestError when the grammar cannot be used. Blocks for as long as compiling takes.

        Returns the seconds of computing that it took; they are 0 where it is remembered.
        """
        line = msgspec.json.encode(params)
        digest = hashlib.sha256(line).digest()
        if self._recall(digest):
            return 0.0
        with self._places:
            if self._recall(digest):  # it was asked twice at a time
                return 0.0
            verdict = self._ask_a_child(line)
        if verdict.is_certain:
            self._remember(digest, verdict.problem)
        raise_problem(verdict.problem, verdict.seconds)
        return verdict.seconds

    def is_known(self, params: StructuredOutputsParams) -> bool:
        """Whether `check` will answer at once."""
        with self._lock:
            return hashlib.sha256(msgspec.json.encode(params)).digest() in self._found

    def close(self) -> None:
        """End the child processes, each as soon as it is idle."""
        with self._lock:
            self._closed = True
            children, self._idle = self._idle, []
        for child in children:
            child.kill()

    def _recall(self, digest: bytes) -> bool:
        """Whether the grammar is known to be good. Raises RequestError when it is known not to be."""
        with self._lock:
            if digest not in self._found:
                return False
            self._found.move_to_end(digest)
            problem = self._found[digest]
        raise_problem(problem)
        return True

    def _remember(self, digest: bytes, problem: str | None) -> None:
        with self._lock:
            self._found[digest] = problem
            if len(self._found) > MOST_REMEMBERED:
                self._found.popitem(last=False)

    def _ask_a_child(self, line: bytes) -> "Verdict":
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        try:
            answer = child.ask(line, self.patience)
        except BaseException:
            child.kill()
            raise
        if answer is not None:
            self._keep(child)
            problem, seconds = json.loads(answer)
            return Verdict(problem, seconds)
        died_of_it = child.died_of_it()
        child.kill()
        logger.warning("a grammar of %d bytes could not be compiled in a process of its own", len(line))
        self._keep(Child())  # it starts now, before somebody waits for it
        return Verdict(TOO_HARD, CPU_SECONDS, died_of_it)

    def _keep(self, child: "Child") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.kill()


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a grammar, if anything, and what it cost to find out. `is_certain`: it will be so again."""

    problem: str | None
    seconds: float
    is_certain: bool = True


class GrammarRefused(RequestError):
    """A grammar cannot be used. `seconds` of computing were spent on it."""

    def __init__(self, problem: str, seconds: float):
        super().__init__(problem, "structured_outputs")
        self.seconds = seconds


def raise_problem(problem: str | None, seconds: float = 0.0) -> None:
    if problem is not None:
        raise GrammarRefused(problem, seconds)


class Child:
    """One process that compiles."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "jaxpaged.core.grammar.probe"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "they were asked for"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._started = False

    def ask(self, line: bytes, patience: float) -> bytes | None:
        """The answer; None when the process died of the question, or does nothing any more.

        Raises RequestError when the process cannot even compile a grammar that is certainly good.
        """
        if not self._started:
            known_good = msgspec.json.encode(StructuredOutputsParams(choice=["a"]))
            answer = self._exchange(known_good, START_SECONDS)
            problem = json.loads(answer)[0] if answer else "the process that checks grammars did not start."
            if problem is not None:
                raise RequestError(problem, "structured_outputs")
            self._started = True
        return self._exchange(line, patience)

    def _exchange(self, line: bytes, patience: float) -> bytes | None:
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            return None
        computed = -1.0
        while not select.select([self._stdout], [], [], patience)[0]:
            before, computed = computed, self._computed()
            if computed == before:
                return None
        return self._stdout.readline() or None

    def _computed(self) -> float:
        """Seconds that it has computed so far, as far as the system tells."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)  # Linux's clock of another process
        except (AttributeError, OSError):
            return 0.0

    def died_of_it(self) -> bool:
        """Whether it ended by itself at one of its limits, or because the compiler crashed; not because it was killed
        by somebody else, who may have been short of memory."""
        try:
            code = self._process.wait(DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return code < 0 and code != -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # it died with a question unread
            self._stdin.close()
        self._stdout.close()
