"""What `speculative_config` may say: how tokens are drafted, and how many at a time.

The keys are vLLM's. This module checks them and nothing else: who drafts, and who verifies, is not known here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean

METHODS = ("ngram",)
LATER_METHODS = ("suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator")
"""vLLM's methods that are not there yet."""
MOST_DRAFTS = 32
"""Tokens that a row drafts at a time, at most: a program holds the logits of all of them."""
LONGEST_NGRAM = 32


@dataclass(frozen=True)
class Speculation:
    """A checked `speculative_config`.

    num_speculative_tokens: the most tokens that are drafted for a row and step. prompt_lookup_min, prompt_lookup_max:
    how many of the newest tokens must have occurred before, at least, and how many are looked at.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


def speculation_of(given: Mapping[str, Any]) -> Speculation | None:
    """What the option asks for; None where it is empty. Raises ConfigError for what is unknown or out of range."""
    if not given:
        return None
    known = [f.name for f in fields(Speculation)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"speculative_config has the unknown key {name!r}.{did_you_mean(str(name), known)} "
                f"Known: {', '.join(known)}."
            )
    number = number_of(given, "num_speculative_tokens", None, MOST_DRAFTS)
    if number is None:
        raise ConfigError(
            "speculative_config has no num_speculative_tokens. Say how many tokens may be drafted at a time, such as 4."
        )
    most = number_of(given, "prompt_lookup_max", given.get("prompt_lookup_min", 5), LONGEST_NGRAM)
    least = number_of(given, "prompt_lookup_min", min(most, 2), LONGEST_NGRAM)
    if least > most:
        raise ConfigError(
            f"speculative_config.prompt_lookup_min ({least}) is more than prompt_lookup_max ({most}). Lower the first."
        )
    return Speculation(method_of(given.get("method")), number, least, most)


def method_of(method: Any) -> str:
    """Raises ConfigError when there is no such method, or not yet."""
    if method in METHODS:
        return method
    if method in LATER_METHODS:
        raise ConfigError(
            f"speculative_config.method {method!r} is not there yet. Use {' or '.join(map(repr, METHODS))}."
        )
    near = did_you_mean(str(method), (*METHODS, *LATER_METHODS))
    raise ConfigError(f"speculative_config.method is {method!r}; it must be one of {', '.join(METHODS)}.{near}")


def number_of(given: Mapping[str, Any], name: str, default: Any, most: int) -> Any:
    value = given.get(name, default)
    if name in given and (type(value) is not int or not 1 <= value <= most):
        raise ConfigError(f"speculative_config.{name} is {value!r}; it must be a whole number from 1 to {most}.")
    return value


def resolved_speculation(given: Mapping[str, Any], runner: str) -> dict[str, Any]:
    """`speculative_config` with nothing left open. Raises ConfigError for what it cannot be."""
    speculation = speculation_of(given)
    if speculation is None:
        return {}
    if runner == "pooling":
        raise ConfigError("speculative_config is given, but a pooling engine draws no tokens. Leave it out.")
    return asdict(speculation)
