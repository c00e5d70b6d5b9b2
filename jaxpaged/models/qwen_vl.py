"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen 2, Qwen 3 or Qwen 3 with experts, whose tokens have three positions, beside a
tower (arXiv 2409.12191, 2502.13923, 2511.21631).

In config.json the fields of the language model are in `text_config`, or, as the older ones are published, beside
`vision_config`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.experts import Experts
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models import qwen3
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, mlp_with_bias, pre_norm_config
from jaxpaged.models.expert_specs import stacked_expert_specs
from jaxpaged.models.qwen2 import QWEN2, qwen_windows
from jaxpaged.models.qwen3 import QWEN3
from jaxpaged.models.qwen_moe import QWEN3_MOE, qwen3_config_from_hf
from jaxpaged.models.vision.qwen_vl import QWEN2_5_VISION, QWEN2_VISION, QWEN3_VISION
from jaxpaged.models.wrapped import OF_IMAGES, text_part


def text_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model, also where they are not in a part of their own."""
    return {name: value for name, value in text_part(hf).items() if name not in OF_IMAGES}


def with_sections(hf: dict[str, Any], sections: list[int], takes_turns: bool) -> dict[str, Any]:
    """The fields with sections of three positions, unless they have other ones; whether they take turns is not theirs
    to say. The type "mrope" is no scaling."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = hf.get(name) or {}
    if not isinstance(given, dict):
        return hf  # which is an error elsewhere
    kinds = {kind: "default" for kind in ("type", "rope_type") if given.get(kind) == "mrope"}
    return {**hf, name: {"mrope_section": sections, **given, **kinds, "mrope_interleaved": takes_turns}}


def qwen2_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen2-VL's and Qwen2.5-VL's config.json. Embeddings are tied where either part says so."""
    text = text_fields(hf)
    if (hf.get("text_config") or {}).get("tie_word_embeddings") is True:
        text["tie_word_embeddings"] = True
    fields = HfFields(with_sections({"rope_theta": 1e6, **text}, [16, 24, 24], takes_turns=False))
    return pre_norm_config(fields, qwen_windows(fields), qkv_bias=True)


def qwen3_vl_config_from_hf(read: Callable[[dict[str, Any]], DecoderConfig], hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3-VL's. What `text_config` says of ties is not asked; weights of experts are always normalised."""
    text = {"rope_theta": 5e5, **text_fields(hf), "tie_word_embeddings": hf.get("tie_word_embeddings") or False}
    if "moe_intermediate_size" in text:
        text["norm_topk_prob"] = True
    return read(with_sections(text, [24, 20, 20], takes_turns=True))


def stacked_experts(config: DecoderConfig, name: str, layer: int) -> Mlp | Experts:
    """Specs of the feed-forward block of a layer."""
    if layer not in config.sparse_layers:
        return mlp_with_bias(config, f"{name}.mlp")
    return stacked_expert_specs(f"{name}.mlp")


QWEN2_VL = replace(
    QWEN2,
    architectures=("Qwen2VLForConditionalGeneration",),
    config_from_hf=qwen2_config_from_hf,
    vision=QWEN2_VISION,
)
QWEN2_5_VL = replace(QWEN2_VL, architectures=("Qwen2_5_VLForConditionalGeneration",), vision=QWEN2_5_VISION)
QWEN3_VL = replace(
    QWEN3,
    architectures=("Qwen3VLForConditionalGeneration",),
    config_from_hf=partial(qwen3_vl_config_from_hf, qwen3.config_from_hf),
    vision=QWEN3_VISION,
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    config_from_hf=partial(qwen3_vl_config_from_hf, qwen3_config_from_hf),
    param_specs=partial(decoder_specs, qk_norm=True, feed_forward=stacked_experts),
    vision=QWEN3_VISION,
)
