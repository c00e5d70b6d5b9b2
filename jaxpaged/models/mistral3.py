"""Mistral Small 3.1 and 3.2, Ministral 3, Pixtral 12B in the form of Llava: Mistrals that see, with Pixtral's tower.

Ministral 3's queries grow with their position (arXiv 2501.19399), and its positions are stretched by yarn.
"""

from dataclasses import replace
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields, short
from jaxpaged.models.decoder import pre_norm_config
from jaxpaged.models.rope_config import growth_of_queries, with_rope
from jaxpaged.models.vision.pixtral import PIXTRAL_VISION
from jaxpaged.models.wrapped import text_part


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Of the part of config.json that describes the language model, which must be a Mistral or a Ministral 3."""
    text = {name: value for name, value in text_part(hf).items() if name != "is_composition"}
    read = READERS.get(HfFields(text).text("model_type") or "mistral")
    if read is None:
        raise CheckpointError(
            f"config.json: model_type of text_config is {short(text['model_type'])}; of this architecture "
            f"{', '.join(READERS)} and mistral4 are supported."
        )
    return read(text)


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What Ministral 3's config.json means where it says nothing of positions."""


def ministral_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Ministral 3's config.json. Every layer has the same window, or none."""
    fields = HfFields({"head_dim": 128, **with_rope(hf, MINISTRAL_ROPE)})
    window = fields.count_or_none("sliding_window")
    windows = [window] * fields.count("num_hidden_layers")
    return pre_norm_config(fields, windows, norm_eps=1e-5, query_growth=growth_of_queries(fields))


READERS = {"mistral": llama.mistral_config_from_hf, "ministral3": ministral_config_from_hf}
"""`model_type` of the language model -> what reads its part."""
MINISTRAL3 = replace(llama.MISTRAL, architectures=("Ministral3ForCausalLM",), config_from_hf=ministral_config_from_hf)


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
