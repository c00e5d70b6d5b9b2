"""Blocks leave the device in one form and come back to it, whatever the layout of the attention backend."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.cache_types import CACHE_TYPES, LARGEST
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, LatentSpec, StateArray, StateSpec, pool_layouts
from jaxpaged.kv_store.options import KVOffload
from jaxpaged.kv_store.tier_options import TierWish
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.rope import RopeConfig
from jaxpaged.worker.cache.attention import as_stored
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.cache.latent import as_stored as of_latents
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.opening import as_named, check_offload, namespace_of
from jaxpaged.worker.kv_transfer.programs import BlockCopy
from pallas_kernels.ragged_paged_attention import quantized
from tests.worker.test_context_split import engine_spec


def lower_gather(*args):
    copy = BlockCopy(*args)
    return jax.jit(copy.gather, out_shardings=copy.replicated).lower(copy.tensors, copy.block_ids)


def lower_scatter(*args):
    copy = BlockCopy(*args)
    placed = jax.tree.map(lambda leaf: leaf.sharding, copy.tensors)
    program = jax.jit(copy.scatter, donate_argnums=(0,), out_shardings=placed)
    return program.lower(copy.tensors, copy.block_ids, copy.pages)


def copies(spec, backend, num_devices, num_blocks, written, read, form):
    """(descriptions of two layers' tensors, zeros as they say, the programs that write and read so many pages)."""
    mesh = make_mesh(num_devices)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = [tensor_struct(AttentionContext(mesh, backend), spec, num_blocks, jnp.bfloat16)] * 2
    scatter = lower_scatter(structs, spec, backend, whole, written, form).compile()
    gather = lower_gather(structs, spec, backend, whole, read, form).compile()
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), structs)
    return structs, zeros, scatter, gather


def num_bytes(arrays):
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)


ATTENTION = AttentionSpec(block_size=8, num_kv_heads=2, head_dim=16, dtype_bytes=2)
EXACTLY = PageForm("exact", np.dtype(jnp.bfloat16), 8)
LATENT = LatentSpec(block_size=8, width=24, dtype_bytes=2)
COPIED = replace(ATTENTION, num_kv_heads=4, head_copies=2)
SPLIT = replace(COPIED, context_shards=2)


def test_options_and_kernels_have_the_same_types_of_8_bits():
    assert {dtype.name: largest for dtype, largest in quantized.LARGEST.items()} == LARGEST


@pytest.mark.parametrize(
    "spec", [ATTENTION, LATENT, COPIED, SPLIT], ids=["heads", "latents", "copied heads", "copied heads, contexts split"]
)
@pytest.mark.parametrize(
    ("backend", "num_devices"), [("reference", 1), ("reference", 2), ("reference", 4), ("tpu-interpret", 1)]
)
def test_pages_come_back_as_they_were(backend, num_devices, spec):
    if spec.context_shards > num_devices or (spec is ATTENTION and num_devices == 4):
        pytest.skip("heads and contexts are split over as many devices as they have parts")
    structs, zeros, scatter, gather = copies(spec, backend, num_devices, 6, 3, 4, EXACTLY)
    shape = (3, 2, *spec.page_shape(8))
    pages = np.random.default_rng(1).standard_normal(shape).astype(jnp.bfloat16)
    written = scatter(zeros, np.array([4, -1, 2], np.int32), (pages,))
    found = np.asarray(*gather(written, np.array([2, 4, 1, -1], np.int32)))
    assert (found[:2] == pages[[2, 0]]).all()
    assert not found[2:].any(), "padding was written"
    if isinstance(spec, AttentionSpec):
        whole = jax.sharding.NamedSharding(make_mesh(num_devices), jax.sharding.PartitionSpec())
        all_heads = lower_gather(structs, replace(spec, head_copies=1), backend, whole, 1, EXACTLY).compile()
        (cached,) = all_heads(written, np.array([2], np.int32))
        assert (np.asarray(cached) == pages[[2]].repeat(spec.head_copies, axis=-2)).all(), "some copies are not written"


