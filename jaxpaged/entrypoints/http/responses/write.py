"""An output as a response: its deltas become items, and numbered events that tell how they grow.

    response.created, response.in_progress
    per item: output_item.added, [content_part.added, deltas, done, content_part.done,] output_item.done
    response.completed | response.incomplete | response.failed

Where tokens have log probabilities, those of the text are told from those of thinking, calls and markers. This module
knows neither the engine nor where events go.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.errors import status_of
from jaxpaged.entrypoints.http.openai.logprobs import TokenLogprob
from jaxpaged.entrypoints.http.responses.protocol import (
    FunctionCall,
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
    new_id,
)
from jaxpaged.messages import CompletionOutput
from jaxpaged.parsing.deltas import Delta, ToolCallDelta
from jaxpaged.serving.errors import ErrorKind, ServingError

ENCODER = msgspec.json.Encoder()
STATUS: dict[str, Status] = {"length": "incomplete", "abort": "cancelled"}
"""How a response ended -> the response's status, where that is not completed."""
PREFIX = {
    OutputMessage: "response.output_text",
    ReasoningItem: "response.reasoning_text",
    FunctionCall: "response.function_call_arguments",
}
"""Kind of an item -> what its events are called before `.delta` and `.done`."""


class EventLog:
    """Hands out events, which are encoded at once, since what they show goes on changing.

    `sequence_number` counts from 0. Silent: nobody wants them.
    """

    def __init__(self, silent: bool = False):
        self.silent = silent
        self._number = 0
        self._frames: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        if self.silent:
            return
        data = ENCODER.encode({"type": kind, "sequence_number": self._number, **fields})
        self._frames.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._number += 1

    def take(self) -> list[bytes]:
        """The events since the last time."""
        frames, self._frames = self._frames, []
        return frames

    def late_error(self, error: ServingError) -> bytes:
        """An event for a failure of the stream itself; a response that fails has one of its own."""
        self.add("error", code=str(status_of(error)), message=str(error), param=error.parameter)
        return b"".join(self.take())


