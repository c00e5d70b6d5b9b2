"""Whether what a request asks of its output can be compiled, found out where a crash or a hang hurts nobody.

A child process compiles it first, under limits of computing time, memory and stack: grammars come from clients, and
some make the compiler overflow its stack, which no `except` catches. A caller with
many checks can suspend hard ones while others run (`Check.run`), and take one back (`Check.drop`).

This module knows no vocabulary and no engine.
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
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

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
"""That compute at a time."""
MOST_PAUSED = 4
"""That stand still in the middle of their work at a time."""
LOOK_SECONDS = 0.02
"""Between two looks at how long a child has computed, where that is limited."""
MOST_REMEMBERED = 4096
DYING_SECONDS = 5.0
"""For a child whose output has ended to end itself."""


class GrammarChecker:
    """Checks in child processes, which start when they are needed. Threads may share it; each check has a child.

    What was found of a grammar is remembered, good or bad, so that asking again costs nothing.
    """

    def __init__(self, patience: float = PATIENCE):
        self.patience = patience
        self._lock = threading.Lock()  # for the four below
        self._idle: list[Child] = []
        self._num_paused = 0
        self._closed = False
        self._found: OrderedDict[bytes, str | None] = OrderedDict()  # by digest; the ones asked for last come last
        self._places = threading.BoundedSemaphore(MOST_CHILDREN)

    def check(self, params: StructuredOutputsParams) -> float:
        """Raise RequestError when the grammar cannot be used. Blocks for as long as compiling takes.

        Returns the seconds of computing that it took; they are 0 where it is remembered.
        """
        check = self.begin(params)
        if self.recall(check.digest):
            return 0.0
        with self._places:
            check.run()
        return check.seconds

    def begin(self, params: StructuredOutputsParams) -> "Check":
        """A check that has not begun to compute; `run` does it, in pieces."""
        return Check(self, msgspec.json.encode(params))

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

    def recall(self, digest: bytes) -> bool:
        """Whether the grammar is known to be good. Raises RequestError when it is known not to be."""
        with self._lock:
            if digest not in self._found:
                return False
            self._found.move_to_end(digest)
            problem = self._found[digest]
        raise_problem(problem)
        return True

    def remember(self, digest: bytes, problem: str | None) -> None:
        with self._lock:
            self._found[digest] = problem
            if len(self._found) > MOST_REMEMBERED:
                self._found.popitem(last=False)

    def take_child(self) -> "Child":
        with self._lock:
            child = self._idle.pop() if self._idle else None
        return child or Child()

    def keep_child(self, child: "Child") -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MOST_CHILDREN:
                self._idle.append(child)
                return
        child.kill()

    def may_pause(self) -> bool:
        """Whether one more child may stand still in the middle of its work; it is counted until `resumed`."""
        with self._lock:
            if self._closed or self._num_paused >= MOST_PAUSED:
                return False
            self._num_paused += 1
            return True

    def resumed(self) -> None:
        with self._lock:
            self._num_paused -= 1


class Check:
    """One grammar while it is found out whether it can be used: in pieces, between which its child stands still.

    `seconds` of computing have been spent on it so far. One thread at a time may `run` it, and any may `drop` it.
    """

    def __init__(self, checker: GrammarChecker, line: bytes):
        self.digest = hashlib.sha256(line).digest()
        self.seconds = 0.0
        self._checker, self._line = checker, line
        self._lock = threading.Lock()  # for the three below
        self._child: Child | None = None
        self._is_paused = False
        self._dropped = False

    @property
    def size(self) -> int:
        """Of the grammar, in bytes."""
        return len(self._line)

    def run(self, seconds: float = float("inf")) -> bool:
        """Go on until it has computed for so many seconds in all. True: the grammar is good, or nobody wants to know
        any more; False: it is not known yet. Raises RequestError when it cannot be used."""
        if self._checker.recall(self.digest):  # it was asked twice at a time
            self.drop()
            return True
        child = self._resumed()
        if child is None:
            return True
        try:
            answer = child.answer(self._checker.patience, seconds)
        except StillComputing:
            return self._pause(child, seconds)
        except BaseException:
            self._let_go(child)
            raise
        verdict = self._verdict(child, answer)
        if verdict is None:
            return True
        self.seconds = verdict.seconds
        if verdict.is_certain:
            self._checker.remember(self.digest, verdict.problem)
        raise_problem(verdict.problem, verdict.seconds)
        return True

    def drop(self) -> None:
        """End the computing: nobody wants to know the result any more."""
        with self._lock:
            self._dropped = True
            child, paused = self._child, self._is_paused
            if child is not None:
                child.end()
            if paused:
                self._child, self._is_paused = None, False
        if child is not None and paused:
            child.kill()
            self._checker.resumed()

    def _resumed(self) -> "Child | None":
        """The child that computes this, going on or beginning; None: it has been dropped."""
        with self._lock:
            if self._dropped:
                return None
            if self._is_paused and self._child is not None:
                self._is_paused = False
                self._checker.resumed()
                self._child.go_on()
                return self._child
        child = self._checker.take_child()
        try:
            child.send(self._line)
        except BaseException:
            child.kill()
            raise
        with self._lock:
            self._child = child
            if self._dropped:
                child.end()
        return child

    def _pause(self, child: "Child", seconds: float) -> bool:
        """Let the child stand still; where too many do, it is given up, and another one will begin anew."""
        with self._lock:
            self.seconds = seconds
            if not self._dropped and self._checker.may_pause():
                child.pause()
                self._is_paused = True
                return False
            self._child = None
        child.kill()
        return self._dropped

    def _verdict(self, child: "Child", answer: bytes | None) -> "Verdict | None":
        """What the child found, or died of; None: it was dropped meanwhile."""
        with self._lock:
            self._child = None
            dropped = self._dropped
        if answer is not None and not dropped:
            self._checker.keep_child(child)
            problem, seconds = json.loads(answer)
            return Verdict(problem, seconds)
        died_of_it = not dropped and child.died_of_it()
        child.kill()
        self._checker.keep_child(Child())  # it starts now, before somebody waits for it
        if dropped:
            return None
        logger.warning("a grammar of %d bytes could not be compiled in a process of its own", len(self._line))
        return Verdict(TOO_HARD, CPU_SECONDS, died_of_it)

    def _let_go(self, child: "Child") -> None:
        with self._lock:
            self._child = None
        child.kill()


class StillComputing(Exception):
    """A child has computed for as long as it may for now."""


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
        self._begun = 0.0  # what it had computed when it was given the grammar

    def send(self, line: bytes) -> None:
        """Give it a grammar to compile.

        Raises RequestError when the process cannot even compile a grammar that is certainly good.
        """
        if not self._started:
            self._put(msgspec.json.encode(StructuredOutputsParams(choice=["a"])))
            answer = self.answer(START_SECONDS)
            problem = json.loads(answer)[0] if answer else "the process that checks grammars did not start."
            if problem is not None:
                raise RequestError(problem, "structured_outputs")
            self._started = True
        self._put(line)

    def _put(self, line: bytes) -> None:
        self._begun = self._computed()
        with contextlib.suppress(BrokenPipeError):  # it is dead, and gives no result
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    def answer(self, patience: float, seconds: float = float("inf")) -> bytes | None:
        """The result; None when the process died of the question, or has not computed for as long as `patience`.

        Raises StillComputing when it has computed for so many seconds since it was given the grammar.
        """
        computed, waited = -1.0, 0.0
        pause = patience if seconds == float("inf") else min(patience, LOOK_SECONDS)
        while not select.select([self._stdout], [], [], pause)[0]:
            now = self._computed()
            if now - self._begun >= seconds:
                raise StillComputing
            waited += pause
            if waited >= patience:
                if now == computed:
                    return None
                computed, waited = now, 0.0
        return self._stdout.readline() or None

    def pause(self) -> None:
        """Let it stand still until `go_on`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Make it die. A caller that waits for its result is told."""
        self._process.kill()

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
