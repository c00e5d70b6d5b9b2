"""Structural tags: real grammars, followed by a matcher, on a vocabulary with tokens that stand for markers."""

import json

import pytest

from jaxpaged.core.grammar.text import grammar_text
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams, Thinking
from tests.core.grammar.marked_tokenizer import marked_tokenizer

llguidance = pytest.importorskip("llguidance")

TOKENIZER = marked_tokenizer(["[CALL]", "[/CALL]"], ["<tool>", "</tool>"])

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
HI = {"type": "const_string", "value": "hi"}


def tag(begin, content=NUMBER, end="</f>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags, triggers=("<f=",), **options):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **options}


def spelled(text):
    """Tokens of single characters, none of which stands for a marker."""
    return [token for letter in text for token in TOKENIZER.encode(letter)]


def matcher_of(structural_tag, **fields):
    params = StructuredOutputsParams(structural_tag=structural_tag, **fields)
    matcher = llguidance.LLMatcher(TOKENIZER.for_grammars, grammar_text(params, TOKENIZER.ids), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(form, text, encode=None, **fields):
    ids = (encode or TOKENIZER.encode)(text)
    matcher = matcher_of({"type": "structural_tag", "format": form}, **fields)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


TWO = (tag("<f=a>"), tag("<f=b>", HI))
NESTED = tag("<t>", triggered(*TWO), "</t>")
ONCE = tag("<t>", triggered(*TWO, stop_after_first=True), "</t>")
FIRST_ONLY = {"at_least_one": True, "stop_after_first": True}
CASES = [
    (HI, ["hi"], ["", "h", "hi!"]),
    (NUMBER, ["12"], ["x"]),
    ({"type": "json_schema", "json_schema": True}, ["[1]", '{"a": null}'], ["x"]),
    ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["ab"]),
    ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"]),
    (ANY, ["", "the cat <f=\n"], []),
    ({"type": "sequence", "elements": [HI, NUMBER, ANY]}, ["hi1", "hi1 and so on"], ["hi", "1hi"]),
    ({"type": "or", "elements": [HI, NUMBER]}, ["hi", "3"], ["hi3", ""]),
    ({"type": "optional", "content": HI}, ["", "hi"], ["hihi"]),
    ({"type": "plus", "content": HI}, ["hi", "hihi"], [""]),
    ({"type": "star", "content": HI}, ["", "hi", "hihi"], ["hih"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": HI}, ["hi", "hihi"], ["", "hihihi"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": HI}, ["hihi", "hi" * 5], ["hi"]),
    (tag("<f=a>"), ["<f=a>1</f>"], ["<f=a>1", "x<f=a>1</f>", "<f=a>x</f>", "<f=a>1</f>x"]),
    (tag("a", end=""), ["a1"], ["a", "a1</f>"]),
    (tag("a", ANY, ["b", "c</f>"]), ["axb", "axc</f>", "ab"], ["ax", "axbx", "axc"]),
    (tag("a", ANY, ""), ["a", "axb"], ["b"]),
    (
        triggered(*TWO),
        ["", "the cat", "<f", "<f=a>1</f>", "so <f=b>hi</f> and <f=a>2</f>.", "<f=a>1</f><f=a>2</f>"],
        ["<f=", "<f=c>", "<f=a>x</f>", "<f=a>1</f><f=c>"],
    ),
    (triggered(*TWO, at_least_one=True), ["<f=a>1</f>", "<f=b>hi</f> so <f=a>1</f>"], ["", "so <f=a>1</f>"]),
    (triggered(*TWO, stop_after_first=True), ["so", "so <f=a>1</f>"], ["<f=a>1</f> so"]),
    (triggered(*TWO, **FIRST_ONLY), ["<f=a>1</f>"], ["", "<f=a>1</f> so", "so"]),
    (NESTED, ["<t></t>", "<t>so <f=a>1</f> so</t>"], ["<t>so", "<t></t>so", "<t><f=c></t>", "<t>so <f=a></t>"]),
    (ONCE, ["<t>a<f=a>1</f></t>", "<t>a</t>"], ["<t><f=a>1</f>a</t>"]),
    (
        {"type": "tags_with_separator", "tags": list(TWO), "separator": ", "},
        ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>hi</f>, <f=a>2</f>"],
        ["so", "<f=a>1</f><f=a>1</f>", "<f=a>1</f>, "],
    ),
    (
        {"type": "tags_with_separator", "tags": [TWO[0]], "separator": "", "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f><f=a>2</f>"],
        [""],
    ),
    (
        {"type": "tags_with_separator", "tags": [TWO[0]], "separator": ",", **FIRST_ONLY},
        ["<f=a>1</f>"],
        ["", "<f=a>1</f>,<f=a>1</f>"],
    ),
    (triggered(tag("é<\u2028😀>", HI, "\\\"'"), triggers=["é"]), ["aé<\u2028😀>hi\\\"'b"], ["aéb"]),
    ({"type": "sequence", "elements": [triggered(*TWO, **FIRST_ONLY), HI]}, ["<f=a>1</f>hi"], ["<f=a>1</f>"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_what_a_tag_allows_is_what_it_says(form, good, bad):
    for text in good:
        assert allows(form, text), text
        assert allows(form, text, encode=spelled), text
    for text in bad:
        assert not allows(form, text), text


MARKED = triggered(tag("<tool>a", NUMBER, "</tool>"), tag("[CALL]b", HI, "[/CALL]!"), triggers=["<tool>", "[CALL]b"])


@pytest.mark.parametrize("encode", [None, spelled])
def test_markers_count_as_tokens_and_spelled_out(encode):
    for text in ("so", "so <tool>a1</tool> and [CALL]bhi[/CALL]! so", "<tool>a1</tool><tool>a2</tool>"):
        assert allows(MARKED, text, encode), text
    for text in ("<tool>b", "<tool>a1", "so [CALL]bx", "[CALL]bhi[/CALL]x"):
        assert not allows(MARKED, text, encode), text
    inside = tag("<tool>", ANY, "</tool>")
    assert allows(inside, "<tool>so</tool>", encode) and not allows(inside, "<tool>so</tool>so", encode)


def test_a_token_that_is_longer_than_its_trigger_begins_the_tag():
    form = triggered(tag("<tool>1", HI), triggers=["<to"])
    assert allows(form, "so <tool>1hi</f>") and not allows(form, "so <tool>2")
    assert allows(form, "so <tool>1hi</f>", spelled) and not allows(form, "so <top", spelled)


def test_the_form_of_before_means_the_same():
    schema = {"type": "integer"}
    for given in (schema, json.dumps(schema)):
        old = {
            "type": "structural_tag",
            "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": given, "end": "</f>"}],
        }
        new = {"type": "structural_tag", "format": triggered(TWO[0])}
        for form in (old, json.dumps(old)):
            same = [grammar_text(StructuredOutputsParams(structural_tag=value), TOKENIZER.ids) for value in (form, new)]
            assert same[0] == same[1]


def test_options_of_json_count_in_tags_and_thinking_comes_before():
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    form = tag("<f=a>", {"type": "json_schema", "json_schema": schema})
    assert allows(form, '<f=a>{"a": {"b": 2}}</f>')
    assert not allows(form, '<f=a>{"a": 1, "b": 2}</f>')
    assert not allows(form, '<f=a>{"a": 1}</f>', disable_any_whitespace=True)
    thinking = Thinking("<think>", "</think>", False)
    assert allows(form, '<think>the <f=a>\n</think>\n<f=a>{"a": 1}</f>', thinking=thinking)
    assert not allows(form, '<think>the\n</think>\n<f=a>{"b": 1}</f>', thinking=thinking)
