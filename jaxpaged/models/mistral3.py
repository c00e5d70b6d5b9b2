"""Mistral Small 3.1 and 3.2, and Pixtral 12B in the form of Llava: Mistrals that see, with Pixtral's tower."""

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
    return llama.mistral_config_from_hf({name: value for name, value in text.items() if name != "is_composition"})


MISTRAL3 = replace(
    llama.MISTRAL,
    architectures=("Mistral3ForConditionalGeneration",),
    config_from_hf=config_from_hf,
    vision=PIXTRAL_VISION,
)


def pixtral_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Of Llava's config.json, whose text_config leaves out what is as transformers has it."""
    text = text_part(hf)
    return config_from_hf({**hf, "text_config": {**MISTRAL_DEFAULTS, **text}})


MISTRAL_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
PIXTRAL = replace(MISTRAL3, architectures=("LlavaForConditionalGeneration",), config_from_hf=pixtral_config_from_hf)


def is_pixtral(hf: dict[str, Any]) -> bool:
    """Whether a Llava, of which there are several kinds, has Pixtral's tower."""
    vision = hf.get("vision_config")
    return isinstance(vision, dict) and vision.get("model_type") == "pixtral"
