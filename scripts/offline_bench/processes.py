"""Starts one engine in a fresh process, hands it a job, and collects the lines that come back.

A process that crashes, hangs or is killed gives what it said so far and one line on what went wrong; nothing here
raises for it. With others it takes turns. This module knows no engine and no metric.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from offline_bench.turns import Clock, Runner, Turns

ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
# Which of its processes writes a line, as vLLM says it.
PREFIX = re.compile(r"^\([^)]*\)\s*")
GOODBYE_SECONDS = 20.0
"""How long a process that has said everything may take to end."""


@dataclasses.dataclass
class Outcome:
    """The events of a process in order, and what went wrong, if anything: one line."""

    events: list[dict[str, Any]]
    error: str | None


def run_process(
    command: list[str], job: dict[str, Any], log: Path, timeout: float, variables: dict[str, str], turns: Turns
) -> Outcome:
    """Run `command` with `job` on its standard input; `started` and `clock` are added to it. `log` gets its standard
    error. It shares the cores with others in `turns`; its clock stands still meanwhile, `timeout` does not."""
    log.parent.mkdir(parents=True, exist_ok=True)
    clock = Clock(log.parent)
    with open(log, "wb") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | variables,
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
        runner, timed_out = Runner(process.pid, clock), threading.Event()
        watchdog = threading.Timer(timeout, lambda: (timed_out.set(), runner.end()))
        watchdog.start()
        try:
            with turns.taken_by(runner):
                events = exchange(process, job | {"started": started, "clock": str(clock.path)})
            finished = bool(events) and events[-1]["event"] == "end"
            status = process.wait(GOODBYE_SECONDS if finished else None)
        except subprocess.TimeoutExpired:
            status = 0  # it has said everything, and only does not end
        finally:
            watchdog.cancel()
            runner.end()
            process.wait()
            process.stdout.close()
            clock.path.unlink()
    if finished:
        return Outcome(events, None)
    reason = f"stopped after {timeout:.0f} s." if timed_out.is_set() else why(status, log)
    return Outcome(events, reason)


def exchange(process: subprocess.Popen, job: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
    except BrokenPipeError:
        return []  # it died before it read its job; the log has the reason
    events = []
    for line in process.stdout:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a library that writes to standard output before the session takes it
        if isinstance(event, dict) and "event" in event:
            events.append(event)
            if event["event"] == "end":
                break
    return events


def why(status: int, log: Path) -> str:
    """The last line of the log that names an error, or how the process ended."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if ERROR_LINE.match(line)]
    if status < 0:
        by_signal = f"killed by signal {-status} ({signal.Signals(-status).name})"
        return f"{by_signal}. {named[-1][:300]}" if named else f"{by_signal}."
    if named or lines:
        return (named or lines)[-1][:300]
    return f"exit status {status}, and nothing was printed."
