"""A server of this package as a process of its own, for scripts: started on free ports of 127.0.0.1, measured, stopped.

What it logs goes to a file, so that it never waits for somebody to read it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LOOPBACK = "127.0.0.1"
READY_SECONDS, STOP_SECONDS = 600.0, 60.0


@dataclass
class Server:
    """A server that listens at `url` and, if it is not empty, over gRPC at `grpc`."""

    process: subprocess.Popen
    log: BinaryIO
    url: str = ""
    grpc: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def core_pid(self) -> int | None:
        """The process of the engine core that runs now; None between two."""
        return next(iter(self.pids_of("core_process")), None)

    def decoder_pids(self) -> list[int]:
        """The processes that decode pictures."""
        return self.pids_of("multimodal.child")

    def pids_of(self, program: str) -> list[int]:
        """Processes that it has started with a command that holds `program`."""
        found = []
        for child in children(self.pid):
            with contextlib.suppress(OSError):
                if program.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

    def logged(self) -> str:
        """All that it has logged so far."""
        descriptor = self.log.fileno()  # its position is the server's
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def end_of_log(self) -> str:
        return self.logged()[-3000:]


def serve_command(*options: str) -> list[str]:
    """`jaxpaged serve` on a free port, over HTTP."""
    return [sys.executable, "-m", "jaxpaged", "serve", "--host", LOOPBACK, "--port", "0", *options]


@contextlib.contextmanager
def server(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """The server that `command` starts, once it says where it listens; it is stopped afterwards.

    Ends this program when the server does not start, and when it ends by itself.
    """
    with tempfile.TemporaryFile("ab+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(environment or {})})
        try:
            started = listening(process, log)
            yield started
            if process.poll() is not None:
                sys.exit(f"the server ended by itself, with status {process.returncode}:\n{started.end_of_log()}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def listening(process: subprocess.Popen, log: BinaryIO) -> Server:
    """Wait until the server has said where it listens, in one line."""
    made, end = Server(process, log), time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < end:
        text = made.logged()
        if found := re.search(r"(http://[\w.:]+)[^\n]*\n", text):
            made.url = found[1]
            made.grpc = first_of(r"over gRPC at (\S+)", found[0])
            return made
        time.sleep(0.1)
    sys.exit(f"the server did not start:\n{made.end_of_log()}")


def first_of(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that still run."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, those that they have started, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def still_running(pids: Sequence[int], seconds: float = 5.0) -> list[int]:
    """Those of these processes that have not ended after so long."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def memory(pid: int) -> float:
    """MiB that a process holds, without its children; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return int(first_of(r"VmRSS:\s+(\d+)", status) or 0) / 1024


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_open_files(pid: int) -> int:
    """Files, sockets and pipes that a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))
