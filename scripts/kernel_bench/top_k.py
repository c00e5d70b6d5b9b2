"""What a user would call instead of our search for the largest: `jax.lax.top_k`, or sorting."""

from typing import Any

import jax.numpy as jnp
from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.timing import fed_back
from pallas_kernels.workloads import chain_of, operands_of

OP = "top_k"


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`."""
    return {
        "jax.lax.top_k": lambda: chain_of(OP, case, "reference"),
        "sorting whole rows": lambda: fed_back(
            lambda x_SV: jnp.sort(x_SV, axis=1, descending=True)[:, : case.count], *operands_of(OP, case, "reference")
        ),
    }
