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
from statistics import fmean
from typing import Any

from jaxpaged.engine.observability.step_times import MILLISECONDS, mean_per_step, padding, step_times
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
    num_encoded: int = 0
    encode: float = 0.0

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
        if self.num_encoded:
            lines.append(("pictures", f"{self.num_encoded} embeddings in at most {self.encode:.2f} s of the device"))
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
                    "encoded": record.num_encoded,
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
            num_encoded=sum(record.num_encoded for record in records),
            encode=sum(t.encode for t in times),
        )

    def save(self, path: str | Path) -> Path:
        """Draw the timeline as PNG, SVG or PDF. Raises UsageError without matplotlib, or if it cannot be written."""
        path = canvas.check_picture_path(path)
        return canvas.write_figure(draw_timeline(self), path)

    def save_trace(self, path: str | Path) -> Path:
        """Write Chrome trace events (JSON). Raises UsageError when the file cannot be written."""
        from jaxpaged.tools.pictures.chrome_trace import write_trace

        return write_trace(self.records, path)

    def save_log(self, path: str | Path) -> Path:
        """Write the steps as JSON lines, for `jaxpaged buckets fit`. Raises UsageError when it cannot be written."""
        return write_step_log(path, self.records, self.token_buckets)

    def __repr__(self) -> str:
        return text_table(self.summary().lines())

    def _repr_html_(self) -> str:
        """The picture and the summary; without matplotlib the summary, and how to get the picture."""
        table = html_table(self.summary().lines())
        if not self.records:
            return table
        if not canvas.has_matplotlib():
            return f"{table}<p>A picture needs matplotlib. {canvas.INSTALL}</p>"
        png = base64.b64encode(canvas.png_bytes(draw_timeline(self))).decode()
        return f'<img alt="timeline of {len(self)} steps" src="data:image/png;base64,{png}"/>{table}'


# ---- the picture: what steps held, where their time went, and a few steps in close-up ---------------

MAX_BARS = 1000
CLOSE_UP_STEPS = 12
LABEL_SHARE = 0.008  # of the picture's width, that a digit of a bar's number takes, and as much again beside it
HOST_PARTS = {
    "schedule": canvas.BLUE,
    "compile": canvas.RED,
    "dispatch": canvas.SKY,
    "update": canvas.GREEN,
    "front end": canvas.PINK,
}
LABELS = {"wait": "waiting for the device", "compile": "waiting for a program"}
WAIT_COLOR, DEVICE_COLORS = canvas.GREY, (canvas.ORANGE, canvas.PALE_ORANGE)
HOST_LANE, DEVICE_LANE, LANE_HEIGHT = 1.0, 0.0, 0.7


def draw_timeline(timeline: Timeline) -> Any:
    """A matplotlib figure."""
    figure = canvas.new_figure(11, 8.2)
    summary = timeline.summary()
    title = f"{summary.num_steps} steps in {summary.elapsed:.2f} s"
    if summary.num_dispatches:
        title += f": {summary.num_tokens} tokens, {summary.padding_share:.0%} padding\n"
        title += f"Median step: {summary.host.median * MILLISECONDS:.2f} ms of host work, "
        title += f"{summary.wait.median * MILLISECONDS:.2f} ms of waiting"
    if summary.compile:
        title += f". {summary.compile:.2f} s in all were spent waiting for programs"
    figure.suptitle(title, fontsize=13, color=canvas.INK)
    tokens, parts, close_up = figure.subplots(3, 1, height_ratios=(1, 1, 0.9))
    if timeline.records:
        draw_tokens(tokens, timeline)
        draw_parts(parts, timeline)
        draw_close_up(close_up, timeline)
    return figure


def steps_per_bar(num_steps: int) -> int:
    """1, or more when there are more steps than a picture has room for."""
    return -(-num_steps // MAX_BARS)


def bars_of(values: Sequence[float]) -> list[float]:
    """One value a bar: that of its step, or the mean of its steps."""
    size = steps_per_bar(len(values))
    return list(values) if size == 1 else [fmean(values[i : i + size]) for i in range(0, len(values), size)]


def edges_of(num_steps: int) -> list[float]:
    """Borders between the bars on an axis of step numbers, counted from the first step shown."""
    return [0.5 + i for i in range(0, num_steps, steps_per_bar(num_steps))] + [0.5 + num_steps]


def draw_tokens(axes: Any, timeline: Timeline) -> None:
    """Scheduled tokens per step, with what padding adds on top; of a run of steps, those of the mean one."""
    edges = edges_of(len(timeline))
    scheduled = bars_of([mean_per_step(record, record.num_tokens) for record in timeline.records])
    padded = bars_of([mean_per_step(record, record.num_tokens + padding(record)) for record in timeline.records])
    axes.stairs(padded, edges, baseline=scheduled, fill=True, color=canvas.YELLOW, label="padding")
    axes.stairs(scheduled, edges, fill=True, color=canvas.BLUE, label="scheduled tokens")
    axes.yaxis.get_major_locator().set_params(integer=True)
    finish_step_axes(axes, timeline, "tokens per step", "What steps hold")


def draw_parts(axes: Any, timeline: Timeline) -> None:
    """Milliseconds per step by part, stacked: host work at the bottom, waiting for the device on top."""
    edges = edges_of(len(timeline))
    base = [0.0] * (len(edges) - 1)
    for name, color in {**HOST_PARTS, "wait": WAIT_COLOR}.items():
        seconds = bars_of([getattr(times, name.replace(" ", "_")) for times in timeline.times])
        top = [b + s * MILLISECONDS for b, s in zip(base, seconds)]
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=LABELS.get(name, name))
        base = top
    limit, longest = readable_limit(base), max(base)
    axes.set_ylim(0, limit)
    if longest > limit:
        words = f"higher bars are cut; the highest is {longest:,.0f} ms"
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        place = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 9, "color": canvas.INK}
        axes.text(0.995, 0.97, words, bbox=behind, **place)
    finish_step_axes(axes, timeline, "ms per step", "Where the host's time goes")


