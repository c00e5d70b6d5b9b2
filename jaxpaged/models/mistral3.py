"""Mistral Small 3.1 and 3.2: a Mistral that sees, with Pixtral's tower."""

from dataclasses import replace
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, short
from jaxpaged.models.vision.pixtral import PIXTRAL_VISION
from jaxpaged.models.wrapped import text_part


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Of the part of config.json that describes the language model, which must be a Mistral."""
    text = text_part(hf)
    if text.get("model_type", "mistral") != "mistral":
        raise CheckpointError(
            f"config.json: model_type of text_config is {short(text['model_type'])}; of this architecture only "
            "'mistral' is supported."
        )
    return llama.mistral_config_from_hf(text)


MISTRAL3 = replace(
    llama.MISTRAL,
    architectures=("Mistral3ForConditionalGeneration",),
    config_from_hf=config_from_hf,
    vision=PIXTRAL_VISION,
)
