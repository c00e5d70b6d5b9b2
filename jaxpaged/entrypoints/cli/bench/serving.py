"""A server under load: found, made ready, asked, and measured.

`bench serve` does this once, `bench sweep` at several loads. This module knows flags as attributes; requests, traffic
and figures come from their own modules.
"""

import argparse
import asyncio
import contextlib
import math
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.batch_progress import bar_class
from jaxpaged.entrypoints.cli.bench import report
from jaxpaged.entrypoints.cli.bench.backends import Asked, Backend
from jaxpaged.entrypoints.cli.bench.client_text import ClientText, load_client_text
from jaxpaged.entrypoints.cli.bench.datasets import check_dataset, sample_requests
from jaxpaged.entrypoints.cli.bench.load import Run, run_load
from jaxpaged.entrypoints.cli.bench.metrics import limits_of, metrics_named, percentiles_of, serving_result
from jaxpaged.entrypoints.cli.bench.requests import BenchRequest, Outcome
from jaxpaged.entrypoints.cli.bench.serve import HTTP_ENDPOINTS, SAMPLING
from jaxpaged.entrypoints.cli.bench.traffic import Traffic, rate_changes
from jaxpaged.entrypoints.cli.serve import check_extra
from jaxpaged.entrypoints.cli.server_answers import ServerError
from jaxpaged.entrypoints.cli.terminal import complain
from jaxpaged.errors import UsageError

FAILURE, INTERRUPTED = 1, 130
COMMAND = "jaxpaged bench"
TEST_PROMPT = "Hello"
LATE_SECONDS = 0.05
"""Requests that are sent this much too late are no longer the load that was asked for."""
BUSY_SHARE = 0.9
"""Of a core: with more of it taken by the load generator, answers wait for it. It says nothing of a shorter run than
`SHORT_RUN` seconds."""
SHORT_RUN = 1.0


@dataclass(frozen=True)
class Statistics:
    """What is computed of a run."""

    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float]

    @classmethod
    def of_flags(cls, args: argparse.Namespace) -> "Statistics":
        """Raises UsageError."""
        return cls(
            metrics_named(args.percentile_metrics), percentiles_of(args.metric_percentiles), limits_of(args.goodput)
        )


@dataclass(frozen=True)
class Load:
    """How requests are sent. `self_timed`: at the times that they bring along."""

    traffic: Traffic
    max_concurrency: int | None = None
    self_timed: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency is {self.max_concurrency}; it must be at least 1.")

    def arrivals(self, requests: Sequence[BenchRequest], seed: int) -> list[float]:
        if self.self_timed:
            return [request.timestamp or 0.0 for request in requests]
        return self.traffic.arrivals(len(requests), seed)


@dataclass
class Server:
    """A server that answers, and the model that is asked. `model_id` is what it is called, or made from."""

    backend: Backend
    asked: Asked
    model_id: str
    tokenizer_id: str | None
    text: ClientText
    id_prefix: str

    async def send(self, request: BenchRequest, number: int) -> Outcome:
        return await self.backend.send(request, self.asked, f"{self.id_prefix}{number}")

    def asking(self, name: str, fields: Mapping[str, Any]) -> "Server":
        """The same server, asked for further fields, with other request ids."""
        asked = replace(self.asked, fields={**self.asked.fields, **fields})
        return replace(self, asked=asked, id_prefix=f"{self.id_prefix}{name}-")


async def bench_serve(args: argparse.Namespace) -> int:
    """Everything that `bench serve` does. Returns the exit status."""
    statistics, metadata = Statistics.of_flags(args), report.pairs_of(args.metadata, "--metadata")
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    load = Load(Traffic(args.request_rate, args.burstiness, *ramp), args.max_concurrency, is_self_timed(args))
    check_dataset(args)
    saved = args.save_result or args.append_result
    if saved:
        report.check_result_folder(Path(args.result_dir or ".", args.result_filename or "x").parent)
    elif args.save_detailed or args.result_dir or args.result_filename:
        raise UsageError("nothing is saved without --save-result or --append-result. Add one of them.")
    async with open_server(args) as server:
        requests = sample_requests(args, server.text)
        await warm_up(server, requests, args)
        run = await measure(server, requests, load, args)
    result = result_of(args, server, requests, load, run, statistics, metadata)
    print(report.serving_table(result))
    remark_on(run, load)
    if saved:
        path = report.result_path(args.result_dir, args.result_filename, result)
        report.write_result(path, result if args.save_detailed else report.without_details(result), args.append_result)
        print(f"The result is in {path}.", file=sys.stderr)
    return INTERRUPTED if run.interrupted else FAILURE if result["failed"] else 0


