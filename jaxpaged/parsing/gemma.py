"""Gemma's own call format: gemma4, functiongemma.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpaged.parsing.json_text import TOOL_NAME
from jaxpaged.parsing.loose_values import LooseValues, unescape_json
from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Source, Steps

WORDS: Mapping[str, str] = {"true": "true", "false": "false", "null": "null", "None": "null"}


@dataclass(frozen=True)
class GemmaCalls:
    """`start call:name{...} end`, strings between two of `quote`."""

    start: str
    end: str
    quote: str

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        outside, called = Markers(self.start, self.end), False
        while found := (yield from source.until(outside, out.content)):
            if found == self.start:
                called |= yield from self._read_call(source, out)
            elif not called:
                out.content(found)

    def _read_call(self, source: Source, out: Output) -> Steps[bool]:
        source.keep(self.start)
        header, found = yield from source.text_until(Markers("{", self.end, "\n"))
        text, name = source.kept(), header.strip().removeprefix("call:").strip()
        if found != "{" or not TOOL_NAME.fullmatch(name):
            out.content(text)
            return False
        out.begin_call(name)
        values = LooseValues(source, out.arguments, {self.quote: None, '"': unescape_json}, WORDS, any_word=True)
        yield from values.members("}", ":")
        return True


gemma4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
functiongemma = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
