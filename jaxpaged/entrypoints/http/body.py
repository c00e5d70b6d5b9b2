"""Request bodies: read within a limit, decoded into a struct, with errors that name the field at fault.

What a JSON text will become when it is decoded is counted as it comes, before anything is made of it. Of the fields
that an endpoint does not know, those that ask for nothing pass, and others are refused by name. This module knows JSON
and msgspec, and no endpoint.
"""

import asyncio
import codecs
import contextlib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.errors import did_you_mean
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.requests import MAX_DEPTH

MESSAGE = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing, and so does 0."""
ADAPTER = "An adapter is named as the model"
SHAPE = "What an answer must look like says structured_outputs or response_format"
ADVICE = {
    "lora_request": ADAPTER,
    "lora_path": ADAPTER,
    "adapter_id": ADAPTER,
    "guided_decoding_backend": "Grammars have one library here",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), SHAPE),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "choice"), SHAPE),
    "prompt": "/v1/completions takes prompts",
    "messages": "/v1/chat/completions and /v1/messages take messages",
    "input": "/v1/responses and /v1/embeddings take inputs",
    "max_new_tokens": "The limit of an answer is max_tokens",
    "num_beams": "Beams are asked for by use_beam_search and n",
    "logits_processors": "No code of a request is run",
}
"""What clients of other servers send -> what to do instead."""


def known_part(body: bytes | bytearray, kind: type[msgspec.Struct]) -> bytes:
    """The body without those of its unknown fields that ask for nothing. The body is an object."""
    values: dict[str, Any] = msgspec.json.decode(body)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return msgspec.json.encode({name: value for name, value in values.items() if name in known or value not in NOTHING})


def unknown_name(message: str) -> str | None:
    """The field of which msgspec's message says that it is not known."""
    match = MESSAGE.match(message)
    return None if match is None else match["name"]


def refusal(name: str, path: str, kind: type[msgspec.Struct]) -> str:
    """What a client is told. `path`: where the field is, empty for the body itself."""
    if path:
        return f"{path} has no field {name!r}. Leave it out."
    near = f" {ADVICE[name]}." if name in ADVICE else did_you_mean(name, kind.__struct_fields__)
    return f"{name} is given, but this endpoint has no such field.{near or ' Leave it out.'}"


COSTS = {b",": 1, b":": 8, b"{": 12, b"[": 12}
"""How many numbers the decoder reads in the time that it takes for what these signs stand for, and 1 for a quote: most
of all a name of an object that has other names. It lets nobody else run meanwhile."""
DEAREST = max(COSTS.values())
"""No byte counts for more."""


class ValueCount:
    """Counts what stands outside of texts: signs inside of one make it longer, and nothing else."""

    def __init__(self) -> None:
        self.num_values = 0
        """So far, in numbers that take as long."""
        self._in_text = False
        self._escape = b""  # the beginning of one, of which the rest comes with the next piece

    def add(self, piece: bytes) -> None:
        """Count the next piece of the text."""
        if self._escape or b"\\" in piece:
            piece = (self._escape + piece).replace(rb"\\", b"").replace(rb"\"", b"")
            self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        num_quotes = len(parts) - 1
        self.num_values += num_quotes + sum(cost * outside.count(sign) for sign, cost in COSTS.items())
        self._in_text ^= num_quotes % 2 == 1


BODY_TIMEOUT = 60.0
"""Seconds within which the whole body must have come."""
LONG_BODY, REST_SECONDS_A_BYTE = 2**20, 7e-9
"""Longer bodies are decoded one at a time, and so long for each byte after one another. 15 MB hold the loop for 12 to
20 ms, and leave it alone for a tenth of a second before that: a response to somebody else takes several of its rounds,
and is to meet one of them at most."""
READ = "jaxpaged.body"
"""Where a scope has what was seen when its body was read, as a `ReadBody`."""
MOST_VALUES = 2_000_000
"""Of a body, as `ValueCount` counts: to decode so many takes 20 to 90 ms of a busy core."""
CLOSE = {"Connection": "close"}
"""When the rest of a body will not be read, the connection cannot serve another request."""
WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


async def read_struct[T](request: Request, kind: type[T], max_body_bytes: int) -> T:
    """The body as a struct of type `kind`.

    Raises ServingError for another media type, broken JSON and wrong types, 413 for more than `max_body_bytes`.
    """
    return await struct_of(request, await read_json(request, max_body_bytes), kind)


async def read_json(request: Request, max_body_bytes: int) -> bytearray:
    """The body, of which nothing is decoded. Raises ServingError, as `read_struct` does."""
    check_media_type(request.headers.get("content-type", ""))
    body = await read_body(request, max_body_bytes)
    request.scope[READ] = ReadBody(len(body), lent_in(body) if b"do_remote_prefill" in body else None)
    return body


