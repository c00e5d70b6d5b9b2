"""The requests of a benchmark: random text, and prompts from the files that vLLM's benchmark reads.

Lengths and choices are vLLM's; the same seed gives the same requests. This module knows flags only as attributes, and
nothing of servers.
"""

import argparse
import math
import random
from typing import Any

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.client_text import ClientText
from jaxpaged.tools.bench.dataset_files import json_lines, json_list
from jaxpaged.tools.bench.flags import FROM_FILES
from jaxpaged.tools.bench.random_text import RandomText
from jaxpaged.tools.bench.requests import BenchRequest
from jaxpaged.tools.bench.traces import burstgpt_requests, trace_requests

SHAREGPT_LENGTHS = {"least": 4, "prompt": 1024, "total": 2048}
"""Tokens of conversations that are asked: at least in prompt and answer, at most in the prompt, and in both."""
REPEATED = ("sharegpt", "custom")
"""Files whose prompts are asked again, up to `--num-prompts`; a trace is no longer than it is."""


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
