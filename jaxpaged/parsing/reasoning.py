"""Where a model's thinking ends and its answer begins: a table of markers, and one reader for all of them.

Whether the thinking began in the prompt already is for the caller to say; `is_open_after` reads it off the end of the
prompt that the chat template wrote. What stands before that are words of users.
"""

from dataclasses import dataclass

from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Source, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """`open`: an ending that has neither marker leaves the model thinking. `ends_too`: beginnings of calls that end
    the thinking even if its end marker is missing."""

    start: str
    end: str
    open: bool = False
    ends_too: tuple[str, ...] = ()

    def is_open_after(self, ending: str) -> bool:
        """Whether a model that goes on from a prompt with this ending is thinking."""
        start, end = ending.rfind(self.start), ending.rfind(self.end)
        return self.open if start == end == -1 else start > end

    def read(self, source: Source, out: Output, is_open: bool) -> Steps[None]:
        """The thinking, if there is any; it comes first."""
        source.keep()
        yield from source.spaces()
        if (yield from source.skip(self.start)):
            source.kept()
        elif is_open:
            out.reasoning(source.kept())
        else:
            out.content(source.kept())
            return
        found = yield from source.until(Markers(self.end, *self.ends_too), out.reasoning)
        if found in self.ends_too:
            source.unread(found)


THINK = ReasoningFormat("<think>", "</think>")
THINK_FIRST = ReasoningFormat("<think>", "</think>", open=True)

REASONING_FORMATS = {
    "deepseek_r1": THINK_FIRST,
    "deepseek_v3": THINK,
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": THINK,
    "glm47": THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "kimi_k2": ReasoningFormat("<think>", "</think>", ends_too=("<|tool_calls_section_begin|>",)),
    "minimax_m2": THINK_FIRST,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": THINK,
    "qwen3": THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "step3": THINK_FIRST,
}
