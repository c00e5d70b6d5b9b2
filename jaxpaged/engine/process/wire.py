"""What front ends and an engine core in another process say to each other, and how a value becomes frames.

A message is a frame with its kind and a value. A value is one msgpack frame, structs as arrays, followed by one frame
for every numpy array in it. Nothing that is received is ever run: types are known beforehand, and arrays hold plain
numbers. This module knows no sockets.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxpaged import errors
from jaxpaged.errors import EngineError, JaxpagedError
from jaxpaged.messages import SchedulerStats

# Kinds that a front end sends: its arrival, then requests, ids of requests to stop, and questions.
HELLO, ADD, ABORT, CALL = b"hello", b"add", b"abort", b"call"
# Kinds that a core sends: it serves, what a step gave, how it is doing, a request that it refuses, an answer.
READY, STEP, STATS, REFUSED, ANSWER = b"ready", b"step", b"stats", b"refused", b"answer"

PLAIN_KINDS = "biuf"
"""numpy's letters for truth values, integers and floating point numbers: what an array may hold."""


class CoreFacts(msgspec.Struct, array_like=True):
    """What a front end must know of a core: `options` are those of `EngineConfig`, resolved."""

    options: dict[str, Any]
    vocab_size: int
    model_folder: str
    tokenizer_folder: str


class Refusal(msgspec.Struct, array_like=True):
    """A request that the core does not take: a RequestError on its way."""

    request_id: str
    message: str
    parameter: str | None = None


class CoreStats(msgspec.Struct, array_like=True):
    """How a core is doing: its queues, and the counters of its executor."""

    scheduler: SchedulerStats
    executor: dict[str, Any]


class Call(msgspec.Struct, array_like=True):
    """A `CoreCall` by its name, and its fields."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct, array_like=True):
    """The answer to a call, whose frames follow, unless there was an error: the name of its class, and its message."""

    call_id: int
    error: tuple[str, str] | None = None


# ---- between a core's process and the one that started it, through pipes ------------------------


class Start(msgspec.Struct, array_like=True):
    """What a new process is to serve. `factory` is "module:function", see `core_process.Factory`."""

    options: dict[str, Any]
    factory: str
    directory: str
    log_level: int
    log_format: str


class Loading(msgspec.Struct, array_like=True, tag=True):
    """`messages.Progress`."""

    what: str
    done: int
    total: int


class Announced(msgspec.Struct, array_like=True, tag=True):
    """Options and model are known; nothing is loaded yet."""

    facts: CoreFacts


class Serving(msgspec.Struct, array_like=True, tag=True):
    """The socket is open."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The process ends: the name of an exception's class, and its message."""

    error: str
    message: str


Status = Loading | Announced | Serving | Failed


# ---- values as frames ----------------------------------------------------------------------------


class FrameEncoder:
    """Makes frames of values. Not for several threads at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put_aside)
        self._arrays: list[memoryview] = []

    def encode(self, value: Any) -> list[Any]:
        """The frames of a value. Raises TypeError when it holds something that is not plain data."""
        self._arrays = []
        return [self._encoder.encode(value), *self._arrays]

    def _put_aside(self, value: Any) -> Any:
        """Arrays get a frame of their own, and in their place stand type, shape, and number of the frame."""
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in PLAIN_KINDS:
            raise TypeError(f"{value!r} cannot be sent to another process. Use plain values and arrays of numbers.")
        self._arrays.append(memoryview(np.ascontiguousarray(value)).cast("B") if value.size else memoryview(b""))
        return value.dtype.str, value.shape, len(self._arrays) - 1


class FrameDecoder:
    """Makes values of one type from frames. Not for several threads at a time."""

    def __init__(self, type: Any):
        self._decoder = msgspec.msgpack.Decoder(type, dec_hook=self._take_array)
        self._frames: Sequence[bytes] = ()

    def decode(self, frames: Sequence[bytes]) -> Any:
        """The value. Raises ValueError (msgspec's errors are such) when the frames are not one of this type."""
        if not frames:
            raise ValueError("the message has no value")
        self._frames = frames[1:]
        return self._decoder.decode(frames[0])

    def _take_array(self, type: Any, value: Any) -> np.ndarray:
        if type is not np.ndarray:
            raise ValueError(f"nothing of type {type} is ever sent")
        name, shape, number = msgspec.convert(value, tuple[str, tuple[int, ...], int])
        try:
            dtype = np.dtype(name)
        except TypeError:
            raise ValueError(f"an array has the unknown type {name!r}") from None
        if dtype.kind not in PLAIN_KINDS or not 0 <= number < len(self._frames):
            raise ValueError(f"an array of type {name!r} in frame {number} of {len(self._frames)} cannot be")
        array = np.frombuffer(self._frames[number], dtype)  # ValueError unless the length is a multiple
        if any(extent < 0 for extent in shape):
            raise ValueError(f"an array has the shape {shape}")
        return array.reshape(shape)


# ---- errors --------------------------------------------------------------------------------------


def error_named(name: str, message: str) -> JaxpagedError:
    """The error that another process reports by the name of its class and its message."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, JaxpagedError):
        return kind(message)
    return EngineError(f"{name}: {message}")
