"""How keys and values of one token lie in the 128 lanes of a TPU register. Knows nothing of kernels.

A slot of the cache holds the key and the value of one token and head side by side: `[blocks, kv heads, slots, lanes]`.
Slots lie along sublanes, which come in tiles: 8 for 32-bit types, 16 for 16-bit and 32 for 8-bit ones.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_LANES = 128
HALF = NUM_LANES // 2


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The lanes of one slot, for a head dim. Up to 64, key and value share one tile of 128 lanes."""

    head_dim: int

    @functools.cached_property
    def padded(self) -> int:
        """Lanes from a slot's first key number to its first value number."""
        return HALF if self.head_dim <= HALF else math.ceil(self.head_dim / NUM_LANES) * NUM_LANES

    @property
    def slot(self) -> int:
        """Lanes of a slot: key and value."""
        return 2 * self.padded

    @property
    def operand(self) -> int:
        """Lanes of the operands of both products: whole tiles, so that none is ever shifted.

        Where key and value share a tile, queries are zero in the value's lanes, and outputs have something
        meaningless in the key's.
        """
        return max(self.padded, NUM_LANES)

    @property
    def keys(self) -> slice:
        return slice(0, self.operand)

    @property
    def values(self) -> slice:
        return slice(self.slot - self.operand, self.slot)

    @property
    def outputs(self) -> slice:
        """Where the head's numbers are in an output of `operand` lanes."""
        start = self.operand - self.padded
        return slice(start, start + self.head_dim)


def over_lanes(x: jax.Array) -> jax.Array:
    """[..., lanes], all lanes alike."""
    return jnp.broadcast_to(x[..., None], (*x.shape, NUM_LANES))


class LanesLayout:
    """Keys and values side by side, `[blocks, kv heads, slots, lanes]`: every block is contiguous, and each head in it.

    Slots lie along sublanes and head dims along lanes, as the matrix unit wants them. Lanes beyond the head dim are
    zero: head dims up to 64 take 128 lanes for both, others a multiple of 128 for each.

    Scales of tokens, `[blocks, kv heads, 2, lanes]`, are whole tiles of lanes too, though smaller blocks waste some:
    the compiler would keep narrower ones in another order, and transpose all of them in every step.
    """

    heads_axis = 1
    slots_axis = 2
    scale_slots_axis = 3
    num_arrays = 1

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, Lanes(head_dim).slot)

    def scale_shapes(self, num_blocks: int, block_size: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
        return ((num_blocks, num_kv_heads, 2, round_up(block_size, NUM_LANES)),)

    def pack_scales(self, k_BSK: jax.Array, v_BSK: jax.Array) -> tuple[jax.Array, ...]:
        scales_BK2S = jnp.stack([jnp.swapaxes(x, 1, 2) for x in (k_BSK, v_BSK)], axis=2)
        return (pad_lanes(scales_BK2S, round_up(scales_BK2S.shape[-1], NUM_LANES)),)

    def unpack_scales(self, arrays: tuple[jax.Array, ...], block_size: int) -> tuple[jax.Array, jax.Array]:
        k_BSK, v_BSK = (jnp.swapaxes(arrays[0][:, :, which, :block_size], 1, 2) for which in range(2))
        return k_BSK, v_BSK

    def stored_dim(self, head_dim: int) -> int:
        return Lanes(head_dim).padded

    def pack(self, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.swapaxes(join(k_BSKH, v_BSKH), 1, 2),)

    def unpack(self, arrays: tuple[jax.Array, ...], head_dim: int) -> tuple[jax.Array, jax.Array]:
        kv_BSKW, padded = jnp.swapaxes(arrays[0], 1, 2), Lanes(head_dim).padded
        return kv_BSKW[..., :head_dim], kv_BSKW[..., padded : padded + head_dim]


def join(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values [..., H] as slots [..., W]."""
    lanes = Lanes(k.shape[-1])
    return jnp.concatenate([pad_lanes(x, lanes.padded) for x in (k, v)], axis=-1)


def pad_lanes(x: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])


def sublane_tile(dtype: Any) -> int:
    """Slots in one tile of the cache: the grain of what can be read and written."""
    return 32 // np.dtype(dtype).itemsize


def round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