TOKEN_SCALES, HEAD_SCALES = CACHE_TYPES["int8_per_token_head"], CACHE_TYPES["fp8_e5m2"]


@pytest.mark.parametrize(
    ("backend", "spec", "num_devices", "cache_type"),
    [
        ("reference", ATTENTION, 2, TOKEN_SCALES),
        ("reference", SPLIT, 4, TOKEN_SCALES),
        ("tpu-interpret", ATTENTION, 1, TOKEN_SCALES),
        ("tpu-interpret", SPLIT, 4, TOKEN_SCALES),
        ("reference", COPIED, 2, HEAD_SCALES),
    ],
    ids=["heads", "contexts split", "lanes", "lanes, contexts split", "scales of heads"],
)
def test_pages_of_8_bits_come_with_the_scales_of_their_tokens(backend, spec, num_devices, cache_type):
    """Two blocks make a page, and one is written that is not read."""
    spec = replace(spec, block_size=4).cached_as(cache_type)
    form, rng = EXACTLY.of(spec), np.random.default_rng(1)
    structs, zeros, scatter, gather = copies(spec, backend, num_devices, 8, 2, 2, form)
    shape = (2, 2, *spec.page_shape(8))
    pages = [rng.integers(-100, 100, shape).astype(form.page_dtype)]
    if form.is_scaled:
        pages.append(rng.random(shape[:-1], np.float32))
    assert [(each.shape, each.dtype) for each in pages] == form.layout(shape)
    written = scatter(zeros, np.array([4, 5, 2, 7], np.int32), tuple(pages))
    found = [np.asarray(each) for each in gather(written, np.array([2, 7, 4, 5], np.int32))]
    for is_, should_be in zip(found, pages, strict=True):
        np.testing.assert_array_equal(is_, should_be[::-1])
    stored = as_stored(spec, backend)
    arrays = (*structs[0].arrays, *(structs[0].scales if form.is_scaled else ()))
    assert num_bytes(arrays) == 8 * stored.block_bytes


@pytest.mark.parametrize("backend", ["reference", "tpu-interpret"])
@pytest.mark.parametrize("shards", [1, 2])
def test_pages_of_latents_of_8_bits_end_with_the_bytes_of_two_scales(backend, shards):
    made = LatentSpec(4, 24, 2, latent_dim=16, context_shards=shards)
    spec = of_latents(made.cached_as(TOKEN_SCALES), backend)
    form, rng = EXACTLY.of(spec), np.random.default_rng(1)
    structs, zeros, scatter, gather = copies(spec, backend, shards, 8, 2, 2, form)
    pages = rng.integers(-100, 100, (2, 2, *spec.page_shape(8)), np.int8)
    scales = rng.random((*pages.shape[:-1], 2), np.float32)
    pages[..., -8:] = scales.view(np.int8)
    written = scatter(zeros, np.array([4, 5, 2, 7], np.int32), (pages,))
    (found,) = gather(written, np.array([2, 7, 4, 5], np.int32))
    np.testing.assert_array_equal(np.asarray(found), pages[::-1])
    in_memory = np.asarray(written[1].scales[0])[5].reshape(2, shards, -1)[..., : 4 // shards].reshape(2, 4)
    np.testing.assert_array_equal(in_memory, scales[0, 1, 0, 4:, 0].T)
    assert num_bytes(jax.tree.leaves(structs[0])) == 8 * shards * spec.block_bytes


@pytest.mark.parametrize("num_devices", [1, 2])
def test_snapshots_come_back_bit_by_bit(num_devices):
    """Arrays of several types and ways to be split; NaN with a payload is among them."""
    arrays = StateArray((2, 16), "bfloat16", split_axis=1), StateArray((4, 3), "float32"), StateArray((2,), "int8")
    spec, mesh = StateSpec(8, arrays, num_drafts=2), make_mesh(num_devices)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = [tensor_struct(AttentionContext(mesh, "reference"), spec, 6, jnp.bfloat16, num_rows=3)] * 2
    form = EXACTLY.of(spec)
    scatter = lower_scatter(structs, spec, "reference", whole, 3, form).compile()
    gather = lower_gather(structs, spec, "reference", whole, 4, form).compile()
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), structs)
    pages = np.random.default_rng(1).integers(0, 256, (3, 2, *spec.page_shape(8)), np.uint8)
    pages[0, 0, 0, 0, 0, :4] = 0x7F  # as bfloat16 and as float32
    written = scatter(zeros, np.array([4, -1, 2], np.int32), (pages,))
    found = np.asarray(*gather(written, np.array([2, 4, 1, -1], np.int32)))
    assert (found[:2] == pages[[2, 0]]).all()
    assert not found[2:].any(), "padding was written"
    first = np.asarray(written[1].blocks[0])[2]
    assert first.tobytes() == pages[2, 1, 0, 0, 0, :64].tobytes()
    assert not any(np.asarray(rows).any() for rows in written[0].rows)


