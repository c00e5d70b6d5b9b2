"""Flags that several commands share, and the options that were given: by flags, and by a YAML file (`--config FILE`).

A file holds options by the names that their flags have, with - or _. This module knows no command.
"""

import argparse
import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.config import all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS
from jaxpaged.entrypoints.option_flags import FLAGS_OF_THEIR_OWN, add_flag, converter, spelled
from jaxpaged.errors import ConfigError, UsageError, did_you_mean
from jaxpaged.sampling_params import SAMPLING_HELP, SamplingParams


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL as an argument, which means what --model means; `engine_options` reads both."""
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="a folder in Hugging Face format, a hub id, or 'demo'; the same as --model",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every sampling parameter that a caller may set."""
    group = parser.add_argument_group("sampling", "defaults are those of the model's generation_config.json")
    annotations = typing.get_type_hints(SamplingParams)
    for name, help in SAMPLING_HELP.items():
        add_flag(group, name, annotations[name], help, None)


def engine_options(
    args: argparse.Namespace, file: Mapping[str, Any] | None = None, besides: Collection[str] = ()
) -> dict[str, Any]:
    """What was given for the engine: the options of the YAML `file`, overridden by flags and by MODEL.

    None: --config is read here. The command has options `besides` of its own. Raises ConfigError, and UsageError for
    two models.
    """
    if file is None:
        file = read_config_file(args.config) if args.config else {}
    names = [*(option.name for _, option in all_options()), *FOREIGN_OPTIONS]
    places = {name: FLAGS_OF_THEIR_OWN.get(name, name) for name in names if name not in besides}
    given = {name: getattr(args, place) for name, place in places.items() if hasattr(args, place)}
    model = chosen_model(args)
    return {**file, **given, **({"model": model} if model is not None else {})}


def chosen_model(args: argparse.Namespace) -> str | None:
    """The MODEL of the command line, or that of --model. Raises UsageError when there are both."""
    argument, flag = getattr(args, "model_argument", None), getattr(args, "model", None)
    if argument is not None and flag is not None and argument != flag:
        raise UsageError(f"two models are given, {argument} and --model {flag}. Leave one out.")
    return argument if flag is None else flag


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given."""
    return {name: getattr(args, name) for name in SamplingParams.__struct_fields__ if hasattr(args, name)}


# ---- files of options ---------------------------------------------------------------------------------


def read_config_file(
    path: str, more: Sequence[dataclasses.Field] = (), foreign: Collection[str] = ()
) -> dict[str, Any]:
    """The options of a YAML file: those of the engine, and `more`; vLLM's `foreign` ones as they are.

    Raises ConfigError for unknown names and for values of another type.
    """
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
    known = {option.name: option for option in [*(option for _, option in all_options()), *more]}
    passed = {*FOREIGN_OPTIONS, *foreign}
    options = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in known:
            options[name] = file_value(path, known[name], value)
        elif name in passed:
            options[name] = value
        else:
            says = did_you_mean(name, [*known, *passed]) or (" It holds engine options only." if not more else "")
            raise ConfigError(f"unknown option {str(key)!r} in {path}.{says}")
    return options


def file_value(path: str, option: dataclasses.Field, value: Any) -> Any:
    """A value of a YAML file in the type of its option: `32k` is a number there too, a list may be a tuple."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    try:
        return spelled(option.metadata.get("aliases", {}), converter(option.type))(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{option.name} in {path}: {error}") from None
