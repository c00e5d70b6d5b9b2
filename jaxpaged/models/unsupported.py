"""What a config.json describes where it is no model that is supported: in one sentence, with what would serve now.

Knows names that people meet on hubs, and no mathematics.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.other_formats import SUPPORTED, quantised

SENSES = {
    "images": ("vision_config", "visual", "img_processor", "vision_tower", "mm_vision_tower", "image_token_id"),
    "audio": ("audio_config", "audio_encoder_config", "audio_processor", "audio_token_id", "thinker_config"),
}
"""What a model reads besides text -> fields of config.json that say so."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields that describe the language model inside."""
METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8 (without a scale for every block)",
    "fbgemm_fp8": "FBGEMM FP8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "quanto": "Quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
    "auto-round": "AutoRound",
    "modelopt": "ModelOpt",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "bitnet": "BitNet",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "quark": "Quark",
}
"""`quant_method` -> what its makers call it."""


def architecture_error(name: str, hf: Mapping[str, Any], supported: Collection[str]) -> CheckpointError:
    """The error for an architecture that is not among `supported`."""
    name = name[:80]
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


def quantisation_error(given: Any, file: str = "config.json") -> CheckpointError:
    """The error for a `quantization_config`, or a file in place of it, of a kind that is not read."""
    given = given if isinstance(given, Mapping) else {}
    method, bits = given.get("quant_method"), bits_of(given)
    name = METHODS.get(str(method)) or METHODS.get(str(method).replace("_", "-"))
    if name is None:
        name = "MLX" if method is None and "group_size" in given else str(method or "an unnamed method")[:40]
    how = f"with {name}" + (f" to {bits} bits" if bits else "")
    return quantised(f"{file} says that the weights were quantised {how}", bits)


OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where quantisation is described beside config.json -> what is meant unless the file says so."""


def refuse_quantised_folder(folder: Path, hf: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a folder whose weights were quantised by a tool that says so in a file of its own."""
    for name, method in OLD_FILES.items():
        if (folder / name).exists() and not hf.get("quantization_config"):
            try:
                given = json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                given = {}
            raise quantisation_error({"quant_method": method, **(given if isinstance(given, dict) else {})}, name)


def bits_of(given: Mapping[str, Any]) -> int | None:
    """How many bits a weight has, as far as the description says so."""
    groups = given.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [group.get("weights") for group in groups if isinstance(group, Mapping)]
    told = [
        given.get("bits"),
        given.get("w_bit"),
        *(each.get("num_bits") for each in weights if isinstance(each, Mapping)),
    ]
    told += [size for size in (4, 8) if given.get(f"load_in_{size}bit") is True]
    told += [8 for name in ("quant_method", "quant_type") if "fp8" in str(given.get(name, ""))]
    return next((bits for bits in told if type(bits) is int and 0 < bits < 16), None)
