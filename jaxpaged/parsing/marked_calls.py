"""Formats that mark the parts of a call by special tokens: deepseek_v3, deepseek_v31, kimi_k2.

<section> <call> header <arguments> {...} <end of call> <call> ... <end of section>
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpaged.parsing.json_text import TOOL_NAME, copy_value
from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Source, Steps

SEPARATOR = "<｜tool▁sep｜>"


@dataclass(frozen=True)
class MarkedCalls:
    """`read_header` makes (name, id or None) of what stands between `call` and `arguments`."""

    section: str
    section_end: str
    call: str
    call_end: str
    arguments: str
    read_header: Callable[[str], tuple[str, str | None]]

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        outside = Markers(self.section, self.section_end, self.call, self.call_end)
        while found := (yield from source.until(outside, out.content)):
            if found == self.call:
                yield from self._read_call(source, out)

    def _read_call(self, source: Source, out: Output) -> Steps[None]:
        source.keep(self.call)
        header, found = yield from source.text_until(Markers(self.arguments, self.call_end, self.section_end))
        text = source.kept()
        name, call_id = self.read_header(header)
        if not found or not TOOL_NAME.fullmatch(name):
            out.content(text)
            return
        out.begin_call(name, call_id)
        whole = found != self.arguments or (yield from self._read_arguments(source, out))
        if whole:
            out.end_call()

    def _read_arguments(self, source: Source, out: Output) -> Steps[bool]:
        """A JSON object; anything else is passed on as it is, up to the end of the call."""
        yield from source.spaces()
        is_object = yield from source.at("{")
        if is_object and not (yield from copy_value(source, out.arguments)):
            return False
        rest, found = yield from source.text_until(Markers(self.call_end, self.section_end))
        if not is_object:
            out.arguments(rest.rstrip())
        return found is not None


def name_before_separator(header: str) -> tuple[str, None]:
    return header.strip(), None


def name_after_separator(header: str) -> tuple[str, None]:
    """The kind of the tool comes first: `function<sep>name`."""
    return header.partition(SEPARATOR)[2].strip(), None


def name_in_id(header: str) -> tuple[str, str | None]:
    """`functions.name:0` is name and id in one."""
    call_id = header.strip()
    return call_id.removeprefix("functions.").rpartition(":")[0], call_id


deepseek_v31 = MarkedCalls(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    SEPARATOR,
    name_before_separator,
)
deepseek_v3 = MarkedCalls(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "```json",
    name_after_separator,
)
kimi_k2 = MarkedCalls(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    name_in_id,
)
