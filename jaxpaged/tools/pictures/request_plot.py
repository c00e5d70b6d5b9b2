"""Draws when the requests of a benchmark waited and were answered."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.tools.pictures import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = (
    ("held back by the client", canvas.GREY),
    ("until the first token", canvas.ORANGE),
    ("answer", canvas.BLUE),
)
THICKEST, THINNEST, BARS_HEIGHT = 6.0, 0.5, 300.0
"""Of the line of a request, and of all of them, in points."""

Span = tuple[float, float]


def draw_requests(result: Mapping[str, Any]) -> "Figure":
    """A matplotlib figure of a detailed result of `bench serve`: a line for every request, and how many were under
    way."""
    spans, failed = spans_of(result)
    figure = canvas.new_figure(11, 7)
    lines, under_way = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width = max(THINNEST, min(THICKEST, 0.7 * BARS_HEIGHT / max(len(spans[0]), 1)))
    for (label, color), phase in zip(PHASES, spans, strict=True):
        shown = [(row, *span) for row, span in enumerate(phase, 1) if span[1] > span[0]]
        if shown:
            lines.hlines(*zip(*shown, strict=True), color=color, linewidth=width, label=label)
    if failed:
        ends, rows = zip(*failed, strict=True)
        lines.plot(ends, rows, "x", color=canvas.RED, markersize=5, label="failed")
    lines.set_ylabel("request", fontsize=9, color=canvas.INK)
    lines.yaxis.get_major_locator().set_params(integer=True)
    lines.invert_yaxis()
    draw_under_way(under_way, spans[1:])
    for axes in (lines, under_way):
        canvas.plain_axes(axes)
    figure.legend(*lines.get_legend_handles_labels(), loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    title = f"{result['model_id']}, {result['backend']}: {result['num_prompts']} requests"
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, color=canvas.INK)
    return figure


def spans_of(result: Mapping[str, Any]) -> tuple[tuple[list[Span], ...], list[Span]]:
    """(begin and end of every phase of every request), (end, row) of those that failed; in seconds from the first."""
    starts, queued = result["start_times"], result["queue_times"]
    origin = min((start - wait for start, wait in zip(starts, queued, strict=True)), default=0.0)
    waiting, first, rest, failed = [], [], [], []
    values = zip(starts, queued, result["ttfts"], result["latencies"], result["errors"], strict=True)
    for row, (start, wait, ttft, latency, error) in enumerate(values, 1):
        sent = start - origin
        begun, end = sent + (ttft or latency), sent + latency
        waiting.append((sent - wait, sent))
        first.append((sent, begun))
        rest.append((begun, end))
        if error:
            failed.append((end, row))
    return (waiting, first, rest), failed


def draw_under_way(axes: Any, phases: Sequence[Sequence[Span]]) -> None:
    """How many requests waited for their first token, on top of how many were being answered."""
    times = sorted({time for phase in phases for span in phase for time in span})
    base = [0.0] * (len(times) - 1)
    for (label, color), phase in reversed(list(zip(PHASES[1:], phases, strict=True))):
        top = [low + count for low, count in zip(base, counts_between(times, phase), strict=True)]
        if base:
            axes.stairs(top, times, baseline=base, fill=True, color=color, label=label)
        base = top
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds", fontsize=9, color=canvas.INK)
    axes.set_ylabel("under way", fontsize=9, color=canvas.INK)
    axes.yaxis.get_major_locator().set_params(integer=True)


def counts_between(times: Sequence[float], spans: Sequence[Span]) -> list[int]:
    """How many spans hold the time from each of `times`, which are in order and have all of their ends, to the next."""
    changes = dict.fromkeys(times, 0)
    for begin, end in spans:
        changes[begin] += 1
        changes[end] -= 1
    counts, now = [], 0
    for time in times[:-1]:
        now += changes[time]
        counts.append(now)
    return counts
