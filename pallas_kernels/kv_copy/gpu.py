"""Copy-on-write on an NVIDIA GPU (Pallas, Triton lowering): each program moves a piece of one block.

Layout: any, with blocks on the first axis; a block is contiguous and seen as a row of integers of the same width.

Grid: (pairs, pieces of a block), one launch per array of the pool.

Skipping: a pair with an id outside of the pool loads and stores nothing.

Requires: targets are distinct and no pair's source, since programs run in any order. Elements of whole bytes.

Padding: ids outside of the pool; the last piece of a block is masked.

Numerics: bytes are moved, not numbers: NaN payloads survive.

Cost: reads and writes each block once, half of what XLA's gather and scatter move. Not measured.

Knows nothing of what a block holds.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.shapes import ceil_div

PIECE_BYTES = 4096  # 32 bytes for each of 128 threads: two wide loads in flight


def cannot_take(pool: tuple[Any, ...]) -> str | None:
    """Elements need addresses of their own."""
    packed = sorted({str(x_B.dtype) for x_B in pool if _bits(x_B.dtype) < 8})
    return f"pool has elements of {', '.join(packed)}; accepted are elements of 8 bits or more" if packed else None


def copy_blocks(
    pool: tuple[jax.Array, ...], source_P: jax.Array, target_P: jax.Array, *, interpret: Any
) -> tuple[jax.Array, ...]:
    """See `kv_copy.copy_blocks`."""
    return tuple(_copy(x_B, source_P, target_P, interpret=interpret) for x_B in pool)


def _copy(x_B: jax.Array, source_P: jax.Array, target_P: jax.Array, *, interpret: Any) -> jax.Array:
    num_blocks, block_elements = x_B.shape[0], math.prod(x_B.shape[1:])
    integer = jnp.dtype(f"uint{_bits(x_B.dtype)}")
    x_BE = lax.bitcast_convert_type(x_B, integer).reshape(num_blocks, block_elements)
    piece = min(PIECE_BYTES // integer.itemsize, pl.next_power_of_2(block_elements))
    y_BE = pl.pallas_call(
        functools.partial(_kernel, piece=piece),
        out_shape=jax.ShapeDtypeStruct(x_BE.shape, x_BE.dtype),
        grid=(source_P.shape[0], ceil_div(block_elements, piece)),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="kv_copy",
    )(source_P, target_P, x_BE)
    return lax.bitcast_convert_type(y_BE.reshape(x_B.shape), x_B.dtype)


def _kernel(source_P, target_P, _, x_BE, *, piece: int):
    pair, first = pl.program_id(0), pl.program_id(1) * piece
    (num_blocks, block_elements), source, target = x_BE.shape, source_P[pair], target_P[pair]
    moves = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)
    mask = moves & (first + jnp.arange(piece) < block_elements)
    where = pl.ds(first, piece)
    # An id that is not in the pool must not even form an address: the interpreter would clip it, hardware fault.
    source, target = jnp.where(moves, source, 0), jnp.where(moves, target, 0)
    plgpu.store(x_BE.at[target, where], plgpu.load(x_BE.at[source, where], mask=mask, other=0), mask=mask)


def _bits(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize * 8 if not str(dtype).endswith("int4") else 4