def is_self_timed(args: argparse.Namespace) -> bool:
    """Whether requests bring their times along. Raises UsageError where they cannot."""
    if args.dataset_name != "timed_trace":
        if args.self_timed is not None:
            raise UsageError("--self-timed is for --dataset-name timed_trace, whose requests have times. Leave it out.")
        return False
    if args.self_timed is not False and (args.request_rate != math.inf or args.ramp_up_strategy is not None):
        raise UsageError("the trace has its own times. Give --no-self-timed for a rate of your own.")
    return args.self_timed is not False


# ---- the server ------------------------------------------------------------------------------------


def check_backend_extra(backend: str) -> None:
    """Raise UsageError when the libraries of a backend are not installed."""
    if backend in HTTP_ENDPOINTS:
        check_extra("serve", "httptools")
    else:
        check_extra("grpc", "grpc")


@contextlib.asynccontextmanager
async def open_server(args: argparse.Namespace) -> AsyncIterator[Server]:
    """The server of the flags, once it is ready. Raises UsageError and ServerError.

    A short request comes first: it finds a wrong model, key or field before a thousand fail.
    """
    fields = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    asked = Asked(
        args.served_model_name or args.model or "", args.ignore_eos or args.dataset_name in ("random", "timed_trace"),
        args.logprobs, {**fields, **args.extra_body},
    )  # fmt: skip
    chat = args.backend in ("openai-chat", "grpc-chat")
    backend = grpc_backend(args, chat) if args.backend.startswith("grpc") else http_backend(args, chat)
    try:
        await wait_until_ready(backend, args.ready_check_timeout_sec)
        model_id = args.model
        if model_id is None:
            name, model_id = await backend.first_model()
            asked = replace(asked, model=args.served_model_name or name)
        prefix = args.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
        tested = await backend.send(BenchRequest(TEST_PROMPT, 1, 1), asked, f"{prefix}test")
        if not tested.success:
            raise ServerError(f"the first request failed: {tested.error}")
        tokenizer_id = None if args.skip_tokenizer_init else args.tokenizer or model_id
        text = ClientText(None, chat=chat) if tokenizer_id is None else load_client_text(tokenizer_id, chat)
        yield Server(backend, asked, model_id, tokenizer_id, text, prefix)
    finally:
        await backend.close()


def http_backend(args: argparse.Namespace, chat: bool) -> Backend:
    from jaxpaged.entrypoints.cli.bench.backends import HttpBackend
    from jaxpaged.entrypoints.cli.bench.http_client import HttpClient

    endpoint = args.endpoint or HTTP_ENDPOINTS[args.backend]
    if endpoint.endswith("chat/completions") != chat or not endpoint.endswith("completions"):
        raise UsageError(
            f"--endpoint is {endpoint}; that of --backend {args.backend} is {HTTP_ENDPOINTS[args.backend]}."
        )
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= report.pairs_of(args.header, "--header")
    url = (args.base_url or f"http://{bracketed(args.host)}:{args.port or 8000}").rstrip("/").removesuffix("/v1")
    allow_many_connections()
    client = HttpClient(url, headers, insecure=args.insecure, ca_certificate=args.ca_certificate)
    return HttpBackend(client, "/" + endpoint.lstrip("/"), chat)


def grpc_backend(args: argparse.Namespace, chat: bool) -> Backend:
    from jaxpaged.client import AsyncClient
    from jaxpaged.entrypoints.cli.bench.backends import GrpcBackend

    if args.endpoint or args.header or args.insecure:
        raise UsageError(f"--endpoint, --header and --insecure are for HTTP, not for --backend {args.backend}.")
    target = args.base_url or f"{bracketed(args.host)}:{args.port or 50051}"
    if "://" in target:
        raise UsageError(f"--base-url is {target}; for gRPC it is host:port or unix:/path.")
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    try:
        client = AsyncClient(target, api_key=key, ca_certificate=args.ca_certificate, retries=0)
    except OSError as error:
        raise UsageError(f"cannot read --ca-certificate {args.ca_certificate}: {error.strerror}.") from None
    return GrpcBackend(client, target, chat)


