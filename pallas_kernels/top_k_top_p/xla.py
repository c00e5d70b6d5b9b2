"""The least logit that may be drawn, by two threshold searches in XLA. Runs everywhere, and is the CPU backend.

A search is skipped when no row wants it. The three weights of a pass come from one reduction with three operands:
XLA:CPU vectorises that one, while a reduction of one operand stays scalar. One core, a row of 262,144 logits: 1.6 ms
where 32 passes with one threshold took 7 (`jaxpaged/sampling` uses the search by itself).

Knows nothing of drawing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.top_k_top_p import search


def cannot_take(logits_SV: Any) -> str | None:
    """It takes any logits."""
    return None


def least_logits(
    logits_SV: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    temperature_S: jax.Array,
    *,
    interpret: Any,
) -> jax.Array:
    """See `top_k_top_p.least_logits`; there is nothing to interpret."""
    cuts_S = (top_k_S > 0) & (top_k_S < logits_SV.shape[1])
    ones_SV = jnp.ones((1, 1), jnp.float32)
    top_S = jnp.max(logits_SV, axis=1)
    kth_S = threshold_if(cuts_S, logits_SV, ones_SV, top_k_S.astype(jnp.float32))
    floor_S = jnp.maximum(kth_S, top_S + jnp.log(min_p_S) * temperature_S)
    weights_SV = jnp.exp((logits_SV - top_S[:, None]) / temperature_S[:, None])
    total_S = jnp.sum(jnp.where(logits_SV >= floor_S[:, None], weights_SV, 0.0), axis=1)
    nucleus_S = threshold_if(top_p_S < 1.0, logits_SV, weights_SV, top_p_S * total_S)
    return jnp.maximum(floor_S, nucleus_S)


def threshold_if(wanted_S: jax.Array, logits_SV: jax.Array, weights_SV: jax.Array, need_S: jax.Array) -> jax.Array:
    """`largest_threshold` in the rows that want one, -inf in the others; no work when none does."""
    no_limit_S = jnp.full(need_S.shape, -jnp.inf)
    found_S = lax.cond(jnp.any(wanted_S), largest_threshold, lambda *_: no_limit_S, logits_SV, weights_SV, need_S)
    return jnp.where(wanted_S, found_S, -jnp.inf)


def largest_threshold(logits_SV: jax.Array, weights_SV: jax.Array, need_S: jax.Array) -> jax.Array:
    """The largest t for which the tokens with logit >= t weigh at least `need`; -inf if all together do not.

    `weights_SV` may be [1, 1] where every token weighs the same.
    """

    def weigh(thresholds_S: Sequence[jax.Array]) -> Sequence[jax.Array]:
        above = tuple(jnp.where(logits_SV >= t_S[:, None], weights_SV, 0.0) for t_S in thresholds_S)
        nothing = (jnp.float32(0.0),) * len(above)
        return lax.reduce(above, nothing, lambda x, y: tuple(a + b for a, b in zip(x, y)), (1,))

    return search.largest_threshold(weigh, need_S)
