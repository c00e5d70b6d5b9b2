"""The layers of a model dealt to stages, and the one KV cache that all stages have: known from shapes alone."""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from jaxpaged.config import EngineConfig
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.models.stages import deal_layers
from jaxpaged.worker.kv_blocks import Division
from jaxpaged.worker.programs.blueprint import Blueprint


def stage_blueprints(
    config: EngineConfig, model: Model, decoder: DecoderConfig, meshes: Sequence[Mesh | AbstractMesh]
) -> list[Blueprint]:
    """One for each stage; of an engine without stages one for all layers. Raises ConfigError."""
    stages = deal_layers(decoder.num_layers, len(meshes)) if len(meshes) > 1 else (None,)
    return [Blueprint(config, model, decoder, *each) for each in zip(meshes, stages, strict=True)]


def whole_kv_cache(blueprint: Blueprint, num_blocks: int) -> KVCacheConfig:
    """The cache of all stages as one, whose first pool has `num_blocks`: a block id is a block on each of them."""
    return Division(blueprint.whole_groups, blueprint.demand, blueprint.num_shards).kv_cache(num_blocks)
