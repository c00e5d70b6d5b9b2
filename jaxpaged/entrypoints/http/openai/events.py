"""The frames of OpenAI's streams: chunks, the end, and an error after the first chunk.

This module knows neither completions nor chats.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.errors import error_body
from jaxpaged.entrypoints.http.openai.fields import UsageOptions, usage_options
from jaxpaged.entrypoints.http.openai.protocol import SYSTEM_FINGERPRINT, Chunk, usage_of
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.entrypoints.http.transport.sending import event
from jaxpaged.messages import RequestOutput
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.output_reader import UsageCounter
from jaxpaged.serving.service import Service

DONE = event(b"[DONE]")
ENCODER = msgspec.json.Encoder()
PLACEHOLDER = "\0"
"""Stands for the text of a `TextEvents`. Names and ids are printable, so nothing else in a chunk looks like it."""


class ChunkWriter:
    """Writes the chunks of one stream, each made by `kind`, with what all of them have in common."""

    def __init__(
        self,
        kind: Callable[..., Chunk],
        name: str,
        request_id: str,
        model: str,
        usage: UsageOptions,
        counter: UsageCounter,
    ):
        self._new = functools.partial(kind, id=request_id, object=name, created=int(time.time()), model=model)
        self._usage = usage
        self._counter = counter

    def chunk(self, choice: Any, **more: Any) -> bytes:
        """News of one choice; `more` are further fields of the chunk."""
        ended = choice.finish_reason is not None
        return written(
            self._new(
                choices=(choice,),
                usage=usage_of(self._counter, in_stream=True) if self._usage.in_every_chunk else None,
                system_fingerprint=SYSTEM_FINGERPRINT if ended and not self._usage.at_end else None,
                **more,
            )
        )

    def lent(self, params: dict[str, Any]) -> bytes:
        """The chunk that says where another engine finds the prompt's keys and values."""
        return written(self._new(choices=(), kv_transfer_params=params))

    def last(self, num_thinking: int | None = None) -> bytes:
        """The chunk with the usage of the whole request, and how many of its tokens were thinking if that is known."""
        usage = usage_of(self._counter, in_stream=True, num_thinking=num_thinking)
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


class OpenAIStream:
    """What the writers of OpenAI's streams have in common: chunks that `kind` makes, the usage, and how they end."""

    def __init__(self, service: Service, parsed: Parsed, kind: Callable[..., Chunk], name: str):
        options = service.options
        self._usage = usage_options(parsed.body, options.enable_force_include_usage)
        self._is_lent = len(parsed.generation.prompts) > 1  # of several nobody could say which one
        self._counter = UsageCounter(options.enable_prompt_tokens_details, parsed.generation.media_tokens)
        self._chunks = ChunkWriter(kind, name, parsed.generation.request_id, parsed.model, self._usage, self._counter)

    def lent(self, output: RequestOutput) -> bytes:
        """News of where the prompt is lent, from its first step on; told once."""
        if output.kv_transfer_params is None or self._is_lent:
            return b""
        self._is_lent = True
        return self._chunks.lent(output.kv_transfer_params)

    def end(self) -> bytes:
        """The usage of the whole request where it is asked for, and the end."""
        usage = self._chunks.last(self._num_thinking()) if self._usage.at_end else b""
        return usage + DONE

    def _num_thinking(self) -> int | None:
        """How many tokens were thinking; None: it is not looked for."""
        return None

    def late_error(self, error: ServingError) -> bytes:
        """An error in a stream that has begun: it takes the place of the rest."""
        return event(error_body(error)) + DONE
