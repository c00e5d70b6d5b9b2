"""Grammars of outputs that begin with thinking: free text up to a marker, then the grammar itself.

This module knows how grammars of llguidance are put together, and compiles none.
"""

import json
from collections.abc import Mapping

from jaxpaged.sampling_params.structured_outputs import Thinking


def after_thinking(answer: str, thinking: Thinking, added_tokens: Mapping[str, int]) -> str:
    """A grammar, as JSON, of thinking and the answer. `answer` is a grammar too, as JSON or in Lark's notation.

    Some white space may stand between the two.
    """
    start = marker(thinking.start, added_tokens)
    order = f"({start})? think SPACE? @answer" if thinking.is_open else f"({start} think SPACE?)? @answer"
    if thinking.end in added_tokens:
        think = f"think: TEXT <[{added_tokens[thinking.end]}]>"
    else:
        think = f"think[lazy]: TEXT {json.dumps(thinking.end)}"
    lark = f"start: {order}\n{think}\nTEXT: /(.|\\n)*/\nSPACE: /[ \\n]{{1,4}}/\n"
    first, *others = grammars_of(answer)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})


def grammars_of(text: str) -> list[dict]:
    """The parts of a grammar, the first of which is where it starts."""
    return json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]


def marker(text: str, added_tokens: Mapping[str, int]) -> str:
    """A marker, whose beginning may be a token of its own."""
    for name in sorted(added_tokens, key=len, reverse=True):
        if name and text.startswith(name):
            rest = text[len(name) :]
            return f"<[{added_tokens[name]}]>" + (f" {json.dumps(rest)}" if rest else "")
    return json.dumps(text)
