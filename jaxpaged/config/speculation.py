"""What `speculative_config` may say: how tokens are drafted, and how many at a time.

The keys are vLLM's. This module checks them and nothing else: who drafts, and who verifies, is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean

MOST_DRAFTS = 32
"""Tokens that a row drafts at a time, at most: a program holds the logits of all of them."""
NUMBERS = {
    "num_speculative_tokens": MOST_DRAFTS,
    "prompt_lookup_min": 32,
    "prompt_lookup_max": 32,
    "suffix_decoding_max_tree_depth": 64,
    "draft_tensor_parallel_size": 4096,
}
"""Keys whose value is a whole number from 1, and its largest value."""
MODEL_KEYS = ("model", "revision", "quantization", "draft_tensor_parallel_size")
METHODS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("suffix_decoding_max_tree_depth",),
    "draft_model": MODEL_KEYS,
    "eagle3": MODEL_KEYS,
    "mtp": (),
}
"""Each method and its own keys."""
MODEL_METHODS = ("draft_model", "eagle3", "mtp")
"""Methods whose drafts a model or a head computes; those with the key `model` name its weights."""
OWN_DRAFT_MODELS = {("draft_model", "demo"): "demo-draft", ("eagle3", "demo"): "demo-eagle3"}
"""Method and embedded model, and what ships beside it to draft for it."""
OTHER_NAMES = {"mimo_mtp": "mtp"}
"""Older names of methods."""
LATER_METHODS = ("eagle", "medusa", "mlp_speculator")
"""vLLM's methods that are not there yet."""
QUANTIZATIONS = (None, "int8", "int4")
SHORTEST_SUFFIX = 2
NUM_ANSWER_TOKENS = 16_384
"""Tokens of earlier answers in which suffixes are looked for."""


@dataclass(frozen=True)
class Speculation:
    """A checked `speculative_config`.

    num_speculative_tokens: the most tokens that are drafted for a row and step. match_lengths: how many of the newest
    tokens must have occurred before, at least, and how many are looked at; None: nothing is looked up.
    num_answer_tokens: of earlier answers, that are looked at besides the request's own.
    """

    method: str
    num_speculative_tokens: int
    match_lengths: tuple[int, int] | None
    num_answer_tokens: int = 0


def speculation_of(given: Mapping[str, Any]) -> Speculation | None:
    """What the option asks for; None where it is empty. `given` is checked."""
    if not given:
        return None
    method, number = given["method"], given["num_speculative_tokens"]
    if method in MODEL_METHODS:
        return Speculation(method, number, None)
    if method == "suffix":
        lengths = SHORTEST_SUFFIX, given["suffix_decoding_max_tree_depth"]
        return Speculation(method, number, lengths, NUM_ANSWER_TOKENS)
    return Speculation(method, number, (given["prompt_lookup_min"], given["prompt_lookup_max"]))


def checked_speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative_config` with every key of its method. Raises ConfigError for what is unknown or out of range."""
    if not given:
        return {}
    method = checked_method(given.get("method"))
    known = ["method", "num_speculative_tokens", *METHODS[method]]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"speculative_config has the unknown key {name!r}.{did_you_mean(str(name), known)} "
                f"Known for {method!r}: {', '.join(known)}."
            )
        check_value(name, value)
    if "num_speculative_tokens" not in given:
        raise ConfigError(
            "speculative_config has no num_speculative_tokens. Say how many tokens may be drafted at a time, such as 4."
        )
    return {**own_keys(method, given), **given, "method": method}


def check_value(name: str, value: Any) -> None:
    """Raise ConfigError unless a key may have that value."""
    if name in NUMBERS:
        allowed = f"a whole number from 1 to {NUMBERS[name]}"
        is_allowed = type(value) is int and 1 <= value <= NUMBERS[name]
    elif name == "quantization":
        allowed, is_allowed = "'int8', 'int4' or null", value in QUANTIZATIONS
    else:
        allowed, is_allowed = "a text", (isinstance(value, str) and value != "") or (name, value) == ("revision", None)
    if not is_allowed:
        raise ConfigError(f"speculative_config.{name} is {value!r}; it must be {allowed}.")


def own_keys(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a method with nothing left open. Raises ConfigError where they contradict each other."""
    if method in MODEL_METHODS:
        return {key: None for key in ("revision", "quantization") if key in METHODS[method]}
    if method == "suffix":
        depth = given.get("suffix_decoding_max_tree_depth", 24)
        if depth < SHORTEST_SUFFIX:
            raise ConfigError(
                f"speculative_config.suffix_decoding_max_tree_depth is {depth}; it must be at least {SHORTEST_SUFFIX}."
            )
        return {"suffix_decoding_max_tree_depth": depth}
    most = given.get("prompt_lookup_max", given.get("prompt_lookup_min", 5))
    least = given.get("prompt_lookup_min", min(most, 2))
    if least > most:
        raise ConfigError(
            f"speculative_config.prompt_lookup_min ({least}) is more than prompt_lookup_max ({most}). Lower the first."
        )
    return {"prompt_lookup_min": least, "prompt_lookup_max": most}


def checked_method(method: Any) -> str:
    """Raises ConfigError when there is no such method, or not yet."""
    method = OTHER_NAMES.get(method, method) if isinstance(method, str) else method
    if isinstance(method, str) and method in METHODS:
        return method
    if method in LATER_METHODS:
        raise ConfigError(
            f"speculative_config.method {method!r} is not there yet. Use {' or '.join(map(repr, METHODS))}."
        )
    near = did_you_mean(str(method), (*METHODS, *LATER_METHODS))
    raise ConfigError(f"speculative_config.method is {method!r}; it must be one of {', '.join(METHODS)}.{near}")


def draft_model_of(given: Mapping[str, Any], model: str) -> str | None:
    """Folder or hub id of what drafts for `model`; None where it has no weights of its own. Raises ConfigError."""
    method = given.get("method", "")
    if "model" not in METHODS.get(method, ()):
        return None
    name = given.get("model") or OWN_DRAFT_MODELS.get((method, model))
    if name is None:
        what = "model" if method == "draft_model" else "head"
        raise ConfigError(f"speculative_config has no model. Name the folder or hub id of the {what} that drafts.")
    return name


def resolved_speculation(given: Mapping[str, Any], runner: str, num_devices: int, model: str) -> dict[str, Any]:
    """`speculative_config` for `model` with nothing left open. Raises ConfigError for what it cannot be."""
    if given and runner == "pooling":
        raise ConfigError("speculative_config is given, but a pooling engine draws no tokens. Leave it out.")
    if given.get("draft_tensor_parallel_size", num_devices) != num_devices:
        raise ConfigError(
            f"speculative_config.draft_tensor_parallel_size is {given['draft_tensor_parallel_size']}, but the draft "
            f"model is split like the other one, over tensor_parallel_size = {num_devices} devices. Leave it out."
        )
    draft_model = draft_model_of(given, model)
    return checked_speculation({**given, "model": draft_model} if draft_model else given)
