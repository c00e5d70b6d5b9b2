"""Every option of the engine: frozen classes, resolved once, checked before any weight is read.

    options = EngineConfig.from_options(model="...", max_num_seqs=64)   # unknown keys are errors
    config = options.resolve(facts, platform="cpu")                     # what model and platform decide is settled

Options are declared in `sections.py`, put together in `engine_config.py`, and settled in `resolution.py`. No model file
is read here: what is needed of a model comes in as `ModelFacts`.
"""

from jaxpaged.config.engine_config import EngineConfig, all_options
from jaxpaged.config.resolution import ModelFacts, settled
from jaxpaged.config.sections import EMBEDDED_MODEL, RAW_AND_PROCESSED, CacheConfig, ModelConfig, SchedulerConfig

__all__ = [
    "EMBEDDED_MODEL",
    "RAW_AND_PROCESSED",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "ModelFacts",
    "SchedulerConfig",
    "all_options",
    "settled",
]
