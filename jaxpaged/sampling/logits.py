"""What changes logits before the temperature: masks, biases, penalties, bad words.

A row's state is read only where its `Feature` bits say so: rows that never needed the full program leave the state
of earlier owners in place. Each function does no work when no row of the step wants it.
"""

import jax
import jax.numpy as jnp

from jaxpaged.sampling.rows import RowParams
from jaxpaged.sampling.state import BAD_WORD_LAST, SamplingState
from jaxpaged.sampling_features import Feature
from jaxpaged.sampling_limits import MAX_BAD_WORDS


def apply_bitmask(logits_SV: jax.Array, bits_SW: jax.Array) -> jax.Array:
    """-inf where bit v % 32 of word v // 32 is not set."""
    allowed_SW32 = (bits_SW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed_SV = allowed_SW32.reshape(len(bits_SW), -1)[:, : logits_SV.shape[1]]
    return jnp.where(allowed_SV == 1, logits_SV, -jnp.inf)


def apply_bias_and_masks(logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """Allowed tokens, then bias, then end and stop tokens of rows that are not min_tokens long yet."""
    logits_SV = if_any(rows.has(Feature.ALLOWED), keep_allowed, logits_SV, state, rows)
    logits_SV = if_any(rows.has(Feature.LOGIT_BIAS), add_bias, logits_SV, state, rows)
    too_short_S = rows.num_output_S < rows.min_tokens_S
    return if_any(too_short_S, mask_stop_ids, logits_SV, state, rows)


def keep_allowed(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    every = jnp.uint32(0xFFFFFFFF)
    return apply_bitmask(logits_SV, jnp.where(wanted_S[:, None], state.allowed_bits_RW[rows.row_S], every))


def add_bias(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    ids_SJ = jnp.where(wanted_S[:, None], state.bias_ids_RJ[rows.row_S], logits_SV.shape[1])
    return at_ids(logits_SV, ids_SJ).add(state.bias_values_RJ[rows.row_S], mode="drop")


def mask_stop_ids(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    ids_SJ = jnp.where(wanted_S[:, None], state.stop_ids_RJ[rows.row_S], logits_SV.shape[1])
    return at_ids(logits_SV, ids_SJ).set(-jnp.inf, mode="drop")


def apply_penalties(logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """Repetition, then frequency, then presence.

    Repetition divides positive and multiplies negative logits of every token in prompt or output; frequency
    subtracts per occurrence in the output, presence once.
    """
    return if_any(rows.has(Feature.PENALTIES), penalise, logits_SV, state, rows)


def penalise(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    seen_SV = jnp.where(wanted_S[:, None], state.seen_RV[rows.row_S], 0)
    output_count_SV = (seen_SV >> 1).astype(jnp.float32)
    factor_SV = jnp.where(seen_SV > 0, rows.repetition_penalty_S[:, None], 1.0)
    logits_SV = jnp.where(logits_SV > 0, logits_SV / factor_SV, logits_SV * factor_SV)
    logits_SV = logits_SV - rows.frequency_penalty_S[:, None] * output_count_SV
    return logits_SV - jnp.where(output_count_SV > 0, rows.presence_penalty_S[:, None], 0.0)


def apply_bad_words(logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """-inf for each token that would complete a bad word in the output."""
    return if_any(rows.has(Feature.BAD_WORDS), ban_last_tokens, logits_SV, state, rows)


def ban_last_tokens(
    wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams
) -> jax.Array:
    """A word's last token is banned when none of the tokens before it differs from the end of the output."""
    row_S = rows.row_S
    tokens_SJ, words_SJ, distance_SJ = (
        state.bad_tokens_RJ[row_S], state.bad_words_RJ[row_S], state.bad_distances_RJ[row_S],
    )  # fmt: skip
    recent_SH = state.recent_RH[row_S]
    before_SJ = jnp.take_along_axis(recent_SH, recent_SH.shape[1] - distance_SJ, axis=1, mode="clip")
    is_last_SJ = distance_SJ == BAD_WORD_LAST
    differs_SJ = ~is_last_SJ & (before_SJ != tokens_SJ)
    line_S1 = jnp.arange(len(row_S))[:, None]
    misses_SB = jnp.zeros((len(row_S), MAX_BAD_WORDS), jnp.int32).at[line_S1, words_SJ].add(differs_SJ)
    complete_SJ = jnp.take_along_axis(misses_SB, words_SJ, axis=1) == 0
    banned_SJ = wanted_S[:, None] & is_last_SJ & complete_SJ
    return at_ids(logits_SV, jnp.where(banned_SJ, tokens_SJ, logits_SV.shape[1])).set(-jnp.inf, mode="drop")


def at_ids(logits_SV: jax.Array, ids_SJ: jax.Array):
    """The entries `[s, ids_SJ[s, j]]`, to be updated."""
    return logits_SV.at[jnp.arange(len(ids_SJ))[:, None], ids_SJ]


def if_any(wanted_S: jax.Array, change, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """`change` the logits of the wanted rows; no work when there are none."""
    return jax.lax.cond(
        jnp.any(wanted_S),
        lambda logits_SV: change(wanted_S, logits_SV, state, rows),
        lambda logits_SV: logits_SV,
        logits_SV,
    )
