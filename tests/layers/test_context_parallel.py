"""Contexts split over devices: groups of devices that hold different tokens of a context give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.kv_cache_spec import AttentionSpec, LatentSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, attend, step_metadata
from jaxpaged.layers.latent_attention import attend_latents
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.cache.latent import as_stored
from pallas_kernels.ragged_paged_attention import KVTensor, kv_layout, sharing

N, H, BLOCK, BLOCKS, T, C, P = 8, 16, 64, 60, 56, 128, 32  # a quarter of a block is what the CPU's kernel takes
# Rows with (tokens of the context, of them new): long ones go in tiles of queries, short ones one by one; single tokens
# with contexts that end in every device's part of a block; and a row that is not in use.
ROWS = ((20, 5), (140, 37), (1, 1), (33, 1), (130, 1), (64, 1), (0, 0))
NEW = [new for _, new in ROWS]
WHERE = (
    jnp.int32(6),
    jnp.cumsum(jnp.array([0, *NEW])),
    jnp.array([length for length, _ in ROWS]),
    1 + jnp.arange(len(ROWS) * 5).reshape(len(ROWS), 5),
)


def where_beginnings_are_shared(shards):
    """Two rows hold four blocks in common, and the last token of one of them is the first one behind."""
    tables = np.stack([np.r_[1:5, 40:42], np.r_[1:5, 50:52]])
    shared_6R = np.zeros((sharing.NUM_LINES, 2), np.int32)
    shared_6R[sharing.ROWS] = 0, 1
    shared_6R[sharing.OWN] = shared_6R[sharing.END, 0] = 256 // shards
    shared_6R[sharing.LAST, 0] = 2
    where = jnp.int32(2), jnp.array([0, 1, 4]), jnp.array([257, 265]), jnp.asarray(tables)
    return where, {"num_tokens": 8, "shared_6R": jnp.asarray(shared_6R)}


def context(num_devices: int, shards: int, backend: str = "reference") -> AttentionContext:
    return AttentionContext(make_mesh(num_devices), backend, shards)


def filled(struct, canonical):
    """A cache of this shape and these shardings with the same numbers for any number of devices."""
    return jax.tree.map(
        lambda x: jax.device_put(jnp.broadcast_to(canonical, x.shape).astype(x.dtype), x.sharding), struct
    )


def step(context: AttentionContext, spec, run, where=WHERE, **settings):
    settings = {"num_tokens": T, **settings}
    metadata = step_metadata(context, *where, block_size=spec.device_slots, window=None, **settings)
    return run(AttentionBatch(metadata, context, window=None))


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def poisoned(cache, start_R1, seq_lens_R, tables_RM):
    """NaN in all slots that hold no token from before the step."""
    is_held = np.zeros(cache.shape[:2], bool)
    for table_M, length in zip(np.asarray(tables_RM), np.asarray(seq_lens_R - jnp.diff(start_R1))):
        position = np.arange(length)
        is_held[table_M[position // BLOCK], position % BLOCK] = True
    return np.where(is_held.reshape(*is_held.shape, *[1] * (cache.ndim - 2)), cache, np.nan).astype(cache.dtype)


def run_heads(num_devices: int, shards: int, num_kv_heads: int, sinks_N, backend="reference", where=WHERE, **settings):
    T = settings.get("num_tokens", 56)
    here = context(num_devices, shards, backend)
    copies = max(num_devices // num_kv_heads, 1)
    spec = AttentionSpec(BLOCK, num_kv_heads * copies // shards, H, 4, context_shards=shards)
    struct, layout = tensor_struct(here, spec, BLOCKS, jnp.float32), kv_layout(backend)
    cached_BSKH = np.repeat(poisoned(random(BLOCKS, BLOCK, 1, H), *where[1:]), spec.num_kv_heads, axis=2)
    kv = KVTensor(
        tuple(map(jax.device_put, layout.pack(cached_BSKH, cached_BSKH), [x.sharding for x in struct.arrays]))
    )
    k_TKH, v_TKH = (np.repeat(random(T, num_kv_heads, size), copies, axis=1)[..., :H] for size in (H, H + 1))

    def layer(q_TNH, k_TKH, v_TKH, kv):
        return step(
            here,
            spec,
            lambda batch: attend(batch, q_TNH, k_TKH, v_TKH, kv, scale=0.3, sinks_N=sinks_N),
            where,
            **settings,
        )

    out_TNH, kv = jax.jit(layer)(random(T, N, H), k_TKH, v_TKH, kv)
    return np.asarray(out_TNH), [np.asarray(x)[:, :, :: copies // shards] for x in layout.unpack(kv.arrays, H)]


@pytest.mark.parametrize(
    ("num_devices", "shards", "num_kv_heads", "backend", "sinks"),
    [
        (4, 2, 2, "reference", False),
        (4, 2, 2, "reference", True),
        (8, 4, 1, "reference", False),
        (8, 4, 1, "reference", True),
        (4, 4, 1, "cpu", False),
        (4, 4, 1, "cpu", True),
        # Sinks are added once parts are together, whoever made them.
        pytest.param(2, 2, 1, "tpu-interpret", True, marks=pytest.mark.exhaustive),
        (2, 2, 1, "gpu-interpret", True),
    ],
)
def test_devices_that_hold_parts_of_contexts_give_what_one_gives(num_devices, shards, num_kv_heads, backend, sinks):
    sinks_N = jnp.linspace(-1, 1, N) if sinks else None
    one = run_heads(1, 1, num_kv_heads, sinks_N)
    many = run_heads(num_devices, shards, num_kv_heads, sinks_N, backend)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), one, many)
    assert not many[0][sum(NEW) :].any(), "padding is not zero"


def test_beginnings_that_rows_share_are_read_once_by_each_device():
    one = run_heads(1, 1, 1, None, "reference", *where_beginnings_are_shared(1)[:1], num_tokens=8)
    for backend in ("reference", "cpu"):
        where, settings = where_beginnings_are_shared(4)
        many = run_heads(4, 4, 1, None, backend, where, **settings)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), one, many)


@pytest.mark.parametrize(
    ("num_devices", "shards", "backend"), [(4, 2, "reference"), (4, 4, "reference"), (2, 2, "tpu-interpret")]
)
def test_latents_split_by_token_give_what_whole_ones_give(num_devices, shards, backend):
    def run(num_devices, shards, backend):
        here = context(num_devices, shards, backend)
        spec = as_stored(LatentSpec(BLOCK, C + P, 4, latent_dim=C, context_shards=shards), backend)
        (struct,) = tensor_struct(here, spec, BLOCKS, jnp.float32).arrays
        width = ((0, 0), (0, 0), (0, struct.shape[2] - C - P))
        cache = KVTensor((filled(struct, np.pad(poisoned(random(BLOCKS, BLOCK, C + P), *WHERE[1:]), width)),))

        def layer(*arrays):
            return step(
                here.of_cache(1), spec, lambda batch: attend_latents(batch.replace(context=here), *arrays, scale=0.3)
            )

        arrays = random(T, N, C), random(T, N, P), random(T, C), random(T, P)
        out_TNC, kv = jax.jit(layer)(*arrays, cache)
        (cache,) = kv.arrays
        assert {shard.data.shape[1] for shard in cache.addressable_shards} == {BLOCK // shards}
        return np.asarray(out_TNC), np.asarray(cache)[..., : C + P]

    whole, parts = run(1, 1, "reference"), run(num_devices, shards, backend)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), whole, parts)


def test_pictures_whose_tokens_see_each_other_both_ways_need_whole_contexts():
    with pytest.raises(ValueError, match="2 devices hold parts of each context, .* or give --language-model-only"):
        step_metadata(
            context(2, 2),
            *WHERE,
            num_tokens=T,
            block_size=BLOCK // 2,
            window=None,
            visible_end_T=jnp.zeros(T, jnp.int32),
        )
