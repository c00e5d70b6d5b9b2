"""Texts as values of declared types: what a flag, a YAML file or a command of a chat says.

Ranges are checked by the classes that own the options. This module knows no flag.
"""

import argparse
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def whole_number(text: str) -> int:
    """`4096`, `4k` (4000), `4K` (4096), `1.5m`: as in vLLM, small letters are decimal and capitals binary."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    scaled = float(match[1]) * SUFFIXES[match[2]] if match and match[2] else None
    if match and not match[2] and "." not in match[1]:
        return int(match[1])
    if scaled is None or scaled != int(scaled):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 4k or 4K.")
    return int(scaled)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number.") from None


def finite_number(text: str) -> float:
    """For what is sent as JSON, which has neither infinities nor nan."""
    value = number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number.")
    return value


def switch(text: str) -> bool:
    """For YAML files that quote their switches; on the command line it is --flag or --no-flag."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false.")
    return text.lower() == "true"


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=finite_number)  # Python reads NaN and Infinity, which are not JSON
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}.") from None  # it may hold a secret
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("this is not a JSON object such as '{\"key\": 1}'.")
    return value


def json_or_text(text: str) -> Any:
    """For options of vLLM that have no type here: what is JSON is a value, anything else a text."""
    try:
        return None if text.lower() == "none" else json.loads(text)
    except ValueError:
        return text


def none_or(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else convert(text)


def spelled(aliases: Mapping[Any, Any], convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Other spellings of a value as they are: the class that owns the option knows what they mean."""
    return lambda text: text if text in aliases else convert(text)


def comma_separated(convert: Callable[[str], Any], collection: type) -> Callable[[str], Any]:
    """The function for `a,b`; a list in JSON is understood too."""

    def read(text: str) -> Any:
        try:
            listed = json.loads(text) if text.lstrip().startswith("[") else None
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}.") from None
        parts = text.split(",") if listed is None else map(str, listed)
        return collection(convert(part.strip()) for part in parts if part.strip())

    return read


def converter(annotation: Any) -> Callable[[str], Any]:
    """The function that turns the text of a flag into a value of this type. Texts are taken as they are."""
    kind = essential_type(annotation)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple):
        item = {int: whole_number}.get(arguments[0], str)
        return comma_separated(item, origin)
    if origin is dict or kind is StructuredOutputsParams:
        return json_object
    simple = {int: whole_number, float: number, bool: switch}.get(kind, str)
    return none_or(simple) if kind is int and kind is not annotation else simple


def essential_type(annotation: Any) -> Any:
    """The type without its None; the list among `str | list[str]`."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return kinds[-1]
