"""Which tokens the rows of an engine hold, as the device knows it: their newest tokens, their places, and their drafts.

A sampled token stays on the device in `RowTokens` and feeds the next step, which begins where the row is. So the host
need not know how many tokens a step gave to schedule the next one.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpaged.sampling.rows import unpack_rows
from jaxpaged.sampling.sampler import SampleOutput
from jaxpaged.worker.step.packed import StepLayout, StepParts
from pallas_kernels.token_places import token_places

NOTHING = -1
"""In place of a token: there is no draft, or a kept answer ends."""
NOTHING_ALLOWED, NOT_COMPUTED, CORRUPTED = -1, -2, -3
"""In place of a drawn token: what the request asks for leaves none; its row had ended; the logits are no numbers."""


class Answers(NamedTuple):
    """Answers to earlier requests, one after the other in a ring, each ended by NOTHING. The next goes to `cursor`."""

    tokens_C: Any
    cursor: Any


class RowTokens(NamedTuple):
    """What the device knows of each row; the null row comes last and means nothing.

    last_token_R: the newest token, if it was drawn here. num_computed_R: how many tokens are computed. A token that
    the host does not know is the newest one, and stands behind them. Where tokens are drafted, drafts_RK is what a
    drafter supposes to follow the newest one. Where drafts are looked for in a row, history_RL holds all its known
    tokens, and `answers` are kept where they are looked for in those.
    """

    last_token_R: Any
    num_computed_R: Any
    history_RL: Any = None
    drafts_RK: Any = None
    answers: Answers | None = None


def record_sample(rows: RowTokens, lines_SF: Any, output: SampleOutput) -> tuple[RowTokens, Any]:
    """Keep the drawn tokens for the next step, and mark those that mean nothing."""
    params = unpack_rows(lines_SF)
    rows = rows._replace(last_token_R=rows.last_token_R.at[params.row_S].set(output.tokens_S))
    if rows.history_RL is not None:
        history_RL = rows.history_RL.at[params.row_S, params.position_S].set(output.tokens_S, mode="drop")
        rows = rows._replace(history_RL=history_RL)
    reason_S = jnp.where(output.corrupted_S, CORRUPTED, NOTHING_ALLOWED)
    return rows, jnp.where(output.bad_S, reason_S, output.tokens_S)


def place_rows(parts: StepParts, rows: RowTokens) -> tuple[StepParts, RowTokens]:
    """Where the tokens of a step stand: behind those that are computed, unless the host says where -> (parts that
    say so of all rows, rows with these tokens computed)."""
    num_new_R = parts.query_start_loc_R1[1:] - parts.query_start_loc_R1[:-1]
    own_R = rows.num_computed_R[parts.rows_R] + num_new_R
    seq_lens_R = jnp.where(parts.seq_lens_R < 0, own_R, parts.seq_lens_R)
    num_computed_R = rows.num_computed_R.at[parts.rows_R].set(seq_lens_R)
    return parts._replace(seq_lens_R=seq_lens_R), rows._replace(num_computed_R=num_computed_R)


def locate_tokens(layout: StepLayout, parts: StepParts, rows: RowTokens) -> tuple[Any, Any]:
    """(tokens_T, positions_T): which token each place of the step holds and where it stands in its request."""
    seq_T, positions_T, is_padding_T = locate_places(layout, parts)
    row_T = parts.rows_R[seq_T]
    unknown_T = rows.last_token_R[row_T]
    if rows.drafts_RK is not None:
        nth_T = jnp.arange(layout.num_tokens, dtype=jnp.int32) - parts.query_start_loc_R1[seq_T]
        drafts_T = rows.drafts_RK[row_T, jnp.clip(nth_T - 1, 0, rows.drafts_RK.shape[1] - 1)]
        unknown_T = jnp.where(nth_T > 0, jnp.maximum(drafts_T, 0), unknown_T)
    tokens_T = jnp.where(parts.token_ids_T >= 0, parts.token_ids_T, unknown_T)
    return jnp.where(is_padding_T, 0, tokens_T), jnp.where(is_padding_T, 0, positions_T)


def locate_places(layout: StepLayout, parts: StepParts) -> tuple[Any, Any, Any]:
    """(seq_T, positions_T, is_padding_T): which of the step's requests each place belongs to, and where in it."""
    seq_T, positions_T, real_T = token_places(parts.query_start_loc_R1, parts.seq_lens_R, layout.num_tokens)
    return seq_T, positions_T, ~real_T
