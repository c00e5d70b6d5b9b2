"""gpt-oss's messages, in which thinking, calls and answer are channels: tool parser openai, reasoning parser
openai_gptoss. One reader is both.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

import re

from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Source, Steps

BEGINS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>")
OUTSIDE = Markers(*BEGINS, *ENDS)
BODY = Markers("<|message|>")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class Harmony:
    """Reads the whole answer. Text outside all messages is content; a header that is cut off is nothing."""

    def is_open_after(self, ending: str) -> bool:
        """Messages say what they are, so prompts do not matter."""
        return False

    def read(self, source: Source, out: Output, is_open: bool) -> Steps[None]:
        while found := (yield from source.until(OUTSIDE, out.content)):
            if found in BEGINS:
                header, found = yield from source.text_until(BODY)
                if found:
                    yield from self._read_body(header, source, out)

    def _read_body(self, header: str, source: Source, out: Output) -> Steps[None]:
        """A message up to its end, or to where the next begins."""
        recipient = RECIPIENT.search(header)
        if recipient:
            out.begin_call(recipient[1])
        is_thinking = "analysis" in header and not recipient
        sink = out.arguments if recipient else out.reasoning if is_thinking else out.content
        # Arguments are JSON, which no marker's beginning ends: where a call is cut off there, it is not theirs.
        found = yield from source.until(OUTSIDE, sink, is_whole=not recipient)
        if found and recipient:
            out.end_call()
        if found in BEGINS:
            source.unread(found)


def harmony(source: Source, out: Output) -> Steps[None]:
    """The reader as a tool format."""
    yield from Harmony().read(source, out, is_open=False)
