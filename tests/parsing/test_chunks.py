"""Properties that hold for every format: what was rendered is found, however the text is cut, whatever the text is."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.parsing.deltas import joined
from jaxpaged.parsing.parser import TOOL_FORMATS, make_parser
from jaxpaged.parsing.reasoning import REASONING_FORMATS
from jaxpaged.parsing.source import Source
from tests.parsing.formats import CALLS_ALONE, RENDER

EXAMPLES = settings(max_examples=settings.default.max_examples // 5)  # each test runs once per format
FORMATS = sorted(TOOL_FORMATS)

NAMES = st.sampled_from(["f", "get_weather", "a.b", "x1"])
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>"), max_size=8).filter(
    lambda text: text == text.strip()
)
SCALARS = st.one_of(TEXTS, st.integers(-(10**12), 10**12), st.booleans(), st.none(), st.just(1.5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "key_2"]), inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "zone_1"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)

PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ",",
    ":",
    ";",
    "=",
    "(",
    ")",
    " ",
    "\n",
    "é",
    "漢🙂",
    "f(",
    'a="x"',
    "1",
    "-2.5e3",
    "true",
    "None",
    "call:f",
    "[f(a=1)]",
    '{"name": "f", ',
    '"arguments": {"a": "}"}',
    '"parameters": {}',
    '"name"',
    '"f"',
    '[{"name": "f", "arguments": {"a": 1}}]',
    '{"name": "f", "parameters": {"a": [1, "]"]}}',
    "<",
    "</",
    "```",
]
MARKERS = sorted(
    {
        marker
        for format_name in FORMATS
        for marker in re.findall(
            r"</?[^<>{}\s]+>|\[/?[A-Z_]{3,}\]|functools", RENDER[format_name]("", [("f", {"a": "x"})])
        )
    }
    | {"[TOOL_CALLS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<parameter=", "<function="}
)


def schemas_of(calls) -> dict:
    """What a request would say of the tools, so that parameters written as text get their types back."""
    schemas: dict[str, dict] = {}
    for name, arguments in calls:
        properties = schemas.setdefault(name, {"properties": {}})["properties"]
        for key, value in arguments.items():
            kind = "string" if isinstance(value, str) else "object"
            if properties.setdefault(key, {"type": kind})["type"] != kind:
                properties[key] = {"type": "mixed"}
    return schemas


def read(chunks, tool_parser, reasoning_parser=None, tools=None):
    """The message, after checking that its deltas are such as OpenAI streams."""
    ids = (f"id{i}" for i in itertools.count())
    parser = make_parser(tool_parser, reasoning_parser, tools=tools or {}, new_id=lambda: next(ids))
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)] + parser.finish()
    num_calls = 0
    for delta in deltas:
        call = delta.tool_call
        assert sum(part is not None for part in (delta.content, delta.reasoning, call)) == 1
        assert delta.content != "" and delta.reasoning != ""
        if call is not None:
            begins = call.index == num_calls
            assert begins == (call.id is not None) == (call.name is not None)
            assert begins or (call.index == num_calls - 1 and call.arguments)
            num_calls += begins
    return joined(deltas)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


PLACES = st.lists(st.integers(0, 10**6), max_size=8)


def same_for_all_cuts(text, places, tool_parser, reasoning_parser=None, tools=None):
    whole = read([text], tool_parser, reasoning_parser, tools)
    assert read(cut(text, places), tool_parser, reasoning_parser, tools) == whole
    assert read(list(text), tool_parser, reasoning_parser, tools) == whole
    return whole


@pytest.mark.parametrize("tool_parser", FORMATS)
@EXAMPLES
@given(calls=CALLS, content=st.sampled_from(["", "Let me see.", "é 漢🙂"]), places=PLACES)
def test_calls_that_a_model_writes_are_found_with_their_arguments(tool_parser, calls, content, places):
    if tool_parser in CALLS_ALONE and calls:
        content = ""
    text, tools = RENDER[tool_parser](content, calls), schemas_of(calls)
    message = same_for_all_cuts(text, places, tool_parser, tools=tools)
    assert (message.content or "") == content
    found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    is_text = "mixed" in json.dumps(tools)
    assert found == calls or (is_text and [name for name, _ in found] == [name for name, _ in calls])


@pytest.mark.parametrize("tool_parser", FORMATS)
@EXAMPLES
@given(pieces=st.lists(st.sampled_from([*PIECES, *MARKERS]) | st.text(max_size=3), max_size=14), places=PLACES)
def test_any_text_gives_the_same_message_however_it_is_cut(tool_parser, pieces, places):
    same_for_all_cuts("".join(pieces), places, tool_parser)


@pytest.mark.parametrize("tool_parser", FORMATS)
@EXAMPLES
@given(calls=CALLS, end=st.integers(0, 10**6), places=PLACES)
def test_an_answer_that_is_cut_off_gives_the_same_message_however_it_is_cut(tool_parser, calls, end, places):
    text = RENDER[tool_parser]("Yes. " if tool_parser not in CALLS_ALONE else "", calls)
    whole = read([text], tool_parser, tools=schemas_of(calls))
    truncated = same_for_all_cuts(text[: end % (len(text) + 1)], places, tool_parser, tools=schemas_of(calls))
    for before, after in zip(truncated.tool_calls, whole.tool_calls):
        assert after.name == before.name
        # The beginning of a quote of several characters ("<escape>") may have been text.
        unsure = len("<escape>") if "gemma" in tool_parser else 0
        assert after.arguments.startswith(before.arguments[: len(before.arguments) - unsure])


@pytest.mark.parametrize("reasoning_parser", sorted(REASONING_FORMATS))
@EXAMPLES
@given(data=st.data(), places=PLACES)
def test_reasoning_before_an_answer_is_told_apart(reasoning_parser, data, places):
    known = REASONING_FORMATS[reasoning_parser]
    thought, content = data.draw(TEXTS), data.draw(TEXTS)
    text = f"{known.start}{thought}{known.end}{content}"
    message = same_for_all_cuts(text, places, "hermes", reasoning_parser)
    assert (message.reasoning or "", message.content or "") == (thought, content)


@pytest.mark.parametrize("reasoning_parser", sorted(REASONING_FORMATS))
@EXAMPLES
@given(data=st.data(), places=PLACES)
def test_any_text_with_reasoning_markers_gives_the_same_message(reasoning_parser, data, places):
    known = REASONING_FORMATS[reasoning_parser]
    pieces = st.sampled_from([known.start, known.end, known.start[:-1], known.end[1:], *PIECES, "<tool_call>"])
    same_for_all_cuts("".join(data.draw(st.lists(pieces, max_size=10))), places, "hermes", reasoning_parser)


@pytest.mark.parametrize("tool_parser", FORMATS)
@EXAMPLES
@given(text=st.text(st.characters(exclude_characters="<[{f"), max_size=40))
def test_text_without_markers_is_content_to_the_letter(tool_parser, text):
    assert (read([text], tool_parser).content or "") == text


@pytest.mark.parametrize("tool_parser", FORMATS)
def test_what_is_held_back_is_never_longer_than_a_marker(tool_parser, monkeypatch):
    """So the work per character does not grow with the text: each is copied a bounded number of times."""
    feed, held = Source.feed, []
    monkeypatch.setattr(Source, "feed", lambda self, text: (held.append(len(self._text) - self._at), feed(self, text)))
    call = RENDER[tool_parser]("", [("f", {"a": "x" * 300, "b": [[[1] * 50]] * 5})])
    for text in (call * 3, call[:-40], "<" * 500, "[" * 500, "{" * 500, '{"' * 300, " " * 500):
        read(list(text), tool_parser)
    assert max(held) <= 40
