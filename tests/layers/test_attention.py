"""The shard_map around attention: any number of devices gives the same, and the cache is updated in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.layers.attention import (
    MASK_DIM,
    AttentionBatch,
    AttentionContext,
    allocate_kv,
    attend,
    kv_sharding,
    kv_struct,
)
from jaxpaged.params.sharding import MODEL_AXES
from pallas_kernels.ragged_paged_attention import make_metadata

N, K, H, S, BLOCKS, LAYERS = 8, 4, 16, 8, 500, 2
T = 16


def context(num_devices: int) -> AttentionContext:
    devices = jax.devices()[:num_devices]
    mesh = make_mesh(num_devices, devices)
    return AttentionContext(mesh, "reference")


def attend_layers(context: AttentionContext, q_TNH, kvs, sinks_N=None, visible_end_T=None, masked_T=None):
    """Several layers, each attending from the output of the one before: a prompt, a decode, padding."""
    metadata = make_metadata(
        jnp.int32(2),
        jnp.array([0, 9, 10, 10]),
        jnp.array([9, 30, 0]),
        jnp.arange(1, 16).reshape(3, 5),
        num_tokens=T,
        block_size=S,
        window=None,
        backend=context.backend,
        visible_end_T=visible_end_T,
    )
    kvs_after = []
    for kv in kvs:
        k_TKH, v_TKH = q_TNH[:, :K] * 2, q_TNH[:, K:]
        batch = AttentionBatch(metadata, context, None, masked_T)
        q_TNH, kv = attend(batch, q_TNH, k_TKH, v_TKH, kv, scale=0.3, sinks_N=sinks_N)
        kvs_after.append(kv)
    return q_TNH, kvs_after


def random_queries(dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, N, H)), dtype)


def new_caches(context: AttentionContext, dtype=jnp.float32) -> list:
    return [allocate_kv(context, BLOCKS, S, K, H, dtype) for _ in range(LAYERS)]


def test_sharded_over_devices_gives_what_one_device_gives():
    sinks_N = jnp.linspace(-1, 1, N)
    results = []
    for num_devices in (1, 4):
        run = jax.jit(functools.partial(attend_layers, context(num_devices)))
        out_TNH, kvs = run(random_queries(), new_caches(context(num_devices)), sinks_N)
        results.append((np.asarray(out_TNH), [np.asarray(x) for kv in kvs for x in kv.arrays]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *results)
    assert np.isfinite(results[0][0]).all()
    assert np.abs(results[0][0][:10]).min(axis=(1, 2)).all()


def test_what_tokens_see_behind_them_is_the_same_on_all_devices_and_masked_tokens_stay_unseen():
    """The prompt's tokens 2 to 6 see each other both ways; a padded head dim masks one of them."""
    ends_T, masked_T = jnp.full(T, 0).at[2:7].set(7), jnp.arange(T) == 5
    results = []
    for num_devices in (1, 4):
        here = context(num_devices)
        kvs = [allocate_kv(here, BLOCKS, S, K, H + MASK_DIM, jnp.float32)]
        run = jax.jit(functools.partial(attend_layers, here))
        results.append(np.asarray(run(random_queries(), kvs, None, ends_T, masked_T)[0]))
    np.testing.assert_allclose(*results, atol=1e-6)
    q_QNH, seen = np.asarray(random_queries())[:9], np.tri(9, dtype=bool)
    seen[2:7, 2:7] = True
    seen[:, 5] = False
    score_NQP = 0.3 * np.einsum("QNH,PNH->NQP", q_QNH, np.repeat(2 * q_QNH[:, :K], N // K, axis=1))
    weight_NQP = np.where(seen, np.exp(score_NQP), 0)
    weight_NQP /= weight_NQP.sum(-1, keepdims=True)
    expected_QNH = np.einsum("NQP,PNH->QNH", weight_NQP, np.repeat(q_QNH[:, K:], N // K, axis=1))
    np.testing.assert_allclose(results[0][:9], expected_QNH, atol=1e-5)


def test_the_cache_is_split_by_kv_head():
    kv = allocate_kv(context(4), BLOCKS, S, K, H, jnp.bfloat16)
    for array in kv.arrays:
        assert array.shape == (BLOCKS, K, S, H)
        assert {shard.data.shape for shard in array.addressable_shards} == {(BLOCKS, 1, S, H)}
        assert array.sharding.is_equivalent_to(kv_sharding(context(4), kv).arrays[0], array.ndim)
    struct = kv_struct(context(4), BLOCKS, S, K, H, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kv) == jax.tree.map(lambda x: (x.shape, x.dtype), struct)


def test_a_donated_cache_is_updated_in_place_and_never_copied():
    def memory(num_blocks: int):
        structs = [kv_struct(context(1), num_blocks, S, K, H, jnp.bfloat16) for _ in range(LAYERS)]
        step = jax.jit(functools.partial(attend_layers, context(1)), donate_argnums=1)
        return step.lower(random_queries(jnp.bfloat16), structs).compile().memory_analysis()

    small, large = memory(BLOCKS), memory(10 * BLOCKS)
    assert large.alias_size_in_bytes == 2 * LAYERS * 10 * BLOCKS * S * K * H * 2
    assert large.temp_size_in_bytes == small.temp_size_in_bytes, "temporary memory grows with the cache"


def test_contexts_of_equal_mesh_and_backend_are_equal_keys():
    assert context(2) == context(2)
    assert hash(context(2)) == hash(context(2))
    assert context(2) != context(4)


def test_heads_that_do_not_split_over_the_devices_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"8 query heads and 4 kv heads do not split over 8 devices"):
        jax.eval_shape(functools.partial(attend_layers, context(8)), random_queries(), new_caches(context(1))[:1])


def test_a_mesh_with_other_axes_besides_works():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 2), ("spare", *MODEL_AXES))
    both = AttentionContext(mesh, "reference")
    kv = allocate_kv(both, BLOCKS, S, K, H, jnp.float32)
    assert kv.arrays[0].sharding.spec == PartitionSpec(None, MODEL_AXES)
    out_TNH, _ = jax.jit(functools.partial(attend_layers, both))(random_queries(), [kv])
    alone_TNH, _ = jax.jit(functools.partial(attend_layers, context(1)))(random_queries(), new_caches(context(1))[:1])
    np.testing.assert_allclose(out_TNH, alone_TNH, atol=1e-6)
