"""Flags made from declarations: engine options from `EngineConfig`, sampling parameters from `SamplingParams`.

A flag that was not given leaves no trace in the parsed arguments, so that a YAML file and the model's own defaults
can speak. Ranges are checked by the classes themselves; here text only becomes a value of the right type.
This module knows no command.
"""

import argparse
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxpaged.config import all_options
from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.structured_outputs import StructuredOutputsParams
from jaxpaged.vllm_options import FOREIGN_OPTIONS

SHORT_FLAGS = {"tensor_parallel_size": ["-tp"], "n": ["-n"]}
# Every sampling parameter but `output_kind`, which the command decides, and those that the engine fills in.
SAMPLING_HELP = {
    "temperature": "in [0, 2]; 0 takes the most likely token",
    "top_p": "keep the smallest set of tokens whose probability reaches this",
    "top_k": "keep this many of the most likely tokens; 0: all",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "max_tokens": "longest output in tokens; 'none' fills the context",
    "min_tokens": "do not stop before this many tokens",
    "seed": "the same seed gives the same text; -1: a random one",
    "n": "answers per prompt",
    "stop": "end the output before this text; may be repeated",
    "stop_token_ids": "end the output at one of these tokens",
    "include_stop_str_in_output": "keep the text of the stop string or token",
    "ignore_eos": "go on after the model's own end-of-sequence token",
    "presence_penalty": "in [-2, 2]; make tokens that occurred in the output less likely",
    "frequency_penalty": "in [-2, 2]; the same, for every time they occurred",
    "repetition_penalty": "above 0; above 1 makes tokens of prompt and output less likely",
    "logit_bias": "added to logits, by token id: '{\"17\": -100}'",
    "allowed_token_ids": "draw these tokens only",
    "bad_words": "a text that must not occur in the output; may be repeated",
    "logprobs": "report this many of the most likely tokens per position (with --json); -1: all",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "logprob_token_ids": "report these tokens in place of the most likely ones",
    "detokenize": "turn tokens into text; on by default",
    "skip_special_tokens": "leave special tokens out of the text; on by default",
    "spaces_between_special_tokens": "write spaces between special tokens; on by default",
    "skip_reading_prefix_cache": "compute the whole prompt; on by default with --prompt-logprobs",
    "structured_outputs": "shape of the output: '{\"regex\": \"[0-9]+\"}'; or json, choice, grammar, ...",
    "thinking_token_budget": "longest thinking in tokens, for models with tokens around it; -1: any length",
    "extra_args": "for custom logits processors",
}
# `--seed` is the requests'; the engine's own, for requests without one, can be set in the YAML file.
NOT_ENGINE_FLAGS = {"seed"}
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2; names the nearest flag for an unknown one."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=Help, **settings)

    def error(self, message: str) -> NoReturn:
        sentence = message if message.endswith((".", "?")) else f"{message}."
        self.exit(2, f"{self.prog}: error: {sentence} See {self.prog} --help.\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "command_parser", self)
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            near = did_you_mean(flag.partition("=")[0], command._option_string_actions)
            command.error(f"unknown argument {flag!r}.{near}")
        return parsed


class Help(argparse.RawDescriptionHelpFormatter):
    """Room for our longest flag names; examples keep their lines."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)


# ---- text -> value ---------------------------------------------------------------------------------


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


def switch(text: str) -> bool:
    """For YAML files that quote their switches; on the command line it is --flag or --no-flag."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false.")
    return text.lower() == "true"


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as '{{\"key\": 1}}'.")
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
    return lambda text: collection(convert(part.strip()) for part in text.split(",") if part.strip())


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


# ---- declarations -> flags -------------------------------------------------------------------------


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of the engine, and --config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of engine options; flags override it")
    groups: dict[str, Any] = {}
    for section, option in all_options():
        group = groups.setdefault(section, parser.add_argument_group(f"engine: {section}"))
        if option.name not in NOT_ENGINE_FLAGS:
            help = option.metadata["help"] + shown_default(option.default)
            choices, aliases = option.metadata.get("choices"), option.metadata.get("aliases", {})
            add_flag(group, option.name, option.type, help, choices and (*choices, *aliases), aliases)
    add_foreign_flags(parser)


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags for what is not there: unseen in the help, so that its command lines parse. Which values pass is
    decided with the other options. A flag that the command has already keeps its own meaning."""
    for name, foreign in FOREIGN_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        if flag in parser._option_string_actions:
            continue
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if isinstance(foreign.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        else:
            parser.add_argument(flag, type=json_or_text, **settings)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every sampling parameter that a caller may set."""
    group = parser.add_argument_group("sampling", "defaults are those of the model's generation_config.json")
    annotations = typing.get_type_hints(SamplingParams)
    for name, help in SAMPLING_HELP.items():
        add_flag(group, name, annotations[name], help, None)


def add_flag(
    group: Any, name: str, annotation: Any, help: str, choices: tuple[str, ...] | None,
    aliases: Mapping[Any, Any] | None = None,
) -> None:  # fmt: skip
    flags = [*SHORT_FLAGS.get(name, []), "--" + name.replace("_", "-")]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    kind = essential_type(annotation)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
    elif kind == list[str]:
        # A stop text may contain commas: the flag is repeated instead.
        group.add_argument(*flags, action="append", metavar="TEXT", **settings)
    else:
        metavar = None if choices else metavar_of(kind)
        convert = spelled(aliases or {}, converter(annotation))
        group.add_argument(*flags, type=convert, choices=choices, metavar=metavar, **settings)


def metavar_of(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (list, tuple):
        return "A,B,..."
    is_json = origin is dict or kind is StructuredOutputsParams
    return "JSON" if is_json else {int: "N", float: "X"}.get(kind, "TEXT")


def shown_default(default: Any) -> str:
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f" (default: {default})" if plain else ""


# ---- flags -> options ------------------------------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the engine: the YAML file's options, overridden by flags. Raises ConfigError."""
    names = [option.name for _, option in all_options() if option.name not in NOT_ENGINE_FLAGS] + list(FOREIGN_OPTIONS)
    options = read_config_file(args.config) if args.config else {}
    return options | {name: getattr(args, name) for name in names if hasattr(args, name)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return {name: getattr(args, name) for name in SamplingParams.__struct_fields__ if hasattr(args, name)}


def read_config_file(path: str) -> dict[str, Any]:
    """The engine options of a YAML file; names may be spelled with - or _. Raises ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check the path after --config.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds a {type(content).__name__}; it must hold lines such as `max_num_seqs: 64`.")
    return {str(key).replace("-", "_"): file_value(path, str(key), value) for key, value in content.items()}


def file_value(path: str, key: str, value: Any) -> Any:
    """A value of a YAML file in the type of its option: `32k` is a number there too, a list may be a tuple."""
    known = {option.name: option for _, option in all_options()}
    option = known.get(key.replace("-", "_"))
    if key.replace("-", "_") in FOREIGN_OPTIONS:
        return value
    if option is None:
        near = did_you_mean(key.replace("-", "_"), known)
        raise ConfigError(f"unknown option {key!r} in {path}.{near or ' It holds engine options only.'}")
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    try:
        return spelled(option.metadata.get("aliases", {}), converter(option.type))(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{key} in {path}: {error}") from None
