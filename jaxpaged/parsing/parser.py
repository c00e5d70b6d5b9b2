"""`make_parser`: from the names of formats to a parser of one answer. The names are vLLM's.

    parser = make_parser("hermes", "qwen3", tools={"get_weather": schema})
    deltas = parser.push("Let me see. <tool_c") + parser.push('all>{"name": ...') + parser.finish()

The same text cut in any way gives the same message; `parse` is a parser that gets it in one piece.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.parsing.deltas import Delta, ParsedMessage, joined
from jaxpaged.parsing.gemma import functiongemma, gemma4
from jaxpaged.parsing.harmony import Harmony, harmony
from jaxpaged.parsing.json_calls import ForcedCall, TaggedList, TaggedObjects, forced_list, llama3_json, mistral
from jaxpaged.parsing.marked_calls import deepseek_v3, deepseek_v31, kimi_k2
from jaxpaged.parsing.output import Output, ToolSchemas
from jaxpaged.parsing.parameter_calls import deepseek_v32, glm45, minimax_m2, qwen3_coder
from jaxpaged.parsing.pythonic import llama4_pythonic, pythonic
from jaxpaged.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from jaxpaged.parsing.source import Source, Steps
from jaxpaged.parsing.watched import Watch

ToolFormat = Callable[[Source, Output], Steps[None]]

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "deepseek_v3": deepseek_v3,
        "deepseek_v31": deepseek_v31,
        "deepseek_v32": deepseek_v32,
        "functiongemma": functiongemma,
        "gemma4": gemma4,
        "glm45": glm45,
        "glm47": glm45,
        "granite": TaggedList("<|tool_call|>"),
        "hermes": TaggedObjects("<tool_call>", "</tool_call>"),
        "jamba": TaggedList("<tool_calls>", "</tool_calls>"),
        "kimi_k2": kimi_k2,
        "llama3_json": llama3_json,
        "llama4_json": llama3_json,
        "llama4_pythonic": llama4_pythonic,
        "longcat": TaggedObjects("<longcat_tool_call>", "</longcat_tool_call>"),
        "minimax_m2": minimax_m2,
        "mistral": mistral,
        "openai": harmony,
        "phi4_mini_json": TaggedList("functools"),
        "pythonic": pythonic,
        "qwen3_coder": qwen3_coder,
        "qwen3_xml": qwen3_coder,
    }
)

REASONING_PARSERS: Mapping[str, ReasoningFormat | Harmony] = MappingProxyType(
    {
        **REASONING_FORMATS,
        "openai_gptoss": Harmony(),
    }
)


@dataclass(frozen=True)
class Formats:
    """Formats that may be meant, by name. `watches`: of those that strangers have written."""

    tools: Mapping[str, ToolFormat] = TOOL_FORMATS
    reasoning: Mapping[str, ReasoningFormat | Harmony] = REASONING_PARSERS
    watches: Mapping[str, Watch] = MappingProxyType({})


BUILT_IN = Formats()


class OutputParser:
    """Parses one answer. Its markers may be special tokens, so the text must come with these."""

    def __init__(self, steps: Callable[[Source, Output], Steps[None]], tools: ToolSchemas, new_id: Callable[[], str]):
        self._source = Source()
        self._out = Output(tools, new_id)
        self._steps = steps(self._source, self._out)

    def push(self, text: str) -> list[Delta]:
        """More of the answer -> what it settles."""
        self._source.feed(text)
        next(self._steps)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """The answer is over, complete or not -> what was held back."""
        self._source.close()
        next(self._steps, None)
        self._out.end()
        return self._out.take()


class WatchedParser(OutputParser):
    """One of whose formats a stranger has written."""

    def __init__(self, watch: Watch, *parts: Any):
        super().__init__(*parts)
        self._watch = watch

    def push(self, text: str) -> list[Delta]:
        return self._watch.run(lambda: super(WatchedParser, self).push(text))

    def finish(self) -> list[Delta]:
        return self._watch.run(super().finish)


def make_parser(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    tools: ToolSchemas = MappingProxyType({}),
    ending: str = "",
    forced: str | None = None,
    new_id: Callable[[], str] | None = None,
    formats: Formats = BUILT_IN,
) -> OutputParser:
    """A parser of one answer. None: that is not looked for. `ending` is what the chat template wrote behind the last
    message, which may open or close the model's thinking.

    `tools`: name -> JSON schema of the parameters. `forced`: the answer is the arguments of the tool of this name, or
    with "*" a list of calls, as a grammar made the model write them. `formats`: those that the names may mean. Raises
    ConfigError for unknown names.
    """
    tool_format = tool_format_named(tool_parser, formats) if tool_parser else None
    if forced is not None:
        tool_format = forced_list if forced == "*" else ForcedCall(forced)
    reasoning = reasoning_format_named(reasoning_parser, formats) if reasoning_parser else None

    def steps(source: Source, out: Output) -> Steps[None]:
        if reasoning is not None:
            yield from reasoning.read(source, out, reasoning.is_open_after(ending))
        if tool_format is not None:
            yield from tool_format(source, out)
        yield from source.rest(out.content)

    parts = steps, tools, new_id or (id_of_mistral if tool_parser == "mistral" else id_of_call)
    watch = formats.watches.get(tool_parser or "") or formats.watches.get(reasoning_parser or "")
    return OutputParser(*parts) if watch is None else WatchedParser(watch, *parts)


def parse(
    text: str, tool_parser: str | None = None, reasoning_parser: str | None = None, **options: Any
) -> ParsedMessage:
    """A whole answer at once; the options are those of `make_parser`."""
    parser = make_parser(tool_parser, reasoning_parser, **options)
    return joined(parser.push(text) + parser.finish())


def tool_format_named(name: str, formats: Formats = BUILT_IN) -> ToolFormat:
    """Raises ConfigError."""
    return find("tool parser", name, formats.tools)


def reasoning_format_named(name: str, formats: Formats = BUILT_IN) -> ReasoningFormat | Harmony:
    """Raises ConfigError."""
    return find("reasoning parser", name, formats.reasoning)


def find[T](kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}.{did_you_mean(name, known)} Known are {', '.join(sorted(known))}.")
    return known[name]


def id_of_call() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def id_of_mistral() -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return secrets.token_hex(5)[:9]
