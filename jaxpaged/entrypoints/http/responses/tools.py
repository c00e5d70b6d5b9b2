"""Tools and the choice among them, from the form of this API into that of chats.

This module knows no grammar and no model.
"""

from typing import Any

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.tool_use import ToolUse

FUNCTION_FIELDS = {"description": str, "parameters": dict, "strict": bool}
"""Field of a function besides its name -> its type; all may be left out."""


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool) -> ToolUse | None:
    """None where there is nothing to choose from. Raises HttpError 400 for other tools than functions, names that come
    twice, and choices that cannot be."""
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools or [])]
    names = [each["function"]["name"] for each in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            path = f"tools[{index}].name"
            raise HttpError(400, f"{path} is {name!r}, as another one's. Rename it.", path)
    mode, allowed = chosen(choice, names)
    if not functions:
        if mode not in ("auto", "none"):
            raise HttpError(400, "tool_choice demands a call, but tools is empty. Give tools.", "tool_choice")
        return None
    if mode == "named":
        return ToolUse(functions, "named", allowed[0], parallel)
    return ToolUse([each for each in functions if each["function"]["name"] in allowed], mode, None, parallel)


def function_of(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """A tool as chat templates know it."""
    if tool.get("type") != "function":
        raise HttpError(400, f"{path}.type is {tool.get('type')!r}; only 'function' is served.", f"{path}.type")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise HttpError(400, f"{path}.name must be a text, and not empty. Correct it.", f"{path}.name")
    function = {"name": name}
    for key, kind in FUNCTION_FIELDS.items():
        value = tool.get(key)
        if value is not None and not isinstance(value, kind):
            raise HttpError(
                400, f"{path}.{key} is a JSON value of another type than it must be. Correct it.", f"{path}.{key}"
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
    raise HttpError(
        400, f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required', or an object of type 'function' or "
        "'allowed_tools'.", "tool_choice",
    )  # fmt: skip


def allowed_tools(choice: dict[str, Any], names: list[str]) -> tuple[str, list[str]]:
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise HttpError(400, f"tool_choice.mode is {mode!r}; it must be 'auto' or 'required'.", "tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        raise HttpError(400, "tool_choice.tools must be a list of functions. Give at least one.", "tool_choice.tools")
    allowed = [tool.get("name") if isinstance(tool, dict) else None for tool in tools]
    for index, name in enumerate(allowed):
        check_known(name, names, f"tool_choice.tools[{index}].name")
    return mode, allowed


def check_known(name: Any, names: list[str], path: str) -> None:
    if not isinstance(name, str) or name not in names:
        raise HttpError(400, f"{path} is {name!r}, but tools has {', '.join(names) or 'none'}.", path)
