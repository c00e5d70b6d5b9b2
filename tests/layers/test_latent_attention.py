"""Latent attention over devices, and its TPU kernel for fewer heads than it takes, against the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.kv_cache_spec import LatentSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext
from jaxpaged.layers.latent_attention import attend_latents, check_latent_attention
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.cache.latent import as_stored
from pallas_kernels.ragged_paged_attention import KVTensor, make_metadata

SPEC = LatentSpec(block_size=16, width=160, dtype_bytes=4, latent_dim=128)


def attended(backend, num_devices, num_heads=4):
    """What 20 and 1 tokens see, after 3 and 17 others, and the numbers of a slot."""
    context = AttentionContext(make_mesh(num_devices), backend)
    metadata = make_metadata(
        2,
        jnp.array([0, 20, 21]),
        jnp.array([23, 18]),
        jnp.array([[3, 1], [2, 4]]),
        num_tokens=24,
        block_size=16,
        window=None,
        backend="reference",
    )
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    operands = normal(24, num_heads, 128), normal(24, num_heads, 32), normal(24, 128), normal(24, 32)
    cached_BSW = normal(5, 16, 160)
    struct = tensor_struct(context, as_stored(SPEC, backend), 5, jnp.float32)
    cache_BSW = jnp.pad(cached_BSW, ((0, 0), (0, 0), (0, struct.arrays[0].shape[2] - 160)))
    batch = AttentionBatch(metadata, context, None)
    out_TNC, cache = jax.jit(lambda *x: attend_latents(batch, *x, scale=0.1))(*operands, KVTensor((cache_BSW,)))
    return np.asarray(out_TNC), np.asarray(cache.arrays[0])


def test_devices_and_the_kernel_of_a_tpu_give_what_the_definition_does():
    expected, cache_BSW = attended("reference", 1)
    assert np.abs(expected[:21]).max() > 0.1
    assert not expected[21:].any()
    for backend, num_devices, width in (("reference", 4, 160), ("tpu-interpret", 2, 256)):
        out_TNC, cache = attended(backend, num_devices)
        assert cache.shape[2] == width
        np.testing.assert_array_equal(cache[..., :160], cache_BSW)
        np.testing.assert_allclose(out_TNC, expected, rtol=1e-5, atol=1e-5)


def test_what_no_kernel_takes_is_refused_with_a_reason():
    context = AttentionContext(make_mesh(2), "tpu-interpret")
    check = lambda context, heads=4, latent=128: check_latent_attention(
        context, heads, latent, latent + 32, 16, jnp.bfloat16, jnp.bfloat16
    )
    check(context)
    with pytest.raises(ValueError, match="latent_dim = 96; accepted are multiples of 128"):
        check(context, latent=96)
    with pytest.raises(ValueError, match="3 query heads do not split over 2 devices"):
        check(context, heads=3)
    with pytest.raises(ValueError, match="'invariant' has no kernel for latents"):
        check(dataclasses.replace(context, backend="invariant"))
