"""The frames of OpenAI's streams: chunks, the end, and an error after the first chunk."""

import functools
import time
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError, error_body
from jaxpaged.entrypoints.http.openai.fields import UsageOptions
from jaxpaged.entrypoints.http.openai.protocol import Chunk
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.entrypoints.http.service import SYSTEM_FINGERPRINT
from jaxpaged.entrypoints.http.transport.sse import event

DONE = event(b"[DONE]")
ENCODER = msgspec.json.Encoder()
PLACEHOLDER = "\0"
"""Stands for the text of a `TextEvents`. Names and ids are printable, so nothing else in a chunk looks like it."""


class ChunkWriter:
    """Writes the chunks of one stream, of type `kind`, with what all of them have in common."""

    def __init__(
        self, kind: type[Chunk], name: str, request_id: str, model: str, usage: UsageOptions,
        counter: UsageCounter,
    ):  # fmt: skip
        self._new = functools.partial(kind, id=request_id, object=name, created=int(time.time()), model=model)
        self._usage = usage
        self._counter = counter

    def chunk(self, choice: Any, **more: Any) -> bytes:
        """News of one choice; `more` are further fields of the chunk."""
        ended = choice.finish_reason is not None
        return written(
            self._new(
                choices=(choice,),
                usage=self._counter.read(in_stream=True) if self._usage.in_every_chunk else None,
                system_fingerprint=SYSTEM_FINGERPRINT if ended and not self._usage.at_end else None,
                **more,
            )
        )

    def last(self, num_thinking: int | None = None) -> bytes:
        """The chunk with the usage of the whole request, and how many of its tokens were thinking if that is known."""
        usage = self._counter.read(in_stream=True, num_thinking=num_thinking)
        return written(self._new(choices=(), usage=usage, system_fingerprint=SYSTEM_FINGERPRINT))


def written(chunk: Chunk) -> bytes:
    return event(ENCODER.encode(chunk))


class TextEvents:
    """Events that differ in nothing but one text: what is around it is encoded once."""

    def __init__(self, one: bytes):
        """`one` of them has PLACEHOLDER for its text."""
        self._before, self._behind = one.split(ENCODER.encode(PLACEHOLDER))

    def of(self, text: str) -> bytes:
        return self._before + ENCODER.encode(text) + self._behind


def late_error(error: HttpError) -> bytes:
    """An error in a stream that has begun: it takes the place of the rest."""
    return event(error_body(error)) + DONE
