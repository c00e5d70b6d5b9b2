"""Calls written as a Python list of calls: pythonic, llama4_pythonic.

    [get_weather(city="Paris", days=3), get_time(zone=None)]

Only keyword arguments of literals are calls; anything else is content. Nothing is evaluated. A call is put out once it
is complete, since nothing before its last bracket says that it is one.
"""

import re
from dataclasses import dataclass

from jaxpaged.parsing.json_text import TOOL_NAME
from jaxpaged.parsing.loose_values import LooseValues, unescape_python
from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Source, Steps

NAME = re.compile(r"[\w.]*")
QUOTES = {'"': unescape_python, "'": unescape_python}
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True)
class Pythonic:
    """The whole answer is the list, between `start` and `end` if the model writes them."""

    start: str = ""
    end: str = ""

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        source.keep()
        yield from source.spaces()
        if self.start and (yield from source.skip(self.start)):
            yield from source.spaces()
        if (yield from source.skip("[")):
            yield from self._read_calls(source, out)
        out.content(source.kept())

    def _read_calls(self, source: Source, out: Output) -> Steps[None]:
        """Calls up to the bracket. The source keeps what was read since the last of them."""
        while (yield from read_call(source, out)):
            source.keep()
            more = yield from source.skip_after_space(",")
            if (yield from source.skip_after_space("]")):
                source.keep()
                if self.end and (yield from source.skip_after_space(self.end)):
                    source.keep()
                return
            if not more:
                return
            source.keep()


def read_call(source: Source, out: Output) -> Steps[bool]:
    yield from source.spaces()
    name = yield from source.run(NAME)
    if not TOOL_NAME.fullmatch(name) or (out.tools and name not in out.tools) or not (yield from source.skip("(")):
        return False
    pieces: list[str] = []
    values = LooseValues(source, pieces.append, QUOTES, WORDS, any_word=False)
    if not (yield from values.members(")", "=")):
        return False
    source.kept()
    out.begin_call(name)
    for piece in pieces:
        out.arguments(piece)
    return True


pythonic = Pythonic()
llama4_pythonic = Pythonic("<|python_start|>", "<|python_end|>")