@pytest.mark.parametrize("form", [EXACTLY, replace(EXACTLY, name="int8")], ids=["exact", "int8"])
@pytest.mark.parametrize("spec", [ATTENTION, LATENT, SPLIT], ids=["heads", "latents", "copied heads, contexts split"])
@pytest.mark.parametrize("backend", ["reference", "tpu-interpret"])
def test_blocks_of_any_size_take_and_give_the_same_pages(backend, spec, form):
    if (spec is LATENT and form.is_scaled) or (spec is SPLIT and backend != "reference"):
        pytest.skip("latents are not rounded; contexts are split by the reference")
    mesh = make_mesh(4 if spec is SPLIT else 1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def back_and_forth(block_size, num_pieces, ids, ids_read):
        """Pages that went into blocks with these ids and came out of others."""
        sized = replace(spec, block_size=block_size)
        structs = [tensor_struct(AttentionContext(mesh, backend), sized, 10, jnp.bfloat16)] * 2
        args = structs, sized, backend, whole, num_pieces, form
        scatter, gather = lower_scatter(*args).compile(), lower_gather(*args).compile()
        zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), structs)
        return [*map(np.asarray, gather(scatter(zeros, np.array(ids, np.int32), pages), np.array(ids_read, np.int32)))]

    shape = (4, 2, *spec.page_shape(8))
    pages = (np.random.default_rng(1).integers(-120, 120, shape).astype(form.page_dtype),)
    if form.is_scaled:
        pages += (np.random.default_rng(2).random(shape[:-1], np.float32),)
    expected = back_and_forth(8, 4, [4, 1, 2, 7], [4, 1, 2, 7])
    assert form.is_scaled or (expected[0] == pages[0]).all()
    for block_size, num_pieces, ids in ((4, 4, [9, 3, 1, 8, 2, 4, 6, 5]), (16, 2, [5, 2])):
        for found, page in zip(back_and_forth(block_size, num_pieces, ids, ids), expected, strict=True):
            assert found.shape == page.shape and (found == page).all()
        half = len(ids) // 2
        swapped = back_and_forth(block_size, num_pieces, ids, ids[half:] + ids[:half])
        assert (swapped[0] == expected[0][[2, 3, 0, 1]]).all()


def test_devices_and_what_they_hold_of_a_context_or_head_make_no_other_pages():
    seen = set()
    for devices, shards in ((1, 1), (2, 1), (4, 1), (4, 2)):
        made = engine_spec("gemma2", devices, shards, block_size=8)
        cache = KVCacheConfig((4,) * len(pool_layouts(made.kv_groups)), made.kv_groups)
        shapes = tuple(group.spec.page_shape(8) for group in cache.groups)
        seen.add((namespace_of(made, cache, "weights"), shapes))
    ((_, shapes),) = seen
    assert {shape[-2] for shape in shapes} == {2}


