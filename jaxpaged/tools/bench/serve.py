"""`jaxpaged bench serve`: latency and throughput of a server under a load.

This module knows flags; what is done with them is in `serving.py`.
"""

import argparse
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser
from jaxpaged.entrypoints.cli.values import finite_number, json_object, number, whole_number
from jaxpaged.tools.bench.dataset_flags import add_dataset_flags, add_tokenizer_flags

HTTP_ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
BACKENDS = (*HTTP_ENDPOINTS, "grpc", "grpc-chat")
SAMPLING = {
    "temperature": finite_number,
    "top_p": finite_number,
    "top_k": whole_number,
    "min_p": finite_number,
    "frequency_penalty": finite_number,
    "presence_penalty": finite_number,
    "repetition_penalty": finite_number,
}

EPILOG = """\
Requests are sent when they are due, whether or not earlier ones have been answered; --max-concurrency holds them back.
Latencies count from the sending of a request. Names, definitions and results are those of vLLM's `bench serve`.
The guide is jaxpaged/guides/measuring.md.

exit status: 0 every request was answered; 1 some failed, or the server did not answer; 2 wrong usage; 130 interrupted

examples:
  jaxpaged bench serve --num-prompts 100 --input-len 128 --output-len 32
  jaxpaged bench serve --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl --request-rate 4
  jaxpaged bench serve --backend grpc --port 50051 --max-concurrency 16 --goodput ttft:500 tpot:50
  jaxpaged bench serve --request-rate 8 --burstiness 0.5 --save-result --result-dir results --metadata machine=a
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser("serve", help="latency and throughput of a server under a load", epilog=EPILOG)
    add_server_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=number,
        default=float("inf"),
        metavar="X",
        help="requests a second; inf sends all at once (default: inf)",
    )
    load.add_argument(
        "--max-concurrency", type=whole_number, metavar="N", help="most requests at a time; the others wait here"
    )
    load.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="raise the rate from request to request; replaces --request-rate",
    )
    load.add_argument("--ramp-up-start-rps", type=number, metavar="X", help="requests a second at the first request")
    load.add_argument("--ramp-up-end-rps", type=number, metavar="X", help="requests a second at the last request")
    load.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send at the times of the file (default: on for timed_trace, off for burstgpt)",
    )
    report = add_run_flags(parser, load)
    report.add_argument(
        "--profile", action="store_true", help="have the server record what its devices do, in its --profile-dir"
    )
    report.add_argument(
        "--admin-base-url",
        metavar="URL",
        help="address of the server's admin endpoints for --profile: http://127.0.0.1:PORT with the "
        "--admin-port of `jaxpaged serve` (default: --base-url)",
    )
    report.add_argument(
        "--plot-timeline",
        action="store_true",
        help="draw when each request waited and was answered, in a file beside the result",
    )
    report.add_argument("--save-result", action="store_true", help="write the result as JSON")
    report.add_argument("--append-result", action="store_true", help="add the result to the file, as a line of JSON")
    report.add_argument("--save-detailed", action="store_true", help="write figures and text of every request, too")
    report.add_argument("--result-dir", metavar="FOLDER", help="folder for the result (default: the current folder)")
    report.add_argument(
        "--result-filename",
        metavar="NAME",
        help="name of the result's file (default: made of label, rate, model and time)",
    )
    parser.set_defaults(run=run, command_parser=parser)


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


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    check_extras(args.backend)
    from jaxpaged.entrypoints.cli.serve import run_loop
    from jaxpaged.tools.bench.serving import bench_serve

    return run_loop(bench_serve(args))


def check_extras(backend: str) -> None:
    """Raise UsageError when the libraries that a load needs are not installed."""
    from jaxpaged.entrypoints.cli.serve import check_extra

    check_extra("serve", "httptools")
    if backend not in HTTP_ENDPOINTS:
        check_extra("grpc", "grpc")
