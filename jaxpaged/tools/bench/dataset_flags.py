"""The flags of datasets, which several benchmarks have, by vLLM's names. This module reads no file."""

import argparse

from jaxpaged.entrypoints.cli.values import number, whole_number

NAMES = ("random", "sharegpt", "prefix_repetition", "custom", "timed_trace", "burstgpt")
FROM_FILES = ("sharegpt", "custom", "timed_trace", "burstgpt")
TIMED = ("timed_trace", "burstgpt")
"""Those whose requests bring along when they are sent."""
MADE_UP = ("random", *TIMED)
"""Those whose text says nothing, so that answers end only where their length is reached."""
NO_PICTURES = "requests take text only"
ELSEWHERE = "write its prompts as JSON lines, and ask them with --dataset-name custom"
REFUSED = {
    "hf": f"data sets of a hub differ in their fields; {ELSEWHERE}",
    "spec_bench": ELSEWHERE,
    "speed_bench": ELSEWHERE,
    "random-mm": NO_PICTURES,
    "custom_image": NO_PICTURES,
    "custom_audio": NO_PICTURES,
    "random-rerank": "answers are measured, and a rerank has none",
}
"""vLLM's data sets that are not here, and why."""


LENGTHS = (
    ("random-input-len", 1024, "random: tokens of a prompt"),
    ("random-output-len", 128, "random: tokens of an answer"),
    ("random-prefix-len", 0, "random: tokens that all prompts begin with, before their own"),
    ("prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a prefix"),
    ("prefix-repetition-suffix-len", 256, "prefix_repetition: tokens after the prefix"),
    ("prefix-repetition-num-prefixes", 10, "prefix_repetition: different prefixes, each for as many prompts"),
    ("prefix-repetition-output-len", 128, "prefix_repetition: tokens of an answer"),
    ("sharegpt-output-len", None, "sharegpt: tokens of an answer (default: as many as in the file)"),
    ("custom-output-len", 256, 'custom: tokens of an answer; -1 takes "output_tokens" of each line'),
    ("timed-trace-chunk-hash-size", 16, "timed_trace: tokens that one hash id stands for"),
)
"""Flags whose value is a whole number: name, default and help."""


def dataset_name(text: str) -> str:
    """Raises ArgumentTypeError for a data set that vLLM has and this benchmark has not."""
    if text in REFUSED:
        raise argparse.ArgumentTypeError(f"{text} is not supported: {REFUSED[text]}.")
    return text


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """What is asked."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        type=dataset_name,
        choices=NAMES,
        default="random",
        help="source of the prompts (default: random)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="the file of sharegpt, custom, timed_trace or burstgpt")
    group.add_argument(
        "--num-prompts", type=whole_number, default=1000, metavar="N", help="number of requests (default: 1000)"
    )
    group.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="seed for prompts and times of arrival (default: 0)"
    )
    group.add_argument("--input-len", type=whole_number, metavar="N", help="the same as --random-input-len")
    group.add_argument(
        "--output-len", type=whole_number, metavar="N", help="tokens of every answer, for any dataset but timed_trace"
    )
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of the file")
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="send no prompt twice, even if the file has fewer than --num-prompts",
    )
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="custom: send prompts as they are, without the model's chat template",
    )
    for name, default, help in LENGTHS:
        shown = help if default is None else f"{help} (default: {default})"
        group.add_argument(f"--{name}", type=whole_number, default=default, metavar="N", help=shown)
    group.add_argument(
        "--random-range-ratio",
        type=number,
        default=0.0,
        metavar="X",
        help="random: lengths vary by this share, in [0, 1) (default: 0)",
    )
    group.add_argument(
        "--timed-trace-sec-multiplier",
        type=number,
        default=1.0,
        metavar="X",
        help="timed_trace: seconds in a unit of its times, 0.001 for ms (default: 1)",
    )
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        group.add_argument(
            f"--timed-trace-label-{field.replace('_', '-')}",
            default=field,
            metavar="NAME",
            help=f"timed_trace: the file's name for {field}",
        )


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """For prompts that are made here, of a server's model."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer", metavar="NAME", help="folder or hub id (default: that of --model)")
    group.add_argument(
        "--skip-tokenizer-init",
        action="store_true",
        help="load no tokenizer; for datasets whose prompts and lengths need none",
    )
