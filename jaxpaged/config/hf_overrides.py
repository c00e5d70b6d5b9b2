"""`hf_overrides`: a model's config.json with some fields replaced, as the engine and the front end both read it."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import ConfigError

READ_ELSEWHERE = {
    "eos_token_id": "override_generation_config, or stop_token_ids of a request",
    **dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty"), "override_generation_config"),
    **dict.fromkeys(
        (
            "id2label",
            "num_labels",
            "problem_type",
            "is_matryoshka",
            "matryoshka_dimensions",
            "sentence_transformers",
            "sbert_ce_default_activation_function",
        ),
        "pooler_config, or change config.json in a copy of the folder",
    ),
}
"""Fields that the front end reads from the file: what to use in place of an override."""


def overridden(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with fields replaced, those of an object inside it one by one. Raises ConfigError
    for fields that are read elsewhere, too."""
    if overrides.get("head_dtype", "float32") != "float32":
        raise ConfigError(
            f"hf_overrides sets head_dtype {overrides['head_dtype']!r}, but logits are float32 sums always, of "
            "products in the type of the model. Give float32, or leave it out."
        )
    for name in overrides.keys() & READ_ELSEWHERE.keys():
        raise ConfigError(f"hf_overrides sets {name}, which it cannot. Use {READ_ELSEWHERE[name]}.")
    merged = dict(hf)
    for name, value in overrides.items():
        if name == "head_dtype":
            continue
        before = hf.get(name)
        merged[name] = value
        if isinstance(before, dict) and isinstance(value, Mapping):
            merged[name] = overridden(before, value)
    return merged
