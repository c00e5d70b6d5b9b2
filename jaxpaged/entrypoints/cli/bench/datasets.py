"""The requests of a benchmark: random text, and the files that vLLM's benchmark reads.

Lengths and choices are vLLM's; the same seed gives the same requests. This module knows flags only as attributes, and
nothing of servers.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.entrypoints.cli.bench.client_text import ClientText
from jaxpaged.entrypoints.cli.bench.dataset_flags import FROM_FILES
from jaxpaged.entrypoints.cli.bench.random_text import RandomText
from jaxpaged.entrypoints.cli.bench.requests import BenchRequest
from jaxpaged.errors import UsageError

SHAREGPT_LENGTHS = {"least": 4, "prompt": 1024, "total": 2048}
"""Tokens of conversations that are asked: at least in prompt and answer, at most in the prompt, and in both."""


def sample_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """What the flags of `dataset_flags` ask for. Raises UsageError."""
    check_dataset(args)
    sample = {
        "random": random_requests, "sharegpt": sharegpt_requests, "prefix_repetition": prefix_requests,
        "custom": custom_requests, "timed_trace": trace_requests,
    }[args.dataset_name]  # fmt: skip
    requests = sample(args, text)
    if not requests:
        raise UsageError(f"{args.dataset_path or args.dataset_name} gives no request.")
    if args.dataset_name in FROM_FILES[:2] and not args.no_oversample:
        again = random.Random(args.seed)
        requests += [again.choice(requests) for _ in range(args.num_prompts - len(requests))]
    return requests


def check_dataset(args: argparse.Namespace) -> None:
    """Raise UsageError for numbers and combinations that make no sense."""
    if args.dataset_name in FROM_FILES and args.dataset_path is None:
        raise UsageError(f"--dataset-name {args.dataset_name} needs its file: --dataset-path FILE.")
    if args.dataset_name not in FROM_FILES and args.dataset_path is not None:
        known = ", ".join(FROM_FILES)
        raise UsageError(
            f"--dataset-name {args.dataset_name} reads no file. For {args.dataset_path} it is one of {known}."
        )
    if args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; it must be at least 0.")
    least = {
        "num_prompts": 1, "input_len": 1, "output_len": 1, "random_input_len": 1, "random_output_len": 1,
        "random_prefix_len": 0, "prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 1,
        "prefix_repetition_num_prefixes": 1, "prefix_repetition_output_len": 1, "sharegpt_output_len": 1,
        "timed_trace_chunk_hash_size": 1,
    }  # fmt: skip
    for name, minimum in least.items():
        if (value := getattr(args, name)) is not None and value < minimum:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}.")
    if not 0 <= args.random_range_ratio < 1:
        raise UsageError(f"--random-range-ratio is {args.random_range_ratio:g}; it must be from 0 to below 1.")
    if not 0 < args.timed_trace_sec_multiplier < math.inf:
        raise UsageError(f"--timed-trace-sec-multiplier is {args.timed_trace_sec_multiplier:g}; it must be above 0.")
    if args.custom_output_len < 1 and args.custom_output_len != -1:
        raise UsageError(f"--custom-output-len is {args.custom_output_len}; it must be at least 1, or -1.")


# ---- made up ---------------------------------------------------------------------------------------


def random_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """Prompts that share nothing but `--random-prefix-len` tokens."""
    tokenizer = text.needed("random")
    made, ratio = RandomText(tokenizer, args.seed), args.random_range_ratio
    added = text.num_added  # such as a beginning of text: it is part of the length
    inside = max((args.input_len or args.random_input_len) - added, 0)
    answer = args.output_len or args.random_output_len
    if args.random_prefix_len + math.floor(inside * (1 - ratio)) < 1:
        raise UsageError(
            f"--random-input-len is too small: the tokenizer adds {added} tokens, --random-range-ratio is {ratio:g}."
        )
    count = args.num_prompts
    prefix = made.draw(args.random_prefix_len)
    prompt_lens = made.rng.integers(math.floor(inside * (1 - ratio)), math.ceil(inside * (1 + ratio)) + 1, count)
    output_lens = made.rng.integers(
        max(math.floor(answer * (1 - ratio)), 1), max(math.ceil(answer * (1 + ratio)), 1) + 1, count
    )
    offsets = made.rng.integers(0, len(made.allowed), count)
    requests = []
    for number in range(count):
        length = len(prefix) + int(prompt_lens[number])
        tokens = prefix + made.sequence(int(offsets[number]) + number, int(prompt_lens[number]))
        prompt, found = made.settle(tokens, length)
        requests.append(BenchRequest(prompt, len(found) + added, int(output_lens[number])))
    return requests


def prefix_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """As many prompts for each of some prefixes, in random order."""
    tokenizer = text.needed("prefix_repetition")
    made = RandomText(tokenizer, args.seed)
    num_prefixes, answer = args.prefix_repetition_num_prefixes, args.output_len or args.prefix_repetition_output_len
    each = args.num_prompts // num_prefixes
    if each == 0:
        raise UsageError(
            f"--num-prompts {args.num_prompts} is less than --prefix-repetition-num-prefixes {num_prefixes}."
        )
    requests = []
    for _ in range(num_prefixes):
        length = args.prefix_repetition_prefix_len
        _, prefix = made.settle(made.draw(length), length)
        for _ in range(each):
            length = args.prefix_repetition_suffix_len
            _, suffix = made.settle(made.draw(length), length)
            requests.append(
                BenchRequest(tokenizer.decode(prefix + suffix), len(prefix + suffix) + text.num_added, answer)
            )
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(requests)
    return requests


# ---- from files ------------------------------------------------------------------------------------


def sharegpt_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """The first turn of conversations: its prompt, and as many tokens as its answer has.

    Conversations that are very short or long are left out, as vLLM does.
    """
    answer_len = args.output_len or args.sharegpt_output_len
    if answer_len is None:
        text.needed("sharegpt without --sharegpt-output-len")
    turns = [pair for number, entry in enumerate(json_list(args.dataset_path), 1)
             if (pair := first_turn(entry, f"entry {number} of {args.dataset_path}"))]  # fmt: skip
    requests: list[BenchRequest] = []
    for prompt, answer in shuffled(turns, args):
        if len(requests) == args.num_prompts:
            break
        prompt_len, length = text.count(prompt), answer_len or text.count(answer)
        limits = SHAREGPT_LENGTHS
        too_short = prompt_len < limits["least"] or (answer_len is None and length < limits["least"])
        too_long = prompt_len > limits["prompt"] or prompt_len + length > limits["total"]
        if text.tokenizer is None or not (too_short or too_long):
            requests.append(BenchRequest(prompt, prompt_len, length))
    return requests


def first_turn(entry: Any, where: str) -> tuple[str, str] | None:
    """Prompt and answer of a conversation; None when it has fewer than two messages. Raises UsageError."""
    try:
        turns = entry.get("conversations", ())
        if len(turns) < 2:
            return None
        prompt, answer = turns[0]["value"], turns[1]["value"]
    except (AttributeError, LookupError, TypeError):
        prompt = answer = None
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise UsageError(f'{where} is no conversation: {{"conversations": [{{"value": "..."}}, {{"value": "..."}}]}}.')
    return prompt, answer


def custom_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """Lines with "prompt" (a text), or "messages" for servers that take chats."""
    answer_len = args.output_len or args.custom_output_len
    rows = list(json_lines(args.dataset_path))
    requests = []
    for where, row in shuffled(rows, args)[: args.num_prompts]:
        length = row.get("output_tokens") if answer_len == -1 else answer_len
        if not isinstance(length, int) or length < 1:
            raise UsageError(f'{where} needs "output_tokens", a whole number, for --custom-output-len -1.')
        prompt = custom_prompt(row, where, text, templated=not args.skip_chat_template)
        prompt_len = text.count(prompt) if isinstance(prompt, str) else 0
        requests.append(BenchRequest(prompt, prompt_len, length))
    return requests


def custom_prompt(row: dict[str, Any], where: str, text: ClientText, templated: bool) -> Any:
    """What is sent for a line: the chat itself where the server takes chats, else its text. Raises UsageError."""
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        messages = [{"role": "user", "content": prompt}]
    elif not isinstance(messages, list) or not messages:
        raise UsageError(f'{where} has no "prompt" (a text) and no "messages".')
    if text.chat:
        return messages
    if templated and text.has_template:
        return text.rendered(messages)
    if not isinstance(prompt, str):
        raise UsageError(f"{where} is a chat, which needs the model's chat template or the backend openai-chat.")
    return prompt


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
    labels = [getattr(args, f"timed_trace_label_{name}")
              for name in ("timestamp", "input_length", "output_length", "hash_ids")]  # fmt: skip
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
    requests.sort(key=lambda request: request.timestamp)
    first = requests[0].timestamp if requests else 0.0
    return [BenchRequest(each.prompt, each.prompt_len, each.output_len, each.timestamp - first) for each in requests]


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


def shuffled[T](rows: list[T], args: argparse.Namespace) -> list[T]:
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(rows)
    return rows


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


def read(path: str, how: Callable[[Any], Any]) -> Any:
    """What a file holds. Raises UsageError."""
    try:
        with Path(path).open("r", encoding="utf-8") as file:
            return how(file)
    except OSError as error:
        raise UsageError(f"cannot read --dataset-path {path}: {error.strerror}.") from None
    except ValueError as error:  # not JSON, not UTF-8
        raise UsageError(f"--dataset-path {path} cannot be read: {error}.") from None
