"""Input items to the messages of a chat template, and tools to functions.

What the model made in one turn comes as several items: thinking, text, calls. Templates have one message for a turn.
This module knows no tokens, and nothing of how answers are generated.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.openai.conversation import template_message

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Role of an item -> that of the message: few templates know developers."""

Item = dict[str, Any]


class Turns:
    """Collects messages, a turn of the model in one. `messages` are for templates."""

    def __init__(self, instructions: str | None = None):
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the model's message that may still get items
        self._names: dict[str, str] = {}  # id of a call -> name of its function
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    def add_all(self, items: Sequence[Item], path: str) -> None:
        """Items in their order. `path` is what errors call the list. Raises HttpError 400 naming the item."""
        for index, item in enumerate(items):
            self.add(item, f"{path}[{index}]")

    def add(self, item: Item, path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, path)
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "function_call_output":
            self._add_output(item, path)
        elif kind == "reasoning":
            self._add_reasoning(item, path)
        else:
            known = "message, function_call, function_call_output, reasoning"
            raise HttpError(400, f"{path}.type is {kind!r}; items may be {known}.", f"{path}.type")

    def _add_message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise HttpError(400, f"{path}.role is {role!r}; it must be one of {', '.join(ROLES)}.", f"{path}.role")
        message = template_message({"role": ROLES[role], "content": item.get("content")}, path)
        if role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] or "tool_calls" in turn:
                turn = self._new_turn()
            turn["content"] = message["content"]
            return
        self._turn = None
        first = self.messages[0] if len(self.messages) == 1 else None
        if message["role"] == "system" and first is not None and first["role"] == "system":
            first["content"] = f"{plain(first['content'])}\n\n{plain(message['content'])}"  # most templates take one
        else:
            self.messages.append(message)

    def _add_call(self, item: Item, path: str) -> None:
        call_id, name, arguments = (text_field(item, key, path) for key in ("call_id", "name", "arguments"))
        turn = self._turn or self._new_turn()
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(call)
        self._names[call_id] = name

    def _add_output(self, item: Item, path: str) -> None:
        call_id = text_field(item, "call_id", path)
        if call_id not in self._names:
            raise HttpError(
                400, f"{path}.call_id is {call_id!r}, but no function_call before it has that call_id. Give the call "
                "too, or its previous_response_id.", f"{path}.call_id",
            )  # fmt: skip
        if item.get("output") is None:
            raise HttpError(400, f"{path}.output is missing. Give what the function returned.", f"{path}.output")
        try:
            message = template_message({"role": "tool", "content": item["output"]}, path)
        except HttpError as error:
            raise HttpError(
                400, str(error).replace(f"{path}.content", f"{path}.output"),
                (error.parameter or path).replace(f"{path}.content", f"{path}.output"),
            ) from None  # fmt: skip
        self._turn = None
        self.messages.append({**message, "tool_call_id": call_id, "name": self._names[call_id]})

    def _add_reasoning(self, item: Item, path: str) -> None:
        """Templates that want thinking back know it as `reasoning` or `reasoning_content`."""
        content = item.get("content") or []
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise HttpError(
                400, f"{path}.content must be a list of parts of type 'reasoning_text'. Correct it.", f"{path}.content"
            )
        if texts:
            turn = self._new_turn()
            turn["reasoning"] = turn["reasoning_content"] = "\n".join(texts)

    def _new_turn(self) -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": ""}
        self.messages.append(self._turn)
        return self._turn


def text_field(item: Item, key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise HttpError(400, f"{path}.{key} must be a text. Correct it.", f"{path}.{key}")
    return value


def plain(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def input_items(value: str | list[Item]) -> list[Item]:
    """The input as items. Raises HttpError 400 when there are none."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not value:
        raise HttpError(400, "input is an empty list. Give at least one item.", "input")
    return value
