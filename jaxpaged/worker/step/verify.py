"""The function of a program that draws the tokens of a step with drafts in it.

Nothing is drawn yet where a row drafted, but the hidden states are there. So a token is drawn behind the first of a
row's tokens, as in any step, with the noise of its position; if the row's next token, its first draft, is what was
drawn, then the hidden state behind that is right too, and a token is drawn there, and so on. A row ends with the token
that was drawn in place of a wrong draft, or behind the last. So each token is the one that single steps would have
drawn, with all that a request can ask for, and the row is left as these leave it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.sampling.rows import NUM_COLUMNS, ROW, lines_of_active
from jaxpaged.worker.step.functions import StepFunctions
from jaxpaged.worker.step.row_tokens import NOT_COMPUTED, NOTHING, RowTokens

NUM_VERIFY_COLUMNS = NUM_COLUMNS + 2
"""Behind the columns of `SamplingRows.pack`: the place in the step of a row's first token that draws, and how many."""


class Verification(NamedTuple):
    """What the loop carries from token to token; I is the number of the token in its row. `logprobs` is None in the
    plain program."""

    nth: Any
    active_S: Any
    rows: RowTokens
    sampling: Any
    tokens_IS: Any
    logprobs: Any


def verify_lines(lines_SF: np.ndarray, first_places: np.ndarray, num_tokens: list[int]) -> np.ndarray:
    """What a verification takes: the bits of the sampling lines, and behind them which tokens of the step they are."""
    lines_SC = np.zeros((len(lines_SF), NUM_VERIFY_COLUMNS), np.int32)
    lines_SC[:, :NUM_COLUMNS] = lines_SF.view(np.int32)
    lines_SC[: len(num_tokens), NUM_COLUMNS] = first_places
    lines_SC[: len(num_tokens), NUM_COLUMNS + 1] = num_tokens
    return lines_SC


def verify(
    functions: StepFunctions,
    head: Any,
    hidden_LD: Any,
    rows: RowTokens,
    sampling: Any,
    packed_SC: Any,
    masks_ISW: Any = None,
) -> tuple[Any, ...]:
    """All tokens of a step -> (rows, tokens_IS, sampling state, log probabilities, num_drafts_S: how many drafts each
    row had).

    Each token has a mask of its own, which follows from the drafts before it.
    """
    lines_SF, first_S, count_S = packed_SC[:, :NUM_COLUMNS], packed_SC[:, NUM_COLUMNS], packed_SC[:, NUM_COLUMNS + 1]
    row_S, num_most = lines_SF[:, ROW], rows.drafts_RK.shape[1] + 1
    nth_I = jnp.arange(num_most, dtype=jnp.int32)
    place_IS = first_S + jnp.minimum(nth_I[:, None], jnp.maximum(count_S - 1, 0))
    logits_SV = functions.logits(head, jax.tree.map(lambda lines: lines[place_IS.reshape(-1)], hidden_LD))
    logits_ISV = logits_SV.reshape(num_most, len(row_S), -1)
    drafts_SI = jnp.pad(rows.drafts_RK[row_S], ((0, 0), (0, 1)), constant_values=NOTHING)
    drafts_SI = jnp.where(nth_I + 1 < count_S[:, None], drafts_SI, NOTHING)
    num_computed_R = rows.num_computed_R.at[row_S].add(-jnp.maximum(count_S - 1, 0))

    def draw_next(carry: Verification) -> Verification:
        nth, active_S = carry.nth, carry.active_S
        lines = lines_of_active(lines_SF, active_S, functions.max_num_seqs)
        masks = None if masks_ISW is None else masks_ISW[nth]
        rows, tokens_S, sampling, new = functions.draw(logits_ISV[nth], carry.rows, carry.sampling, lines, masks)
        agrees_S = active_S & (drafts_SI[:, nth] != NOTHING) & (tokens_S == drafts_SI[:, nth])
        return Verification(
            nth=nth + 1,
            active_S=agrees_S,
            rows=rows._replace(num_computed_R=rows.num_computed_R.at[row_S].add(agrees_S.astype(jnp.int32))),
            sampling=sampling,
            tokens_IS=carry.tokens_IS.at[nth].set(jnp.where(active_S, tokens_S, NOT_COMPUTED)),
            logprobs=jax.tree.map(lambda kept, lines: kept.at[nth].set(lines), carry.logprobs, new),
        )

    begin = Verification(
        nth=jnp.int32(0),
        active_S=count_S > 0,
        rows=rows._replace(num_computed_R=num_computed_R),
        sampling=sampling,
        tokens_IS=jnp.full((num_most, len(row_S)), NOT_COMPUTED, jnp.int32),
        logprobs=functions.no_logprobs(sampling, num_most, len(row_S)),
    )
    end = jax.lax.while_loop(lambda carry: jnp.any(carry.active_S), draw_next, begin)
    return end.rows, end.tokens_IS, end.sampling, end.logprobs, jnp.sum(drafts_SI != NOTHING, axis=1)
