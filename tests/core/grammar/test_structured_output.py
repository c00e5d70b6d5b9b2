"""Grammars and their matchers, on the embedded model's vocabulary."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

pytest.importorskip("llguidance")

TOKENIZER = next(Path(__file__).parents[3].glob("jaxpaged/assets/**/tokenizer.json"))
VOCAB, EOS = 2051, 1  # a few ids more than the tokenizer has, as models do
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER.read_text(), VOCAB, [EOS])


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(TOKENIZER))


def matcher_of(grammars, **fields):
    return grammars.matcher_of(grammars.compile(StructuredOutputsParams(**fields)))


def allowed(grammars, matcher) -> list[int]:
    bits_IW = np.full((1, grammars.num_words), 0xFFFFFFFF, np.uint32)
    matcher.fill(bits_IW)
    assert matcher.error is None and bits_IW.any()
    return tokens_of(bits_IW[0])


def tokens_of(bits_W) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little")).tolist()


def random_answer(grammars, tokenizer, matcher, draw, most=400):
    """Any allowed token after another, up to the end."""
    tokens = []
    while not matcher.is_complete and len(tokens) < most:
        token = draw.choice(allowed(grammars, matcher))
        if token == EOS:
            break
        tokens.append(token)
        assert matcher.accept([token])
    assert matcher.may_end
    return tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_the_answer_has_its_shape(grammars, tokenizer, seed):
    draw = random.Random(seed)

    def answer(**fields):
        return random_answer(grammars, tokenizer, matcher_of(grammars, **fields), draw)

    assert answer(choice=["yes", "no", 'say "maybe"']) in ("yes", "no", 'say "maybe"')
    assert re.fullmatch("[ab]{2,5}-[0-9]{3}", answer(regex="[ab]{2,5}-[0-9]{3}"))
    value = json.loads(answer(json=SCHEMA))
    assert set(value) == {"name", "age", "tags"} and len(value["name"]) <= 5 and 0 <= value["age"] <= 99
    assert all(tag in ("a", "bc") for tag in value["tags"])
    assert re.fullmatch(r"\(*x\)*", answer(grammar='start: "(" start ")" | "x"'))
    assert set(answer(grammar='root ::= "ab" root | "c"')) <= set("abc")


def test_white_space_in_json_can_be_forbidden_chosen_and_is_bounded(grammars, tokenizer):
    tight = json.dumps({"a": 1}, separators=(",", ":"))
    wide = '{"a"' + " " * 20 + ": 1}"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def takes(text, **fields):
        return matcher_of(grammars, json=schema, **fields).accept(tokenizer.encode(text).ids)

    assert takes(tight) and takes('{ "a":\n        1 }') and not takes(wide) and not takes('{"a":\n\n1}')
    assert takes(tight, disable_any_whitespace=True) and not takes('{"a": 1}', disable_any_whitespace=True)
    assert takes(wide, whitespace_pattern=" *") and not takes('{"a":\n1}', whitespace_pattern=" *")


def test_objects_have_the_properties_that_their_schema_names_and_no_others(grammars, tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    free, inner = tokenizer.encode('{"x":1}').ids, tokenizer.encode('{"a":{"x":1}}').ids

    def takes(ids, **fields):
        return matcher_of(grammars, **fields).accept(ids)

    assert not takes(free, json=schema) and takes(inner, json=schema)
    assert takes(free, json={**schema, "additionalProperties": True})
    assert not takes(inner, json=schema, disable_additional_properties=True)
    assert takes(free, json_object=True) and takes(free, json_object=True, disable_additional_properties=True)


def test_the_end_is_allowed_where_the_answer_may_end_and_nowhere_else(grammars, tokenizer):
    matcher = matcher_of(grammars, regex="a+")
    assert EOS not in allowed(grammars, matcher)
    assert matcher.accept(tokenizer.encode("aa").ids)
    assert EOS in allowed(grammars, matcher) and matcher.may_end and not matcher.is_complete
    assert matcher.accept([EOS])
    assert matcher.is_complete and allowed(grammars, matcher) == [EOS]


def test_no_id_beyond_the_tokenizers_is_ever_allowed(grammars):
    assert max(allowed(grammars, matcher_of(grammars, regex="(.|\n)*"))) < 2048


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_behind_drafts_a_matcher_allows_what_it_would_if_they_had_come(grammars, draw):
    """As far as they fit; and it stays where it is."""
    matcher, guide = matcher_of(grammars, json=SCHEMA), matcher_of(grammars, json=SCHEMA)
    tokens, masks = [], [allowed(grammars, guide)]
    for _ in range(12):
        tokens.append(draw.choice([token for token in masks[-1] if token != EOS] or [EOS]))
        assert guide.accept(tokens[-1:])
        masks.append(allowed(grammars, guide))
    known, num_fit = draw.randint(0, 8), draw.randint(0, 4)
    assert matcher.accept(tokens[:known])
    drafts = tokens[known : known + num_fit]
    drafts += [token for token in range(2048) if token not in masks[known + num_fit]][:2]  # the first does not fit
    bits_IW = np.zeros((len(drafts) + 1, grammars.num_words), np.uint32)
    matcher.fill(bits_IW, drafts)
    whole = next((i for i in range(len(tokens) + 1) if masks[i] == [EOS]), 99)
    for i in range(min(num_fit, whole - known) + 1):
        assert tokens_of(bits_IW[i]) == masks[known + i] or known + i == whole
    assert not bits_IW[num_fit + 1 :].any(), "behind what does not fit nothing is said"
    assert allowed(grammars, matcher) == masks[known]
    assert matcher.accept(tokens[known:])


def test_what_drafts_would_cost_fails_nobody(grammars):
    """The matcher of llguidance never recovers from an error; behind tokens that did not come it need not."""
    matcher = matcher_of(grammars, regex="a+b")
    (a, *_) = allowed(grammars, matcher)

    class Costly:
        def __init__(self, inner):
            self.inner, self.broken = inner, False

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def consume_token(self, token_id):
            self.broken = True
            return self.inner.consume_token(token_id)

        def is_error(self):
            return self.broken

    matcher._matcher = Costly(matcher._matcher)
    bits_IW = np.full((2, grammars.num_words), 0xFFFFFFFF, np.uint32)
    matcher.fill(bits_IW, [a])
    assert a in tokens_of(bits_IW[0]) and not bits_IW[1].any()
    assert matcher.error is None and matcher.accept([a])


def test_a_token_that_does_not_fit_spoils_this_matcher_only(grammars, tokenizer):
    first, second = matcher_of(grammars, choice=["yes"]), matcher_of(grammars, choice=["yes"])
    assert not first.accept(tokenizer.encode("no").ids)
    assert "doesn't satisfy the grammar" in first.error
    bits_IW = np.full((2, grammars.num_words), 0xFFFFFFFF, np.uint32)
    first.fill(bits_IW, [3])
    assert not bits_IW[0].any() and not first.is_complete
    assert second.error is None and second.accept(tokenizer.encode("yes").ids)


def test_a_grammar_is_compiled_once_for_all_its_requests(grammars):
    same = [StructuredOutputsParams(regex="once+") for _ in range(2)]
    assert grammars.compile(same[0]) is grammars.compile(same[1])
    assert grammars.compile(same[0]) is not grammars.compile(StructuredOutputsParams(regex="twice+"))


def test_a_grammar_that_is_none_fails_alone_and_again(grammars):
    for _ in range(2):
        with pytest.raises(RequestError, match="structured_outputs cannot be used: .*unclosed group"):
            matcher_of(grammars, regex="(a")
    assert matcher_of(grammars, regex="a").error is None


def test_a_grammar_can_keep_a_text_out_wherever_it_stands(grammars, tokenizer):
    """As the docstring of `bad_words` says, which ban tokens."""
    grammar = r"start: TEXT" + "\n" + r"TEXT: /(.|\n)*/ & ~/(.|\n)*\.(.|\n)*/"
    matcher = matcher_of(grammars, grammar=grammar)
    assert matcher.accept(tokenizer.encode('the "cat', add_special_tokens=False).ids)
    may_come = set(allowed(grammars, matcher))
    with_period = {i for i in range(tokenizer.get_vocab_size()) if "." in tokenizer.decode([i])}
    assert with_period and not may_come & with_period
    assert tokenizer.encode(" the", add_special_tokens=False).ids[0] in may_come
