"""What `speculative_config` may say: how tokens are drafted, and how many at a time.

The keys are vLLM's. This module checks them and nothing else: who drafts, and who verifies, is not known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean

METHODS = {
    "ngram": {"prompt_lookup_min": 32, "prompt_lookup_max": 32},
    "suffix": {"suffix_decoding_max_tree_depth": 64},
}
"""Each method, its own keys, and the largest value of each."""
LATER_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator")
"""vLLM's methods that are not there yet."""
MOST_DRAFTS = 32
"""Tokens that a row drafts at a time, at most: a program holds the logits of all of them."""
SHORTEST_SUFFIX = 2
NUM_ANSWER_TOKENS = 16_384
"""Tokens of earlier answers in which suffixes are looked for."""


@dataclass(frozen=True)
class Speculation:
    """A checked `speculative_config`.

    num_speculative_tokens: the most tokens that are drafted for a row and step. match_lengths: how many of the newest
    tokens must have occurred before, at least, and how many are looked at. num_answer_tokens: of earlier answers, that
    are looked at besides the request's own.
    """

    method: str
    num_speculative_tokens: int
    match_lengths: tuple[int, int]
    num_answer_tokens: int = 0


def speculation_of(given: Mapping[str, Any]) -> Speculation | None:
    """What the option asks for; None where it is empty. `given` is checked."""
    if not given:
        return None
    method, number = given["method"], given["num_speculative_tokens"]
    if method == "suffix":
        lengths = SHORTEST_SUFFIX, given["suffix_decoding_max_tree_depth"]
        return Speculation(method, number, lengths, NUM_ANSWER_TOKENS)
    return Speculation(method, number, (given["prompt_lookup_min"], given["prompt_lookup_max"]))


def checked_speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative_config` with every key of its method. Raises ConfigError for what is unknown or out of range."""
    if not given:
        return {}
    method = checked_method(given.get("method"))
    limits = {"num_speculative_tokens": MOST_DRAFTS, **METHODS[method]}
    for name, value in given.items():
        if name == "method":
            continue
        if name not in limits:
            known = ["method", *limits]
            raise ConfigError(
                f"speculative_config has the unknown key {name!r}.{did_you_mean(str(name), known)} "
                f"Known for {method!r}: {', '.join(known)}."
            )
        if type(value) is not int or not 1 <= value <= limits[name]:
            raise ConfigError(
                f"speculative_config.{name} is {value!r}; it must be a whole number from 1 to {limits[name]}."
            )
    if "num_speculative_tokens" not in given:
        raise ConfigError(
            "speculative_config has no num_speculative_tokens. Say how many tokens may be drafted at a time, such as 4."
        )
    return {"method": method, **own_keys(method, given), **given}


def own_keys(method: str, given: Mapping[str, Any]) -> dict[str, int]:
    """The keys of a method with nothing left open. Raises ConfigError where they contradict each other."""
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
    if method in METHODS:
        return method
    if method in LATER_METHODS:
        raise ConfigError(
            f"speculative_config.method {method!r} is not there yet. Use {' or '.join(map(repr, METHODS))}."
        )
    near = did_you_mean(str(method), (*METHODS, *LATER_METHODS))
    raise ConfigError(f"speculative_config.method is {method!r}; it must be one of {', '.join(METHODS)}.{near}")


def resolved_speculation(given: Mapping[str, Any], runner: str) -> dict[str, Any]:
    """`speculative_config` with nothing left open. Raises ConfigError for what it cannot be."""
    if given and runner == "pooling":
        raise ConfigError("speculative_config is given, but a pooling engine draws no tokens. Leave it out.")
    return checked_speculation(given)