def readable_limit(values: Sequence[float]) -> float:
    """An upper end for an axis on which a few very slow steps, such as those that wait for a program, are cut off."""
    ordered = sorted(values)
    usual = ordered[int(0.95 * (len(ordered) - 1))]
    return 1.15 * (usual if ordered[-1] > 4 * usual else ordered[-1]) or 1.0


def finish_step_axes(axes: Any, timeline: Timeline, unit: str, title: str) -> None:
    canvas.plain_axes(axes)
    axes.set_xlim(0.5, len(timeline) + 0.5)
    axes.set_ylabel(unit, fontsize=10, color=canvas.INK)
    size = steps_per_bar(len(timeline))
    axes.set_xlabel("step" if size == 1 else f"step; a bar is the mean of {size}", fontsize=10, color=canvas.INK)
    axes.set_title(title, fontsize=11, color=canvas.INK, loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(
        fontsize=9,
        frameon=False,
        ncols=len(HOST_PARTS) + 1,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.1,
        columnspacing=1.2,
        handlelength=1.4,
    )


def close_up_range(records: Sequence[StepRecord]) -> range:
    """The steps of the close-up: of all runs of so many steps, one that took as long as half of them do."""
    length = min(CLOSE_UP_STEPS, len(records))
    runs = [range(first, first + length) for first in range(len(records) - length + 1)]
    runs.sort(key=lambda run: records[run.stop - 1].result_ready - records[run.start].schedule_begin)
    return runs[len(runs) // 2]


def draw_close_up(axes: Any, timeline: Timeline) -> None:
    """A few steps in time: what the host does above what the device does."""
    shown = close_up_range(timeline.records)
    first, last = timeline.records[shown.start], timeline.records[shown.stop - 1]
    origin = first.result_ready - timeline.times[shown.start].device
    # Their neighbours reach into the picture: the host is ahead of the device, and behind it.
    for i in range(max(shown.start - 2, 0), min(shown.stop + 2, len(timeline))):
        draw_host_bars(axes, timeline, i, origin)
        draw_device_bar(axes, timeline, i, origin)
    axes.set_yticks([DEVICE_LANE, HOST_LANE], ["device", "host"])
    canvas.plain_axes(axes)
    axes.grid(visible=False)
    axes.set_ylim(DEVICE_LANE - 0.5, HOST_LANE + 0.5)
    axes.set_xlim(0, (last.update_end - origin) * MILLISECONDS)
    label_device_bars(axes, timeline, shown, origin)
    axes.set_xlabel("milliseconds", fontsize=10, color=canvas.INK)
    title = f"Close-up of steps {shown.start + 1} to {shown.stop}; the number on the device is the step"
    axes.set_title(title, fontsize=11, color=canvas.INK, loc="left")


def draw_host_bars(axes: Any, timeline: Timeline, i: int, origin: float) -> None:
    record, front_end = timeline.records[i], timeline.times[i].front_end
    bars = [
        ("schedule", record.schedule_begin, record.schedule_end),
        ("compile", record.schedule_end, record.schedule_end + record.program_wait),
        ("dispatch", record.schedule_end + record.program_wait, record.dispatch_end),
        ("update", record.result_ready, record.update_end),
        ("front end", record.update_end, record.update_end + front_end),
    ]
    for name, begin, end in bars:
        draw_bar(axes, begin - origin, end - begin, HOST_LANE, HOST_PARTS[name])
    draw_bar(axes, record.wait_begin - origin, timeline.times[i].wait, HOST_LANE, WAIT_COLOR)


def draw_device_bar(axes: Any, timeline: Timeline, i: int, origin: float) -> None:
    record, seconds = timeline.records[i], timeline.times[i].device
    begin = record.result_ready - seconds - origin
    draw_bar(axes, begin, seconds, DEVICE_LANE, DEVICE_COLORS[i % 2])


def label_device_bars(axes: Any, timeline: Timeline, shown: range, origin: float) -> None:
    """The number of the step on every bar that is wide enough for it."""
    digit = LABEL_SHARE * axes.get_xlim()[1]
    for i in shown:
        width = timeline.times[i].device * MILLISECONDS
        if width >= digit * (len(str(i + 1)) + 1):
            center = (timeline.records[i].result_ready - origin) * MILLISECONDS - width / 2
            axes.text(center, DEVICE_LANE, str(i + 1), ha="center", va="center", fontsize=8, color=canvas.INK)


def draw_bar(axes: Any, begin: float, seconds: float, lane: float, color: str) -> None:
    axes.barh(lane, seconds * MILLISECONDS, LANE_HEIGHT, left=begin * MILLISECONDS, color=color, linewidth=0)
