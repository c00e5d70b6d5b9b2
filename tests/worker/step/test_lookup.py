"""Drafts by looking up, against a search that goes from place to place; and the answers that are kept."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.config.speculation import Speculation
from jaxpaged.messages import ProgramKey
from jaxpaged.worker.drafters import LookupDrafter
from jaxpaged.worker.step.lookup import CHUNK, load_history, look_up, look_up_drafts, pack_history, remember
from jaxpaged.worker.step.row_tokens import NOTHING, Answers, RowTokens

WIDTH, MOST = 24, 5
compiled_look_up = jax.jit(look_up, static_argnums=(2, 3, 4, 5))


def searched(tokens, shortest, longest, num_drafts):
    """What followed the longest, then latest, earlier occurrence of the newest tokens, going round."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(num_drafts)]
    return [NOTHING] * num_drafts


@settings(max_examples=100)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    lengths=st.sampled_from([(1, 1), (1, 4), (3, 4)]),
)
def test_the_longest_then_latest_occurrence_is_found(texts, lengths):
    text_SW = np.random.default_rng(0).integers(0, 4, (3, WIDTH), np.int32)  # behind the newest nothing is looked at
    for row, text in zip(text_SW, texts):
        row[: len(text)] = text
    newest_S = jnp.array([len(text) - 1 for text in texts])
    drafts_SK = compiled_look_up(jnp.array(text_SW), newest_S, 0, *lengths, MOST)
    assert drafts_SK.tolist() == [searched(text, *lengths, MOST) for text in texts]


compiled_load, compiled_remember = jax.jit(load_history), jax.jit(remember)
compiled_draft = jax.jit(look_up_drafts, static_argnums=0)


def rows_of(histories, num_answer_tokens):
    """Rows of which all tokens but the newest are computed."""
    rows = RowTokens(
        jnp.zeros(len(histories), jnp.int32),
        jnp.array([len(history) - 1 for history in histories]),
        jnp.zeros((len(histories), WIDTH), jnp.int32),
        jnp.zeros((len(histories), MOST), jnp.int32),
        Answers(jnp.zeros(num_answer_tokens, jnp.int32), jnp.int32(0)),
    )
    for row, history in enumerate(histories):
        for packed in pack_history(row, history):
            rows = compiled_load(rows, packed)
    return rows


def test_long_prompts_take_several_uploads():
    tokens = list(range(1, 2 * CHUNK + 8))
    rows = RowTokens(jnp.zeros(2), jnp.zeros(2), jnp.zeros((2, len(tokens)), jnp.int32))
    uploads = list(pack_history(1, tokens))
    for packed in uploads:
        rows = compiled_load(rows, packed)
    assert len(uploads) == 3 and rows.history_RL.tolist() == [[0] * len(tokens), tokens]


def test_answers_of_others_are_drafted_from_up_to_their_end():
    speculation = Speculation("suffix", MOST, (2, 8), 16)
    rows = rows_of([[9, 1, 2, 3, 4, 5], [7, 1, 2], [8, 4, 5], [5, 6]], 16)
    rows = compiled_remember(rows, jnp.array([0, 1]))  # the answer of row 0, whose prompt is one token
    drafts_RK = compiled_draft(speculation, rows, jnp.arange(4))[0].drafts_RK
    assert drafts_RK[1].tolist() == [3, 4, 5, NOTHING, NOTHING]
    assert drafts_RK[2].tolist() == [NOTHING] * MOST, "that answer ends there"
    assert drafts_RK[3].tolist() == [NOTHING] * MOST


def test_the_end_of_an_answer_hides_no_match_that_goes_on():
    """An answer that repeats itself ends with what it is made of: its end is the latest match, and nothing follows."""
    speculation = Speculation("suffix", MOST, (2, 8), 16)
    rows = rows_of([[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [9, 1, 1], [9, 4, 1, 1, 1, 1, 1, 1]], 16)
    rows = compiled_remember(rows, jnp.array([0, 1]))
    drafts_RK = compiled_draft(speculation, rows, jnp.array([1, 2]))[0].drafts_RK
    assert drafts_RK[1].tolist() == [1] * MOST
    assert drafts_RK[2].tolist() == [1, 1, 1, 1, NOTHING], "six tokens of that answer match before its last four"
    rows = compiled_remember(rows, jnp.array([2, 1]))
    assert compiled_draft(speculation, rows, jnp.array([1]))[0].drafts_RK[1].tolist() == [1] * MOST


def test_a_requests_own_tokens_go_before_as_long_a_match_elsewhere():
    rows = rows_of([[0, 1, 2, 3, 4], [1, 2, 9, 1, 2]], 16)
    rows = compiled_remember(rows, jnp.array([0, 0]))
    drafts_RK = compiled_draft(Speculation("suffix", MOST, (2, 8), 16), rows, jnp.array([1]))[0].drafts_RK
    assert drafts_RK[1].tolist() == [9, 1, 2, 9, 1]


def test_who_has_a_cache_salt_neither_finds_the_answers_of_others_nor_leaves_its_own():
    rows = compiled_remember(rows_of([[9, 1, 2, 3, 4], [7, 1, 2], [1, 2, 6, 1, 2]], 16), jnp.array([0, 1]))
    calls = []
    device = SimpleNamespace(
        state=SimpleNamespace(rows=rows), call=lambda key, rows, packed: calls.append(packed) or (rows, None)
    )
    drafter = LookupDrafter(3)
    for row, is_private in enumerate([False, True, True]):
        request = SimpleNamespace(token_ids=[], is_private=is_private)
        drafter.admit(device, 0, row, request)
    drafter.propose(device, ProgramKey("draft", 4), SimpleNamespace(newest=SimpleNamespace(rows=np.arange(3))), None)
    drafter.release(device, 1, 0)
    drafter.release(device, 2, 0)
    assert [packed.tolist() for packed in calls] == [[0, -2, -3, 3]], "nothing of a private row is remembered"
    packed_S = jnp.array(calls[0][:3])
    drafts_RK = compiled_draft(Speculation("suffix", MOST, (2, 8), 16), rows, packed_S)[0].drafts_RK
    assert drafts_RK[1].tolist() == [NOTHING] * MOST and drafts_RK[2].tolist() == [6, 1, 2, 6, 1]
    assert compiled_draft(Speculation("suffix", MOST, (2, 8), 16), rows, jnp.array([1]))[0].drafts_RK[1, 0] == 3


@pytest.mark.parametrize("size", [4, 7, 16])
def test_the_newest_answers_are_kept_in_the_room_there_is(size):
    rows, kept = rows_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], size), []
    for row, text in [(0, [1, 2, 3]), (1, [4, 5]), (2, [6, 7, 8, 9])] * 2:
        rows = compiled_remember(rows, jnp.array([row, 0]))
        kept += [*text[: size - 1], NOTHING]
    ring = np.roll(rows.answers.tokens_C, -int(rows.answers.cursor)).tolist()
    assert ring == kept[-size:]


def test_what_was_preempted_before_it_answered_leaves_nothing_but_an_end():
    rows = rows_of([[1, 2, 3]], 8)
    rows = compiled_remember(rows, jnp.array([0, 7]))
    assert rows.answers.tokens_C.tolist() == [NOTHING, *[0] * 7] and int(rows.answers.cursor) == 1
