"""What a user would call instead of our sampling masks: sorting, or the largest few with `jax.lax.top_k`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.timing import Chain, fed_back
from pallas_kernels.workloads import chain_of, operands_of

OP = "top_k_top_p"
FEW = 64  # at least as many as the cases' top_k


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`. Ours in XLA is one where a kernel is the best."""
    result: Yardsticks = {
        "sorting the vocabulary": lambda: chain_of(OP, case, "reference"),
        f"jax.lax.top_k of {FEW}, then their sum": lambda: largest_few(case),
    }
    return result if platform == "cpu" else result | {"ours, searching in XLA": lambda: chain_of(OP, case, "xla")}


def largest_few(case: Any) -> Chain | None:
    """Right only where every row has a top_k, and none above `FEW`."""
    if not all(0 < top_k <= FEW for top_k, _, _ in case.limits):
        return None
    return fed_back(least_of_few, *operands_of(OP, case, "reference"))


def least_of_few(logits_SV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array, min_p_S: jax.Array) -> jax.Array:
    """least_S, as `top_k_top_p.least_logits`, from the largest few of each row (f of them)."""
    few_Sf = lax.top_k(logits_SV, FEW)[0]
    stays_Sf = (jnp.arange(FEW) < top_k_S[:, None]) & (few_Sf >= few_Sf[:, :1] + jnp.log(min_p_S)[:, None])
    weight_Sf = jnp.where(stays_Sf, jnp.exp(few_Sf - few_Sf[:, :1]), 0.0)
    above_Sf = jnp.cumsum(weight_Sf, axis=1) - weight_Sf
    stays_Sf &= above_Sf < (top_p_S * jnp.sum(weight_Sf, axis=1))[:, None]
    return jnp.min(jnp.where(stays_Sf, few_Sf, jnp.inf), axis=1)
