"""What an option is: a dataclass field with its help and its limits, and the check of a value against them.

This module knows no option by name.
"""

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean, shown_option

PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""'module:NAME'."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text.

    `choices`, `not_empty`, and for numbers, also those in a tuple, `minimum`, `maximum` and `above` are checked.
    `aliases` maps other spellings of a value to it; `foreign` maps values of vLLM that are not here to what to do.
    `several`: the flag of a tuple takes several words. `or_place`: besides its `choices` it may be 'module:NAME'.
    """
    metadata["help"] = help
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    tuple: "a list",
}


def checked(f: dataclasses.Field, value: Any) -> Any:
    """The value in the type of its field. Raises ConfigError for another type, or outside what the metadata allows."""
    aliases = f.metadata.get("aliases", {})
    if type(value) in map(type, aliases):
        value = aliases.get(value, value)
    value = in_declared_type(f, value)
    if value is None:
        return None
    limits, name = f.metadata, f.name
    is_place = limits.get("or_place") and isinstance(value, str) and PLACE.fullmatch(value)
    if "choices" in limits and value not in limits["choices"] and not is_place:
        raise ConfigError(f"{name} is {shown_option(name, value)}{why_not_one_of(value, limits)}")
    if limits.get("not_empty") and not value:
        raise ConfigError(f"{name} is empty; leave it out for the default.")
    for item in value if isinstance(value, tuple) else (value,):
        check_range(name, item, limits)
    return value


def why_not_one_of(value: Any, limits: Mapping[str, Any]) -> str:
    """The second half of a sentence about a value that is none of the `choices`, and what to do."""
    if isinstance(value, str) and (known := limits.get("foreign", {}).get(value.lower())):
        return f", but {known}"
    return f"; it must be one of {', '.join(limits['choices'])}.{did_you_mean(str(value), limits['choices'])}"


def in_declared_type(f: dataclasses.Field, value: Any) -> Any:
    """Paths become texts and lists become tuples; nothing else is converted."""
    kinds = typing.get_args(f.type) if isinstance(f.type, types.UnionType) else (f.type,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    origin = typing.get_origin(kind) or kind
    if origin is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(kind)[0]
        if item is int and not all(type(entry) is int for entry in value):
            raise ConfigError(f"{f.name} is {shown_option(f.name, value)}; it must hold whole numbers only.")
        if item is str and not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{f.name} is {shown_option(f.name, value)}; it must hold texts only.")
        return tuple(value)
    accepted: Any = {float: (int, float), dict: Mapping}.get(origin, origin)
    if not isinstance(value, accepted) or (isinstance(value, bool) and origin is not bool):
        raise ConfigError(f"{f.name} is {shown_option(f.name, value)}; it must be {KIND_NAMES[origin]}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{f.name} is {value!r}; it must be finite.")
    return value


def check_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise ConfigError when a number is outside `minimum`, `maximum` or `above`."""
    if "minimum" in limits and value < limits["minimum"]:
        raise ConfigError(f"{name} is {value}; it must be at least {limits['minimum']}.")
    if "maximum" in limits and value > limits["maximum"]:
        raise ConfigError(f"{name} is {value}; it must be at most {limits['maximum']}.")
    if "above" in limits and value <= limits["above"]:
        raise ConfigError(f"{name} is {value}; it must be more than {limits['above']}.")
