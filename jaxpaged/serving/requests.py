"""What every protocol says of a request besides what it asks for: its id, who asks, and how it is served.

This module knows no protocol and no model.
"""

import asyncio
import functools
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.observability.tracing import CONTEXT_HEADERS
from jaxpaged.messages import LoRAInfo
from jaxpaged.serving.errors import ServingError

SHORT_BODY = 4096
"""Bytes up to which a request is not worth a thread."""
MAX_DEPTH = 64
"""Lists and objects inside each other: deeper ones are refused before anything walks through them recursively."""
CORE_HEADER = "X-data-parallel-rank"
"""vLLM's name of the header, and of the metadata, by which a request names one of several engine cores."""
REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True)
class RequestContext:
    """Who asks, and how a request is served.

    `request_id` has the prefix of its protocol, `model` is the name under which the response goes out, and `lora` the
    adapter that has it, if it is one's. `client` is who asks, as far as that is sure, and `user` one of its users, as
    it says itself. `num_bytes` is the size of the request, in JSON and about. `trace` is its place in a trace; None: it
    has none. `unless_it_leaves` runs work for as long as the client is there, and cancels it then.
    """

    client: str
    request_id: str = ""
    model: str = ""
    user: str = ""
    num_bytes: int = SHORT_BODY + 1
    data_parallel_rank: int | None = None
    trace: Mapping[str, str] | None = None
    unless_it_leaves: Callable[[Awaitable[None]], Awaitable[None]] | None = None
    lora: LoRAInfo | None = None


async def off_loop[T](
    num_bytes: int, function: Callable[..., T], *arguments: Any, threads: Executor | None = None
) -> T:
    """`function(*arguments)`, in a thread unless the request has few bytes: what is done with one takes time that grows
    with it, and nobody else is to wait for that. `threads`: those that it needs whatever its size."""
    if threads is not None:
        return await asyncio.get_running_loop().run_in_executor(threads, functools.partial(function, *arguments))
    if num_bytes <= SHORT_BODY:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def checked_id(name: str, value: str) -> str:
    """Raises ServingError, which names the header or the field."""
    if not REQUEST_ID.fullmatch(value):
        raise ServingError(f"{name} is {value!r}; it must have 1 to 128 visible ASCII characters.", name)
    return value


def own_or_new(request_id: str | None) -> str:
    """The id that a client gave in a field of its request, or a new one. Raises ServingError."""
    if request_id is not None:
        checked_id("request_id", request_id)
    return request_id or os.urandom(16).hex()


def chosen_core(given: Sequence[str]) -> int | None:
    """The engine core that values of `CORE_HEADER` name. The engine refuses those that it has not.

    Raises ServingError for a value that is no number of a core, and for two.
    """
    if not given:
        return None
    if len(given) > 1:
        raise ServingError(f"{CORE_HEADER} is given {len(given)} times. Send one.", CORE_HEADER)
    if not (given[0].isascii() and given[0].isdecimal() and len(given[0]) <= 4):
        raise ServingError(f"{CORE_HEADER} is {given[0]!r}; it must be the number of an engine core.", CORE_HEADER)
    return int(given[0])


def trace_in(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The trace that W3C Trace Context says a request belongs to. The names of `headers` are in lower case.

    Two parents are none, and several states are one, as the standard has it.
    """
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in CONTEXT_HEADERS:
            found.setdefault(name, []).append(value)
    parents, states = (found.get(name, []) for name in CONTEXT_HEADERS)
    parent, state = CONTEXT_HEADERS
    if len(parents) != 1:
        return {}
    return {parent: parents[0], **({state: ",".join(states)} if states else {})}


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ServingError unless the value is one of `allowed`."""
    if value not in allowed:
        raise ServingError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.", name)


def check_depth(name: str, value: Any) -> None:
    """Raise ServingError when lists and objects are nested too deeply in the field `name`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in children(item)]
        if not level:
            return
    raise ServingError(f"{name} is nested more than {MAX_DEPTH} levels deep. Flatten it.", name)


def children(item: Any) -> list[Any]:
    """The lists and objects directly inside an item."""
    inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [child for child in inside if isinstance(child, dict | list)]
