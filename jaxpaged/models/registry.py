"""Architecture name in config.json -> the module that implements it."""

from typing import Any

from jaxpaged.errors import CheckpointError, did_you_mean
from jaxpaged.models.config import architecture_of
from jaxpaged.models.gemma2 import GEMMA2
from jaxpaged.models.gemma3 import GEMMA3
from jaxpaged.models.interface import Model
from jaxpaged.models.llama import LLAMA, MISTRAL
from jaxpaged.models.phi3 import PHI3
from jaxpaged.models.qwen2 import QWEN2
from jaxpaged.models.qwen3 import QWEN3

MODELS: dict[str, Model] = {
    name: model for model in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3) for name in model.architectures
}
"""Every supported architecture."""


def model_for(hf: dict[str, Any]) -> Model:
    """The model of a raw config.json. CheckpointError naming the supported ones when there is none."""
    name = architecture_of(hf)
    if name not in MODELS:
        raise CheckpointError(
            f"config.json: the architecture {name!r} is not supported.{did_you_mean(name, MODELS)} "
            f"Supported: {', '.join(MODELS)}."
        )
    return MODELS[name]
