"""Steps as Chrome trace events: open the file in https://ui.perfetto.dev or chrome://tracing.

Two tracks: the engine core on the host, waiting included, and the device, a bar a step, or a run of decode steps. One
counter: tokens and padding of a step; a second one where blocks of keys and values were copied off the device or to it.
The format: "Trace Event Format", Google, complete ("X"), counter ("C") and metadata ("M") events.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.engine.observability.step_times import device_begin, mean_per_step, padding
from jaxpaged.errors import UsageError
from jaxpaged.messages import StepRecord

MICROSECONDS = 1e6
TRACKS = {"engine core": 1, "device": 2}


def write_trace(records: Sequence[StepRecord], path: str | Path) -> Path:
    """Write the events of these steps. Raises UsageError when the file cannot be written."""
    path = Path(path)
    content = msgspec.json.encode({"traceEvents": list(trace_events(records)), "displayTimeUnit": "ms"})
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}. Choose another path.") from None
    return path


def trace_events(records: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """All events. Time 0 is when the first step began to be scheduled."""
    origin = records[0].schedule_begin if records else 0.0
    for name, track in TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
    ready_before = origin
    for record in records:
        yield from step_events(record, origin, ready_before)
        ready_before = record.result_ready


def step_events(record: StepRecord, origin: float, ready_before: float) -> Iterator[dict[str, Any]]:
    """The events of one step; the device is on it from the later of its dispatch and the result before it."""
    facts = {
        "tokens": record.num_tokens,
        "token_bucket": record.token_bucket,
        "requests": record.num_requests,
        "sampled": record.num_sampled,
        "sample_bucket": record.sample_bucket,
        "full_sampler": record.full_sampler,
        "steps": record.num_steps,
        "pages_saved": record.pages_saved,
        "pages_loaded": record.pages_loaded,
        "encoded": record.num_encoded,
    }

    def bar(name: str, track: str, begin: float, end: float) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": f"{name} {record.step_id}",
            "cat": track,
            "pid": 1,
            "tid": TRACKS[track],
            "ts": (begin - origin) * MICROSECONDS,
            "dur": (end - begin) * MICROSECONDS,
            "args": facts,
        }

    yield bar("schedule", "engine core", record.schedule_begin, record.schedule_end)
    compiled = record.schedule_end + record.program_wait
    if record.program_wait:
        yield bar("compile", "engine core", record.schedule_end, compiled)
    yield bar("dispatch", "engine core", compiled, record.dispatch_end)
    yield bar("wait", "engine core", record.wait_begin, record.result_ready)
    yield bar("update", "engine core", record.result_ready, record.update_end)
    begin = device_begin(record, ready_before)
    yield bar("step", "device", begin, record.result_ready)
    if record.num_encoded:
        yield bar("encode", "device", begin, max(record.encoded_at, begin))
    if record.pages_saved or record.pages_loaded:
        yield {
            "ph": "C",
            "name": "blocks copied",
            "pid": 1,
            "ts": (begin - origin) * MICROSECONDS,
            "args": {"off the device": record.pages_saved, "to the device": record.pages_loaded},
        }
    yield {
        "ph": "C",
        "name": "tokens",
        "pid": 1,
        "ts": (begin - origin) * MICROSECONDS,
        "args": {
            "scheduled": mean_per_step(record, record.num_tokens),
            "padding": mean_per_step(record, padding(record)),
        },
    }
