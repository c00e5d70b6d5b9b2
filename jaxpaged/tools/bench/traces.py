"""Requests of traces: what real servers were asked, as times and lengths, with made-up text.

This module knows flags only as attributes, and nothing of servers.
"""

import argparse
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.client_text import ClientText
from jaxpaged.tools.bench.dataset_files import csv_rows, json_lines
from jaxpaged.tools.bench.random_text import RandomText
from jaxpaged.tools.bench.requests import BenchRequest

BURSTGPT_MODEL = "GPT-4"
"""Of the models that BurstGPT's rows are about, the one whose rows are asked, as in vLLM's benchmark."""
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


def trace_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """Lines with a time, lengths, and ids of the blocks of the prompt: equal ids are equal tokens.

    Prompts are token ids: text could not keep what they have in common. The last id may stand for a part of its tokens.
    """
    tokenizer = text.needed("timed_trace")
    if text.chat:
        raise UsageError(
            "--dataset-name timed_trace has token ids, and a chat takes text. Use the backend openai or grpc."
        )
    allowed, size = RandomText(tokenizer, args.seed).allowed, args.timed_trace_chunk_hash_size
    labels = [
        getattr(args, f"timed_trace_label_{name}")
        for name in ("timestamp", "input_length", "output_length", "hash_ids")
    ]
    blocks: dict[int, list[int]] = {}
    requests = []
    for where, row in json_lines(args.dataset_path):
        if len(requests) == args.num_prompts:
            break
        time, length, answer, ids = trace_line(row, labels, where, size)
        for each in ids:
            if each not in blocks:
                rng = np.random.default_rng([args.seed, abs(each), int(each < 0)])
                blocks[each] = allowed[rng.integers(0, len(allowed), size)].tolist()
        prompt = [token for each in ids for token in blocks[each]][:length]
        requests.append(BenchRequest(prompt, length, answer, time * args.timed_trace_sec_multiplier))
    return from_the_first_on(requests)


def trace_line(row: dict[str, Any], labels: list[str], where: str, size: int) -> tuple[float, int, int, list[int]]:
    """(time, tokens of the prompt, tokens of the answer, ids of blocks). Raises UsageError."""
    time, length, answer, ids = (row.get(label) for label in labels)
    whole = lambda value: isinstance(value, int) and not isinstance(value, bool)
    if not (isinstance(time, int | float) and math.isfinite(time) and whole(length) and whole(answer)):
        raise UsageError(f"{where} needs the numbers {', '.join(labels[:3])}. See --timed-trace-label-timestamp, ...")
    if not isinstance(ids, list) or not all(map(whole, ids)):
        raise UsageError(f"{where} needs {labels[3]}, a list of whole numbers.")
    if length < 1 or answer < 1:
        raise UsageError(f"{where} has {labels[1]} {length} and {labels[2]} {answer}; both must be at least 1.")
    if len(ids) != math.ceil(length / size):
        raise UsageError(
            f"{where} has {len(ids)} hash ids for {length} tokens, {math.ceil(length / size)} blocks of {size}. "
            "Set --timed-trace-chunk-hash-size to the trace's own: 512 for Mooncake's."
        )
    return float(time), length, answer, ids


def burstgpt_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """Rows of BurstGPT's CSV files: a time in seconds, a model, tokens of the prompt and of the answer.

    Rows of `BURSTGPT_MODEL` whose answer did not fail are drawn without repetition, or taken from the first on where
    nothing is to be shuffled.
    """
    made = RandomText(text.needed("burstgpt"), args.seed)
    rows = [
        row
        for where, columns in csv_rows(args.dataset_path, BURSTGPT_COLUMNS)
        if columns["Model"] == BURSTGPT_MODEL and (row := burstgpt_row(columns, where))[2] > 0
    ]
    if not args.disable_shuffle and len(rows) > args.num_prompts:
        rows = random.Random(args.seed).sample(rows, args.num_prompts)
    requests = []
    for number, (time, length, answer) in enumerate(rows[: args.num_prompts]):
        inside = max(length - text.num_added, 1)  # a server adds a beginning of text, which counts
        prompt, found = made.settle(made.sequence(number, inside), inside)
        requests.append(BenchRequest(prompt, len(found) + text.num_added, args.output_len or answer, time))
    return from_the_first_on(requests)


def burstgpt_row(columns: dict[str, str], where: str) -> tuple[float, int, int]:
    """(time, tokens of the prompt, tokens of the answer). Raises UsageError."""
    try:
        time, length, answer = float(columns["Timestamp"]), *(int(columns[name]) for name in BURSTGPT_COLUMNS[2:])
        if math.isfinite(time) and length >= 0 and answer >= 0:
            return time, length, answer
    except (TypeError, ValueError):  # None where a line is too short
        pass
    raise UsageError(f"{where} needs the numbers {', '.join(each for each in BURSTGPT_COLUMNS if each != 'Model')}.")


def from_the_first_on(requests: list[BenchRequest]) -> list[BenchRequest]:
    """In order of their times, which count from the first of them."""
    requests = sorted(requests, key=lambda request: request.timestamp or 0.0)
    first = (requests[0].timestamp or 0.0) if requests else 0.0
    return [replace(each, timestamp=(each.timestamp or 0.0) - first) for each in requests]
