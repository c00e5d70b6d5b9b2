"""The frames of OpenAI's streams: a chunk, the end, and an error after the first chunk."""

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError, error_body
from jaxpaged.entrypoints.http.sse import event

DONE = event(b"[DONE]")
ENCODER = msgspec.json.Encoder()
PLACEHOLDER = "\0"
"""Stands for the text of a `TextEvents`. Names and ids are printable, so nothing else in a chunk looks like it."""


def chunk_event(chunk: msgspec.Struct) -> bytes:
    return event(ENCODER.encode(chunk))


class TextEvents:
    """Events that differ in nothing but one text: what is around it is encoded once."""

    def __init__(self, chunk: msgspec.Struct):
        """`chunk` is one of them, with PLACEHOLDER for its text."""
        self._before, self._behind = chunk_event(chunk).split(ENCODER.encode(PLACEHOLDER))

    def of(self, text: str) -> bytes:
        return self._before + ENCODER.encode(text) + self._behind


def late_error(error: HttpError) -> bytes:
    """An error in a stream that has begun: it takes the place of the rest."""
    return event(error_body(error)) + DONE
