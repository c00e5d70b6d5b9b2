"""What a person and a file get of a run: the table that vLLM prints, and its JSON.

This module computes no figure.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.metrics import DETAILS, METRICS

WIDTH, LABEL_WIDTH = 50, 40
SHOWN_ERRORS = 5
LINES = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
    ("CPU of the load generator (cores):", "client_cpu_share", ".2f"),
)
"""Label, field, format. A field that is None or no number is left out."""


def serving_table(result: Mapping[str, Any]) -> str:
    """The table of a run."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    for label, name, form in LINES:
        if isinstance(value := result.get(name), int | float):
            lines.append(f"{label:<{LABEL_WIDTH}} {value:<10{form}}")
    for name, (short, title) in METRICS.items():
        found = [(statistic, key) for statistic, key in statistics_in(result, name)]
        if found:
            lines.append(f"{title:-^{WIDTH}}")
            lines += [f"{f'{statistic} {short} (ms):':<{LABEL_WIDTH}} {result[key]:<10.2f}" for statistic, key in found]
    return "\n".join([*(line.rstrip() for line in lines), "=" * WIDTH])


def statistics_in(result: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    """(what it is called, field) of every statistic of a metric that a result has, but the standard deviation."""
    end = f"_{name}_ms"
    fields = [key for key in result if key.endswith(end) and "_" not in key.removesuffix(end)]
    return [(key.removesuffix(end).capitalize(), key) for key in fields if not key.startswith("std_")]


def failures(errors: Sequence[str]) -> list[str]:
    """A line for every kind of error, the most frequent first. Errors that differ in numbers are of one kind."""
    examples: dict[str, str] = {}
    kinds = Counter(re.sub(r"\d+", "#", error) for error in errors if error)
    for error in errors:
        examples.setdefault(re.sub(r"\d+", "#", error), error)
    shown = kinds.most_common(SHOWN_ERRORS)
    lines = [f"{count} x {examples[kind]}" for kind, count in shown]
    rest = kinds.total() - sum(count for _, count in shown)
    return lines + ([f"{rest} x other errors"] if rest else [])


def pairs_of(words: Sequence[str], flag: str) -> dict[str, str]:
    """The values of `key=value ...`. Raises UsageError."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{flag} has {word!r}; it takes KEY=VALUE.")
        found[name.strip()] = value.strip()
    return found


# ---- files -----------------------------------------------------------------------------------------


def result_path(result_dir: str | None, filename: str | None, result: Mapping[str, Any]) -> Path:
    """Where a result goes: vLLM's name for it, unless there is a `filename`."""
    name = filename
    if not name:
        concurrency = result["max_concurrency"]
        parts = [str(result["label"] or result["backend"])]
        if result.get("ramp_up_strategy"):
            ramp = f"{result['ramp_up_start_rps']:g}qps-{result['ramp_up_end_rps']:g}qps"
            parts.append(f"ramp-up-{result['ramp_up_strategy']}-{ramp}")
        else:
            parts.append(f"{result['request_rate']}qps")
        parts += [f"concurrency{concurrency}"] if concurrency is not None else []
        parts += [str(result["model_id"]).rstrip("/").rpartition("/")[2], str(result["date"])]
        name = "-".join(parts).replace("/", "_") + ".json"
    return Path(result_dir or ".") / name


def check_result_folder(path: str | Path) -> None:
    """Make the folder that results go to. Raises UsageError: that must not come out after the measurement."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write results to {path}: {error.strerror}. Choose another folder.") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"cannot write results to {path}. Choose another folder.")


def write_result(path: Path, result: Mapping[str, Any], append: bool = False) -> None:
    """Write an object to a file, or a further line of it. Raises UsageError."""
    text = json.dumps(result)
    try:
        if append:
            begun = path.exists() and path.stat().st_size > 0
            with path.open("a", encoding="utf-8") as file:
                file.write(("\n" if begun else "") + text)
            return
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Choose another --result-dir.") from None


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what it has for every request."""
    return {name: value for name, value in result.items() if name not in DETAILS}


def rate_in_result(rate: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(rate) else rate


def now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
