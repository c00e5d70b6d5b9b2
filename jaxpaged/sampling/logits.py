"""What changes logits before the temperature: masks, biases, penalties, bad words.

A row's state is read only where its `Feature` bits say so: rows that never needed the full program leave the state
of earlier owners in place. Each function does no work when no row of the step wants it.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxpaged.sampling.rows import RowParams
from jaxpaged.sampling.state import BAD_WORD_LAST, SamplingState
from jaxpaged.sampling_params.features import Feature
from jaxpaged.sampling_params.limits import MAX_BAD_WORDS


def apply_bitmask(logits_SV: jax.Array, bits_SW: jax.Array) -> jax.Array:
    """-inf where bit v % 32 of word v // 32 is not set.

    Row after row in memory: a TPU would rather spread bits over columns, and turn all logits for that, before and after
    it: 1.5 ms in place of 0.3 for 256 rows of 128k, by its compiler's count, and 0.7 in a step that spreads none.
    """
    by_rows = Layout((0, 1))
    logits_SV = with_layout_constraint(logits_SV, by_rows)
    allowed_SW32 = (bits_SW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed_SV = allowed_SW32.reshape(len(bits_SW), -1)[:, : logits_SV.shape[1]]
    return with_layout_constraint(jnp.where(allowed_SV == 1, logits_SV, -jnp.inf), by_rows)


def change_logits(logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """Allowed tokens, then biases, then penalties. End and stop tokens of rows that are not min_tokens long yet, and
    ends of bad words, are masked together with the biases, since no penalty brings back what is -inf.

    There is one condition around all of it, so that a step which wants nothing does not pay for each.
    """
    sparse_S = rows.has(Feature.LOGIT_BIAS | Feature.BAD_WORDS) | too_short(rows)

    def change(_: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
        logits_SV = if_any(rows.has(Feature.ALLOWED), keep_allowed, logits_SV, state, rows)
        logits_SV = if_any(sparse_S, change_few, logits_SV, state, rows)
        return if_any(rows.has(Feature.PENALTIES), penalise, logits_SV, state, rows)

    return if_any(sparse_S | rows.has(Feature.ALLOWED | Feature.PENALTIES), change, logits_SV, state, rows)


def too_short(rows: RowParams) -> jax.Array:
    """Rows that are not min_tokens long yet."""
    return rows.num_output_S < rows.min_tokens_S


def keep_allowed(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    bits_SW = jnp.where(wanted_S[:, None], state.allowed_bits_RW[rows.row_S], jnp.uint32(0xFFFFFFFF))
    return apply_bitmask(logits_SV, bits_SW)


def change_few(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """Biases, stop tokens and bad words: one sum at a few tokens of each row, -inf where a token is masked.

    On all logits in one line: a scatter into two axes makes a TPU turn them around, before it and after it, and in
    steps without any, too.
    """
    num_rows, num_tokens = logits_SV.shape
    ids_of = (
        (rows.has(Feature.LOGIT_BIAS), state.bias_ids_RJ[rows.row_S]),
        (too_short(rows), state.stop_ids_RJ[rows.row_S]),
        (rows.has(Feature.BAD_WORDS), banned_last_tokens(state, rows, num_tokens)),
    )
    ids_SJ = jnp.concatenate([jnp.where(has_S[:, None], ids_SJ, num_tokens) for has_S, ids_SJ in ids_of], axis=1)
    biases_SJ = state.bias_values_RJ[rows.row_S]
    num_masked = ids_SJ.shape[1] - biases_SJ.shape[1]
    values_SJ = jnp.pad(biases_SJ, ((0, 0), (0, num_masked)), constant_values=-jnp.inf)
    place_SJ = jnp.arange(num_rows)[:, None] * num_tokens + ids_SJ
    place_SJ = jnp.where(ids_SJ < num_tokens, place_SJ, num_rows * num_tokens)
    return logits_SV.reshape(-1).at[place_SJ].add(values_SJ, mode="drop").reshape(logits_SV.shape)


def penalise(wanted_S: jax.Array, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """Repetition, then frequency, then presence.

    Repetition divides positive and multiplies negative logits of every token in prompt or output; frequency
    subtracts per occurrence in the output, presence once.
    """
    seen_SV = jnp.where(wanted_S[:, None], state.seen_RV[rows.row_S], 0)
    output_count_SV = (seen_SV >> 1).astype(jnp.float32)
    factor_SV = jnp.where(seen_SV > 0, rows.repetition_penalty_S[:, None], 1.0)
    logits_SV = jnp.where(logits_SV > 0, logits_SV / factor_SV, logits_SV * factor_SV)
    logits_SV = logits_SV - rows.frequency_penalty_S[:, None] * output_count_SV
    return logits_SV - jnp.where(output_count_SV > 0, rows.presence_penalty_S[:, None], 0.0)


def banned_last_tokens(state: SamplingState, rows: RowParams, num_tokens: int) -> jax.Array:
    """Tokens that would complete a bad word in the output, each in its place, `num_tokens` in all others.

    A word's last token is banned when none of the tokens before it differs from the end of the output.
    """
    row_S = rows.row_S
    tokens_SJ, words_SJ, distance_SJ = (
        state.bad_tokens_RJ[row_S],
        state.bad_words_RJ[row_S],
        state.bad_distances_RJ[row_S],
    )
    recent_SH = state.recent_RH[row_S]
    before_SJ = jnp.take_along_axis(recent_SH, recent_SH.shape[1] - distance_SJ, axis=1, mode="clip")
    is_last_SJ = distance_SJ == BAD_WORD_LAST
    differs_SJ = ~is_last_SJ & (before_SJ != tokens_SJ)
    line_S1 = jnp.arange(len(row_S))[:, None]
    misses_SB = jnp.zeros((len(row_S), MAX_BAD_WORDS), jnp.int32).at[line_S1, words_SJ].add(differs_SJ)
    complete_SJ = jnp.take_along_axis(misses_SB, words_SJ, axis=1) == 0
    return jnp.where(is_last_SJ & complete_SJ, tokens_SJ, num_tokens)


def if_any(wanted_S: jax.Array, change, logits_SV: jax.Array, state: SamplingState, rows: RowParams) -> jax.Array:
    """`change` the logits of the wanted rows; no work when there are none."""
    return jax.lax.cond(
        jnp.any(wanted_S),
        lambda logits_SV: change(wanted_S, logits_SV, state, rows),
        lambda logits_SV: logits_SV,
        logits_SV,
    )
