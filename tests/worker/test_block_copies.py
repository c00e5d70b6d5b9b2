"""Blocks out of a pool and back, bit for bit, with NaN payloads and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.worker.cache.block_copies import gather_blocks, scatter_blocks
from pallas_kernels.testing import bits, run_once

NUM_BLOCKS = 12
IDS = np.array([3, -1, 4, 12, 0, 2**31 - 1, -(2**31), 11], np.int32)
INSIDE = [0, 2, 4, 7]  # of these ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_gathered_blocks_scattered_elsewhere_change_nothing_but_those_blocks(dtype):
    rng, size = np.random.default_rng(0), jnp.dtype(dtype).itemsize
    pool = [
        rng.integers(0, 256, (NUM_BLOCKS, *shape, 8 * size), np.uint8).view(dtype)
        for shape in ((2, 5), (3,), (5, 2, 2))
    ]
    blocks = run_once(gather_blocks, tuple(pool), IDS)
    for x_B, x_P in zip(pool, blocks, strict=True):
        np.testing.assert_array_equal(bits(x_P)[INSIDE], bits(x_B)[IDS[INSIDE]])
        assert not np.delete(bits(x_P), INSIDE, axis=0).any()
    targets = np.roll(IDS, 1)
    after = run_once(scatter_blocks, tuple(pool), targets, blocks)
    for x_B, x_P, found_B in zip(pool, blocks, after, strict=True):
        wanted_B = x_B.copy()
        for target, block in zip(targets, np.asarray(x_P)):
            if 0 <= target < NUM_BLOCKS:
                wanted_B[target] = block
        np.testing.assert_array_equal(bits(found_B), bits(wanted_B))


def test_a_donated_pool_is_updated_in_place():
    pool, ids = (jnp.zeros((64, 2, 16, 8)),), jax.ShapeDtypeStruct((4,), jnp.int32)
    blocks = (jnp.zeros((4, 2, 16, 8)),)
    memory = jax.jit(scatter_blocks, donate_argnums=0).lower(pool, ids, blocks).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool[0].nbytes
    assert memory.temp_size_in_bytes < pool[0].nbytes / 4


def test_blocks_of_another_type_are_refused():
    pool = (jnp.zeros((4, 2, 8)),)
    with pytest.raises(ValueError, match=r"blocks are .*, but 2 blocks of this pool are"):
        scatter_blocks(pool, jnp.zeros(2, jnp.int32), (pool[0][:2].astype(jnp.bfloat16),))
