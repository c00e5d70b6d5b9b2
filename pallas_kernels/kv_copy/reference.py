"""Copying KV blocks in plain jax.numpy: the definition, and what XLA does well on every platform.

Knows nothing of backends; arguments have been checked.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.token_places import NOWHERE


def cannot_take(pool: tuple[Any, ...]) -> str | None:
    """It takes any pool."""
    return None


def copy_blocks(
    pool: tuple[jax.Array, ...], source_P: jax.Array, target_P: jax.Array, *, interpret: Any
) -> tuple[jax.Array, ...]:
    """See `kv_copy.copy_blocks`; there is nothing to interpret."""
    num_blocks = pool[0].shape[0]
    target_P = jnp.where(in_pool(source_P, num_blocks), target_P, NOWHERE)
    return scatter_blocks(pool, target_P, gather_blocks(pool, source_P))


def gather_blocks(pool: tuple[jax.Array, ...], id_P: jax.Array) -> tuple[jax.Array, ...]:
    """See `kv_copy.gather_blocks`."""
    id_P = jnp.where(in_pool(id_P, pool[0].shape[0]), id_P, NOWHERE)
    return tuple(x_B.at[id_P].get(mode="fill", fill_value=0) for x_B in pool)


def scatter_blocks(
    pool: tuple[jax.Array, ...], id_P: jax.Array, blocks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """See `kv_copy.scatter_blocks`."""
    id_P = jnp.where(in_pool(id_P, pool[0].shape[0]), id_P, NOWHERE)
    return tuple(x_B.at[id_P].set(x_P, mode="drop") for x_B, x_P in zip(pool, blocks))


def in_pool(id_P: jax.Array, num_blocks: int) -> jax.Array:
    return (id_P >= 0) & (id_P < num_blocks)
