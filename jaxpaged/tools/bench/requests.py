"""A request of a benchmark, what came of it, and how the stream of an answer is read.

Times are those of one clock, in seconds, and are given by the caller: nothing here waits or looks at a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxpaged.entrypoints.cli.server_answers import error_text

MAX_EVENT_BYTES = 64 * 2**20
"""Of an event that does not end: whoever sends more is no server with this API."""
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is asked. `timestamp` is when, in seconds after the first, if the dataset says so."""

    prompt: Prompt
    prompt_len: int
    output_len: int
    timestamp: float | None = None


@dataclass(slots=True)
class Outcome:
    """What came of a request. All but `start_time` are seconds since that, which is when it was sent.

    `latency` lasts to the last chunk with output; a chunk with usage alone does not count. `itl` has the time before
    every chunk but the first. `queue_time` passed between the time at which it was due and `start_time`.
    """

    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_len: int = 0
    output_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    error: str = ""
    has_output: bool = False

    @property
    def success(self) -> bool:
        return self.has_output and not self.error

    @property
    def generated_text(self) -> str:
        return "".join(self.pieces)

    @property
    def num_chunks(self) -> int:
        """How often output came."""
        return 1 + len(self.itl) if self.has_output else 0

    def add_chunk(self, now: float, text: str) -> None:
        """Output came."""
        elapsed = now - self.start_time
        if self.has_output:
            self.itl.append(elapsed - self.latency)
        else:
            self.has_output, self.ttft = True, elapsed
        self.latency = elapsed
        if text:
            self.pieces.append(text)

    def fail(self, error: str) -> None:
        """The request failed; the first reason is the one that is kept."""
        self.error = self.error or error


# ---- events of OpenAI's API ------------------------------------------------------------------------


class Delta(msgspec.Struct):
    """What is new in a chat's answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(msgspec.Struct):
    """A part of an answer: `text` of completions, `delta` of chats."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """How many tokens there were."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """The data of an event."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


CHUNKS = msgspec.json.Decoder(Chunk)
"""Decodes the data of an event; what is not measured is skipped."""


class AnswerStream:
    """Reads the bytes of a streamed answer into an `Outcome`, however they are cut."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome
        self.is_done = False  # the server has said that nothing follows
        self._rest = b""
        self._silent_end: float | None = None  # when a chat ended whose tokens had no text

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), now)
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest = b""
            self.outcome.fail(f"an event of the answer is longer than {MAX_EVENT_BYTES} bytes.")

    def end(self) -> None:
        """The answer is over."""
        outcome = self.outcome
        if not outcome.has_output and self._silent_end is not None:
            outcome.add_chunk(self._silent_end, "")
        if not outcome.has_output:
            outcome.fail("the answer ended without any output.")

    def _read_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = CHUNKS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.outcome.fail(f"an event of the answer is not what the API says: {error}.")
            return
        if chunk.error is not None:
            self.outcome.fail(error_text(chunk.error))
        if chunk.choices:
            self._read_choice(chunk.choices[0], now)
        if (usage := chunk.usage) is not None:
            self.outcome.output_tokens = usage.completion_tokens or self.outcome.output_tokens
            self.outcome.prompt_len = usage.prompt_tokens or self.outcome.prompt_len

    def _read_choice(self, choice: Choice, now: float) -> None:
        """A chat begins with its role, which is no output; after the first output every chunk counts."""
        delta = choice.delta
        if delta is None:
            self.outcome.add_chunk(now, choice.text or "")
        elif self.outcome.has_output or delta.has_output:
            text = (delta.reasoning or delta.reasoning_content or "") + (delta.content or "")
            self.outcome.add_chunk(now, text)
        elif choice.finish_reason is not None:
            self._silent_end = now
