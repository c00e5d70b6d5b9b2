"""Collects what a format finds, as deltas.

Content is the text without its calls. White space at its end, which stands between calls and after them, is left out
where there are calls; in a text without calls nothing is changed.
This module knows no format.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.parsing.deltas import Delta, ToolCallDelta

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its parameters."""


class Output:
    """Where a format puts what it reads. `tools` are those that the request offers; none known: an empty mapping.

    `new_id` makes the id of a call whose format has none.
    """

    def __init__(self, tools: ToolSchemas, new_id: Callable[[], str]):
        self.tools = tools
        self._new_id = new_id
        self._spaces: list[str] = []  # after the content so far
        self._has_arguments = False
        self._num_calls = 0
        self._last_index = 0  # of the call that the last delta belonged to
        # What `take` has not handed out: (kind, the first delta of a call that begins here, text in pieces).
        self._pending: list[tuple[str, ToolCallDelta | None, list[str]]] = []

    def content(self, text: str) -> None:
        visible = text.rstrip()
        if visible:
            for piece in (*self._spaces, visible):
                self._add("content", piece)
            self._spaces.clear()
        if len(visible) < len(text):
            self._spaces.append(text[len(visible) :])

    def reasoning(self, text: str) -> None:
        if text:
            self._add("reasoning", text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._has_arguments = False
        first = ToolCallDelta(self._num_calls, call_id or self._new_id(), name)
        self._num_calls += 1
        self._pending.append(("call", first, []))

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if text:
            self._has_arguments = True
            self._add("call", text)

    def end_call(self) -> None:
        """The call is complete. One without arguments gets an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        """The text is over."""
        if not self._num_calls:
            for piece in self._spaces:
                self._add("content", piece)
        self._spaces.clear()

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        pending, self._pending = self._pending, []
        return [self._delta(kind, first, "".join(pieces)) for kind, first, pieces in pending]

    def _delta(self, kind: str, first: ToolCallDelta | None, text: str) -> Delta:
        if kind != "call":
            return Delta(**{kind: text})
        if first is None:
            return Delta(tool_call=ToolCallDelta(self._last_index, arguments=text))
        self._last_index = first.index
        return Delta(tool_call=ToolCallDelta(first.index, first.id, first.name, text))

    def _add(self, kind: str, text: str) -> None:
        if not self._pending or self._pending[-1][0] != kind:
            self._pending.append((kind, None, []))
        self._pending[-1][2].append(text)
