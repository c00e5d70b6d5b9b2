"""The frames of OpenAI's streams: a chunk, the end, and an error after the first chunk."""

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError, error_body
from jaxpaged.entrypoints.http.sse import event

DONE = event(b"[DONE]")
ENCODER = msgspec.json.Encoder()


def chunk_event(chunk: msgspec.Struct) -> bytes:
    return event(ENCODER.encode(chunk))


def late_error(error: HttpError) -> bytes:
    """An error in a stream that has begun: it takes the place of the rest."""
    return event(error_body(error)) + DONE
