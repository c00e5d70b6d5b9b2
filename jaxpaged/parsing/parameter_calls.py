"""Formats that write a call parameter by parameter, as text between tags: qwen3_coder, glm45, minimax_m2,
deepseek_v32.

What a parameter's text stands for follows from the tool's schema (`typed_text.py`), unless its tag says it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpaged.parsing.json_text import TOOL_NAME
from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Source, Steps
from jaxpaged.parsing.typed_text import argument_json, json_string, loose_json, parameter_schema


@dataclass(frozen=True)
class ParameterCalls:
    """`call` header `name_end` ( `key` name `key_end` `value` text `value_end` )* `call_end`.

    An empty `name_end`: the name ends with the first key or with the call. An empty `value`: the value follows the key
    at once. `wrappers` stand around calls and mean nothing.
    """

    call: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str
    wrappers: tuple[str, ...] = ()

    @cached_property
    def inside(self) -> Markers:
        return Markers(self.key, self.call_end)

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        outside, called = Markers(self.call, *self.wrappers), False
        while found := (yield from source.until(outside, out.content)):
            if found == self.call:
                called |= yield from self._read_call(source, out)
            elif not called:
                yield from self._pass_wrapper(found, source, out)

    def _pass_wrapper(self, wrapper: str, source: Source, out: Output) -> Steps[None]:
        """A wrapper that has no call in it is content."""
        source.keep(wrapper)
        yield from source.spaces()
        followed = yield from source.at(self.call)
        text = source.kept()
        out.content("" if followed else text)

    def _read_call(self, source: Source, out: Output) -> Steps[bool]:
        """False: it has no name that could be a tool's, and was content."""
        source.keep(self.call)
        ends = Markers(self.name_end, "\n") if self.name_end else self.inside
        header, found = yield from source.text_until(ends)
        text, name = source.kept(), header.strip().strip("\"'")
        if not found or (self.name_end and found != self.name_end) or not TOOL_NAME.fullmatch(name):
            out.content(text)
            return False
        if not self.name_end:
            source.unread(found)
        out.begin_call(name)
        out.arguments("{")
        if (yield from self._read_parameters(source, out, out.tools.get(name, {}))):
            out.arguments("}")
        return True

    def _read_parameters(self, source: Source, out: Output, schema: Mapping[str, Any]) -> Steps[bool]:
        """False when the text ends before the call does. What stands between parameters is dropped."""
        separator = ""
        while (found := (yield from source.until(self.inside, lambda text: None))) == self.key:
            header, found = yield from source.text_until(Markers(self.key_end))
            if found and self.value:
                found = yield from source.until(Markers(self.value), lambda text: None)
            text, found = (yield from source.text_until(Markers(self.value_end))) if found else ("", None)
            if not found:
                return False
            name, is_text = read_key(header)
            value = value_json(trimmed(text), name, schema, is_text)
            out.arguments(f"{separator}{json_string(name)}: {value}")
            separator = ", "
        return found is not None


def read_key(header: str) -> tuple[str, bool | None]:
    """(Name, whether the tag itself says that the value is a text). The name may be in quotes, with attributes."""
    quoted = re.match(r'\s*"([^"]*)"(.*)', header, re.DOTALL)
    if not quoted:
        return header.strip(), None
    says = re.search(r'string="(true|false)"', quoted[2])
    return quoted[1], None if says is None else says[1] == "true"


def trimmed(text: str) -> str:
    """Without the line breaks right after and right before the tags."""
    return text.removeprefix("\n").removesuffix("\n")


def value_json(text: str, name: str, schema: Mapping[str, Any], is_text: bool | None) -> str:
    """The JSON of the parameter `name`. `is_text`: what its tag says; None: the schema of all parameters is asked."""
    if is_text is None:
        return argument_json(text, parameter_schema(schema, name), schema)
    return json_string(text) if is_text else loose_json(text)


qwen3_coder = ParameterCalls(
    "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", ("<tool_call>", "</tool_call>")
)
glm45 = ParameterCalls("<tool_call>", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
minimax_m2 = ParameterCalls(
    "<invoke name=",
    ">",
    "<parameter name=",
    ">",
    "",
    "</parameter>",
    "</invoke>",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
deepseek_v32 = ParameterCalls(
    "<｜DSML｜invoke name=",
    ">",
    "<｜DSML｜parameter name=",
    ">",
    "",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)
