"""`--config FILE`: options in YAML, by the names that their flags have, with - or _.

This module knows no command; which options a file may hold is said by the caller.
"""

import argparse
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.config import all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS
from jaxpaged.entrypoints.cli.values import converter, spelled
from jaxpaged.errors import ConfigError, did_you_mean


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
