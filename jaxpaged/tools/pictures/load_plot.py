"""Draws the latency of a server against its load."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.tools.pictures import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "end-to-end latency"))
WIDE_RANGE = 20.0
"""Largest over smallest latency from which on the axis is logarithmic."""

EDGE = 0.06
"""Of the answered requests a second: a load that has less stands next to the axis."""
MEAN = {"linewidth": 1.8, "marker": "o", "markersize": 5, "clip_on": False, "zorder": 3}
"""Markers are drawn whole where they lie on an axis, as those of small loads do."""

write_figure = canvas.write_figure


def draw_load(rows: Sequence[Mapping[str, Any]], percentile: float, limits: Mapping[str, float]) -> "Figure":
    """A matplotlib figure of results of `bench sweep`, in order of their load: tokens a second, and three latencies.

    Lines go through the mean of the runs at a load, dots are runs. `limits` are milliseconds, by metric.
    """
    levels = list(dict.fromkeys(map(level_of, rows)))
    figure = canvas.new_figure(11, 7)
    panels = figure.subplots(2, 2).flat
    draw_throughput(panels[0], rows, levels)
    for axes, (name, title) in zip(list(panels)[1:], PANELS, strict=True):
        draw_latency(axes, rows, levels, name, percentile)
        limit = limits.get(name)
        axes.set_title(
            title if limit is None else f"{title}, limit {limit:g} ms", fontsize=11, loc="left", color=canvas.INK
        )
        if limit is not None and limit <= axes.get_ylim()[1]:
            axes.axhline(limit, color=canvas.RED, linewidth=1.0, linestyle="--", zorder=1)
    figure.legend(
        *figure.axes[1].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False, fontsize=9
    )
    first = rows[0]
    figure.suptitle(
        f"{first['model_id']}, {first['backend']}: {first['num_prompts']} requests a run", fontsize=13, color=canvas.INK
    )
    return figure


def level_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """(variable, value as it is shown) of a run."""
    if row["max_concurrency"] is not None:
        return "requests at a time", str(row["max_concurrency"])
    return "requests/s", "∞" if row["request_rate"] == "inf" else f"{row['request_rate']:g}"


def draw_throughput(axes: Any, rows: Sequence[Mapping[str, Any]], levels: Sequence[tuple[str, str]]) -> None:
    """Output tokens a second at every load, which are equally far apart."""
    means = means_of(rows, levels, lambda row: row["output_throughput"])
    places = range(len(levels))
    axes.plot(places, means, color=canvas.GREEN, **MEAN)
    dots(axes, [levels.index(level_of(row)) for row in rows], [row["output_throughput"] for row in rows], canvas.GREEN)
    axes.set_xticks(places, [value for _, value in levels])
    variables = list(dict.fromkeys(variable for variable, _ in levels))
    axes.set_xlabel(f"load: {', '.join(variables)}", fontsize=9, color=canvas.INK)
    axes.set_ylabel("output tokens/s", fontsize=9, color=canvas.INK)
    axes.set_ylim(bottom=0)
    axes.set_title("throughput", fontsize=11, loc="left", color=canvas.INK)
    canvas.plain_axes(axes)


def draw_latency(
    axes: Any, rows: Sequence[Mapping[str, Any]], levels: Sequence[tuple[str, str]], name: str, percentile: float
) -> None:
    """Median and percentile against the requests a second that were really answered."""
    rates = means_of(rows, levels, lambda row: row["request_throughput"])
    lines = (("median", "median", canvas.BLUE), (f"p{percentile:g}", f"P{percentile:g}", canvas.ORANGE))
    for field, label, color in lines:
        value = lambda row, key=f"{field}_{name}_ms": row[key]
        means = means_of(rows, levels, value)
        axes.plot(rates, means, color=color, label=label, **MEAN)
        dots(axes, [row["request_throughput"] for row in rows], [value(row) for row in rows], color)
    for rate, top, (_, shown) in zip(rates, means, levels, strict=True):
        side, where = (1, "left") if rate < max(rates) * EDGE else (-1, "right")  # within the axes
        axes.annotate(
            shown, (rate, top), xytext=(5 * side, 4), textcoords="offset points", fontsize=8, ha=where, color=canvas.INK
        )
    values = [row[f"{field}_{name}_ms"] for row in rows for field, _, _ in lines]
    if min(values) > 0 and max(values) / min(values) > WIDE_RANGE:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:,g}")
        axes.set_ylim(min(values) / 1.5, max(values) * 2)
    else:
        axes.set_ylim(0, max(values) * 1.15 or 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("answered requests/s; numbers: the load", fontsize=9, color=canvas.INK)
    axes.set_ylabel("ms", fontsize=9, color=canvas.INK)
    canvas.plain_axes(axes)


def dots(axes: Any, xs: Sequence[float], ys: Sequence[float], color: str) -> None:
    """Single runs, paler than their mean."""
    axes.scatter(xs, ys, color=color, alpha=0.35, s=18, linewidths=0, clip_on=False, zorder=3)


def means_of(
    rows: Sequence[Mapping[str, Any]], levels: Sequence[tuple[str, str]], value: Callable[[Mapping[str, Any]], float]
) -> list[float]:
    """The mean of the runs at every load."""
    found = [[value(row) for row in rows if level_of(row) == level] for level in levels]
    return [math.fsum(values) / len(values) for values in found]
