"""What front ends and an engine core in another process say to each other.

A message is a frame with its kind, followed by the frames of a value (`jaxpaged/encoding/frames.py`). This module
knows no sockets.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxpaged.errors import JaxpagedError
from jaxpaged.messages import Progress, SchedulerStats

# Kinds that a front end sends: its arrival, then requests, pixels, ids of requests to stop, and questions.
HELLO, ADD, ITEM, ABORT, CALL = b"hello", b"add", b"item", b"abort", b"call"
# Kinds that a core sends: it serves, what a step gave, how it is doing, a request that it refuses, a result; and once
# for each request with pictures that it has taken, which pixels it lacks.
READY, STEP, STATS, REFUSED, ANSWER = b"ready", b"step", b"stats", b"refused", b"answer"
WANTED = b"wanted"


class CoreFacts(msgspec.Struct, array_like=True):
    """What a front end must know of a core: `options` are those of `EngineConfig`, resolved. `embed_numbers`: how many
    numbers an embedding of a picture has, in a model that sees."""

    options: dict[str, Any]
    vocab_size: int
    model_folder: str
    tokenizer_folder: str
    embed_numbers: int = 0


class Refusal(msgspec.Struct, array_like=True):
    """A request that the core does not take: a RequestError on its way."""

    request_id: str
    message: str
    parameter: str | None = None


class Item(msgspec.Struct, array_like=True):
    """The pixels of a picture, for a request that comes next, or that was said to lack them."""

    request_id: str
    key: bytes
    pixels: np.ndarray


class Wanted(msgspec.Struct, array_like=True):
    """The core has this request, which waits for the pixels of these keys; if there are none, it has all of it."""

    request_id: str
    keys: list[bytes]


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
    """The result of a call, whose frames follow, unless there was an error: the name of its class, and its message."""

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
    name: str = "engine core"  # in the log


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


class Reports(NamedTuple):
    """How whoever makes a core reports of it: the facts as soon as they are known, how far loading is, and why the
    process is about to end, where nobody can raise that."""

    announce: Callable[[CoreFacts], None]
    progress: Progress
    fail: Callable[[JaxpagedError], None]