def allow_many_connections() -> None:
    """Every connection is an open file, of which the system allows a process 1024 at first, in many places."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def wait_until_ready(backend: Backend, timeout: float) -> None:
    """Wait for a server that starts; without a timeout only say that it is not ready. Raises ServerError."""
    end = time.monotonic() + timeout
    while True:
        try:
            obstacle = await backend.obstacle()
        except ServerError as error:
            if time.monotonic() >= end:
                raise
            obstacle = str(error)
        if obstacle is None:
            return
        if time.monotonic() >= end:
            if timeout > 0:
                raise ServerError(f"the server is not ready after {timeout:g} s: {obstacle}")
            complain(
                COMMAND, f"the server is not at full speed yet: {obstacle} Wait for it: --ready-check-timeout-sec 300"
            )
            return
        await asyncio.sleep(min(1.0, timeout / 10))


async def warm_up(server: Server, requests: Sequence[BenchRequest], args: argparse.Namespace) -> None:
    """Send the first request as often as asked, unmeasured. Raises ServerError when one fails."""
    if args.num_warmups < 1:
        return
    repeated = [requests[0]] * args.num_warmups
    at_once = getattr(args, "max_concurrency", None)
    run = await run_load(server.asking("warmup", {}).send, repeated, [0.0] * len(repeated), at_once)
    if run.interrupted:
        raise KeyboardInterrupt
    if lines := report.failures([outcome.error for outcome in run.outcomes]):
        raise ServerError(f"a warm-up failed: {lines[0]}")


# ---- the measurement -------------------------------------------------------------------------------


async def measure(server: Server, requests: Sequence[BenchRequest], load: Load, args: argparse.Namespace) -> Run:
    """Ask everything once, with a progress bar in a terminal."""
    with contextlib.closing(bar(len(requests), args.disable_tqdm)) as progress:
        return await run_load(
            server.send, requests, load.arrivals(requests, args.seed), load.max_concurrency,
            lambda outcome: progress.update(1),
        )  # fmt: skip


def bar(total: int, disabled: bool) -> Any:
    return bar_class()(total=total, desc="Requests", unit="req", disable=disabled or not sys.stderr.isatty())


def result_of(
    args: argparse.Namespace, server: Server, requests: Sequence[BenchRequest], load: Load, run: Run,
    statistics: Statistics, metadata: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The result with all of vLLM's fields, and what the load generator itself took."""
    traffic = load.traffic
    result: dict[str, Any] = {
        "date": report.now(), "endpoint_type": args.backend, "backend": args.backend, "label": args.label,
        "model_id": server.model_id, "tokenizer_id": server.tokenizer_id, "num_prompts": len(requests), **metadata,
        "request_rate": report.rate_in_result(traffic.request_rate),
        "burstiness": report.rate_in_result(traffic.burstiness),
        "max_concurrency": load.max_concurrency,
    }  # fmt: skip
    if traffic.strategy is not None:
        result |= {"ramp_up_strategy": traffic.strategy, "ramp_up_start_rps": traffic.start_rps,
                   "ramp_up_end_rps": traffic.end_rps}  # fmt: skip
        result["rps_change_events"] = rate_events(traffic, load.arrivals(requests, args.seed), run.duration)
    result |= serving_result(
        run.outcomes, run.duration, metrics=statistics.metrics, percentiles=statistics.percentiles,
        goodput=statistics.goodput, count_tokens=server.text.count_answer,
    )  # fmt: skip
    lags = sorted(run.send_lags)
    result["client_cpu_share"] = run.cpu_seconds / max(run.duration, 1e-9)
    result["max_send_lag_ms"] = 1e3 * lags[-1] if lags else 0.0
    return result


def rate_events(traffic: Traffic, arrivals: Sequence[float], duration: float) -> list[dict[str, Any]]:
    """When a ramp reached every whole rate, as times of day. The run has just ended."""
    begin = datetime.now() - timedelta(seconds=duration)
    changes = rate_changes(traffic.rates(len(arrivals)).tolist(), arrivals)
    return [{"rps": rate, "timestamp": (begin + timedelta(seconds=due)).isoformat()} for rate, due in changes]


def remark_on(run: Run, load: Load) -> None:
    """Say on standard error what a reader of the figures must know."""
    for line in report.failures([outcome.error for outcome in run.outcomes]):
        complain(COMMAND, f"failed: {line}")
    if run.interrupted:
        complain(COMMAND, "interrupted: the figures are those of requests that had ended")
    is_timed = load.self_timed or load.traffic.request_rate != math.inf or load.traffic.strategy is not None
    if is_timed and max(run.send_lags, default=0.0) > LATE_SECONDS:
        worst = max(run.send_lags)
        complain(COMMAND, f"requests were sent up to {1e3 * worst:.0f} ms late: this machine is too busy for the load")
    if run.duration > SHORT_RUN and run.cpu_seconds > BUSY_SHARE * run.duration:
        complain(COMMAND, "the load generator used a whole core, so latencies contain waits of its own")