@dataclass(frozen=True)
class ReadBody:
    """A body that was read. `lent`: its `kv_transfer_params`, if its prompt may be lent by another engine. They are
    looked for before anything else, since the lease is given back whatever the request is refused for."""

    num_bytes: int
    lent: Any = None


def num_bytes_of(request: Request) -> int:
    """Of the body, which was read."""
    return request.scope[READ].num_bytes


class Lent(msgspec.Struct):
    """What is read of a body whose other fields may be wrong."""

    kv_transfer_params: Any = None


def lent_in(body: bytearray) -> Any:
    """The `kv_transfer_params` of a body; None where it is no JSON object."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        return decoder(Lent).decode(body).kv_transfer_params
    return None


async def struct_of[T](request: Request, body: bytearray, kind: type[T]) -> T:
    """A body that was read as a struct of type `kind`. Raises ServingError."""
    if len(body) <= LONG_BODY:
        return decoded(body, kind)
    async with request.app.state.long_bodies:
        await asyncio.sleep(REST_SECONDS_A_BYTE * len(body))
        return decoded(body, kind)


def decoded[T](body: bytearray, kind: type[T]) -> T:
    """The struct in a body. Raises ServingError."""
    try:
        return strictly_decoded(body, kind)
    except msgspec.ValidationError as error:
        raise wrong_field(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise ServingError(f"The body is not valid JSON: {error}. Correct it.") from None
    except RecursionError:
        raise ServingError(f"The body is nested more than {MAX_DEPTH} levels deep. Flatten it.") from None


def strictly_decoded[T](body: bytes | bytearray, kind: type[T]) -> T:
    """Raises what msgspec does, for fields too that the struct does not know, unless they ask for nothing."""
    try:
        return decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        if unknown_name(str(error)) is None:
            raise
    return decoder(kind).decode(known_part(body, kind))


@functools.cache
def decoder(kind: type) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind)


def check_media_type(header: str) -> None:
    media_type = header.partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ServingError(
            f"The content type is {media_type or 'not given'!r}. Send JSON with 'Content-Type: application/json'."
        )


async def read_body(request: Request, max_body_bytes: int) -> bytearray:
    """The whole body. Raises ServingError as soon as it is known to be too long, 408 when it does not come, and 400
    for what is no UTF-8."""
    announced = announced_length(request)
    if max_body_bytes < announced < math.inf:
        raise too_large(max_body_bytes, int(announced))
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await joined(request, max_body_bytes)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"The body is not valid UTF-8: {error.reason}. Correct it.", headers=CLOSE) from None
    except TimeoutError:
        raise HttpError(
            408, f"The body did not come within {BODY_TIMEOUT:g} seconds. Send it faster.", headers=CLOSE
        ) from None


def announced_length(request: Request) -> float:
    """How many bytes the body has, as its header says; infinity where it does not."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdigit() else math.inf


async def joined(request: Request, max_body_bytes: int) -> bytearray:
    """Looks at every piece as it comes: a body that would be decoded into very many objects is refused before that,
    since the decoder holds up everybody until it is done. It also does not look at names that it does not know, so what
    is no text is found here."""
    body, length, count, text = bytearray(), 0, ValueCount(), codecs.getincrementaldecoder("utf-8")()
    is_cut = False  # in the middle of a character
    is_small = announced_length(request) <= MOST_VALUES // DEAREST  # so that it cannot have so many
    async for piece in request.stream():
        length += len(piece)
        if length > max_body_bytes:
            raise too_large(max_body_bytes)
        if not is_small:
            count.add(piece)
        if count.num_values > MOST_VALUES:
            raise HttpError(
                413, f"The body holds more than about {MOST_VALUES} values. Send several requests.", headers=CLOSE
            )
        if is_cut or not piece.isascii():
            text.decode(piece)
            is_cut = bool(text.getstate()[0])
        body += piece
    text.decode(b"", final=True)
    return body


def too_large(limit: int, length: int | None = None) -> ServingError:
    size = f"has {length} bytes" if length else "is longer than allowed"
    return HttpError(413, f"The body {size}; at most {limit} are read. Shorten it.", headers=CLOSE)


def wrong_field(message: str, kind: type) -> ServingError:
    """msgspec's message as an error with the path of the field, such as `messages[0].role`."""
    match = WHERE.match(message)
    what, path = match["what"], match["path"] or ""
    if (name := unknown_name(what)) is not None:
        return ServingError(refusal(name, path, kind), f"{path}.{name}" if path else name)
    if missing := MISSING.search(what):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return ServingError(f"{path} is missing. Add it.", path)
    expectation = what[:1].lower() + what[1:].replace("`", "")
    return ServingError(f"{path or 'The body'} does not fit: {expectation}. Correct it.", path or None)


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
