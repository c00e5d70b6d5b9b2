"""An engine's model for its trainer, and which engines have none. What it computes is in `models/dense_forward.py`."""

from collections.abc import Sequence

from jaxpaged.errors import ConfigError
from jaxpaged.models.dense_forward import DenseModel, check
from jaxpaged.worker.engine_spec import EngineSpec


def dense_model(stages: Sequence[EngineSpec]) -> DenseModel:
    """The model of an engine that has these stages, mostly one. Raises ConfigError."""
    if len(stages) > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {len(stages)}, and dense_forward takes whole models. Use tensor_parallel_size."
        )
    [spec] = stages
    if spec.pools:
        raise ConfigError("the engine pools, and dense_forward takes models that generate.")
    if spec.config.parallel.expert_balance is not None:
        raise ConfigError(
            "enable_eplb moves experts and copies them, and copies would learn apart. Leave it out for training."
        )
    check(spec.decoder, spec.mesh)
    return DenseModel(spec.decoder_model, spec.decoder, spec.mesh)