def test_the_size_of_blocks_makes_no_other_pages_but_that_of_pages_does():
    def space(block_size):
        made = engine_spec("gemma2", 1, 1, block_size=block_size)
        return namespace_of(made, KVCacheConfig((4,) * len(pool_layouts(made.kv_groups)), made.kv_groups), "weights")

    assert space(16) == space(32) == space(64) != space(8)


def test_the_longest_sequence_makes_other_pages_only_where_angles_go_by_it():
    decoder = engine_spec("gemma2", 1, 1, block_size=8).decoders[0]
    of = lambda rope: tuple(replace(layer, rope=rope) for layer in decoder.layers)
    named = lambda rope: {
        as_named(replace(decoder, max_model_len=length, layers=of(rope))) for length in (64, 512, 4096, 8192)
    }
    default, trained = RopeConfig(1e4, 8), {"original_max_position": 1024}
    for rope in (None, default, replace(default, rope_type="yarn", factor=4.0, **trained)):
        assert len(named(rope)) == 1, rope
    assert len(named(replace(default, rope_type="dynamic", factor=2.0, max_position=1024))) > 1
    long = replace(default, rope_type="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, **trained)
    assert len(named(long)) > 1
    assert named(default) != named(replace(default, theta=1e5))


@pytest.mark.parametrize(("name", "error"), [("int8", 1 / 127 / 2), ("fp8", 1 / 16)])
@pytest.mark.parametrize("backend", ["reference", "tpu-interpret"])
def test_rounded_pages_are_off_by_half_a_step_of_each_tokens_and_heads_own_scale(backend, name, error):
    form, mesh = replace(EXACTLY, name=name), make_mesh(1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    structs = [tensor_struct(AttentionContext(mesh, backend), ATTENTION, 4, jnp.bfloat16)] * 2
    exact = np.random.default_rng(1).standard_normal((2, 2, *ATTENTION.page_shape(8)))
    exact *= 10.0 ** np.random.default_rng(2).integers(-8, 8, exact.shape[:-1])[..., None]  # no token is like another
    exact[0, 0, 0, 0, 0] = 0.0
    exact = exact.astype(jnp.bfloat16)
    make = lambda lower, form: lower(structs, ATTENTION, backend, whole, 2, form).compile()
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)
    ids = np.array([3, 1], np.int32)
    cached = make(lower_scatter, EXACTLY)(zeros(), ids, (exact,))
    values, scales = make(lower_gather, form)(cached, ids)
    assert values.dtype == form.page_dtype and form.num_bytes(values.shape) == values.nbytes + scales.nbytes
    loaded = make(lower_scatter, form)(zeros(), ids, tuple(map(np.asarray, (values, scales))))
    (found,) = make(lower_gather, EXACTLY)(loaded, ids)
    wide, found = exact.astype(np.float64), np.asarray(found, np.float64)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    # fp8 has 3 bits behind the first; what is loaded is rounded to bfloat16 once more.
    allowed = (largest if name == "int8" else np.maximum(np.abs(wide), largest / 2**14)) * error + np.abs(wide) / 2**8
    assert (np.abs(found - wide) <= allowed).all() and np.abs(found - wide).max() > 0
    assert not found[0, 0, 0, 0, 0].any(), "zeros stay zeros"


def test_latents_are_never_rounded():
    caches = lambda spec: SimpleNamespace(groups=[SimpleNamespace(spec=spec)], content="")
    rounded = KVOffload((TierWish("host", capacity=1),), pages="int8")
    check_offload(rounded, None, caches(ATTENTION))
    with pytest.raises(ConfigError, match="pages=int8, but this model caches latents"):
        check_offload(rounded, None, caches(LATENT))
    check_offload(KVOffload(rounded.tiers), None, caches(LATENT))
