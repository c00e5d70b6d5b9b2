"""What a config.json describes where it is no model that is supported: in one sentence, with what would serve now.

Knows names that people meet on hubs, and no mathematics.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.other_formats import SUPPORTED

SENSES = {
    "images": ("vision_config", "visual", "img_processor", "vision_tower", "mm_vision_tower", "image_token_id"),
    "audio": ("audio_config", "audio_encoder_config", "audio_processor", "audio_token_id", "thinker_config"),
}
"""What a model reads besides text -> fields of config.json that say so."""
REASONS = {
    "MiMoV2ForCausalLM": (
        "Its queries, keys and values are one matrix, cut for several devices, of which config.json does not tell how "
        "many. Serve the model's GGUF version, which has them in order, or MiMo-V2-Flash."
    )
}
"""Architectures that are not read -> why, and what to do."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields that describe the language model inside."""


def architecture_error(name: str, hf: Mapping[str, Any], supported: Collection[str]) -> CheckpointError:
    """The error for an architecture that is not among `supported`."""
    name = name[:80]
    if name in REASONS:
        return CheckpointError(f"config.json describes {name}, which is not supported yet. {REASONS[name]} {SUPPORTED}")
    senses = " and ".join(sense for sense, fields in SENSES.items() if any(hf.get(field) for field in fields))
    if senses:
        inside = text_model_of(hf, supported)
        remedy = (
            f"Serve a model for text only with the same layers, of the architecture {inside}."
            if inside
            else "Serve a model for text only."
        )
        return CheckpointError(
            f"config.json describes {name}, a model that also reads {senses}. It is not supported yet. "
            f"{remedy} {SUPPORTED}"
        )
    if "eagle" in name.lower() or "speculators_model_type" in hf:
        return CheckpointError(
            f"config.json describes {name}, a head that drafts for another model. Name it in --speculative-config, "
            f"with the method eagle3 if it is one, and serve the other model. {SUPPORTED}"
        )
    what = "an encoder with a decoder, and not supported" if hf.get("is_encoder_decoder") else "not supported yet"
    layers = name.partition("For")[0]
    same = next(
        (f"{each}, with layers of the same name, is. " for each in supported if each.partition("For")[0] == layers), ""
    )
    return CheckpointError(
        f"config.json describes the architecture {name}, which is {what}. {same or 'Serve one that is. '}{SUPPORTED}"
    )


def tower_error(name: str) -> CheckpointError:
    """The error for an architecture of which only the language model is supported."""
    return CheckpointError(
        f"config.json describes {name}, a model that also reads images. What reads them is not supported; its language "
        f"model is: start with --language-model-only to serve it for text. {SUPPORTED}"
    )


def text_model_of(hf: Mapping[str, Any], supported: Collection[str]) -> str | None:
    """The supported architecture whose layers the language model inside has, by its name; None where none is known."""
    part = next((hf[field] for field in TEXT_PARTS if isinstance(hf.get(field), dict)), hf)
    names = part.get("architectures") if part is not hf else None
    first = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if first in supported:
        return first
    kind = plain(str(part.get("model_type") or hf.get("model_type") or ""))
    fitting = [each for each in supported if kind.startswith(plain(each.removesuffix("ForCausalLM")))]
    return max(fitting, key=len, default=None)


def plain(name: str) -> str:
    """`qwen2vl` of `qwen2_vl`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
