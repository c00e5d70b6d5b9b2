"""Drafts by looking up: what followed the newest tokens of a request when they last occurred, in the same request or,
with the method "suffix", in answers to earlier ones.

All of it runs on the device, which alone knows the newest tokens while steps are in flight: the tokens of a row are
written when it is given to a request, and those that are drawn by whatever draws them. Answers are kept one after the
other in a ring of fixed size, the newest in place of the oldest. This module does not know which drafts are any good.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.config.speculation import Speculation
from jaxpaged.worker.step.row_tokens import NOTHING, RowTokens

CHUNK = 512
"""Tokens in one upload of `load_history`."""
HEADER = 3  # row, position of the first token, number of tokens


class Matches(NamedTuple):
    """What the search carries: tokens compared so far, places where all of them were the same, and how many were."""

    distance: Any
    matching_SW: Any
    length_SW: Any


def num_following(text_SW: Any, most: int) -> Any:
    """How many tokens, `most` at most, come after each before its text ends: counts_SW."""
    width = text_SW.shape[1]
    padded = jnp.pad(text_SW, ((0, 0), (0, most)), constant_values=NOTHING)
    count_SW = jnp.zeros(text_SW.shape, jnp.int32)
    for distance in range(most, 0, -1):
        count_SW = jnp.where(padded[:, distance : distance + width] == NOTHING, 0, count_SW + 1)
    return count_SW


def look_up(text_SW: Any, newest_S: Any, own: int, shortest: int, longest: int, num_drafts: int) -> Any:
    """drafts_SK of rows whose newest token is at place `newest_S` of their text, -1 where there is none.

    A row's own tokens begin at place `own`; before them are others, NOTHING between any two texts. The newest tokens,
    `shortest` to `longest` of them, are looked for at earlier places where something follows: the longest match wins,
    then that which most drafts follow before its text ends, then the latest. A draft that reaches the newest token goes
    round, as if the tokens since the match repeated themselves.
    """
    width = text_SW.shape[1]
    place_W = jnp.arange(width, dtype=jnp.int32)
    padded = jnp.pad(text_SW, ((0, 0), (longest, 0)), constant_values=NOTHING)

    def compare(matches: Matches) -> Matches:
        wanted_S1 = jnp.take_along_axis(text_SW, jnp.maximum(newest_S - matches.distance, 0)[:, None], axis=1)
        before_SW = jax.lax.dynamic_slice_in_dim(padded, longest - matches.distance, width, axis=1)
        inside_S1 = (newest_S - matches.distance >= own)[:, None]
        matching_SW = matches.matching_SW & (before_SW == wanted_S1) & inside_S1
        return Matches(matches.distance + 1, matching_SW, matches.length_SW + matching_SW)

    earlier_SW = place_W < newest_S[:, None]
    follow_SW = jnp.where(place_W >= own, num_drafts, num_following(text_SW, num_drafts))
    first = Matches(jnp.int32(0), earlier_SW & (follow_SW > 0), jnp.zeros(text_SW.shape, jnp.int32))
    going_on = lambda matches: (matches.distance < longest) & jnp.any(matches.matching_SW)
    length_SW = jax.lax.while_loop(going_on, compare, first).length_SW
    score_SW = jnp.where(length_SW >= shortest, length_SW * (num_drafts + 1) + follow_SW, -1)
    best_S = jnp.max(score_SW, axis=1)
    first_S = jnp.max(jnp.where(score_SW == best_S[:, None], place_W, -1), axis=1) + 1
    nth_SK = jnp.arange(num_drafts, dtype=jnp.int32) % jnp.maximum(newest_S + 1 - first_S, 1)[:, None]
    drafts_SK = jnp.take_along_axis(text_SW, first_S[:, None] + nth_SK, axis=1, mode="clip")
    ended_SK = jnp.cumsum(drafts_SK == NOTHING, axis=1) > 0
    return jnp.where(ended_SK | (best_S[:, None] < 0), NOTHING, drafts_SK)


def look_up_drafts(speculation: Speculation, rows: RowTokens, packed_S: Any) -> tuple[RowTokens, Any]:
    """(Rows with drafts for some of them, these drafts_SK). A row's newest token is the first that is not computed.

    `packed_S` has row r, or -1 - r for one that looks at its own tokens only.
    """
    private_S = packed_S < 0
    row_S = jnp.where(private_S, -1 - packed_S, packed_S)
    text_SW, own = rows.history_RL[row_S], 0
    if rows.answers is not None:
        own = len(rows.answers.tokens_C) + 1
        others_SC = jnp.where(private_S[:, None], NOTHING, rows.answers.tokens_C)
        text_SW = jnp.concatenate([others_SC, jnp.full((len(row_S), 1), NOTHING), text_SW], axis=1)
    drafts_SK = look_up(
        text_SW, own + rows.num_computed_R[row_S], own, *speculation.match_lengths, speculation.num_speculative_tokens
    )
    return rows._replace(drafts_RK=rows.drafts_RK.at[row_S].set(drafts_SK)), drafts_SK


def load_history(rows: RowTokens, packed: Any) -> RowTokens:
    """Write one upload of `pack_history`."""
    nth_C = jnp.arange(CHUNK, dtype=jnp.int32)
    place_C = jnp.where(nth_C < packed[2], packed[1] + nth_C, rows.history_RL.shape[1])
    history_RL = rows.history_RL.at[packed[0], place_C].set(packed[HEADER:], mode="drop")
    return rows._replace(history_RL=history_RL)


def remember(rows: RowTokens, packed: Any) -> RowTokens:
    """Add the answer of a row to those that are kept. `packed`: the row, and the tokens of its prompt."""
    row, num_prompt = packed
    tokens_C, cursor = rows.answers
    history_L = rows.history_RL[row]
    count = jnp.clip(rows.num_computed_R[row] + 1 - num_prompt, 0, len(tokens_C) - 1)
    nth_L = jnp.arange(len(history_L) + 1, dtype=jnp.int32)
    answer_L = jnp.where(nth_L < count, history_L[jnp.minimum(num_prompt + nth_L, len(history_L) - 1)], NOTHING)
    place_L = jnp.where(nth_L <= count, (cursor + nth_L) % len(tokens_C), len(tokens_C))
    answers = rows.answers._replace(
        tokens_C=tokens_C.at[place_L].set(answer_L, mode="drop"), cursor=(cursor + count + 1) % len(tokens_C)
    )
    return rows._replace(answers=answers)


def pack_history(row: int, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Uploads [HEADER + CHUNK], int32, of all that is known of a row."""
    for first in range(0, len(token_ids), CHUNK):
        chunk = token_ids[first : first + CHUNK]
        packed = np.zeros(HEADER + CHUNK, np.int32)
        packed[:HEADER] = row, first, len(chunk)
        packed[HEADER : HEADER + len(chunk)] = chunk
        yield packed
