"""How the cached keys and values of a layer lie in memory. Every backend has one layout; nobody else knows it.

Seen from outside a cache is keys and values `[blocks, slots, kv heads, head dim]`. This module knows nothing of
attention; the layout of the TPU's kernels is in `tpu/lanes.py`.
"""

from typing import Protocol

import jax
import jax.numpy as jnp


class KVLayout(Protocol):
    """Arrays of equal shape, blocks on the first axis of each, kv heads and slots on `heads_axis` and `slots_axis`;
    `scale_slots_axis`: slots of the arrays of scales, which may have some more behind those that there are."""

    heads_axis: int
    slots_axis: int
    scale_slots_axis: int
    num_arrays: int

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of each array."""

    def scale_shapes(self, num_blocks: int, block_size: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays with a float32 scale for each token and head; kv heads on `heads_axis` too."""

    def pack_scales(self, k_BSK: jax.Array, v_BSK: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays that hold these scales."""

    def unpack_scales(self, arrays: tuple[jax.Array, ...], block_size: int) -> tuple[jax.Array, jax.Array]:
        """(k_BSK, v_BSK) of some blocks or all."""

    def stored_dim(self, head_dim: int) -> int:
        """Numbers that lie in memory for each key, and as many for each value."""

    def pack(self, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays that hold these keys and values."""

    def unpack(self, arrays: tuple[jax.Array, ...], head_dim: int) -> tuple[jax.Array, jax.Array]:
        """(k_BSKH, v_BSKH) of some blocks or all."""


class SplitLayout:
    """Keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous."""

    heads_axis = 1
    slots_axis = 2
    scale_slots_axis = 2
    num_arrays = 2

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def scale_shapes(self, num_blocks: int, block_size: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        return ((num_blocks, num_kv_heads, block_size),) * 2

    def pack_scales(self, k_BSK: jax.Array, v_BSK: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.swapaxes(k_BSK, 1, 2), jnp.swapaxes(v_BSK, 1, 2)

    def unpack_scales(self, arrays: tuple[jax.Array, ...], block_size: int) -> tuple[jax.Array, jax.Array]:
        k_BKS, v_BKS = arrays
        return jnp.swapaxes(k_BKS, 1, 2), jnp.swapaxes(v_BKS, 1, 2)

    def stored_dim(self, head_dim: int) -> int:
        return head_dim

    def pack(self, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.swapaxes(k_BSKH, 1, 2), jnp.swapaxes(v_BSKH, 1, 2)

    def unpack(self, arrays: tuple[jax.Array, ...], head_dim: int) -> tuple[jax.Array, jax.Array]:
        k_BKSH, v_BKSH = arrays
        return jnp.swapaxes(k_BKSH, 1, 2), jnp.swapaxes(v_BKSH, 1, 2)
