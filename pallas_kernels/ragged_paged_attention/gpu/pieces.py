"""Loads and stores of vectors whose length is no power of two, which Triton's are: 80 = 64 + 16.

Arrays are indexed element by element, so that Pallas's interpreter runs the same code. This module knows nothing of
attention.

Letters beside the package's: X rows of a tile, P a piece of H.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu.statics import pieces


def columns(head_dim: int) -> list[tuple[jax.Array, jax.Array | None]]:
    """(index [1, P], whether it is within the head [1, P] or None if all are) of every piece."""
    result = []
    for offset, size in pieces(head_dim):
        column_1P = offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        result.append((column_1P, column_1P < head_dim if offset + size > head_dim else None))
    return result


def both(mask: jax.Array | None, other: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """The conjunction of two masks that broadcast to `shape`; None is true everywhere."""
    masks = [jnp.broadcast_to(x, shape) for x in (mask, other) if x is not None]
    return masks[0] & masks[1] if len(masks) == 2 else (masks or [None])[0]


def load_pieces(ref: Any, index: tuple, mask: jax.Array | None, head_dim: int) -> list[jax.Array]:
    """ref[*index, :] as pieces [X, P], `index` and `mask` being scalars or [X, 1]; zero where masked."""
    result = []
    for column_1P, inside_1P in columns(head_dim):
        num_rows = next(x.shape[0] for x in index if getattr(x, "ndim", 0))
        mask_XP = both(mask, inside_1P, (num_rows, column_1P.shape[1]))
        other = None if mask_XP is None else jnp.zeros((), ref.dtype)
        result.append(plgpu.load(ref.at[(*index, column_1P)], mask=mask_XP, other=other))
    return result


def store_pieces(ref: Any, index: tuple, values: list[jax.Array], mask: jax.Array, head_dim: int) -> None:
    """The reverse of `load_pieces`, in the type of `ref`."""
    for (column_1P, inside_1P), value_XP in zip(columns(head_dim), values):
        mask_XP = both(mask, inside_1P, value_XP.shape)
        plgpu.store(ref.at[(*index, column_1P)], value_XP.astype(ref.dtype), mask=mask_XP)
