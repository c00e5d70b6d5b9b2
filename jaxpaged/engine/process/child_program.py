"""One of our programs in a process of its own, as the process that starts it and the program itself see it begin.

The program is started anew, not forked, and not through `multiprocessing`: what it is to do is plain data, the caller's
main module is not run again, and no library's threads or locks are inherited. It is told what to do by the first
message of its standard input. This module does not know what programs do.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
"""Comes before every message in a pipe: its length in bytes."""


def framed(message: Any) -> bytes:
    """A message as it goes through a pipe."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def started(
    program: str, *arguments: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """A process that runs `program`, a line of Python. `environment`: variables besides those of this process."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=2,  # standard output belongs to the front end
        pass_fds=pass_fds,
        process_group=0,  # a terminal's Ctrl-C is for the front end, which has requests to finish
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )


def tell(process: subprocess.Popen[bytes], start: Any) -> None:
    """Say what a program is to do. Raises BrokenPipeError when it is dead already."""
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(framed(start))
    process.stdin.flush()


def end_in_words(status: int) -> str:
    """What ended a process, by its exit status."""
    if status >= 0:
        return f"ended with exit status {status}"
    hint = ", as the system does when memory runs out" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status} ({signal.Signals(-status).name}{hint})"


# ---- in the program ------------------------------------------------------------------------------


def read_start[S](kind: type[S]) -> S:
    """What standard input says first. Whoever started this process decides when it ends: it may have requests to finish
    when a terminal or a service manager tells all processes to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb", buffering=0) as pipe:
        length = LENGTH.unpack(read_exactly(pipe.read, LENGTH.size))[0]
        return msgspec.msgpack.decode(read_exactly(pipe.read, length), type=kind)


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """`size` bytes. Raises EOFError when there are fewer."""
    data = b""
    while len(data) < size:
        piece = read(size - len(data))
        if not piece:
            raise EOFError(f"the message has {size} bytes, but {len(data)} came")
        data += piece
    return data


def wait_for_end_of_input() -> None:
    """For a thread: returns when nobody needs this process any more, since whoever started it is done, or dead."""
    while os.read(0, 4096):
        pass
