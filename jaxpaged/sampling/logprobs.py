"""Log probabilities: of the drawn token, of the most likely ones or of chosen ones, and ranks.

This module does not know how the token was drawn.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpaged.sampling.limits import BY_CANDIDATES, LimitsMethod, largest, row_sums
from jaxpaged.sampling.rows import RowParams
from jaxpaged.sampling.state import SamplingState
from jaxpaged.sampling_params.features import Feature


@flax.struct.dataclass
class LogprobOutput:
    """J = 1 + max_logprobs columns: the token itself first, then the most likely ones, best first.

    A row that asked for `logprob_token_ids` has those in their order instead; columns beyond them mean nothing.
    Ranks are 1 + the number of strictly larger values. Rows that asked for no log probabilities mean nothing.
    `processed_S2`, where both kinds are wanted: the token's processed log probability, and the log of the probability
    that limits left. `mask_SW`, where it is wanted: bit v % 32 of word v // 32 is set if token v might have been drawn,
    in rows with limits; 0 in others.
    """

    token_ids_SJ: jax.Array
    logprobs_SJ: jax.Array
    ranks_S: jax.Array
    processed_S2: jax.Array | None = None
    mask_SW: jax.Array | None = None


def row_logprobs(
    logits_SV: jax.Array,
    tokens_S: jax.Array,
    state: SamplingState,
    rows: RowParams,
    max_logprobs: int,
    logprobs_mode: str,
    method: LimitsMethod,
) -> LogprobOutput:
    """Log probabilities of the rows that asked for them; no work when none did."""
    num_rows = len(tokens_S)
    nothing = LogprobOutput(
        jnp.zeros((num_rows, 1 + max_logprobs), jnp.int32),
        jnp.zeros((num_rows, 1 + max_logprobs), jnp.float32),
        jnp.ones(num_rows, jnp.int32),
    )

    def wanted() -> LogprobOutput:
        top_ids_SK = largest(logits_SV, max_logprobs, method)[1]
        chosen_SK = state.logprob_ids_RK[rows.row_S][:, :max_logprobs]
        chosen_SK = jnp.pad(chosen_SK, ((0, 0), (0, max_logprobs - chosen_SK.shape[1])))
        ids_SK = jnp.where(rows.has(Feature.LOGPROB_IDS)[:, None], chosen_SK, top_ids_SK)
        return values_of(logits_SV, tokens_S, ids_SK, logprobs_mode)

    return jax.lax.cond(jnp.any(rows.has(Feature.LOGPROBS)), wanted, lambda: nothing)


def prompt_logprobs(
    logits_CV: jax.Array,
    target_ids_C: jax.Array,
    max_logprobs: int,
    logprobs_mode: str = "raw_logprobs",
    method: LimitsMethod = BY_CANDIDATES,
) -> LogprobOutput:
    """Log probabilities of prompt tokens: line i of the logits predicts `target_ids_C[i]`.

    A prompt is not sampled, so nothing is processed: of the mode only "logprobs" or "logits" matters.
    """
    top_ids_CK = largest(logits_CV, max_logprobs, method)[1]
    return values_of(logits_CV, target_ids_C, top_ids_CK, logprobs_mode)


def values_of(logits_SV: jax.Array, tokens_S: jax.Array, ids_SK: jax.Array, logprobs_mode: str) -> LogprobOutput:
    """Values of the tokens and of `ids_SK` beside them, normalised unless the mode says logits."""
    ids_SJ = jnp.concatenate([tokens_S[:, None], ids_SK], axis=1)
    values_SJ = jnp.take_along_axis(logits_SV, ids_SJ, axis=1)
    ranks_S = 1 + jnp.sum(logits_SV > values_SJ[:, :1], axis=1, dtype=jnp.int32)
    if logprobs_mode.endswith("logprobs"):
        values_SJ = values_SJ - log_normaliser(logits_SV)
    return LogprobOutput(ids_SJ, values_SJ, ranks_S)


def with_processed(
    output: LogprobOutput, scaled_SV: jax.Array, stays_SV: jax.Array, tokens_S: jax.Array, rows: RowParams
) -> LogprobOutput:
    """The same with processed log probabilities of the tokens; no work when no row asked for any. `scaled_SV`: logits
    after everything but limits, which leave the tokens of `stays_SV`."""

    def wanted() -> jax.Array:
        left_SV = jnp.where(stays_SV, scaled_SV, -jnp.inf)
        whole_S1, kept_S1 = log_normaliser(scaled_SV), log_normaliser(left_SV)
        own_S1 = jnp.take_along_axis(left_SV, tokens_S[:, None], axis=1)
        return jnp.concatenate([own_S1 - kept_S1, kept_S1 - whole_S1], axis=1)

    none_S2 = jnp.zeros((len(tokens_S), 2), jnp.float32)
    return output.replace(processed_S2=jax.lax.cond(jnp.any(rows.has(Feature.LOGPROBS)), wanted, lambda: none_S2))


def with_mask(output: LogprobOutput, left_SV: jax.Array, rows: RowParams) -> LogprobOutput:
    """The same with what limits left; no work when no row asked for it."""
    num_rows, num_tokens = left_SV.shape
    num_words = -(-num_tokens // 32)

    def wanted() -> jax.Array:
        asked_SV = jnp.pad(left_SV & rows.has(Feature.MASK)[:, None], ((0, 0), (0, 32 * num_words - num_tokens)))
        bits_SW32 = asked_SV.reshape(num_rows, num_words, 32).astype(jnp.uint32)
        return jnp.sum(bits_SW32 << jnp.arange(32, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)

    none_SW = jnp.zeros((num_rows, num_words), jnp.uint32)
    return output.replace(mask_SW=jax.lax.cond(jnp.any(rows.has(Feature.MASK)), wanted, lambda: none_SW))


def log_normaliser(logits_SV: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) of every row, [S, 1]. Rows that are no distribution give NaN or infinity."""
    top_S1 = jnp.max(logits_SV, axis=1, keepdims=True)
    return top_S1 + jnp.log(row_sums(jnp.exp(logits_SV - top_S1)))[:, None]
