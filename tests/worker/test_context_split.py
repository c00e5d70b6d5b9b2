"""Which caches can be split over devices by token, and what is said of those that cannot."""

import dataclasses

import pytest

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import KVCacheConfig, KVCacheGroup, LatentSpec, StateArray, StateSpec
from jaxpaged.models.registry import model_for
from jaxpaged.worker.context_split import split_contexts
from jaxpaged.worker.programs.blueprint import Blueprint
from tests.models.checkpoints import CONFIGS

FACTS = ModelFacts(max_position_embeddings=128, dtype="float32", num_heads=8, vocab_size=211)


def blueprint(name, devices, shards, **options):
    hf = CONFIGS[name]
    model = model_for(hf)
    given = EngineConfig.from_options(
        tensor_parallel_size=devices, decode_context_parallel_size=shards, max_model_len=64,
        attention_backend="reference", **options,
    )  # fmt: skip
    return Blueprint(given.resolve(FACTS, "cpu"), model, model.config_from_hf(hf), make_mesh(devices))


@pytest.mark.parametrize(
    ("name", "devices", "shards", "message"),
    [
        ("llama", 8, 3, "decode_context_parallel_size 3 does not divide tensor_parallel_size 8.*one of .1, 2, 4, 8"),
        ("llama", 8, 8, "8 must divide the copies of each key-value head: the 2 heads of the model have 4 on"),
        ("llama", 2, 2, "the 2 heads of the model have 1 on tensor_parallel_size 2 devices"),
        ("mistral_window", 4, 2, r"is 2, but layers of this model see \d+ tokens only \(sliding_window\)"),
        ("llama4", 4, 2, r"tokens only \(chunked_local_attention\)"),
    ],
)
def test_caches_that_cannot_be_split_are_refused_with_the_reason(name, devices, shards, message):
    with pytest.raises(ConfigError, match=message):
        blueprint(name, devices, shards, block_size=24).kv_groups  # noqa: B018


def test_caches_of_other_kinds_are_refused():
    [*specs], decoders = blueprint("deepseek_v3", 4, 1)._cache_specs, blueprint("deepseek_v3", 4, 1).decoders
    with pytest.raises(ConfigError, match="is 4, but a head that drafts keeps features, which are not split"):
        split_contexts([*specs, LatentSpec(8, 48, 4)], 4, 4, decoders)
    states = StateSpec(8, (StateArray((4, 8), "float32"),), num_records=1, record_bytes=8)
    with pytest.raises(ConfigError, match="recurrent states, which this model has, are not split"):
        split_contexts([states] * len(specs), 4, 4, decoders)


def test_blocks_are_split_in_equal_parts():
    with pytest.raises(ConfigError, match="block_size is 9, but each block lies on decode_context_parallel_size = 2"):
        blueprint("llama", 4, 2, block_size=9)
    assert blueprint("llama", 8, 4).config.cache.block_size == 128


@pytest.mark.parametrize(("name", "devices", "shards"), [("llama", 8, 4), ("deepseek_v3", 8, 8)])
def test_the_same_memory_holds_so_many_times_as_many_tokens(name, devices, shards):
    whole, split = (blueprint(name, devices, each, block_size=32) for each in (1, shards))
    block = lambda built: KVCacheConfig((1,), built.kv_groups).num_bytes(devices)
    assert block(whole) == shards * block(split)
    assert {group.spec.device_slots for group in split.kv_groups} == {32 // shards}


def test_pages_of_a_split_cache_are_those_of_a_whole_one():
    """What names them (`kv_transfer/opening.py`) is their spec in words."""
    spec = LatentSpec(block_size=8, width=12, dtype_bytes=4)
    split = dataclasses.replace(spec, context_shards=4)
    assert str(KVCacheGroup(spec, (0,))) == str(KVCacheGroup(split, (0,)))
    assert spec != split
