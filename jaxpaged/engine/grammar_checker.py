"""Whether what a request asks of its answer can be compiled, found out where a crash or a hang hurts nobody.

A child process compiles it first, under limits of time, memory and stack: grammars come from clients, and some make
the compiler overflow its stack, which no `except` catches. This module knows no vocabulary and no engine.
"""

import contextlib
import json
import logging
import select
import subprocess
import sys
import threading
from collections import OrderedDict

import msgspec

from jaxpaged.core.grammar_probe import CPU_SECONDS
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

SECONDS = 60.0
"""To wait for an answer, on a machine that has much else to do. The child limits its own computing to far less."""
START_SECONDS = 300.0
"""To wait for a child process to start."""
TOO_HARD = (
    f"structured_outputs cannot be used: compiling it takes more than {CPU_SECONDS} s, or more memory or longer chains "
    "of rules than are allowed. Make it simpler."
)
MOST_CHILDREN = 4
MOST_REMEMBERED = 1024


class GrammarChecker:
    """Checks in child processes, which start when they are needed. Threads may share it."""

    def __init__(self, seconds: float = SECONDS):
        self.seconds = seconds
        self._lock = threading.Lock()  # for the two below
        self._idle: list[Child] = []
        self._good: OrderedDict[bytes, None] = OrderedDict()  # the ones asked for last come last
        self._places = threading.BoundedSemaphore(MOST_CHILDREN)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise RequestError when the grammar cannot be used. Blocks for as long as compiling takes."""
        key = msgspec.json.encode(params)
        if key not in self._good:
            with self._places:
                problem = self._ask_a_child(key)
            if problem is not None:
                raise RequestError(problem, "structured_outputs")
        with self._lock:
            self._good[key] = None
            self._good.move_to_end(key)
            if len(self._good) > MOST_REMEMBERED:
                self._good.popitem(last=False)

    def close(self) -> None:
        """End the child processes that are idle."""
        with self._lock:
            children, self._idle = self._idle, []
        for child in children:
            child.kill()

    def _ask_a_child(self, line: bytes) -> str | None:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        try:
            answer = child.ask(line, self.seconds)
        except BaseException:
            child.kill()
            raise
        if answer is None:
            child.kill()
            logger.warning("a grammar of %d bytes could not be compiled in a process of its own", len(line))
            return TOO_HARD
        with self._lock:
            self._idle.append(child)
        return json.loads(answer)


class Child:
    """One process that compiles."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "jaxpaged.core.grammar_probe"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._started = False

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """The answer; None when there is none in time, or the process died of the question.

        Raises RequestError when the process cannot even compile a grammar that is certainly good.
        """
        if not self._started:
            known_good = msgspec.json.encode(StructuredOutputsParams(choice=["a"]))
            answer = self._exchange(known_good, START_SECONDS)
            if answer is None or json.loads(answer) is not None:
                problem = json.loads(answer) if answer else "the process that checks grammars did not start."
                raise RequestError(problem, "structured_outputs")
            self._started = True
        return self._exchange(line, seconds)

    def _exchange(self, line: bytes, seconds: float) -> bytes | None:
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        answer = self._process.stdout.readline() if ready else b""
        return answer or None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # it died with a question unread
            self._process.stdin.close()
        self._process.stdout.close()
