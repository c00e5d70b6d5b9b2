"""A step log as a file: JSON lines, a header and then one object a step, with the fields of `messages.StepRecord`.

    {"format": "jaxpaged step log", "version": 1, "token_buckets": [8, 16, 32]}
    {"step_id": 1, "num_tokens": 21, "token_bucket": 32, ...}

This module knows the file, not what is done with it.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxpaged.errors import UsageError
from jaxpaged.messages import StepRecord

FORMAT, VERSION = "jaxpaged step log", 1


class Header(msgspec.Struct):
    """The first line. `token_buckets` are all that the engine had, empty when its executor pads nothing."""

    format: str
    version: int
    token_buckets: list[int]


def write_step_log(path: str | Path, records: Sequence[StepRecord], token_buckets: Sequence[int]) -> Path:
    """Write a log. Raises UsageError when the file cannot be written."""
    path = Path(path)
    encode = msgspec.json.encode
    lines = [encode(Header(FORMAT, VERSION, list(token_buckets))), *map(encode, records)]
    try:
        path.write_bytes(b"\n".join(lines) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Choose another path.") from None
    return path


def read_step_log(path: str | Path) -> tuple[list[StepRecord], list[int]]:
    """The steps of a log, and the token buckets of its engine. Raises UsageError for what is no step log."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check the path.") from None
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        header = Header("", 0, [])
    if header.format != FORMAT:
        raise UsageError(f"{path} is no step log. Make one: jaxpaged generate --step-log FILE, or timeline().save_log.")
    if header.version != VERSION:
        raise UsageError(f"{path} is a step log of version {header.version}, not {VERSION}. Make a new one.")
    decoder = msgspec.json.Decoder(StepRecord)
    records = []
    for number, line in enumerate(lines[1:], 2):
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}, line {number} is no step: {error}. Delete the line, or log anew.") from None
    return records, header.token_buckets
