"""Sampling defaults and end-of-sequence ids that a model brings along in `generation_config.json`, or in config.json.

This module knows the file, not how requests use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.engine.input.tokenizer import read_json
from jaxpaged.errors import CheckpointError, ConfigError, RequestError, did_you_mean
from jaxpaged.sampling_params import OPENAI_PENALTIES, SHAPING, SamplingParams

SAMPLING_FIELDS = {name: name for name in SHAPING if name not in OPENAI_PENALTIES} | {"max_new_tokens": "max_tokens"}
"""Name in the file -> name in SamplingParams. Other entries of the file do not change what vLLM's users get."""

NEUTRAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
"""What transformers once wrote into every config.json, without anybody having asked for it."""


@dataclass(frozen=True)
class GenerationDefaults:
    """`sampling` are SamplingParams fields for requests that bring none; `eos_token_ids` end every sequence."""

    sampling: Mapping[str, Any]
    eos_token_ids: tuple[int, ...] = ()

    def sampling_params(self) -> SamplingParams:
        """A fresh SamplingParams with these defaults."""
        return SamplingParams(**self.sampling)


def load_generation_defaults(
    folder: Path, source: str = "auto", overrides: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """Read a model's folder. `source` "vllm" leaves the file's sampling fields out; its end ids always count.

    `overrides` win over the file; they have its names. Raises ConfigError for unknown ones, and CheckpointError
    when the file is damaged.
    """
    overrides = dict(overrides or {})
    known = [*SAMPLING_FIELDS, "eos_token_id"]
    for name in overrides:
        if name not in known:
            raise ConfigError(
                f"override_generation_config has the unknown key {name!r}.{did_you_mean(name, known)} "
                f"Known are {', '.join(known)}."
            )
    description = read_json(folder / "config.json")
    path = folder / "generation_config.json"
    file = read_json(path) if path.exists() else in_description(description)
    merged = {**(file if source == "auto" else {}), **overrides}
    sampling = {ours: merged[theirs] for theirs, ours in SAMPLING_FIELDS.items() if merged.get(theirs) is not None}
    eos = overrides.get("eos_token_id", file.get("eos_token_id", description.get("eos_token_id")))
    defaults = GenerationDefaults(sampling, token_ids(eos))
    try:
        defaults.sampling_params()
    except RequestError as error:
        error_class, place = (
            (ConfigError, "override_generation_config") if overrides else (CheckpointError, "generation_config.json")
        )
        raise error_class(f"{place} of {folder} does not fit: {error} Or use generation_config='vllm'.") from error
    return defaults


def in_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of an old config.json, where they stood before there was a file for them."""
    return {name: description[name] for name, usual in NEUTRAL.items() if description.get(name, usual) != usual}


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids, or nothing, as a tuple. Raises CheckpointError for anything else."""
    ids = [] if value is None else [value] if isinstance(value, int) else value
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise CheckpointError(f"eos_token_id is {value!r}; it must be a token id or a list of them.")
    return tuple(ids)