class ResponseWriter:
    """Fills `response` while the response comes in, and tells `log` about it."""

    def __init__(self, response: Response, log: EventLog):
        self.response = response
        self._log = log
        self._item: OutputItem | None = None  # the one that grows
        self._texts: list[str] = []  # of it
        self._logprobs: list[TokenLogprob] = []  # of it

    def queue(self) -> None:
        """The response waits for its turn in the background."""
        self._tell("response.created")
        self._tell("response.queued")

    def begin(self) -> None:
        """The engine has begun."""
        was_queued = self.response.status == "queued"
        self.response.status = "in_progress"
        if not was_queued:
            self._tell("response.created")
        self._tell("response.in_progress")

    def write(self, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """More of the response. `logprobs` are those of its content."""
        for delta in deltas:
            if delta.reasoning:
                self._grow_text(ReasoningItem, delta.reasoning)
            if delta.content:
                self._grow_text(OutputMessage, delta.content, logprobs)
                logprobs = ()
            if delta.tool_call is not None:
                self._grow_call(delta.tool_call)

    def finish(self, finish_reason: str, usage: ResponseUsage, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """The response is over. `logprobs` are of tokens without text, after its last content."""
        status = STATUS.get(finish_reason, "completed")
        if not self.response.output and status == "completed":
            self._open(OutputMessage(new_id("msg")))  # the model said nothing, and clients look for what it said
        self._logprobs += logprobs
        self._close("completed" if status == "completed" else "incomplete")
        response = self.response
        response.usage = usage
        response.status = status
        if status == "completed":
            response.completed_at = int(time.time())
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        self._tell("response.completed" if status == "completed" else "response.incomplete")

    def cancel(self) -> None:
        """The response is not wanted any more, unless it is over. No event is called so: `response.incomplete` is."""
        if self.response.status not in ("queued", "in_progress"):
            return
        self._close("incomplete")
        self.response.status = "cancelled"
        self._tell("response.incomplete")

    def fail(self, error: ServingError) -> None:
        """The response cannot be finished."""
        self._close("incomplete")
        self.response.status = "failed"
        code = "rate_limit_exceeded" if error.kind is ErrorKind.TOO_MANY else "server_error"
        code = "invalid_prompt" if error.kind is ErrorKind.INVALID else code
        self.response.error = ResponseError(code, str(error))
        self._tell("response.failed")

    # ---- items

    def _grow_text(
        self, kind: type[OutputMessage | ReasoningItem], text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        if type(self._item) is not kind:
            self._close("completed")
            self._open(kind(new_id("msg" if kind is OutputMessage else "rs")))
        self._texts.append(text)
        self._logprobs += logprobs
        shown = {"logprobs": logprobs} if kind is OutputMessage else {}
        self._log.add(f"{PREFIX[kind]}.delta", **self._place(), content_index=0, delta=text, **shown)

    def _grow_call(self, delta: ToolCallDelta) -> None:
        if delta.id is not None:
            self._close("completed")
            self._open(FunctionCall(new_id("fc"), delta.id, delta.name or ""))
        if delta.arguments:
            self._texts.append(delta.arguments)
            self._log.add("response.function_call_arguments.delta", **self._place(), delta=delta.arguments)

    def _open(self, item: OutputItem) -> None:
        self._item, self._texts, self._logprobs = item, [], []
        self.response.output.append(item)
        self._log.add("response.output_item.added", output_index=len(self.response.output) - 1, item=item)
        if not isinstance(item, FunctionCall):
            part = OutputText() if isinstance(item, OutputMessage) else ReasoningText()
            self._log.add("response.content_part.added", **self._place(), content_index=0, part=part)

    def _close(self, status: ItemStatus) -> None:
        """End the item that grows, if there is one."""
        item, text = self._item, "".join(self._texts)
        if item is None:
            return
        if isinstance(item, FunctionCall):
            item.arguments = text
            self._log.add("response.function_call_arguments.done", **self._place(), name=item.name, arguments=text)
        else:
            self._close_part(item, text)
        item.status = status
        self._log.add("response.output_item.done", output_index=len(self.response.output) - 1, item=item)
        self._item = None

    def _close_part(self, item: OutputMessage | ReasoningItem, text: str) -> None:
        shown = {"logprobs": self._logprobs} if isinstance(item, OutputMessage) else {}
        self._log.add(f"{PREFIX[type(item)]}.done", **self._place(), content_index=0, text=text, **shown)
        if isinstance(item, OutputMessage):
            part = OutputText(text, logprobs=self._logprobs)
        else:
            part = ReasoningText(text)
        item.content = [part]
        self._log.add("response.content_part.done", **self._place(), content_index=0, part=part)

    def _place(self) -> dict[str, str | int]:
        assert self._item is not None, "an event about an item, but none is open"
        return {"item_id": self._item.id, "output_index": len(self.response.output) - 1}

    def _tell(self, kind: str) -> None:
        self._log.add(kind, response=self.response)


# ---- log probabilities of the text


class TextLogprobs:
    """Holds the entries of tokens until it is known what they are. `is_plain`: all of them are text."""

    def __init__(self, is_plain: bool):
        self._is_plain = is_plain
        self._waiting: list[TokenLogprob] = []

    def of(self, deltas: Sequence[Delta], entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """The entries of the content in `deltas`, which the tokens of `entries` have settled."""
        self._waiting += entries
        if not deltas:
            return []
        waiting, self._waiting = self._waiting, []
        if self._is_plain:
            return waiting
        if any(delta.content is None for delta in deltas):
            return []
        return newest(waiting, sum(len(delta.content or "") for delta in deltas))

    def rest(self) -> list[TokenLogprob]:
        """Entries of tokens without text at the end of the response, such as the one that ends it."""
        return self._waiting


def newest(entries: list[TokenLogprob], num_characters: int) -> list[TokenLogprob]:
    """The last entries, that have so many characters: those before them were of a marker."""
    first = len(entries)
    while first and num_characters > 0:
        first -= 1
        num_characters -= len(entries[first].token)
    return entries[first:]


def by_token(completion: CompletionOutput) -> list[CompletionOutput]:
    """A result per token, if the texts of the tokens are known and begin with the result's text; else it alone.

    The last texts may be longer: a stop text and the token that ends a response are not part of it.
    """
    positions = completion.logprobs or []
    texts = [candidates[token_id].decoded_token or "" for token_id, candidates in zip(completion.token_ids, positions)]
    if len(texts) < 2 or not "".join(texts).startswith(completion.text):
        return [completion]
    pieces, place = [], 0
    for text, token_id, candidates in zip(texts, completion.token_ids, positions):
        text_here = completion.text[place : place + len(text)]
        pieces.append(CompletionOutput(completion.index, text_here, [token_id], None, [candidates]))
        place += len(text)
    pieces[-1].finish_reason, pieces[-1].stop_reason = completion.finish_reason, completion.stop_reason
    return pieces
