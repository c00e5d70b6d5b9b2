"""Sorting by group in XLA: the definition. Knows nothing of backends."""

from typing import Any

import jax
import jax.numpy as jnp


def cannot_take(group_P: Any, num_groups: Any) -> str | None:
    """It takes any operands."""
    return None


def sort_by_group(group_P: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """See `sort_by_group.sort_by_group`."""
    order_P = jnp.argsort(jnp.minimum(group_P, num_groups))
    return order_P, jnp.argsort(order_P)
