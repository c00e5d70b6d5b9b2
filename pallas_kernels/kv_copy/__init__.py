"""Copying KV blocks: within a pool for copy-on-write, out of it and into it for transfer.

Validates, picks a backend, and says why others were refused. A pool is a tuple of arrays with blocks on the first
axis, whatever the rest means, so that any attention backend's layout will do. All ids are int32; a pair or an entry
with an id outside of the pool is padding: it moves nothing, and reads nobody's memory.

Backends differ in `copy_blocks` only. XLA must read all sources into a buffer before it writes the first target, so
a block crosses the memory bus four times or more (compiled for a v5e, by XLA's own count 7 times its size); `tpu` and
`gpu` copy directly, twice. `gather_blocks` and `scatter_blocks` are XLA's gather and scatter everywhere: besides a
pass that zeroes padding they move each byte once in and once out. No function copies a donated pool. Not measured on
accelerators.

This module knows nothing of requests or of who owns a block. Letters: B blocks in the pool, P pairs or entries.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing
from pallas_kernels.kv_copy import reference

_OP, _BACKENDS = "kv_copy", ("reference", "tpu", "gpu")


def backends(platform: str, pool: tuple[Any, ...] | None = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take `pool`, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if pool is None else [pool]))


def choose_backend(name: str, platform: str, pool: tuple[Any, ...] | None = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if pool is None else [pool]))


def copy_blocks(
    pool: tuple[jax.Array, ...], source_P: jax.Array, target_P: jax.Array, *, backend: str, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """The pool after block `source_P[p]` was copied to block `target_P[p]`, for every p. Donate the pool.

    No target may be another pair's target, or any pair's source. `interpret` is handed to Pallas.
    Raises ValueError for ids that are not one-dimensional int32 of equal length, and as `choose_backend` does.
    """
    _check_pool(pool)
    for name, id_P in (("source_P", source_P), ("target_P", target_P)):
        _check_ids(name, id_P)
    if source_P.shape != target_P.shape:
        raise ValueError(
            f"source_P has {source_P.shape[0]} ids and target_P {target_P.shape[0]}; pad the shorter with -1."
        )
    module = choosing.require(_OP, _BACKENDS, backend, pool)
    if not source_P.shape[0]:
        return pool
    return module.copy_blocks(pool, source_P, target_P, interpret=interpret)


def gather_blocks(pool: tuple[jax.Array, ...], id_P: jax.Array) -> tuple[jax.Array, ...]:
    """Blocks `id_P` of every array [B, ...] of the pool, as arrays [P, ...]; zeros for padding."""
    _check_pool(pool)
    _check_ids("id_P", id_P)
    return reference.gather_blocks(pool, id_P)


def scatter_blocks(
    pool: tuple[jax.Array, ...], id_P: jax.Array, blocks: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The pool with its blocks `id_P` replaced by `blocks`, arrays [P, ...]. Ids are distinct. Donate the pool."""
    _check_pool(pool)
    _check_ids("id_P", id_P)
    wanted = [((*id_P.shape, *x_B.shape[1:]), x_B.dtype) for x_B in pool]
    given = [(x_P.shape, x_P.dtype) for x_P in blocks]
    if wanted != given:
        raise ValueError(f"blocks are {given}, but {id_P.shape[0]} blocks of this pool are {wanted}.")
    return reference.scatter_blocks(pool, id_P, blocks)


def _check_pool(pool: tuple[jax.Array, ...]) -> None:
    sizes = [x_B.shape for x_B in pool]
    if not all(len(shape) >= 2 and shape[0] == sizes[0][0] for shape in sizes):
        raise ValueError(f"pool has arrays of shapes {sizes}; all need the same number of blocks on their first axis.")


def _check_ids(name: str, id_P: jax.Array) -> None:
    if id_P.ndim != 1 or id_P.dtype != jnp.int32:
        raise ValueError(f"{name} is {id_P.dtype}{list(id_P.shape)}; accepted is int32[P].")
