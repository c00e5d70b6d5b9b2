"""A server under load: asked everything once, and measured.

`bench serve` does this once, `bench sweep` at several loads. This module knows flags as attributes; the server,
requests, traffic and figures come from their own modules.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.batch_progress import bar_class
from jaxpaged.entrypoints.cli.server_answers import ServerError, error_text
from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.entrypoints.terminal import complain
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench import report
from jaxpaged.tools.bench.backends import in_words, unreachable
from jaxpaged.tools.bench.datasets import check_dataset, sample_requests
from jaxpaged.tools.bench.flags import TIMED
from jaxpaged.tools.bench.load import Run, Traffic, rate_changes, run_load
from jaxpaged.tools.bench.metrics import limits_of, metrics_named, percentiles_of, serving_result
from jaxpaged.tools.bench.requests import BenchRequest
from jaxpaged.tools.bench.server import COMMAND, Server, admin_client, open_server
from jaxpaged.tools.pictures import canvas

FAILURE, INTERRUPTED = 1, 130
LATE_SECONDS = 0.05
"""Requests that are sent this much too late are no longer the load that was asked for."""
BUSY_SHARE = 0.9
"""Of a core: with more of it taken by the load generator, answers wait for it. It says nothing of a shorter run than
`SHORT_RUN` seconds."""
SHORT_RUN = 1.0
STOP_SECONDS = 600.0
"""Longest wait for the files of a recording to be written."""
WHERE = "jaxpaged has it at --admin-port: give --admin-base-url http://127.0.0.1:PORT."


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


async def bench_serve(args: argparse.Namespace) -> int:
    """Everything that `bench serve` does. Returns the exit status."""
    statistics, metadata = Statistics.of_flags(args), report.pairs_of(args.metadata, "--metadata")
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    load = Load(Traffic(args.request_rate, args.burstiness, *ramp), args.max_concurrency, is_self_timed(args))
    check_dataset(args)
    check_files(args)
    profiler = admin_client(args) if args.profile else None
    async with open_server(args) as server:
        requests = sample_requests(args, server.text)
        await warm_up(server, requests, args)
        async with recording(profiler, COMMAND):
            run = await measure(server, requests, load, args)
    result = result_of(args, server, requests, load, run, statistics, metadata)
    print(report.serving_table(result))
    remark_on(run, load)
    write_files(args, result)
    return INTERRUPTED if run.interrupted else FAILURE if result["failed"] else 0


def check_files(args: argparse.Namespace) -> None:
    """Raise UsageError for files that could not be written after the measurement."""
    if args.save_result or args.append_result:
        report.check_result_folder(Path(args.result_dir or ".", args.result_filename or "x").parent)
    elif args.save_detailed or args.result_dir or args.result_filename:
        raise UsageError("nothing is saved without --save-result or --append-result. Add one of them.")
    if args.plot_timeline and not args.save_result:
        raise UsageError("--plot-timeline draws beside the result. Add --save-result.")
    if args.plot_timeline and not canvas.has_matplotlib():
        raise UsageError(f"--plot-timeline needs matplotlib, which is not installed. {canvas.INSTALL}")


def write_files(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """What was asked for: the result as JSON, and the picture beside it. Raises UsageError."""
    if not (args.save_result or args.append_result):
        return
    path = report.result_path(args.result_dir, args.result_filename, result)
    report.write_result(path, result if args.save_detailed else report.without_details(result), args.append_result)
    print(f"The result is in {path}.", file=sys.stderr)
    if args.plot_timeline:
        from jaxpaged.tools.pictures.request_plot import draw_requests

        picture = canvas.write_figure(draw_requests(result), path.with_suffix(".timeline.png"))
        print(f"The picture is {picture}.", file=sys.stderr)


def is_self_timed(args: argparse.Namespace) -> bool:
    """Whether requests are sent at the times that they bring along. Raises UsageError where they bring none."""
    if args.self_timed is not None and args.dataset_name not in TIMED:
        known = " and ".join(TIMED)
        raise UsageError(f"--self-timed is for --dataset-name {known}, whose requests have times. Leave it out.")
    timed = args.dataset_name == "timed_trace" if args.self_timed is None else args.self_timed
    if timed and (args.request_rate != math.inf or args.ramp_up_strategy is not None):
        raise UsageError("the trace has its own times. Give --no-self-timed for a rate of your own.")
    return timed


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
            server.send,
            requests,
            load.arrivals(requests, args.seed),
            load.max_concurrency,
            lambda outcome: progress.update(1),
        )


def bar(total: int, disabled: bool) -> Any:
    return bar_class()(total=total, desc="Requests", unit="req", disable=disabled or not sys.stderr.isatty())


def result_of(
    args: argparse.Namespace,
    server: Server,
    requests: Sequence[BenchRequest],
    load: Load,
    run: Run,
    statistics: Statistics,
    metadata: Mapping[str, str],
) -> dict[str, Any]:
    """The result with all of vLLM's fields, and what the load generator itself took."""
    traffic = load.traffic
    result: dict[str, Any] = {
        "date": report.now(),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": server.model_id,
        "tokenizer_id": server.tokenizer_id,
        "num_prompts": len(requests),
        **metadata,
        "request_rate": report.rate_in_result(traffic.request_rate),
        "burstiness": report.rate_in_result(traffic.burstiness),
        "max_concurrency": load.max_concurrency,
    }
    if traffic.strategy is not None:
        result |= {
            "ramp_up_strategy": traffic.strategy,
            "ramp_up_start_rps": traffic.start_rps,
            "ramp_up_end_rps": traffic.end_rps,
        }
        result["rps_change_events"] = rate_events(traffic, load.arrivals(requests, args.seed), run.duration)
    result |= serving_result(
        run.outcomes,
        run.duration,
        metrics=statistics.metrics,
        percentiles=statistics.percentiles,
        goodput=statistics.goodput,
        count_tokens=server.text.count_answer,
    )
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


# ---- what the server's devices do meanwhile --------------------------------------------------------


@contextlib.asynccontextmanager
async def recording(client: HttpClient | None, command: str) -> AsyncIterator[None]:
    """The server at `client` records meanwhile; without one nobody does. Raises ServerError where it does not begin."""
    if client is None:
        yield
        return
    try:
        await tell(client, "/start_profile")
        try:
            yield
        finally:
            try:
                await tell(client, "/stop_profile")
            except ServerError as error:  # what was measured is not lost with it
                complain(command, f"the recording of the devices did not end: {error}")
    finally:
        await client.close()


async def tell(client: HttpClient, path: str) -> None:
    """Post an empty object to `path`. Raises ServerError unless the server does what it says."""
    try:
        status, refusal = await client.post(path, b"{}", lambda data, now: None, {}, STOP_SECONDS)
    except TimeoutError as error:
        raise ServerError(f"{client.base_url}{path} does not answer: {in_words(error)}.") from None
    except OSError as error:
        raise ServerError(unreachable(client.base_url, error)) from None
    if status != 200:
        advice = f" {WHERE}" if status == 404 else ""
        raise ServerError(f"{client.base_url}{path} answers {status}: {error_text(refusal)}{advice}")
