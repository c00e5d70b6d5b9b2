"""`--lora NAME=PATH`: a LoRA adapter with which a command's engine answers everything.

It switches on what the engine needs for one adapter, unless flags say otherwise. This module knows nothing of weights.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.config.lora import RANKS
from jaxpaged.errors import UsageError

if TYPE_CHECKING:  # --help must not wait for it
    from jaxpaged.messages import LoRARequest

CONFIG = "adapter_config.json"
MOST_CONFIG_BYTES = 2**20


def add_lora_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        metavar="NAME=PATH",
        help="a LoRA adapter for all prompts: a folder of PEFT's, or a hub id; with --server, -m names one of its own",
    )


def chosen_adapter(args: argparse.Namespace) -> "LoRARequest | None":
    """The adapter that was given, if one was. Raises UsageError for what names none."""
    from jaxpaged.messages import LoRARequest

    given = getattr(args, "lora", None)  # not every command with an engine has the flag
    if given is None:
        return None
    name, is_named, path = given.partition("=")
    if not is_named:
        name, path = Path(given).name, given
    if not name or not path:
        raise UsageError(f"--lora is {given!r}; it must be NAME=PATH.")
    return LoRARequest(name, 1, path)


def options_for(adapter: "LoRARequest | None", options: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine that can have the adapter: those that are given stay as they are."""
    if adapter is None:
        return options
    rank = rank_of(adapter.lora_path)
    enough = next((each for each in RANKS if rank is not None and each >= max(rank, RANKS[1])), None)
    return {"enable_lora": True, **({} if enough is None else {"max_lora_rank": enough}), **options}


def rank_of(path: str) -> int | None:
    """The largest rank that an adapter says that it has; None where that cannot be seen: reading it says why."""
    try:
        file = Path(path).expanduser() / CONFIG
        if file.stat().st_size > MOST_CONFIG_BYTES:
            return None
        config = json.loads(file.read_text(encoding="utf-8"))
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        return max(ranks) if all(type(rank) is int for rank in ranks) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def with_adapter(adapter: "LoRARequest | None") -> dict[str, Any]:
    """The arguments of `add_request` that name it."""
    return {} if adapter is None else {"lora_request": adapter}
