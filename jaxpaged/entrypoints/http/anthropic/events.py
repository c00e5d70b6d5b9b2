"""The events of a streamed answer, as Anthropic's clients read them: each has its name, and data with the same `type`.

This module knows no blocks of its own and no order; `message_stream.py` does.
"""

import msgspec

from jaxpaged.entrypoints.http.anthropic.errors import messages_error
from jaxpaged.entrypoints.http.anthropic.protocol import MessagesResponse, MessagesUsage, OutputBlock
from jaxpaged.entrypoints.http.errors import HttpError, error_message

ENCODER = msgspec.json.Encoder()


class MessageStart(msgspec.Struct, tag="message_start"):
    """The message without its content."""

    message: MessagesResponse


class BlockStart(msgspec.Struct, tag="content_block_start"):
    """A block without its content."""

    index: int
    content_block: OutputBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """A piece of thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    """The digest of the thinking, at its end."""

    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    """A piece of a call's input, which is JSON once they are joined."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    """What a block goes on with."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    """A block is complete."""

    index: int


class Ending(msgspec.Struct):
    """How the message ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The end of the message, with the tokens of all of it."""

    delta: Ending
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """Nothing comes after it."""


class Ping(msgspec.Struct, tag="ping"):
    """A sign of life."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


def frame(event: Event) -> bytes:
    """The bytes of an event."""
    return named(event.__struct_config__.tag, ENCODER.encode(event))


def late_error(error: HttpError) -> bytes:
    """An error in a stream that has begun: it takes the place of the rest."""
    return named("error", ENCODER.encode(messages_error(error.status, error_message(error))))


def named(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
