"""One process of an engine core as seen by the process that starts it: start, reports, stacks, end.

This module does not know when a process should be replaced.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from jaxpaged.engine.process import child_program, wire
from jaxpaged.engine.process.child_program import LENGTH
from jaxpaged.engine.process.core_process import LAST_STEP_SECONDS, STACKS, closing_seconds
from jaxpaged.errors import EngineDeadError
from jaxpaged.executor.device_slices import ALL_DEVICES, DeviceSlice

PROGRAM = "from jaxpaged.engine.process.core_process import main; main()"
LONGEST_DUMP_SECONDS = 1.0
"""How long a process that hangs may take to write down where its threads are."""
SECONDS_AFTER_KILL = 60.0
"""How long the system may take to end a process that was killed: with a device involved that may take long."""
SECONDS_TO_END = 2.0
"""How long a process that has closed its pipe may take to be gone."""


class CoreChild:
    """A process that serves `start` on `devices`. Reports are read from the file descriptor `reports`."""

    def __init__(self, start: wire.Start, devices: DeviceSlice = ALL_DEVICES):
        self._stacks, self._closing_seconds = Path(start.directory) / STACKS, closing_seconds(start)
        self.reports, reports_end = os.pipe()
        self._unread = b""
        try:
            self._process = child_program.started(
                PROGRAM, str(reports_end), pass_fds=[reports_end], environment=devices.environment
            )
        except BaseException:
            os.close(self.reports)
            raise
        finally:
            os.close(reports_end)
        self.pid = self._process.pid
        if devices.processors is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, devices.processors)  # before it is told what to do, and has threads
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and the reports will say so
            child_program.tell(self._process, start)
        assert self._process.stdin is not None, "it was asked for"
        self._stdin = self._process.stdin

    def read(self) -> list[wire.Status] | None:
        """Reports that have come, once `reports` is readable; None when there will be no more."""
        data = os.read(self.reports, 1 << 16)
        if not data:
            return None
        self._unread += data
        messages = []
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            messages.append(msgspec.msgpack.decode(self._unread[LENGTH.size : end], type=wire.Status))
            self._unread = self._unread[end:]
        return messages

    def dump_stacks(self) -> str:
        """Where every thread of the process is now; empty when it does not tell. It answers even while it hangs."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline, size = time.monotonic() + LONGEST_DUMP_SECONDS, 0
        while time.monotonic() < deadline and not (size and size == len(self.stacks())):
            size = len(self.stacks())
            time.sleep(0.02)
        return self.stacks()

    def stacks(self) -> str:
        """Where its threads were when it crashed; empty when it did not, or never came as far as to say so."""
        try:
            return self._stacks.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self._process.kill()

    def wait(self) -> str:
        """Wait for the end of a process that is ending, and return what ended it, in words.

        Raises EngineDeadError when the system cannot end it.
        """
        try:
            status = self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._wait_for_killed()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        os.close(self.reports)
        return child_program.end_in_words(status)

    def _wait_for_killed(self) -> int:
        try:
            return self._process.wait(SECONDS_AFTER_KILL)
        except subprocess.TimeoutExpired:
            raise EngineDeadError(
                f"the engine core's process {self.pid} was killed, but the system does not end it: it may wait for a "
                "device that does not answer. Restart the machine or the container."
            ) from None

    def stop(self) -> None:
        """Let the step under way finish, then end the process."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(LAST_STEP_SECONDS + self._closing_seconds + 1)
        except subprocess.TimeoutExpired:
            self.kill()
        self.wait()
