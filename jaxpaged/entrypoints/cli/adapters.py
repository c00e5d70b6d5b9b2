"""`--lora NAME=PATH`: a LoRA adapter with which a command's engine answers everything.

It switches on what the engine needs for one adapter, unless flags say otherwise. This module knows nothing of weights.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.config.lora import RANKS, adapter_config
from jaxpaged.errors import UsageError

if TYPE_CHECKING:  # --help must not wait for it
    from jaxpaged.messages import LoRARequest

TABLES = ("embed_tokens", "lm_head")


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
    found: dict[str, Any] = {"enable_lora": True}
    config = adapter_config(Path(adapter.lora_path).expanduser())
    rank = rank_of(config)
    enough = next((each for each in RANKS if rank is not None and each >= max(rank, RANKS[1])), None)
    if enough is not None:
        found["max_lora_rank"] = enough
    if tables := tables_of(config):
        found["lora_target_modules"] = ("all-linear", *tables)
    return {**found, **options}


def rank_of(config: dict[str, Any]) -> int | None:
    """The largest rank that an adapter says that it has."""
    try:
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    except (KeyError, AttributeError):
        return None
    return max(ranks) if all(type(rank) is int for rank in ranks) else None


def tables_of(config: dict[str, Any]) -> list[str]:
    """The tables that an adapter says that it changes, which have adapters where an engine is told so."""
    named = config.get("target_modules")
    given = {str(name).rpartition(".")[2] for name in named} if isinstance(named, list) else set()
    tied = bool(config.get("ensure_weight_tying")) and bool(given.intersection(TABLES))
    return [table for table in TABLES if tied or table in given]


def with_adapter(adapter: "LoRARequest | None") -> dict[str, Any]:
    """The arguments of `add_request` that name it."""
    return {} if adapter is None else {"lora_request": adapter}
