"""The conversation of a request: input items as the messages of a chat template, and tools as its functions.

What the model made in one turn comes as several items: thinking, text, calls. Templates have one message for a turn. Of
a conversation that is too long the oldest messages can be left out.
This module knows no tokens, and nothing of how answers are generated.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.engine.input.tokenizer import PromptTooLongError
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.generate import PreparedRequest
from jaxpaged.serving.prompts import has_pictures as parts_have_pictures
from jaxpaged.serving.prompts import template_message
from jaxpaged.serving.tool_use import ToolUse

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Role of an item -> that of the message: few templates know developers."""
FUNCTION_FIELDS = {"description": str, "parameters": dict, "strict": bool}
"""Field of a function besides its name -> its type; all may be left out."""

Item = dict[str, Any]
Messages = list[dict[str, Any]]


class Turns:
    """Collects messages, a turn of the model in one. `messages` are for templates."""

    def __init__(self, instructions: str | None = None, takes_pictures: bool = False):
        self._takes_pictures = takes_pictures
        self.messages: Messages = []
        self._turn: dict[str, Any] | None = None  # the model's message that may still get items
        self._names: dict[str, str] = {}  # id of a call -> name of its function
        if instructions:
            self.messages.append({"role": "system", "content": instructions})

    def add_all(self, items: Sequence[Item], path: str) -> None:
        """Items in their order. `path` is what errors call the list. Raises ServingError naming the item."""
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
            raise ServingError(f"{path}.type is {kind!r}; items may be {known}.", f"{path}.type")

    def _add_message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ServingError(f"{path}.role is {role!r}; it must be one of {', '.join(ROLES)}.", f"{path}.role")
        message = template_message({"role": ROLES[role], "content": item.get("content")}, path, self._takes_pictures)
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
            raise ServingError(
                f"{path}.call_id is {call_id!r}, but no function_call before it has that call_id. Give the call "
                "too, or its previous_response_id.",
                f"{path}.call_id",
            )
        if item.get("output") is None:
            raise ServingError(f"{path}.output is missing. Give what the function returned.", f"{path}.output")
        try:
            message = template_message({"role": "tool", "content": item["output"]}, path, self._takes_pictures)
        except ServingError as error:
            raise ServingError(
                str(error).replace(f"{path}.content", f"{path}.output"),
                (error.parameter or path).replace(f"{path}.content", f"{path}.output"),
            ) from None
        for part in message["content"] if isinstance(message["content"], list) else ():
            if "field" in part:
                part["field"] = part["field"].replace(f"{path}.content", f"{path}.output")
        self._turn = None
        self.messages.append({**message, "tool_call_id": call_id, "name": self._names[call_id]})

    def _add_reasoning(self, item: Item, path: str) -> None:
        """Templates that want thinking back know it as `reasoning` or `reasoning_content`."""
        content = item.get("content") or []
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ServingError(
                f"{path}.content must be a list of parts of type 'reasoning_text'. Correct it.", f"{path}.content"
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
        raise ServingError(f"{path}.{key} must be a text. Correct it.", f"{path}.{key}")
    return value


def plain(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def has_pictures(items: str | Sequence[Item]) -> bool:
    """Whether an item has a part that is a picture, or names one. Items need not have been checked."""
    if isinstance(items, str):
        return False
    contents = (item.get(name) for item in items if isinstance(item, dict) for name in ("content", "output"))
    return parts_have_pictures([{"content": content} for content in contents])


def input_items(value: str | list[Item]) -> list[Item]:
    """The input as items. Raises ServingError when there are none."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not value:
        raise ServingError("input is an empty list. Give at least one item.", "input")
    return value


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool) -> ToolUse | None:
    """None where there is nothing to choose from. Raises ServingError for other tools than functions, names that come
    twice, and choices that cannot be."""
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    names = [each["function"]["name"] for each in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            path = f"tools[{index}].name"
            raise ServingError(f"{path} is {name!r}, as another one's. Rename it.", path)
    mode, allowed = chosen(choice, names)
    if not functions:
        if mode not in ("auto", "none"):
            raise ServingError("tool_choice demands a call, but tools is empty. Give tools.", "tool_choice")
        return None
    if mode == "named":
        return ToolUse(functions, "named", allowed[0], parallel)
    return ToolUse([each for each in functions if each["function"]["name"] in allowed], mode, None, parallel)


def function_of(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """A tool as chat templates know it."""
    if tool.get("type") != "function":
        raise ServingError(f"{path}.type is {tool.get('type')!r}; only 'function' is served.", f"{path}.type")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise ServingError(f"{path}.name must be a text, and not empty. Correct it.", f"{path}.name")
    function = {"name": name}
    for key, kind in FUNCTION_FIELDS.items():
        value = tool.get(key)
        if value is not None and not isinstance(value, kind):
            raise ServingError(
                f"{path}.{key} is a JSON value of another type than it must be. Correct it.", f"{path}.{key}"
            )
        if value is not None:
            function[key] = value
    return {"type": "function", "function": function}


def chosen(choice: str | dict[str, Any] | None, names: list[str]) -> tuple[str, list[str]]:
    """ "auto", "none", "required" or "named", and the names that may be called."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        check_known(choice.get("name"), names, "tool_choice.name")
        return "named", [choice["name"]]
    if kind == "allowed_tools":
        return allowed_tools(choice, names)
    raise ServingError(
        f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required', or an object of type 'function' or "
        "'allowed_tools'.",
        "tool_choice",
    )


def allowed_tools(choice: dict[str, Any], names: list[str]) -> tuple[str, list[str]]:
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise ServingError(f"tool_choice.mode is {mode!r}; it must be 'auto' or 'required'.", "tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        raise ServingError("tool_choice.tools must be a list of functions. Give at least one.", "tool_choice.tools")
    allowed = [tool.get("name") if isinstance(tool, dict) else None for tool in tools]
    for index, name in enumerate(allowed):
        check_known(name, names, f"tool_choice.tools[{index}].name")
    return mode, allowed


def check_known(name: Any, names: list[str], path: str) -> None:
    if not isinstance(name, str) or name not in names:
        raise ServingError(f"{path} is {name!r}, but tools has {', '.join(names) or 'none'}.", path)


def newest_that_fit(messages: Messages, make: Callable[[Messages], PreparedRequest], room: int) -> PreparedRequest:
    """What `make` makes of as many messages as have at most `room` prompt tokens.

    Instructions stay, and what is left begins with a user's message, since templates refuse other beginnings.
    The last user's message is kept even when it alone is longer. Raises what `make` raises.
    """
    num_system = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    beginnings = [i for i, each in enumerate(messages) if i > num_system and each["role"] == "user"]
    beginnings = [num_system, *beginnings]
    low, high = 0, len(beginnings) - 1  # the first that fits is between them, or is the last one
    best: PreparedRequest | None = None
    while low < high:
        middle = (low + high) // 2 if best is not None or low else 0  # most conversations fit as they are
        made = within(room, make, messages[:num_system] + messages[beginnings[middle] :])
        if made is None:
            low = middle + 1
        else:
            best, high = made, middle
    return best or make(messages[:num_system] + messages[beginnings[low] :])


def within(room: int, make: Callable[[Messages], PreparedRequest], messages: Messages) -> PreparedRequest | None:
    """None for messages that are too long."""
    try:
        made = make(messages)
    except PromptTooLongError:
        return None
    return made if len(made.generation.prompts[0].token_ids) <= room else None
