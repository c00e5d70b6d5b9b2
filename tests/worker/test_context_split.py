"""Which caches can be split over devices by token, and what is said of those that cannot."""

import dataclasses

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup, LatentSpec, StateArray, StateSpec
from jaxpaged.models.registry import model_for
from jaxpaged.worker.context_split import exchanged_bytes, split_contexts
from jaxpaged.worker.engine_spec import EngineSpec
from tests.models.checkpoints import CONFIGS

FACTS = ModelFacts(max_position_embeddings=128, dtype="float32", num_heads=8, vocab_size=211)


def engine_spec(name, devices, shards, **options):
    hf = CONFIGS[name]
    model = model_for(hf)
    given = EngineConfig.from_options(
        tensor_parallel_size=devices,
        decode_context_parallel_size=shards,
        max_model_len=64,
        attention_backend="reference",
        **options,
    )
    return EngineSpec(given.resolve(FACTS, "cpu"), model, model.config_from_hf(hf), make_mesh(devices))


@pytest.mark.parametrize(
    ("name", "devices", "shards", "message"),
    [
        ("llama", 8, 3, "decode_context_parallel_size 3 does not divide tensor_parallel_size 8.*one of .1, 2, 4, 8"),
        ("llama", 8, 8, "8 must divide the copies of each key-value head: the 2 heads of the model have 4 on"),
        ("llama", 2, 2, "the 2 heads of the model have 1 on tensor_parallel_size 2 devices"),
        ("mistral_window", 4, 2, r"is 2, but no layer of the model caches all tokens \(sliding_window\)"),
    ],
)
def test_caches_that_cannot_be_split_are_refused_with_the_reason(name, devices, shards, message):
    with pytest.raises(ConfigError, match=message):
        engine_spec(name, devices, shards, block_size=24).kv_groups  # noqa: B018


@pytest.mark.parametrize(("name", "kind"), [("gemma3", "sliding_window"), ("llama4", "chunked_local_attention")])
def test_what_does_not_grow_with_a_context_stays_whole(name, kind):
    whole, split = (engine_spec(name, 4, shards, block_size=8).kv_groups for shards in (1, 2))
    parts = {group.spec.kind: group.spec.context_shards for group in split}
    assert parts == {"full_attention": 2, kind: 1}
    assert {group.spec for group in whole if group.spec.kind == kind} <= {group.spec for group in split}


def test_what_drafts_is_split_if_it_can_be():
    built = engine_spec("deepseek_v3", 4, 1)
    [*specs], features = built.cache_specs, LatentSpec(8, 48, 4)
    decoder = built.decoders[0]
    for num_kv_heads, shards in ((1, 4), (4, 1)):
        head = dataclasses.replace(decoder, layers=decoder.layers[:1], num_kv_heads=num_kv_heads)
        of_head = AttentionSpec(8, 4, 24, 4, head_copies=4 // num_kv_heads)
        *model, keys, rest = split_contexts([*specs, of_head, features], 4, 4, [decoder, head])
        assert {spec.context_shards for spec in model} == {4}
        assert keys == AttentionSpec(8, num_kv_heads, 24, 4, context_shards=shards), "parts in place of copies"
        assert rest == features
    states = StateSpec(8, (StateArray((4, 8), "float32"),))
    with pytest.raises(ConfigError, match=r"no layer of the model caches all tokens \(mamba\), so there is nothing"):
        split_contexts([states] * len(specs), 4, 4, [decoder])


def test_blocks_are_split_in_equal_parts():
    with pytest.raises(ConfigError, match="block_size is 9, but each block lies on decode_context_parallel_size = 2"):
        engine_spec("llama", 4, 2, block_size=9)
    assert engine_spec("llama", 8, 4).config.cache.block_size == 128


@pytest.mark.parametrize(("name", "devices", "shards"), [("llama", 8, 4), ("deepseek_v3", 8, 8)])
def test_the_same_memory_holds_so_many_times_as_many_tokens(name, devices, shards):
    whole, split = (engine_spec(name, devices, each, block_size=32) for each in (1, shards))
    block = lambda built: KVCacheConfig((1,), built.kv_groups).num_bytes(devices)
    assert block(whole) == shards * block(split)
    assert {group.spec.device_slots for group in split.kv_groups} == {32 // shards}


def test_what_merging_exchanges_is_counted_for_split_layers():
    """Queries and results of the heads of four devices, but for what a device has itself; windows exchange nothing."""
    built = engine_spec("gemma3", 8, 4)
    split = [g for g in built.kv_groups if g.spec.context_shards > 1]
    layers, heads = sum(len(g.layer_idxs) for g in split), built.decoder.num_heads * 4 // 8
    assert 0 < layers < built.decoder.num_layers
    wanted = layers * heads * built.decoder.head_dim * 3 / 4 * (4 + 4)
    assert exchanged_bytes(built.decoders, built.kv_groups, built.attention, "float32") == wanted


def test_pages_of_a_split_cache_are_those_of_a_whole_one():
    """What names them (`kv_transfer/opening.py`) is their spec in words."""
    spec = LatentSpec(block_size=8, width=12, dtype_bytes=4)
    split = dataclasses.replace(spec, context_shards=4)
    assert str(KVCacheGroup(spec, (0,))) == str(KVCacheGroup(split, (0,)))
    assert spec != split
