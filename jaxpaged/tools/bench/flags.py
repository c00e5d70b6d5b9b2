"""Flags that several benchmarks have: the server, the load, the requests, what is computed of a run.

This module knows flags, and nothing that is done with them.
"""

import argparse
import typing
from typing import Any

from jaxpaged.entrypoints.option_flags import finite_number, json_object, number, whole_number
from jaxpaged.sampling_params import SHAPING, SamplingParams

HTTP_ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
BACKENDS = (*HTTP_ENDPOINTS, "grpc", "grpc-chat")
DEFAULTS = SamplingParams()
SAMPLING = {
    name: whole_number if kind is int else finite_number
    for name, kind in typing.get_type_hints(SamplingParams).items()
    if name in SHAPING
}
"""Sampling parameters that requests may have -> what reads their flag."""
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


# ---- a server under load ---------------------------------------------------------------------------


def add_run_flags(parser: argparse.ArgumentParser, load: Any) -> Any:
    """What every run against a server takes, at one load or at several -> the group of flags for results."""
    add_load_flags(load)
    add_dataset_flags(parser)
    add_tokenizer_flags(parser)
    add_request_flags(parser)
    report = parser.add_argument_group("results")
    add_statistics_flags(report)
    return report


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Which server is measured, and how it is reached."""
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="openai",
        help="openai (or vllm): completions; openai-chat: chats; grpc, grpc-chat: the same over "
        "jaxpaged's gRPC (default: openai)",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="http://host:port or https://...; for gRPC host:port or unix:/path. Replaces --host and --port",
    )
    group.add_argument("--host", default="127.0.0.1", help="the server's address (default: 127.0.0.1)")
    group.add_argument("--port", type=whole_number, metavar="N", help="its port (default: 8000, for gRPC 50051)")
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of its endpoint (default: /v1/completions or /v1/chat/completions)"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="HTTP headers of every request")
    group.add_argument("--api-key", metavar="KEY", help="API key (default: OPENAI_API_KEY of the environment)")
    group.add_argument("--insecure", action="store_true", help="do not check the certificate of https://")
    group.add_argument(
        "--ca-certificate",
        metavar="FILE",
        help="authorities (PEM) to check the certificate with; for gRPC it switches TLS on",
    )
    group.add_argument("-m", "--model", metavar="NAME", help="model (default: the first that the server names)")
    group.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in requests, when --model is a folder or hub id"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=number,
        default=0.0,
        metavar="X",
        help="seconds to wait for the server to be ready (default: 0)",
    )


def add_load_flags(load: Any) -> None:
    """How the load is, whatever its rate."""
    load.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="X",
        help="1: a Poisson process; less: burstier; more: evener; inf: even (default: 1)",
    )
    load.add_argument(
        "--num-warmups",
        type=whole_number,
        default=0,
        metavar="N",
        help="times that the first request is sent before measuring (default: 0)",
    )
    load.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """What every request asks for."""
    group = parser.add_argument_group("requests", "sampling parameters are the server's unless given")
    group.add_argument(
        "--ignore-eos", action="store_true", help="let answers be as long as asked for; always on for made-up prompts"
    )
    group.add_argument("--logprobs", type=whole_number, metavar="N", help="ask for log probabilities")
    for name, convert in SAMPLING.items():
        metavar = "N" if convert is whole_number else "X"
        group.add_argument(f"--{name.replace('_', '-')}", type=convert, metavar=metavar, help="sampling parameter")
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="further fields of every request: '{\"seed\": 1}'",
    )
    group.add_argument(
        "--request-id-prefix", metavar="TEXT", help="beginning of request ids (default: bench- and random letters)"
    )


def add_statistics_flags(group: Any) -> None:
    """What is computed of what was measured."""
    group.add_argument(
        "--percentile-metrics",
        metavar="A,B,...",
        default="ttft,tpot,itl",
        help="ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue (default: ttft,tpot,itl)",
    )
    group.add_argument("--metric-percentiles", metavar="A,B,...", default="99", help="percentiles (default: 99)")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="count requests that keep these limits of ttft, tpot and e2el, in ms",
    )
    group.add_argument("--label", metavar="TEXT", help="a name for the result (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="further fields of the result")


def check_extras(backend: str) -> None:
    """Raise UsageError when the libraries that a load needs are not installed."""
    from jaxpaged.entrypoints.cli.serve import check_extra

    check_extra("serve", "httptools")
    if backend not in HTTP_ENDPOINTS:
        check_extra("grpc", "grpc")
