"""Grammars of thinking and an answer: real ones, followed by a matcher."""

import pytest

from jaxpaged.core.grammar.text import grammar_text
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams, Thinking
from tests.core.grammar.marked_tokenizer import marked_tokenizer

llguidance = pytest.importorskip("llguidance")

TOKENIZER = marked_tokenizer(["[THINK]", "[/THINK]"], ["<think>", "</think>"])

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}}
SHAPES = [
    ({"choice": ["yes", "no"]}, "yes", "maybe"),
    ({"json_object": True}, '{"a": 1}', "x"),
    ({"json": SCHEMA}, '{"a": 3}', '{"a": "x"}'),
    ({"regex": "[ab]+"}, "ab", "c"),
    ({"grammar": 'start: "x" start "y" | "z"'}, "xzy", "xx"),
]
MARKS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("Start:", "End:"), ("<think>hm\n", "End:")]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("start", "end"), MARKS)
@pytest.mark.parametrize(("shape", "good", "bad"), SHAPES)
def test_an_answer_keeps_its_shape_after_free_thinking(shape, good, bad, start, end, is_open):
    text = grammar_text(StructuredOutputsParams(**shape, thinking=Thinking(start, end, is_open)), TOKENIZER.ids)

    def allows(answer):
        matcher = llguidance.LLMatcher(TOKENIZER.for_grammars, text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(TOKENIZER.encode(answer)) and matcher.is_accepting()

    assert allows(f"{start} a {{}}\n b{end}\n\n{good}") and allows(start + end + good)
    assert allows(f"no start{end}{good}") == is_open
    assert allows(good) != is_open, "who thinks already must end that first"
    assert not any(map(allows, (bad, start + end + bad, f"{start}x", f"{start}x{end}", f"{start}x{end}{good}?")))


def test_without_a_vocabulary_markers_are_text():
    params = StructuredOutputsParams(choice=["yes"], thinking=Thinking("<think>", "</think>", True))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_text(params), log_level=0)
    assert matcher.consume_tokens(list(b"hm</think>\nyes")) and matcher.is_accepting()
