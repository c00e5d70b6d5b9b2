"""Deltas of an answer to a response's items, and to the events that tell how they grow.

    response.created, response.in_progress
    per item: output_item.added, [content_part.added, deltas, done, content_part.done,] output_item.done
    response.completed | response.incomplete | response.failed

This module knows neither the engine nor where events go.
"""

import time
from collections.abc import Sequence

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.openai.logprobs import TokenLogprob
from jaxpaged.entrypoints.http.responses.events import EventLog
from jaxpaged.entrypoints.http.responses.response import (
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
from jaxpaged.parsing.deltas import Delta, ToolCallDelta

STATUS: dict[str, Status] = {"length": "incomplete", "abort": "cancelled"}
"""How an answer ended -> the response's status, where that is not completed."""
PREFIX = {OutputMessage: "response.output_text", ReasoningItem: "response.reasoning_text",
          FunctionCall: "response.function_call_arguments"}  # fmt: skip
"""Kind of an item -> what its events are called before `.delta` and `.done`."""


class ResponseWriter:
    """Fills `response` while the answer comes in, and tells `log` about it."""

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
        """More of the answer. `logprobs` are those of its content."""
        for delta in deltas:
            if delta.reasoning:
                self._grow_text(ReasoningItem, delta.reasoning)
            if delta.content:
                self._grow_text(OutputMessage, delta.content, logprobs)
                logprobs = ()
            if delta.tool_call is not None:
                self._grow_call(delta.tool_call)

    def finish(self, finish_reason: str, usage: ResponseUsage, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """The answer is over. `logprobs` are of tokens without text, after its last content."""
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
        """The answer is not wanted any more, unless it is over. No event is called so: `response.incomplete` is."""
        if self.response.status not in ("queued", "in_progress"):
            return
        self._close("incomplete")
        self.response.status = "cancelled"
        self._tell("response.incomplete")

    def fail(self, error: HttpError) -> None:
        """The answer cannot be finished."""
        self._close("incomplete")
        self.response.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        code = "invalid_prompt" if error.status == 400 else code
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
