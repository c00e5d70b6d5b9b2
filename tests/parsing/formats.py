"""How each format writes an answer: the tests' own account of the formats, against which parsers are held.

`render(content, calls)` gives the text that a model would write for (name, arguments) pairs.
"""

import json
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged(start: str, end: str) -> Callable[[str, Calls], str]:
    def render(content: str, calls: Calls) -> str:
        objects = [compact({"name": name, "arguments": arguments}) for name, arguments in calls]
        return content + "\n".join(f"{start}\n{text}\n{end}" for text in objects)

    return render


def tagged_list(start: str, end: str = "") -> Callable[[str, Calls], str]:
    def render(content: str, calls: Calls) -> str:
        if not calls:
            return content
        return content + start + compact([{"name": name, "arguments": arguments} for name, arguments in calls]) + end

    return render


def llama3(content: str, calls: Calls) -> str:
    return content + "; ".join(compact({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(content: str, calls: Calls) -> str:
    return content + "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}" for name, arguments in calls)


def sections(section: str, section_end: str, one: Callable[[int, str, str], str]) -> Callable[[str, Calls], str]:
    def render(content: str, calls: Calls) -> str:
        body = "".join(one(i, name, compact(arguments)) for i, (name, arguments) in enumerate(calls))
        return content + (section + body + section_end if calls else "")

    return render


def deepseek_v3(i: int, name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(i: int, name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi_k2(i: int, name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def python_value(value: Any) -> str:
    return repr(value)


def pythonic(content: str, calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={python_value(value)}' for key, value in arguments.items())})"

    return f"[{', '.join(call(*pair) for pair in calls)}]" if calls else content


def gemma(start: str, end: str, quote: str) -> Callable[[str, Calls], str]:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return quote + value + quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return compact(value)

    def render(content: str, calls: Calls) -> str:
        return content + "".join(f"{start}call:{name}{written(arguments)}{end}" for name, arguments in calls)

    return render


def parameters(before: str, call: str, parameter: str, after: str) -> Callable[[str, Calls], str]:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else compact(value)

    def render(content: str, calls: Calls) -> str:
        for name, arguments in calls:
            content += before + call.format(name)
            content += "".join(parameter.format(key, text(value)) for key, value in arguments.items()) + after
        return content

    return render


def harmony(content: str, calls: Calls) -> str:
    text = f"<|channel|>final<|message|>{content}<|end|>" if content else ""
    for name, arguments in calls:
        text += f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        text += f"{compact(arguments)}<|call|>"
    return text


RENDER = {
    "deepseek_v3": sections("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek_v3),
    "deepseek_v31": sections("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek_v31),
    "deepseek_v32": parameters(
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="{}">\n',
        '<｜DSML｜parameter name="{}">{}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": parameters("", "<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "glm47": parameters("", "<tool_call>{}", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
    "granite": tagged_list("<|tool_call|>"),
    "hermes": tagged("<tool_call>", "</tool_call>"),
    "jamba": tagged_list("<tool_calls>", "</tool_calls>"),
    "kimi_k2": sections("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", kimi_k2),
    "llama3_json": llama3,
    "llama4_json": llama3,
    "llama4_pythonic": pythonic,
    "longcat": tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": parameters(
        "<minimax:tool_call>\n",
        '<invoke name="{}">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "mistral": mistral,
    "openai": harmony,
    "phi4_mini_json": tagged_list("functools"),
    "pythonic": pythonic,
    "qwen3_coder": parameters(
        "<tool_call>\n", "<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>\n"
    ),
    "qwen3_xml": parameters(
        "<tool_call>\n", "<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>\n"
    ),
}
CALLS_ALONE = {"llama3_json", "llama4_json", "llama4_pythonic", "pythonic"}
"""Formats in which an answer is calls or content, not both."""
