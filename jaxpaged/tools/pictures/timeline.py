"""`Timeline`: where the time of an engine's steps went, as rows, as a summary, as a picture, as a trace.

    llm.timeline()                      # shows itself in a notebook
    llm.timeline()[-50:].save("last.png")
    llm.timeline().save_trace("trace.json")   # for https://ui.perfetto.dev or chrome://tracing

`engine/observability/step_times.py` says what the times mean. A run of decode steps is one entry, with the times of
all of them.
"""

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.engine.observability.step_times import MILLISECONDS, padding, step_times
from jaxpaged.messages import StepRecord
from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.step_log_file import write_step_log
from jaxpaged.tools.pictures.tables import html_table, text_table


@dataclass(frozen=True)
class Part:
    """Seconds that one part of the steps took, in all and in the median step."""

    total: float
    median: float

    def __str__(self) -> str:
        return f"{self.median * MILLISECONDS:.3f} ms in the median step, {self.total:.2f} s in all"


@dataclass(frozen=True)
class Summary:
    """Totals of some steps. `elapsed` seconds are from the first to the last, idle time included; `gap` and `compile`
    are totals.

    A run of decode steps is several steps and one dispatch: parts are per dispatch.
    """

    num_steps: int
    num_dispatches: int
    num_tokens: int
    num_padding: int
    elapsed: float
    host: Part
    front_end: Part
    wait: Part
    device: Part
    gap: float
    compile: float
    num_dropped: int
    pages_saved: int = 0
    pages_loaded: int = 0

    @property
    def padding_share(self) -> float:
        """Padding, of all the tokens that were computed; 0..1."""
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) for people."""
        runs = f", several at a time: {self.num_dispatches} dispatches" if self.num_dispatches < self.num_steps else ""
        lines = [
            ("steps", f"{self.num_steps} in {self.elapsed:.2f} s{runs}"),
            ("tokens", f"{self.num_tokens}, and {self.num_padding} of padding ({self.padding_share:.0%})"),
            ("engine core", str(self.host)),
            ("front end", str(self.front_end)),
            ("waiting", str(self.wait)),
            ("device", f"at most {self.device}"),
            ("gaps", f"{self.gap:.2f} s without a step in flight"),
        ]
        if self.compile:
            lines.append(("compiling", f"{self.compile:.2f} s of waiting for programs"))
        if self.pages_saved or self.pages_loaded:
            lines.append(("besides", f"{self.pages_saved} blocks copied off the device, {self.pages_loaded} to it"))
        return lines + ([("forgotten", f"{self.num_dropped} earlier steps")] if self.num_dropped else [])


def part(seconds: Sequence[float]) -> Part:
    return Part(sum(seconds), statistics.median(seconds) if seconds else 0.0)


class Timeline:
    """Steps of an engine, oldest first. A slice of it is a timeline too."""

    def __init__(self, records: Sequence[StepRecord], num_dropped: int = 0, token_buckets: Sequence[int] = ()):
        self.records = list(records)
        self.num_dropped = num_dropped
        self.token_buckets = tuple(token_buckets)
        self.times = step_times(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, steps: slice) -> "Timeline":
        return Timeline(self.records[steps], 0, self.token_buckets)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict per step, ready for `pandas.DataFrame`; times are milliseconds."""
        rows = []
        for record, times in zip(self.records, self.times):
            rows.append(
                {
                    "step": record.step_id,
                    "steps": record.num_steps,
                    "tokens": record.num_tokens,
                    "bucket": record.token_bucket,
                    "padding": padding(record),
                    "requests": record.num_requests,
                    "sampled": record.num_sampled,
                    "sample_bucket": record.sample_bucket,
                    "full_sampler": record.full_sampler,
                    "pages_saved": record.pages_saved,
                    "pages_loaded": record.pages_loaded,
                    **{f"{name}_ms": seconds * MILLISECONDS for name, seconds in vars(times).items()},
                }
            )
        return rows

    def summary(self) -> Summary:
        """Totals of all these steps."""
        records, times = self.records, self.times
        num_tokens = sum(record.num_tokens for record in records)
        return Summary(
            num_steps=sum(record.num_steps for record in records),
            num_dispatches=len(records),
            num_tokens=num_tokens,
            num_padding=sum(map(padding, records)),
            elapsed=records[-1].update_end - records[0].schedule_begin if records else 0.0,
            host=part([t.host for t in times]),
            front_end=part([t.front_end for t in times]),
            wait=part([t.wait for t in times]),
            device=part([t.device for t in times]),
            gap=sum(t.gap for t in times),
            compile=sum(t.compile for t in times),
            num_dropped=self.num_dropped,
            pages_saved=sum(record.pages_saved for record in records),
            pages_loaded=sum(record.pages_loaded for record in records),
        )

    def save(self, path: str | Path) -> Path:
        """Draw the timeline as PNG, SVG or PDF. Raises UsageError without matplotlib, or if it cannot be written."""
        path = canvas.check_picture_path(path)
        return canvas.write_figure(self._figure(), path)

    def save_trace(self, path: str | Path) -> Path:
        """Write Chrome trace events (JSON). Raises UsageError when the file cannot be written."""
        from jaxpaged.tools.pictures.chrome_trace import write_trace

        return write_trace(self.records, path)

    def save_log(self, path: str | Path) -> Path:
        """Write the steps as JSON lines, for `jaxpaged buckets fit`. Raises UsageError when it cannot be written."""
        return write_step_log(path, self.records, self.token_buckets)

    def _figure(self) -> Any:
        from jaxpaged.tools.pictures.timeline_plot import draw_timeline

        return draw_timeline(self)

    def __repr__(self) -> str:
        return text_table(self.summary().lines())

    def _repr_html_(self) -> str:
        """The picture and the summary; without matplotlib the summary, and how to get the picture."""
        table = html_table(self.summary().lines())
        if not self.records:
            return table
        if not canvas.has_matplotlib():
            return f"{table}<p>A picture needs matplotlib. {canvas.INSTALL}</p>"
        png = base64.b64encode(canvas.png_bytes(self._figure())).decode()
        return f'<img alt="timeline of {len(self)} steps" src="data:image/png;base64,{png}"/>{table}'
