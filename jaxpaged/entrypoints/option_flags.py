"""Flags made from declarations, and text that becomes a value of the right type.

A flag that was not given leaves no trace in the parsed arguments, so that a YAML file and the model's own defaults can
speak. Ranges are checked by the classes that own the options. This module knows no command.
"""

import argparse
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpaged.config import all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS, ForeignOption
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

SHORT_FLAGS = {
    "model": ["-m"],
    "tensor_parallel_size": ["-tp"],
    "quantization": ["-q"],
    "n": ["-n"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
    "decode_context_parallel_size": ["-dcp"],
    "prefill_context_parallel_size": ["-pcp"],
    "enable_expert_parallel": ["-ep"],
    "optimization_level": ["-O"],
    "data_parallel_rank": ["-dpn"],
    "data_parallel_start_rank": ["-dpr"],
    "data_parallel_size_local": ["-dpl"],
    "data_parallel_address": ["-dpa"],
    "data_parallel_rpc_port": ["-dpp"],
    "data_parallel_backend": ["-dpb"],
    "data_parallel_hybrid_lb": ["-dph"],
    "data_parallel_external_lb": ["-dpe"],
    "data_parallel_multi_port_external_lb": ["-dpm"],
    "speculative_config": ["-sc"],
    "compilation_config": ["-cc"],
    "attention_config": ["-ac"],
    "diffusion_config": ["-dc"],
    "api_server_count": ["-asc"],
    "node_rank": ["-r"],
}
# Options of the engine whose name may be a sampling parameter's, and the flag that they have in every command. They
# have their own name too where requests have no flags, as in vLLM's server.
FLAGS_OF_THEIR_OWN = {"seed": "engine_seed"}
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def add_engine_flags(
    parser: argparse._ActionsContainer,
    *,
    file_holds: str | None = "engine options",
    own_names: Mapping[str, str] = FLAGS_OF_THEIR_OWN,
) -> None:
    """A flag for every option of the engine, called by `own_names` if it is there, and --config, unless `file_holds`
    nothing."""
    if file_holds is not None:
        parser.add_argument("--config", metavar="FILE", help=f"YAML file of {file_holds}; flags override it")
    for section, options in itertools.groupby(all_options(), lambda pair: pair[0]):
        group = parser
        if isinstance(parser, argparse.ArgumentParser):  # groups have none of their own
            group = parser.add_argument_group(f"engine: {section}")
        for _, option in options:
            help = option.metadata["help"] + shown_default(option.default)
            choices, aliases = option.metadata.get("choices"), option.metadata.get("aliases", {})
            name = own_names.get(option.name, option.name)
            is_free = name != option.name and "--" + option.name not in parser._option_string_actions
            add_flag(
                group,
                name,
                option.type,
                help,
                choices and (*choices, *map(str, aliases)),
                aliases,
                several=option.metadata.get("several", False),
                synonyms=[option.name] if is_free else (),
            )
    add_foreign_flags(parser)


def add_foreign_flags(
    parser: argparse._ActionsContainer, options: Mapping[str, ForeignOption] = FOREIGN_OPTIONS
) -> None:
    """vLLM's flags for what is not there: unseen in the help, so that its command lines parse. Which values pass is
    decided with the other options. A flag that the command has already keeps its own meaning."""
    for name, foreign in options.items():
        flags = [*SHORT_FLAGS.get(name, []), "--" + name.replace("_", "-")]
        if flags[-1] in parser._option_string_actions:
            continue
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if isinstance(foreign.default, bool):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        elif foreign.many:
            parser.add_argument(*flags, type=json_or_text, nargs="+", action=Collected, **settings)
        else:
            parser.add_argument(*flags, type=json_or_text, **settings)


class Collected(argparse.Action):
    """Values of a flag that takes some, or one that is a list already."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


class Several(argparse.Action):
    """Values of a flag that takes some, each of which may be a list itself: `a b`, `a,b`, `["a", "b"]`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *(each for part in values for each in part)])


def add_flag(
    group: Any,
    name: str,
    annotation: Any,
    help: str,
    choices: tuple[str, ...] | None,
    aliases: Mapping[Any, Any] | None = None,
    *,
    several: bool = False,
    synonyms: Sequence[str] = (),
) -> None:
    """One option as a flag, with further names of it. With `several` a list may be given as words too, as vLLM's server
    takes it."""
    flags = [*SHORT_FLAGS.get(name, []), *("--" + each.replace("_", "-") for each in (name, *synonyms))]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    kind = essential_type(annotation)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
    elif kind == list[str]:
        # A stop text may contain commas: the flag is repeated instead.
        group.add_argument(*flags, action="append", metavar="TEXT", **settings)
    else:
        metavar = f"{{{','.join(choices)}}}" if choices else metavar_of(kind)
        convert = spelled(aliases or {}, converter(annotation))
        if several and typing.get_origin(kind) is tuple:
            settings |= {"nargs": "+", "action": Several}
        group.add_argument(*flags, type=convert, metavar=metavar, **settings)


def metavar_of(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (list, tuple):
        return "A,B,..."
    is_json = origin is dict or kind is StructuredOutputsParams
    return "JSON" if is_json else {int: "N", float: "X"}.get(kind, "TEXT")


def shown_default(default: Any) -> str:
    """The default of an option as its help ends: on where it is True; nothing where it is off, empty, or of no plain
    type."""
    if default is True:
        return " (default: on)"
    if isinstance(default, bool) or not isinstance(default, str | int | float) or default == "":
        return ""
    is_size = isinstance(default, int) and default >= 2**16 and default % 2**10 == 0
    return f" (default: {spelled_size(default) if is_size else default})"


def spelled_size(count: int) -> str:
    """`16M` of 16777216, as `values.whole_number` reads it."""
    letter = next(letter for letter in "GMK" if count % SUFFIXES[letter] == 0)
    return f"{count // SUFFIXES[letter]}{letter}"


# ---- text -> values ----------------------------------------------------------------------------------


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


def one_or_listed(text: str) -> tuple[Any, ...]:
    """A value that may be JSON and may have commas, or a list of them in JSON."""
    value = json_or_text(text)
    return tuple(value) if isinstance(value, list) else (value,)


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
        if arguments[0] is Any:
            return one_or_listed
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
