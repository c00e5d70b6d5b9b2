"""One engine's side of the protocol: a job as JSON on standard input, one JSON object a line on standard output.

The events, in order: `ready` (the model is loaded), `first_token` (of a small request), `settled` (nothing is left to
compile), `first_minute` if the job asks for it, then for every workload `run` or `failed`, and `end`. Whatever else a
library prints goes to standard error. This module knows no engine, and runs with every peer's Python: 3.11 and newer.
"""

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import own_time


class Watch:
    """When every request of a workload got its tokens, in seconds since `begin`."""

    def __init__(self, num_requests: int):
        self.first_seconds: list[float | None] = [None] * num_requests
        self.last_seconds: list[float | None] = [None] * num_requests
        self.first_token_ids: list[int | None] = [None] * num_requests
        self.num_tokens = [0] * num_requests
        self.begin = time.perf_counter()

    def add(self, index: int, token_ids: list[int], at: float | None = None) -> None:
        """Request `index` got these tokens, now or when the performance counter stood `at`."""
        if not token_ids:
            return
        seconds = (time.perf_counter() if at is None else at) - self.begin
        if self.first_seconds[index] is None:
            self.first_seconds[index] = seconds
            self.first_token_ids[index] = int(token_ids[0])
        self.last_seconds[index] = seconds
        self.num_tokens[index] += len(token_ids)


class Engine(Protocol):
    """What a runner provides. A request is a dict with `prompt_token_ids` and `max_tokens`."""

    versions: dict[str, str]

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        """Complete all requests greedily, ignoring end-of-sequence tokens. `shared_prefix`: tokens in common."""

    def settle(self) -> None:
        """Wait for whatever the engine still does in the background."""


class Session:
    """The lines between the benchmark and this process."""

    def __init__(self):
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self.job: dict[str, Any] = json.loads(sys.stdin.read())
        own_time.use(self.job["clock"])
        self._use_threads(self.job["threads"])

    def _use_threads(self, count: int) -> None:
        """The same number of cores for every engine, whatever its own idea of threads is."""
        os.environ["OMP_NUM_THREADS"] = str(count)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])

    def emit(self, event: str, **fields: Any) -> None:
        seconds = time.perf_counter() - self.job["started"]
        self._lines.write(json.dumps({"event": event, "seconds": seconds, **fields}) + "\n")
        self._lines.flush()

    def run(self, engine: Engine) -> None:
        """Everything that the job asks of an engine that is loaded."""
        self.emit("ready", versions=engine.versions)
        warm_up = self.job["warm_up"]
        engine.complete(warm_up[:1], Watch(1), 0)
        self.emit("first_token")
        minute = self.job.get("first_minute")
        early, left = output_rate(engine, minute["batches"], minute["seconds"]) if minute else (0.0, [])
        engine.settle()
        engine.complete(warm_up, Watch(len(warm_up)), 0)
        self.emit("settled")
        if minute:
            later, _ = output_rate(engine, left, minute["seconds"] / 4)
            self.emit("first_minute", per_second=early, later_per_second=later)
        for workload in self.job["workloads"]:
            try:
                self.emit("run", **timed(engine, workload))
            except Exception as error:
                traceback.print_exc()
                self.emit("failed", workload=workload["name"], error=one_line(error))
        self.emit("end", peak_bytes=peak_memory())


def output_rate(engine: Engine, batches: list[list[dict]], seconds: float) -> tuple[float, list[list[dict]]]:
    """(output tokens per second, batches that are left) of one batch after the other, for so many seconds."""
    begin, num_tokens, num_done = time.perf_counter(), 0, 0
    for batch in batches:
        engine.complete(batch, Watch(len(batch)), 0)
        num_tokens, num_done = num_tokens + sum(request["max_tokens"] for request in batch), num_done + 1
        if time.perf_counter() - begin >= seconds:
            break
    return num_tokens / (time.perf_counter() - begin), batches[num_done:]


def timed(engine: Engine, workload: dict) -> dict[str, Any]:
    """One workload, measured. Raises RuntimeError when a request got another number of tokens than it asked for."""
    requests = workload["requests"]
    watch = Watch(len(requests))
    engine.complete(requests, watch, workload["shared_prefix"])
    seconds = time.perf_counter() - watch.begin
    for index, request in enumerate(requests):
        if watch.num_tokens[index] != request["max_tokens"]:
            raise RuntimeError(
                f"request {index} of {workload['name']} got {watch.num_tokens[index]} tokens instead of "
                f"{request['max_tokens']}."
            )
    return {
        "workload": workload["name"],
        "total_seconds": seconds,
        "first_seconds": watch.first_seconds,
        "last_seconds": watch.last_seconds,
        "first_token_ids": watch.first_token_ids,
        "peak_bytes": peak_memory(),
    }


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def peak_memory() -> int:
    """The most resident bytes of this process, plus those of the processes that it has started and that still live."""
    # getrusage alone would do for one process, but on Linux it counts what was there before the program was loaded.
    own = peak_of_process(os.getpid()) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return own + sum(peak_of_process(process) for process in children())


def children() -> list[int]:
    """Processes of this session other than this one. Empty where there is no /proc."""
    session, found = os.getsid(0), []
    for folder in Path("/proc").glob("[0-9]*"):
        process = int(folder.name)
        try:
            if process != os.getpid() and os.getsid(process) == session:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def peak_of_process(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
