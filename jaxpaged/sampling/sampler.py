"""The two sampling programs: plain (a temperature, and limits of how unlikely a token may be) and full (everything).

Both are pure and are traced with fixed shapes; rows that a step does not fill are greedy rows of the null row.
A row's token depends on its own logits, parameters, seed and position, never on the other rows: work that no row
wants is skipped for the whole step, but a row that gets it done for others does not use it.

Nothing here knows which program a step needs; `worker/programs/choose.py` does.

Letters: P parameters of custom logits processors.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpaged.config import RAW_AND_PROCESSED
from jaxpaged.sampling.custom import NO_PROCESSORS, CustomProcessors
from jaxpaged.sampling.limits import BY_CANDIDATES, Limits, LimitsMethod, least_by_kernel, sampling_limits
from jaxpaged.sampling.logits import apply_bitmask, change_logits
from jaxpaged.sampling.logprobs import LogprobOutput, row_logprobs, with_mask, with_processed
from jaxpaged.sampling.noise import exponential_noise, position_keys
from jaxpaged.sampling.rows import RowParams, unpack_rows
from jaxpaged.sampling.state import SamplingState, custom_params, given_tokens, record_tokens
from jaxpaged.sampling_params.features import Feature


@flax.struct.dataclass
class SampleOutput:
    """What a step drew. Where `bad_S` is set the logits were not a distribution (NaN, +inf, or all -inf): the token
    is 0 and means nothing. Where `corrupted_S` is set too, they were none as they came from the model. `logprobs` comes
    from the full program only.
    """

    tokens_S: jax.Array
    bad_S: jax.Array
    corrupted_S: jax.Array
    logprobs: LogprobOutput | None = None


def sample_plain(logits_SV: jax.Array, packed_SF: jax.Array, method: LimitsMethod = BY_CANDIDATES) -> SampleOutput:
    """One token per row, from float32 logits whose padding columns are -inf; `packed_SF` from `SamplingRows.pack`."""
    rows = unpack_rows(packed_SF)
    bad_S = not_a_distribution(logits_SV, method)
    tokens_S, _ = draw(logits_SV, rows, method)
    return SampleOutput(jnp.where(bad_S, 0, tokens_S), bad_S, bad_S)


def sample_full(
    logits_SV: jax.Array,
    state: SamplingState,
    packed_SF: jax.Array,
    *,
    logprobs_mode: str,
    max_logprobs: int,
    mask_bits_SW: jax.Array | None = None,
    custom: CustomProcessors = NO_PROCESSORS,
    method: LimitsMethod = BY_CANDIDATES,
    tells_masks: bool = False,
) -> tuple[SamplingState, SampleOutput]:
    """As `sample_plain`, with everything that a request may ask for, in vLLM's order.

    Grammar mask (bit v % 32 of word v // 32 allows token v), allowed tokens, bias, min_tokens; penalties; bad words;
    custom processors; temperature; limits. Rows whose outputs are given get the next token of theirs in place of the
    drawn one. The state is for donation: counts and recent tokens of
    rows that need them gain the drawn token.
    """
    rows = unpack_rows(packed_SF)
    corrupted_S = not_a_distribution(logits_SV, method)
    if mask_bits_SW is not None:
        logits_SV = apply_bitmask(logits_SV, mask_bits_SW)
    bad_S = corrupted_S | not_a_distribution(logits_SV, method)
    shown_SV = None
    if not logprobs_mode.startswith("processed"):
        shown_SV = kept_for_logprobs(logits_SV, rows)
        # What changes logits may then do so in place: nothing else reads these any more.
        logits_SV, shown_SV, bad_S = jax.lax.optimization_barrier((logits_SV, shown_SV, bad_S))
    processed_SV = change_logits(logits_SV, state, rows)
    processed_SV = custom.apply(processed_SV, custom_params(state, rows), rows)
    bad_S |= not_a_distribution(processed_SV, method)

    tokens_S, least_S = draw(processed_SV, rows, method)
    tokens_S = given_tokens(state, rows, jnp.where(bad_S, 0, tokens_S))
    if shown_SV is None or logprobs_mode == RAW_AND_PROCESSED or tells_masks:
        scaled_SV = by_temperature(processed_SV, rows)
        limited_SV = processed_SV if method.kernel else scaled_SV
        stays_SV = limited_SV >= least_S[:, None]
    if shown_SV is None:
        shown_SV = jnp.where(stays_SV, scaled_SV, -jnp.inf)
    logprobs = row_logprobs(shown_SV, tokens_S, state, rows, max_logprobs, logprobs_mode, method)
    if logprobs_mode == RAW_AND_PROCESSED:
        logprobs = with_processed(logprobs, scaled_SV, stays_SV, tokens_S, rows)
    if tells_masks:
        logprobs = with_mask(logprobs, stays_SV & (processed_SV > -jnp.inf), rows)
    return record_tokens(state, rows, tokens_S), SampleOutput(tokens_S, bad_S, corrupted_S, logprobs)


def kept_for_logprobs(logits_SV: jax.Array, rows: RowParams) -> jax.Array:
    """A copy of the logits, or anything where no row asks for log probabilities."""
    return jax.lax.cond(
        jnp.any(rows.has(Feature.LOGPROBS)),
        lambda logits_SV: logits_SV,
        lambda logits_SV: jax.lax.empty(logits_SV.shape, logits_SV.dtype),
        logits_SV,
    )


def draw(logits_SV: jax.Array, rows: RowParams, method: LimitsMethod) -> tuple[jax.Array, jax.Array]:
    """A token per row, and the least logit that the row could have drawn; -inf without limits. It is one after
    temperature, or, where a kernel finds the limits, before.

    Rows limited to their candidates need noise for those only. Where a kernel finds the limits there are none, and
    every row that draws gets noise for all tokens.
    """
    greedy_S, top_S = first_largest(logits_SV, method)
    key_S2 = position_keys(rows.seed_S2, rows.position_S)
    no_limit_S, nothing_S = jnp.full(greedy_S.shape, -jnp.inf, jnp.float32), jnp.zeros(greedy_S.shape, bool)

    def find_limits() -> tuple[jax.Array, jax.Array, jax.Array]:
        if method.kernel:
            return greedy_S, least_by_kernel(logits_SV, rows, method), nothing_S
        limits = sampling_limits(by_temperature(logits_SV, rows), rows, method)
        least_S = jnp.where(rows.limited_S, limits.least_S, -jnp.inf)
        return draw_narrow(limits, key_S2), least_S, limits.narrow_S & rows.limited_S

    narrow_tokens_S, least_S, narrow_S = jax.lax.cond(
        jnp.any(rows.limited_S), find_limits, lambda: (greedy_S, no_limit_S, nothing_S)
    )
    tokens_S = jax.lax.cond(
        jnp.any(rows.random_S & ~narrow_S),
        lambda: jnp.where(narrow_S, narrow_tokens_S, draw_wide(logits_SV, top_S, rows, least_S, key_S2, method)),
        lambda: narrow_tokens_S,
    )
    return jnp.where(rows.random_S, tokens_S, greedy_S), least_S


def draw_narrow(limits: Limits, key_S2: jax.Array) -> jax.Array:
    """The winner among the candidates."""
    race_SC = exponential_noise(key_S2, limits.candidate_ids_SC) / weights(limits.candidates_SC, limits.least_S)
    return lowest_id(race_SC == jnp.min(race_SC, axis=1, keepdims=True), limits.candidate_ids_SC)


def draw_wide(
    logits_SV: jax.Array, top_S: jax.Array, rows: RowParams, least_S: jax.Array, key_S2: jax.Array, method: LimitsMethod
) -> jax.Array:
    """The winner among all tokens. `top_S`: the largest logits."""
    scaled_SV = by_temperature(logits_SV, rows)
    token_ids_SV = jax.lax.broadcasted_iota(jnp.int32, logits_SV.shape, 1)
    noise_SV = exponential_noise(key_S2, token_ids_SV)
    if method.reads_once:
        stays_SV, top_S1 = logits_SV >= least_S[:, None], by_temperature(top_S[:, None], rows)
        race_SV = noise_SV / jnp.where(stays_SV, jnp.exp(scaled_SV - top_S1), 0.0)
        return first_least(race_SV, token_ids_SV)[0]
    race_SV = noise_SV / weights(scaled_SV, least_S, logits_SV if method.kernel else None)
    return lowest_id(race_SV == jnp.min(race_SV, axis=1, keepdims=True), token_ids_SV)


def weights(logits_SC: jax.Array, least_S: jax.Array, limited_SC: jax.Array | None = None) -> jax.Array:
    """Probabilities relative to the largest; 0 below the limit, which is one of `limited_SC` if they are given."""
    top_S1 = jnp.max(logits_SC, axis=1, keepdims=True)
    stays_SC = (logits_SC if limited_SC is None else limited_SC) >= least_S[:, None]
    return jnp.where(stays_SC, jnp.exp(logits_SC - top_S1), 0.0)


def by_temperature(logits_SV: jax.Array, rows: RowParams) -> jax.Array:
    return logits_SV / jnp.where(rows.random_S, rows.temperature_S, 1.0)[:, None]


def first_argmax(logits_SV: jax.Array) -> jax.Array:
    """The lowest token id of the largest logit; -1 in a row with a NaN, which is neither the largest nor below it.

    XLA:CPU's maximum loses a NaN from some hundreds of columns on, so it is looked for in the second pass, where that
    costs nothing.
    """
    token_ids_SV = jax.lax.broadcasted_iota(jnp.int32, logits_SV.shape, 1)
    top_S1 = jnp.max(logits_SV, axis=1, keepdims=True)
    return lowest_id(~(logits_SV < top_S1), jnp.where(logits_SV == top_S1, token_ids_SV, -1))


def lowest_id(chosen_SC: jax.Array, token_ids_SC: jax.Array) -> jax.Array:
    """The lowest token id that is chosen. With a maximum before it, this is an argmax in two vectorised passes: on a
    CPU twice as fast as `jnp.argmax`, which does not vectorise, and 20 times where its operand has a `where`.
    """
    return jnp.min(jnp.where(chosen_SC, token_ids_SC, jnp.iinfo(jnp.int32).max), axis=1)


def first_largest(logits_SV: jax.Array, method: LimitsMethod) -> tuple[jax.Array, jax.Array]:
    """(`first_argmax`, the largest logits); of rows with a NaN the second is anything."""
    if not method.reads_once:
        return first_argmax(logits_SV), jnp.max(logits_SV, axis=1)
    token_ids_SV = jax.lax.broadcasted_iota(jnp.int32, logits_SV.shape, 1)
    is_nan_SV = jnp.isnan(logits_SV)
    first_S, least_S = first_least(jnp.where(is_nan_SV, -jnp.inf, -logits_SV), jnp.where(is_nan_SV, -1, token_ids_SV))
    return first_S, -least_S


def first_least(x_SV: jax.Array, token_ids_SV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(The lowest token id of the least number, that number) of each row, in one pass."""

    def less(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x, i), (y, j) = one, other
        is_first = (x < y) | ((x == y) & (i < j))
        return jnp.where(is_first, x, y), jnp.where(is_first, i, j)

    nothing = jnp.float32(jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    least_S, first_S = jax.lax.reduce((x_SV, token_ids_SV), nothing, less, (1,))
    return first_S, least_S


def not_a_distribution(logits_SV: jax.Array, method: LimitsMethod = BY_CANDIDATES) -> jax.Array:
    """Rows with a NaN, with +inf, or with nothing above -inf."""
    first_S, top_S = first_largest(logits_SV, method)
    return (first_S < 0) | ~jnp.isfinite(top_S)
