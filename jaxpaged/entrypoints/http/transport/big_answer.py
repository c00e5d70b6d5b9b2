"""Answers that are large: made and encoded in a thread, a little at a time, and sent in pieces.

The encoder holds the interpreter's lock until it is done, so nothing large is given to it at once. This module knows no
endpoint.
"""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.entrypoints.http.body import json_response

SMALL_ANSWER = 2**15
"""Bytes up to which an answer is not worth a thread: they are encoded in less than a millisecond."""
ITEMS_AT_ONCE = 128
"""Of a list, encoded at a time."""
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
        few = [in_small_parts(each) for each in items[start : start + ITEMS_AT_ONCE]]
        parts.append(msgspec.json.encode(few)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


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
