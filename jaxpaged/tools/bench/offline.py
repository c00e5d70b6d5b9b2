"""What the benchmarks of an engine in this process have in common: its options, its start, and their JSON files."""

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.cli.flags import add_model_argument, engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags, whole_number
from jaxpaged.errors import UsageError

if TYPE_CHECKING:  # --help must not wait for the engine
    from jaxpaged.entrypoints.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_offline_flags(parser: argparse.ArgumentParser, counts: Sequence[tuple[str, int, str]]) -> None:
    """`counts` are (flag, default, help) of whole numbers; then what all have, and the engine's options."""
    add_model_argument(parser)
    for name, default, help in counts:
        parser.add_argument(
            f"--{name}", type=whole_number, default=default, metavar="N", help=f"{help} (default: {default})"
        )
    parser.add_argument("--output-json", metavar="FILE", help="write the result")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """What answers are like."""
    parser.add_argument("--disable-detokenize", action="store_true", help="leave answers as token ids")
    add_engine_flags(parser)


def check_at_least(args: argparse.Namespace, minimum: int, *names: str) -> None:
    """Raise UsageError for numbers that are too small."""
    for name in names:
        if getattr(args, name) < minimum:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {getattr(args, name)}; it must be at least {minimum}.")


@contextlib.contextmanager
def open_llm(options: Mapping[str, Any]) -> Iterator["LLM"]:
    """An engine in this process, with every program compiled. Raises ConfigError, CheckpointError or CapacityError."""
    from jaxpaged.entrypoints.cli import engine
    from jaxpaged.entrypoints.llm import LLM
    from jaxpaged.entrypoints.terminal import ProgressLine

    line = ProgressLine()
    try:
        opened = engine.open_engine(options, line.update)
    except BaseException:
        line.close()
        raise
    with LLM.from_engine(opened) as llm:
        llm.wait_for_programs()
        line.close()
        yield llm


def options_of(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The engine's options: `defaults`, and what was given."""
    return {**defaults, **engine_options(args)}


def check_json_path(path: str | None) -> None:
    """Raise UsageError for a file that could not be written after the measurement."""
    from jaxpaged.tools.pictures.canvas import check_folder

    if path is not None:
        check_folder(path)


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a result, if it was asked for. Raises UsageError."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --output-json {path}: {error.strerror}.") from None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The percentiles that vLLM's offline benchmarks report, by their number."""
    import numpy as np

    found = np.percentile(values, PERCENTILES).tolist()
    return {str(percentile): value for percentile, value in zip(PERCENTILES, found, strict=True)}
