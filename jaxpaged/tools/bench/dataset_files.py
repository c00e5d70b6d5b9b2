"""Rows of the files that datasets come from, each with where it stands. This module knows no dataset."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.errors import UsageError


def json_list(path: str) -> list[Any]:
    """The list in a JSON file. Raises UsageError."""
    content = read(path, lambda file: json.load(file))
    if not isinstance(content, list):
        raise UsageError(f"{path} holds no JSON list of conversations.")
    return content


def json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line of a file. Raises UsageError."""
    for number, line in enumerate(read(path, lambda file: file.read().splitlines()), 1):
        if line.strip():
            where = f"line {number} of {path}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{where} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise UsageError(f"{where} is no JSON object.")
            yield where, row


def csv_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, values by column) of every line of a CSV file below its first, which names the columns.

    Raises UsageError, also where one of `columns` is missing.
    """
    reader = csv.DictReader(read(path, lambda file: file.read().splitlines()))
    try:
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise UsageError(f"{path} has no column {missing[0]!r}; its first line must name {', '.join(columns)}.")
        for row in reader:
            yield f"line {reader.line_num} of {path}", row
    except csv.Error as error:
        raise UsageError(f"line {reader.line_num} of {path} is not CSV: {error}.") from None


def read(path: str, how: Callable[[Any], Any]) -> Any:
    """What a file holds. Raises UsageError."""
    try:
        with Path(path).open("r", encoding="utf-8") as file:
            return how(file)
    except OSError as error:
        raise UsageError(f"cannot read --dataset-path {path}: {error.strerror}.") from None
    except ValueError as error:  # not JSON, not UTF-8
        raise UsageError(f"--dataset-path {path} cannot be read: {error}.") from None
