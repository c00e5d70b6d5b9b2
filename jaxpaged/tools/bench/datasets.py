"""The requests of a benchmark: random text, prompts from the files that vLLM's benchmark reads, and traces.

A trace has times and lengths of what real servers were asked, and its text is made up. Tokens do not survive the way to
text and back: the text of some becomes other tokens, more or fewer. So random text is cut and lengthened until its
length is right.

Lengths and choices are vLLM's; the same seed gives the same requests. This module knows flags only as attributes, and
nothing of servers.
"""

import argparse
import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.client_text import ClientText
from jaxpaged.tools.bench.flags import FROM_FILES
from jaxpaged.tools.bench.requests import BenchRequest

SHAREGPT_LENGTHS = {"least": 4, "prompt": 1024, "total": 2048}
"""Tokens of conversations that are asked: at least in prompt and answer, at most in the prompt, and in both."""
REPEATED = ("sharegpt", "custom")
"""Files whose prompts are asked again, up to `--num-prompts`; a trace is no longer than it is."""
BURSTGPT_MODEL = "GPT-4"
"""Of the models that BurstGPT's rows are about, the one whose rows are asked, as in vLLM's benchmark."""
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
MOST_TRIES = 10


def sample_requests(args: argparse.Namespace, text: ClientText) -> list[BenchRequest]:
    """What the flags of `dataset_flags` ask for. Raises UsageError."""
    check_dataset(args)
    sample = {
        "random": random_requests,
        "sharegpt": sharegpt_requests,
        "prefix_repetition": prefix_requests,
        "custom": custom_requests,
        "timed_trace": trace_requests,
        "burstgpt": burstgpt_requests,
    }[args.dataset_name]
    requests = sample(args, text)
    if not requests:
        raise UsageError(f"{args.dataset_path or args.dataset_name} gives no request.")
    if args.dataset_name in REPEATED and not args.no_oversample:
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
        "num_prompts": 1,
        "input_len": 1,
        "output_len": 1,
        "random_input_len": 1,
        "random_output_len": 1,
        "random_prefix_len": 0,
        "prefix_repetition_prefix_len": 0,
        "prefix_repetition_suffix_len": 1,
        "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_output_len": 1,
        "sharegpt_output_len": 1,
        "timed_trace_chunk_hash_size": 1,
    }
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
    turns = [
        pair
        for number, entry in enumerate(json_list(args.dataset_path), 1)
        if (pair := first_turn(entry, f"entry {number} of {args.dataset_path}"))
    ]
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


def shuffled[T](rows: list[T], args: argparse.Namespace) -> list[T]:
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(rows)
    return rows


# ---- traces ----------------------------------------------------------------------------------------


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


# ---- text that says nothing ------------------------------------------------------------------------


class RandomText:
    """Draws text from a vocabulary without its special tokens; the same seed draws the same."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        size = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        self.allowed = np.array([each for each in range(size) if each not in tokenizer.special_ids])
        self.num_off = 0
        """Tokens, in all texts, by which lengths are not as wanted."""

    def draw(self, length: int) -> list[int]:
        """Tokens, each drawn alone."""
        return self.allowed[self.rng.integers(0, len(self.allowed), length)].tolist()

    def sequence(self, offset: int, length: int) -> list[int]:
        """Tokens that follow each other in the vocabulary."""
        return self.allowed[(offset + np.arange(length)) % len(self.allowed)].tolist()

    def settle(self, token_ids: Sequence[int], length: int) -> tuple[str, list[int]]:
        """A text of `length` tokens that begins as `token_ids` say, and the tokens that it becomes.

        Once in a while no text is found; then it has some tokens more or fewer.
        """
        tokens = list(token_ids)[:length]
        text = self._tokenizer.decode(tokens)
        for _ in range(MOST_TRIES):
            text = self._tokenizer.decode(tokens)
            found = self._tokenizer.encode(text, add_special_tokens=False)
            if len(found) == length:
                return text, found
            tokens = found[:length] if len(found) > length else found + self.draw(length - len(found))
        found = self._tokenizer.encode(text, add_special_tokens=False)
        self.num_off += abs(len(found) - length)
        return text, found


# ---- files -----------------------------------------------------------------------------------------


def json_list(path: str) -> list[Any]:
    """The list in a JSON file. Raises UsageError."""
    content = read(path, lambda file: json.load(file))
    if not isinstance(content, list):
        raise UsageError(f"{path} holds no JSON list of conversations.")
    return content


def json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line of a file. Raises UsageError."""
    for number, line in enumerate(read(path, list), 1):  # not splitlines(): U+2028 in a text ends no line
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
    reader = csv.DictReader(read(path, list))
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
