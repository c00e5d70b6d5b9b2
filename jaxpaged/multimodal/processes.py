"""Pictures decoded and resized in a few child processes: not on the event loop, and not in the engine's process.

A picture that kills or hangs its child costs its request; another child takes the place. `child.py` is the program.
"""

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from jaxpaged.errors import EngineDeadError, RequestError
from jaxpaged.multimodal.child import Done, Frame, Job, Setup, message
from jaxpaged.multimodal.decoding import PictureLimits
from jaxpaged.multimodal.identity import WHITE, Colour
from jaxpaged.multimodal.processors import processor_of
from jaxpaged.multimodal.processors.base import PictureLayout

logger = logging.getLogger(__name__)

PIECE = 1 << 20
LARGEST_HEAD = 1 << 26
DONE = msgspec.msgpack.Decoder(Done)  # made before threads share it


@dataclass(frozen=True)
class ProcessLimits:
    """Of one child and one picture. `patience`: seconds after which a child that computes nothing is given up."""

    memory_bytes: int = 3 << 30
    cpu_seconds: float = 30.0
    patience: float = 60.0


@dataclass(frozen=True)
class KeyedPicture:
    """What an encoder takes: uint8 of shape `layout.pixels_shape`, with the name that caches know it by. `is_embeds`:
    in place of pixels are embeddings, as bytes."""

    key: bytes
    layout: PictureLayout
    pixels: np.ndarray
    is_embeds: bool = False


class PictureProcesses:
    """At most `num_processes` children, started when they are needed. Threads may share it: each call has a child.

    Raises CheckpointError when the model's files do not describe a processor.
    """

    def __init__(
        self,
        model: str,
        config: Mapping[str, Any],
        preprocessor_config: Mapping[str, Any],
        num_processes: int = 2,
        limits: PictureLimits | None = None,
        process_limits: ProcessLimits | None = None,
    ):
        processor_of(config, preprocessor_config)
        process_limits = process_limits or ProcessLimits()
        self._setup = Setup(
            model,
            dict(config),
            dict(preprocessor_config),
            limits or PictureLimits(),
            process_limits.memory_bytes,
            process_limits.cpu_seconds,
        )
        self._patience = process_limits.patience
        self._places = threading.BoundedSemaphore(num_processes)
        self._lock = threading.Lock()  # for the three below
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._closed = False

    def process(
        self,
        picture: bytes | np.ndarray | tuple[bytes | np.ndarray, ...],
        field: str,
        options: Mapping[str, Any] | None = None,
        options_field: str = "mm_processor_kwargs",
        background: Colour = WHITE,
        moment: tuple[int, int] | None = None,
    ) -> KeyedPicture:
        """A file's bytes or an array of uint8 to what the encoder takes. Blocks while all children are busy.

        `moment`: rows and columns of tokens of a moment of a video, which is several of these, its frames. `options`
        are those of the request, `mm_processor_kwargs`; `background` is what transparent pixels are laid on. The pixels
        own their memory. Raises RequestError that names the field at fault.
        """
        given = picture if isinstance(picture, tuple) else (picture,)
        data = [bytes_of(each, field) for each in given]
        frames = [
            Frame(own.nbytes, each.shape if isinstance(each, np.ndarray) else None)
            for own, each in zip(data, given, strict=True)
        ]
        job = Job(field, dict(options or {}), options_field, frames, background, moment)
        with self._places:
            child = self._take()
            try:
                done, pixels = child.ask(message(job, *data))
            except ChildLost:
                self._drop(child)
                if self._closed:
                    raise EngineDeadError("The processes that decode pictures have been closed.") from None
                num_bytes = sum(each.nbytes for each in data)
                logger.warning("a picture of %d bytes cost the process that decoded it", num_bytes)
                raise RequestError(
                    f"{field} cannot be decoded with the memory and time that a picture may take. Scale it down.", field
                ) from None
            except BaseException:
                self._drop(child)
                raise
            self._keep(child)
        if done.problem is not None or done.layout is None:
            raise RequestError(done.problem or f"{field} cannot be decoded.", done.parameter)
        return KeyedPicture(done.key, done.layout, pixels)

    def close(self) -> None:
        """End all children. Pictures under way fail with EngineDeadError, and so do later ones."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            children, self._children = self._children, set()
        for child in children:
            child.kill()
        for child in idle:
            child.close()

    def _take(self) -> "Child":
        with self._lock:
            if self._closed:
                raise EngineDeadError("The processes that decode pictures have been closed.")
            while self._idle:
                child = self._idle.pop()
                if not child.has_ended():
                    return child
                self._children.discard(child)  # killed from outside, by nothing that a request did
                child.close()
            child = Child(self._setup, self._patience)
            self._children.add(child)
        return child

    def _keep(self, child: "Child") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.close()

    def _drop(self, child: "Child") -> None:
        with self._lock:
            self._children.discard(child)
        child.kill()
        child.close()


def bytes_of(picture: bytes | np.ndarray, field: str) -> memoryview:
    """Raises RequestError for an array of another type than uint8."""
    if not isinstance(picture, np.ndarray):
        return memoryview(picture)
    if picture.dtype != np.uint8:
        raise RequestError(f"{field} is an array of {picture.dtype}. Give uint8 [height, width, 3].", field)
    return memoryview(np.ascontiguousarray(picture)).cast("B") if picture.size else memoryview(b"")


class ChildLost(Exception):
    """A child died, or computes nothing any more."""


class Child:
    """One process. One thread at a time may ask it."""

    def __init__(self, setup: Setup, patience: float):
        command = [sys.executable, "-m", "jaxpaged.multimodal.child"]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads take address space
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "they were asked for"
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._patience = patience
        self._pending = message(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, parts: list[Any]) -> tuple[Done, np.ndarray]:
        """The answer to one job. Raises ChildLost."""
        parts, self._pending = [*self._pending, *parts], []
        for part in parts:
            self._write(memoryview(part))
        head_bytes = int.from_bytes(self._read(4), "little")
        if head_bytes > LARGEST_HEAD:
            raise ChildLost
        try:
            done = DONE.decode(self._read(head_bytes))
        except msgspec.MsgspecError:
            raise ChildLost from None
        try:
            pixels = np.empty(done.layout.pixels_shape if done.layout else 0, np.uint8)
        except (ValueError, MemoryError):
            raise ChildLost from None
        if done.num_bytes != pixels.nbytes:
            raise ChildLost
        self._read_into(pixels.reshape(-1).data)
        return done, pixels

    def _write(self, data: memoryview) -> None:
        while data:
            self._wait([], [self._stdin])
            try:
                data = data[os.write(self._stdin, data[:PIECE]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise ChildLost from None

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, rest: memoryview) -> None:
        while rest:
            self._wait([self._stdout], [])
            num_bytes = os.readv(self._stdout, [rest[:PIECE]])
            if not num_bytes:
                raise ChildLost
            rest = rest[num_bytes:]

    def _wait(self, readable: list[int], writable: list[int]) -> None:
        """Until it has something to say, or listens. A busy machine is waited for: what counts is that it computes."""
        computed = -1.0
        while not any(select.select(readable, writable, [], self._patience)):
            before, computed = computed, self._computed()
            if before == computed:
                raise ChildLost

    def _computed(self) -> float:
        """Seconds that it has computed so far, as far as the system tells."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)  # Linux's clock of another process
        except (AttributeError, OSError):
            return 0.0

    def kill(self) -> None:
        """End it at once, whatever it does. Who waits for its answer is told."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Give its pipes back, when nobody waits for them any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
