"""Blocks out of a pool and into it, for transfer and offload: XLA's gather and scatter, one pass each.

A pool is a tuple of arrays with blocks on the first axis, whatever the rest means, so that any attention backend's
layout will do. Ids are int32; one outside of the pool is padding: it moves nothing, and reads nobody's memory.

Letters: B blocks in the pool, P ids.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.token_places import NOWHERE


def gather_blocks(pool: tuple[jax.Array, ...], id_P: jax.Array) -> tuple[jax.Array, ...]:
    """Blocks `id_P` of every array [B, ...] of the pool, as arrays [P, ...]; zeros for padding."""
    id_P = _in_pool(id_P, pool)
    return tuple(x_B.at[id_P].get(mode="fill", fill_value=0) for x_B in pool)


def scatter_blocks(
    pool: tuple[jax.Array, ...], id_P: jax.Array, blocks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The pool with its blocks `id_P` replaced by `blocks`, arrays [P, ...]. Ids are distinct. Donate the pool.

    Raises ValueError for blocks of another shape or type, which XLA would broadcast or cast.
    """
    wanted = [((*id_P.shape, *x_B.shape[1:]), x_B.dtype) for x_B in pool]
    given = [(x_P.shape, x_P.dtype) for x_P in blocks]
    if wanted != given:
        raise ValueError(f"blocks are {given}, but {id_P.shape[0]} blocks of this pool are {wanted}.")
    id_P = _in_pool(id_P, pool)
    return tuple(x_B.at[id_P].set(x_P, mode="drop") for x_B, x_P in zip(pool, blocks))


def _in_pool(id_P: jax.Array, pool: tuple[jax.Array, ...]) -> jax.Array:
    """Negative ids would count from the end."""
    return jnp.where((id_P >= 0) & (id_P < pool[0].shape[0]), id_P, NOWHERE)
