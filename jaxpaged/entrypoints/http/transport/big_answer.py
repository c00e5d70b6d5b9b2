"""Answers that are large: made and encoded in a thread, a little at a time, and sent in pieces.

The encoder holds the interpreter's lock until it is done, so nothing large is given to it at once. This module knows no
endpoint.
"""

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.entrypoints.http.body import json_response

SMALL_ANSWER = 2**15
"""Bytes up to which an answer is not worth a thread: they are encoded in less than a millisecond."""
ITEMS_AT_ONCE = 128
"""Of a list, encoded at a time."""
SCALARS = frozenset({str, int, float, bool, type(None)})
PIECE = 2**18
"""Bytes that are handed to a connection at a time."""


async def answer_of(num_bytes: int, make: Callable[[], Any]) -> Response:
    """The JSON of what `make` makes; of about `num_bytes`, or fewer."""
    if num_bytes <= SMALL_ANSWER:
        return json_response(make())
    return BigAnswer(await asyncio.to_thread(lambda: encoded(make())))


def encoded(value: Any) -> bytes:
    """`msgspec.json.encode` in many small steps."""
    return msgspec.json.encode(in_small_parts(value))


def in_small_parts(value: Any) -> Any:
    """The value with everything long in it encoded already."""
    if isinstance(value, list):
        return list_in_parts(value)
    if isinstance(value, dict):
        if len(value) <= ITEMS_AT_ONCE and are_scalar(value.values()):
            return value  # such as the candidates of a token: to look at each of 80,000 takes ten times what they do
        return {key: in_small_parts(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        long = {
            name: in_small_parts(each)
            for name in value.__struct_fields__
            if isinstance(each := getattr(value, name), list | dict | msgspec.Struct)
        }
        return msgspec.structs.replace(value, **long) if long else value
    return value


def list_in_parts(items: list[Any]) -> msgspec.Raw:
    parts = []
    for start in range(0, len(items), ITEMS_AT_ONCE):
        few = items[start : start + ITEMS_AT_ONCE]
        if not are_scalar(few):
            few = [in_small_parts(each) for each in few]
        parts.append(msgspec.json.encode(few)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def are_scalar(values: Iterable[Any]) -> bool:
    return all(map(is_scalar, set(map(type, values))))


@functools.cache
def is_scalar(kind: type) -> bool:
    """Whether what is of a type holds nothing that might be long but texts."""
    if not issubclass(kind, msgspec.Struct):
        return kind in SCALARS
    hints = get_type_hints(kind)
    return all(SCALARS.issuperset(get_args(hints[name]) or [hints[name]]) for name in kind.__struct_fields__)


class BigAnswer(Response):
    """JSON that is sent piece by piece, so that the socket's buffer never holds it whole."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), PIECE):
            piece = bytes(body[start : start + PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": start + PIECE < len(body)})
            await asyncio.sleep(0)
        del body
        self.body = b""
        await asyncio.to_thread(return_freed_pages)


def return_freed_pages() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc); it keeps it otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
