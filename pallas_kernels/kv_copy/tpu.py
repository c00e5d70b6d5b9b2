"""Copy-on-write on a TPU: blocks go from HBM to HBM by direct memory access, and never enter a core.

Layout: any, with blocks on the first axis and at least two axes behind it, so that a block is a whole number of tiles.

Grid: none. One program starts a transfer for each pair and array, `DEPTH` pairs at a time.

Skipping: a pair with an id outside of the pool starts no transfer.

Requires: targets are distinct and no pair's source, since transfers finish in any order. Ids must fit into SMEM.

Padding: ids outside of the pool.

Numerics: bytes are moved, not numbers.

Cost: reads and writes each block once, half of what XLA's gather and scatter move. Not measured.

Knows nothing of what a block holds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

DEPTH = 8  # pairs in flight: enough to hide a transfer's latency behind the others
MAX_PAIRS = 2**15  # two ids of 4 bytes each: a quarter of the smallest SMEM


def cannot_take(pool: tuple[Any, ...]) -> str | None:
    """Blocks must be whole tiles."""
    flat = [x_B.shape for x_B in pool if len(x_B.shape) < 3]
    return f"pool has arrays of shapes {flat}; accepted are arrays with three axes or more" if flat else None


def copy_blocks(
    pool: tuple[jax.Array, ...], source_P: jax.Array, target_P: jax.Array, *, interpret: Any
) -> tuple[jax.Array, ...]:
    """See `kv_copy.copy_blocks`."""
    for first in range(0, source_P.shape[0], MAX_PAIRS):
        part = slice(first, first + MAX_PAIRS)
        pool = _copy(pool, source_P[part], target_P[part], interpret=interpret)
    return pool


def _copy(pool: tuple[jax.Array, ...], source_P: jax.Array, target_P: jax.Array, *, interpret: Any):
    num_arrays = len(pool)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, num_pairs=source_P.shape[0], num_arrays=num_arrays),
        out_shape=tuple(jax.ShapeDtypeStruct(x_B.shape, x_B.dtype) for x_B in pool),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[in_hbm] * num_arrays,
            out_specs=(in_hbm,) * num_arrays,
            scratch_shapes=[pltpu.SemaphoreType.DMA((DEPTH,))],
        ),
        input_output_aliases={2 + i: i for i in range(num_arrays)},
        interpret=interpret,
        name="kv_copy",
    )(source_P, target_P, *pool)


def _kernel(source_P, target_P, *refs, num_pairs: int, num_arrays: int):
    pool, semaphore = refs[num_arrays:-1], refs[-1]  # the outputs, which alias the inputs
    num_blocks = pool[0].shape[0]

    def transfer(pair, act):
        source, target = source_P[pair], target_P[pair]
        moves = (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks)

        @pl.when(moves)
        def _():
            for x_B in pool:
                act(pltpu.make_async_copy(x_B.at[source], x_B.at[target], semaphore.at[lax.rem(pair, DEPTH)]))

    def step(pair, _):
        pl.when(pair >= DEPTH)(lambda: transfer(jnp.maximum(pair - DEPTH, 0), lambda copy: copy.wait()))
        pl.when(pair < num_pairs)(lambda: transfer(jnp.minimum(pair, num_pairs - 1), lambda copy: copy.start()))
        return _

    lax.fori_loop(0, num_pairs + DEPTH, step, None)
