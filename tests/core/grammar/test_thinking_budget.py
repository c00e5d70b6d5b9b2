"""The rule that ends thinking, against a plain recount of all tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.grammar.thinking_budget import BudgetMatcher
from jaxpaged.engine.input.params_of_model import leaves_open

START, END, WORDS = 40, 41, 2
EVERYTHING = np.full(WORDS, 0xFFFFFFFF, np.uint32)
TOKENS = st.lists(st.sampled_from([1, 2, START, END]), max_size=30)


def is_due(budget, prompt, tokens):
    """Whether the token after these must end the thinking: counted from the text, in one go."""
    markers = [token for token in prompt if token in (START, END)]
    num_thought = 0 if markers and markers[-1] == START else None
    for token in tokens:
        if token == END:
            num_thought = None
        elif num_thought is not None:
            num_thought += 1
        elif token == START:
            num_thought = 0
    return num_thought is not None and num_thought >= budget


def allowed(matcher):
    bits_IW = np.zeros((1, WORDS), np.uint32)
    matcher.fill(bits_IW)
    return bits_IW[0]


@given(st.integers(0, 6), TOKENS, TOKENS)
def test_the_end_is_the_only_token_exactly_when_it_is_due(budget, prompt, tokens):
    matcher = BudgetMatcher(budget, START, END, leaves_open(prompt, START, END))
    for place, token in enumerate(tokens):
        due = is_due(budget, prompt, tokens[:place])
        expected = np.array([0, 1 << (END - 32)], np.uint32) if due else EVERYTHING
        np.testing.assert_array_equal(allowed(matcher), expected)
        assert matcher.accept([token]) and not matcher.is_complete and matcher.error is None


@given(st.integers(0, 6), TOKENS, TOKENS, TOKENS)
def test_behind_drafts_it_allows_what_it_would_if_they_had_come(budget, prompt, known, drafts):
    matcher = BudgetMatcher(budget, START, END, leaves_open(prompt, START, END))
    matcher.accept(known)
    bits_IW = np.zeros((len(drafts) + 1, WORDS), np.uint32)
    matcher.fill(bits_IW, drafts)
    for place, bits_W in enumerate(bits_IW):
        np.testing.assert_array_equal(bits_W, allowed(matcher))
        matcher.accept(drafts[place : place + 1])


@given(st.integers(0, 6), TOKENS, TOKENS, st.integers(0, 3), TOKENS)
def test_a_token_that_needs_no_mask_is_never_one_at_which_the_end_is_due(budget, prompt, known, num_unknown, later):
    """Whatever the tokens are that have been drawn and are not known yet."""
    matcher = BudgetMatcher(budget, START, END, leaves_open(prompt, START, END))
    matcher.accept(known)
    num_free = matcher.num_free(num_unknown)
    if num_unknown <= len(later):
        for place in range(num_unknown, min(num_unknown + num_free, len(later) + 1)):
            unknown = later[:place]
            drawn = [token for i, token in enumerate(unknown) if not is_due(budget, prompt, known + unknown[:i])]
            if len(drawn) == len(unknown):  # tokens that could have been drawn
                assert not is_due(budget, prompt, known + unknown)


@pytest.mark.parametrize(("thought", "unknown", "free"), [(0, 0, 5), (3, 1, 1), (4, 1, 0), (5, 0, 0), (9, 2, 0)])
def test_what_is_free_is_what_is_left_of_the_budget(thought, unknown, free):
    matcher = BudgetMatcher(5, START, END, is_thinking=True)
    matcher.accept([1] * thought)
    assert matcher.num_free(unknown) == free


def test_who_does_not_think_may_begin_to_with_the_next_token():
    matcher = BudgetMatcher(5, START, END, is_thinking=False)
    assert [matcher.num_free(num_unknown) for num_unknown in (0, 1, 6, 9)] == [6, 5, 0, 0]


class OddOnly:
    """A grammar of odd tokens."""

    error, is_complete = None, True

    def __init__(self):
        self.taken = []

    def accept(self, token_ids):
        self.taken += token_ids
        return all(token % 2 for token in token_ids)

    def num_free(self, num_unknown):
        return 0

    def fill(self, bits_IW, token_ids=()):
        bits_IW[:] = np.uint32(0xAAAAAAAA) if len(self.taken) < 3 else 0


def test_with_a_grammar_the_end_is_forced_where_that_allows_it():
    grammar = OddOnly()
    matcher = BudgetMatcher(1, START, END, True, grammar)
    assert matcher.num_free(0) == 0 and matcher.is_complete
    np.testing.assert_array_equal(allowed(matcher), [0xAAAAAAAA] * 2)
    assert matcher.accept([1]) and grammar.taken == [1]
    np.testing.assert_array_equal(allowed(matcher), [0, 1 << (END - 32)])
    other = BudgetMatcher(0, 41, 40, True, OddOnly())  # its end is an even token
    np.testing.assert_array_equal(allowed(other), [0xAAAAAAAA] * 2)
    assert not matcher.accept([2])
    matcher.accept([3])
    assert not allowed(matcher).any()
