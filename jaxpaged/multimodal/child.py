"""A process that decodes and resizes pictures, so that one which crashes a decoder crashes only this process.

    python -m jaxpaged.multimodal.child

It reads messages from standard input, a `Setup` and then `Job`s, and answers each job with a `Done`. A message is the
length of its head in 4 bytes, the head as msgpack, and the bytes of a picture or of frames, whose number the head has.
Beyond its limits of memory and computing time it dies without an answer, or says that a picture needs too much. Where
processors are few it gives way to the server and the engine, for whom a wait is a wait of all requests.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.multimodal.decoding import PictureLimits
from jaxpaged.multimodal.identity import options_on, picture_key, source_digest
from jaxpaged.multimodal.pictures import picture_pixels
from jaxpaged.multimodal.processors import processor_of
from jaxpaged.multimodal.processors.base import PictureLayout, Processor

NICENESS = 10


class Setup(msgspec.Struct):
    """What all jobs share. `model` names the checkpoint in keys."""

    model: str
    config: dict[str, Any]
    preprocessor_config: dict[str, Any]
    limits: PictureLimits
    memory_bytes: int
    cpu_seconds: float
    num_bytes: int = 0


class Frame(msgspec.Struct):
    """The bytes of a file, or where there is a `shape` those of an array of uint8."""

    num_bytes: int
    shape: tuple[int, ...] | None


class Job(msgspec.Struct):
    """A picture, which is one frame, or a moment of a video, which has rows and columns of tokens."""

    field: str
    options: dict[str, Any]
    options_field: str
    frames: list[Frame]
    background: tuple[int, int, int]
    moment: tuple[int, int] | None


class Done(msgspec.Struct):
    """The pixels follow. Or `problem` says what is wrong, with the field at fault."""

    problem: str | None = None
    parameter: str | None = None
    key: bytes = b""
    layout: PictureLayout | None = None
    num_bytes: int = 0


def message(head: msgspec.Struct, *data: Any) -> list[Any]:
    """The parts of a message, to be written one after the other."""
    packed = msgspec.msgpack.encode(head)
    return [len(packed).to_bytes(4, "little") + packed, *data]


def answer(job: Job, data: Sequence[bytes], setup: Setup, processor: Processor) -> list[Any]:
    """The parts of the answer to one job, of which `data` are the frames."""
    try:
        chosen = processor.with_options(job.options, job.options_field) if job.options else processor
        sources = [
            own if frame.shape is None else np.frombuffer(own, np.uint8).reshape(frame.shape)
            for own, frame in zip(data, job.frames, strict=True)
        ]
        pixels = [picture_pixels(source, job.field, setup.limits, job.background) for source in sources]
        if job.moment is None:
            picture = chosen.process(pixels[0], job.field)
        else:
            picture = chosen.videos.process(pixels, chosen.videos.moment_layout(*job.moment))
    except UsageError as error:
        return message(Done(str(error), getattr(error, "parameter", None)))
    except MemoryError:
        return message(Done(f"{job.field} needs more memory than a picture may. Scale it down.", job.field))
    digest = source_digest(sources[0] if job.moment is None else tuple(sources))
    modality, options = ("image", chosen.options) if job.moment is None else ("video", chosen.videos.options)
    key = picture_key(setup.model, modality, options_on(options, job.background), picture.layout, digest)
    return message(Done(key=key, layout=picture.layout, num_bytes=picture.pixels.nbytes), picture.pixels.data.cast("B"))


def read_exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    """EOFError when the stream ends before."""
    data = stream.read(num_bytes)
    if len(data) != num_bytes:
        raise EOFError
    return data


def read_head(stream: IO[bytes]) -> bytes:
    return read_exactly(stream, int.from_bytes(read_exactly(stream, 4), "little"))


def main() -> None:
    """Answer until standard input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    give_way()
    try:
        setup = msgspec.msgpack.decode(read_head(source), type=Setup)
        processor = processor_of(setup.config, setup.preprocessor_config)
        limit("RLIMIT_AS", setup.memory_bytes)
        limit("RLIMIT_CORE", 0)
        while True:
            job = msgspec.msgpack.decode(read_head(source), type=Job)
            data = [read_exactly(source, frame.num_bytes) for frame in job.frames]
            limit_computing(setup.cpu_seconds)
            parts = answer(job, data, setup, processor)
            limit_computing(0)
            del data
            for part in parts:
                sink.write(part)
            sink.flush()
    except EOFError:
        return


def give_way() -> None:
    """Have less of the processors than others. Where Linux groups processes by sessions it weighs these first, and what
    is computed here would count against the server: this becomes a session of its own."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


def limit_computing(seconds: float) -> None:
    """End this process with SIGPROF when it has computed for so long from now; 0: no more. Waiting does not count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit(name: str, value: int) -> None:
    """Set the soft limit of a resource of this process."""
    import resource

    which = getattr(resource, name)
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


if __name__ == "__main__":
    main()
