"""Pooling: one vector or a few scores per prompt, in place of generated tokens. Parameters, results and options.

    runner   "generate" or "pooling": what an engine is for
    convert  "embed" (the hidden state itself) or "classify" (the scores of the model's classifier)

Names are vLLM's. This module knows neither devices nor how a result is computed.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jaxpaged.errors import ConfigError, RequestError, SuggestsNames, did_you_mean
from jaxpaged.result import Result

POOLING_TYPES = ("LAST", "MEAN", "CLS")
"""Which hidden states count: that of the last token, the mean of all, or that of the first token."""
POOLER_KEYS = ("pooling_type", "use_activation", "normalize")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
TASKS = {"embed": ("embed",), "classify": ("classify", "score")}
"""Conversion -> what a request may ask for."""


class PoolingParams(msgspec.Struct, metaclass=SuggestsNames, kw_only=True, omit_defaults=True):
    """What a request wants of its vector. None means the engine's default.

    `dimensions` keeps so many leading numbers of an embedding, where the model was trained for it. `use_activation`
    normalises an embedding to length 1, or makes probabilities of scores; `normalize` is an older name of it.
    `truncate_prompt_tokens` keeps that many of the prompt's last tokens; -1: as many as the model takes.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def activation_wanted(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation

    def verify(self) -> None:
        """Raise RequestError for a value of the wrong type, or for two names of one thing that differ."""
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; it must be true or false.", name)
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise RequestError(
                f"use_activation is {self.use_activation} and normalize is {self.normalize}, which mean the same. "
                "Leave normalize out.",
                "normalize",
            )
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(f"dimensions is {size!r}; it must be a whole number of at least 1.", "dimensions")


# ---- results -------------------------------------------------------------------------------------


class PoolingOutput(Result):
    """The numbers of one prompt, float32: an embedding [D] or scores [Y], as a numpy array."""

    data: Any


class EmbeddingOutput(Result):
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(Result):
    """A probability for every label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(Result):
    """How well two texts fit."""

    score: float


class PoolingRequestOutput(Result):
    """The result of one prompt; `outputs` has no data when there is an `error`."""

    request_id: str
    outputs: Any  # PoolingOutput, or one of those above
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


# ---- options -------------------------------------------------------------------------------------


def resolved_pooling(
    runner: str, convert: str, pooler: Mapping[str, Any], task: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The options `runner`, `convert` and `pooler_config` with nothing left open.

    `task` is what the checkpoint is made for: "generate", "embed" or "classify". `defaults` are the pooling options
    that come with it. Raises ConfigError for what it cannot do, and for options that contradict each other.
    """
    if runner == "auto":
        runner = "generate" if task == "generate" and convert in ("auto", "none") else "pooling"
    if runner == "generate":
        return resolved_generation(convert, pooler, task)
    if convert in ("auto", "none"):
        convert = "classify" if task == "classify" else "embed"
    if convert == "classify" and task != "classify":
        raise ConfigError(
            f"convert is 'classify', but the checkpoint, made to {task}, has no classifier. Use convert='embed', or a "
            "checkpoint whose architecture ends in ForSequenceClassification."
        )
    merged = {"pooling_type": "LAST", **defaults, **checked_pooler(pooler)}
    return {"runner": runner, "convert": convert, "pooler_config": merged}


def resolved_generation(convert: str, pooler: Mapping[str, Any], task: str) -> dict[str, Any]:
    if task in ("embed", "classify"):
        raise ConfigError(
            f"runner is 'generate', but the checkpoint is made to {task}: it has no table of logits. "
            "Use runner='pooling'."
        )
    if convert in ("embed", "classify") or pooler:
        name, value = ("pooler_config", dict(pooler)) if pooler else ("convert", convert)
        raise ConfigError(f"{name} is {value!r}, but the runner is 'generate'. Leave it out, or use runner='pooling'.")
    return {"runner": "generate", "convert": "none", "pooler_config": {}}


def checked_pooler(pooler: Mapping[str, Any]) -> dict[str, Any]:
    """`pooler_config` with `use_activation` for its older name. Raises ConfigError for what is not known."""
    for name, value in pooler.items():
        if name not in POOLER_KEYS:
            near = did_you_mean(str(name), POOLER_KEYS)
            raise ConfigError(f"pooler_config has the unknown key {name!r}.{near} Known: {', '.join(POOLER_KEYS)}.")
        if name == "pooling_type" and value not in POOLING_TYPES:
            raise ConfigError(f"pooler_config.pooling_type is {value!r}; it must be one of {', '.join(POOLING_TYPES)}.")
        if name != "pooling_type" and not isinstance(value, bool):
            raise ConfigError(f"pooler_config.{name} is {value!r}; it must be true or false.")
    result = dict(pooler)
    old = result.pop("normalize", None)
    if old is not None and result.setdefault("use_activation", old) != old:
        raise ConfigError("pooler_config has use_activation and normalize, which mean the same. Leave normalize out.")
    return result
