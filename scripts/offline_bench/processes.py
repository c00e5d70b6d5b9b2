"""Starts one engine in a fresh process, hands it a job, and collects the lines that come back.

A process that crashes, hangs or is killed gives what it said so far and one line on what went wrong; nothing here
raises for it. This module knows no engine and no metric.
"""

import contextlib
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
    command: list[str], job: dict[str, Any], log: Path, timeout: float, variables: dict[str, str]
) -> Outcome:
    """Run `command` with `job` on its standard input; `started` is added to it. `log` gets its standard error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as errors:
        started = time.time()
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | variables,
            start_new_session=True, text=True, encoding="utf-8",
        )  # fmt: skip
        timed_out = threading.Event()
        watchdog = threading.Timer(timeout, lambda: (timed_out.set(), end_group(process.pid)))
        watchdog.start()
        try:
            events = exchange(process, job | {"started": started})
            finished = bool(events) and events[-1]["event"] == "end"
            status = process.wait(GOODBYE_SECONDS if finished else None)
        except subprocess.TimeoutExpired:
            status = 0  # it has said everything, and only does not end
        finally:
            watchdog.cancel()
            end_group(process.pid)
            process.wait()
            process.stdout.close()
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


def end_group(process_id: int) -> None:
    """Kill what is left of a process and its children: they share a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)


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
