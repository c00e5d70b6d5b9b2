"""The arithmetic that both kernels share: scores, softmax of a part of the context, merging of parts, in float32.

Powers are of 2: what multiplies scores includes log2(e), since that is what the hardware's exponential wants.
Letters: X query rows of one kv head, P slots, D lanes of an operand. Leading axes are batches.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.tpu.fetch import Item

LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """How products become exponents of 2."""

    scale: float
    soft_cap: float | None

    def exponents(self, product: jax.Array) -> jax.Array:
        if self.soft_cap is None:
            return product * (self.scale * LOG2_E)
        return self.soft_cap * LOG2_E * jnp.tanh(product * (self.scale / self.soft_cap))


def precision_of(dtype: Any) -> Any:
    """float32 operands keep all their bits; narrower ones go through the matrix unit as they are."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def query_key_products(q_nXD: jax.Array, k_nPD: jax.Array, scale_n1P: jax.Array | None) -> jax.Array:
    """[n, X, P] in float32. `scale_n1P`, whose last axis may be 1, is what the stored keys are multiples of."""
    product_nXP = jnp.einsum(
        "nxd,npd->nxp", q_nXD, k_nPD, preferred_element_type=jnp.float32, precision=precision_of(k_nPD.dtype)
    )
    return product_nXP if scale_n1P is None else product_nXP * scale_n1P


def weighted_values(weight_nXP: jax.Array, v_nPD: jax.Array, scale_n1P: jax.Array | None) -> jax.Array:
    """[n, X, D] in float32; `scale_n1P` likewise."""
    if scale_n1P is not None:
        weight_nXP = weight_nXP * scale_n1P
    return jnp.einsum(
        "nxp,npd->nxd",
        weight_nXP.astype(v_nPD.dtype),
        v_nPD,
        preferred_element_type=jnp.float32,
        precision=precision_of(v_nPD.dtype),
    )


def visible_slots(item: Item, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Which slots of an item some query of its segment may see; slots lie along `axis`."""
    position = item.position + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (position >= item.first) & (position < item.end)


def is_seen_whole(item: Item, slots: int) -> jax.Array:
    """Whether some query may see each slot of an item."""
    return (item.first <= item.position) & (item.end >= item.position + slots)


def clear_unseen(block_ref: Any, scales_ref: Any, item: Item) -> None:
    """Zeros in the slots that nobody may see: what lies there may be NaN, and zero times NaN is NaN."""
    slots = block_ref.shape[1]

    @pl.when(jnp.logical_not(is_seen_whole(item, slots)))
    def _():
        block = block_ref[...]
        block_ref[...] = jnp.where(visible_slots(item, block.shape, 1), block, jnp.zeros_like(block))
        if scales_ref is not None:
            scales = scales_ref[...]
            slot = lax.broadcasted_iota(jnp.int32, scales.shape, 0) * (slots // len(scales))
            position = item.position + slot + lax.broadcasted_iota(jnp.int32, scales.shape, 3)
            scales_ref[...] = jnp.where((position >= item.first) & (position < item.end), scales, 0)


def in_one_row(scales_bn2L: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Scales of keys and of values [n, 1, P], from those of the item's blocks b."""
    scales_n2P = jnp.concatenate([scales_bn2L[b][:, :, :block_size] for b in range(len(scales_bn2L))], axis=-1)
    return scales_n2P[:, :1], scales_n2P[:, 1:]
