"""What tiers behind a planned engine would bring under a trace: simulated for several sizes, as a table and a picture.

Speeds are the plan's bounds: what computing takes at least. So real savings are larger, and loading pays sooner.
"""

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.cli.machine import gibibytes
from jaxpaged.errors import UsageError
from jaxpaged.tools.kv_trace import Costs, Simulated, TracedRequest, simulate
from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH = 0.02
"""A larger tier that adds less than this share of what the largest saves brings nothing worth its room."""


class TraceResult:
    """A plan's engine under a trace: without a tier, and with tiers of the sizes that were asked for."""

    def __init__(self, plan: Plan, requests: Sequence[TracedRequest], sizes: Sequence[int], bandwidth: float):
        if not plan.page_token_bytes or not plan.prefill:
            raise UsageError("a trace needs an engine that fits, with keys and values in its cache. Change the plan.")
        longest = plan.prefill[-1].context
        fitting = [request for request in requests if request.input_length < longest]
        self.num_left_out = len(requests) - len(fitting)
        if not fitting:
            raise UsageError(f"no request of the trace is below max_model_len, {longest} tokens. Raise it.")
        self.plan, self.bandwidth = plan, bandwidth
        self.device_tokens = max((context * count for context, count in plan.concurrency.items()), default=0)
        costs = Costs(plan.page_token_bytes, bandwidth, self.compute_seconds)
        self.rows = [simulate(fitting, self.device_tokens, size, costs) for size in (0, *sorted(set(sizes)))]

    def compute_seconds(self, start: int, end: int) -> float:
        """At least, for tokens `start` to `end` of a prompt: of the plan's lengths the next longer one counts."""
        lengths = [speed.context for speed in self.plan.prefill]
        speed = self.plan.prefill[min(bisect.bisect_left(lengths, end), len(lengths) - 1)]
        return (end - start) / speed.tokens_per_second

    @property
    def least_bandwidth(self) -> float:
        """Bytes a second below which loading takes longer than computing, with the longest prompts' speed."""
        return self.plan.page_token_bytes * self.plan.prefill[-1].tokens_per_second

    @property
    def enough(self) -> Simulated | None:
        """The smallest tier that saves nearly what the largest does; None where none saves anything."""
        most = self.rows[-1].saved_seconds
        return next((row for row in self.rows if most and row.saved_seconds >= (1 - ENOUGH) * most), None)

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "tier_bytes": row.tier_bytes,
                "hit_rate": row.hit_rate,
                "device_tokens": row.device_tokens,
                "loaded_tokens": row.loaded_tokens,
                "saved_seconds": row.saved_seconds,
            }
            for row in self.rows
        ]
        return {
            "prompt_tokens": self.rows[0].prompt_tokens,
            "requests_left_out": self.num_left_out,
            "device_tokens": self.device_tokens,
            "token_bytes": self.plan.page_token_bytes,
            "bandwidth": self.bandwidth,
            "least_bandwidth": self.least_bandwidth,
            "tiers": rows,
        }

    def text(self) -> str:
        """For people: a table, and where loading stops paying."""
        lines = [
            f"keys and values besides the device: {self.rows[0].prompt_tokens} tokens of prompts; the device's cache "
            f"keeps about {self.device_tokens}",
            f"{'tier':>12}  {'found':>7}  {'loaded':>7}  {'saved':>11}",
        ]
        for row in self.rows:
            loaded = row.loaded_tokens / row.prompt_tokens
            lines.append(
                f"{sized(row.tier_bytes):>12}  {row.hit_rate:>7.1%}  {loaded:>7.1%}  {row.saved_seconds:>9.3g} s"
            )
        if self.num_left_out:
            lines.append(f"{self.num_left_out} requests are longer than max_model_len and were left out")
        pays = "pays" if self.bandwidth > self.least_bandwidth else "does not pay for the longest prompts"
        lines.append(
            f"loading at {self.bandwidth / 1e9:.1f} GB/s {pays}: a token has {self.plan.page_token_bytes / 1024:.1f}"
            f" KiB, so below {self.least_bandwidth / 1e9:.2f} GB/s computing is sooner, as fast as the plan has it"
        )
        if self.enough is not None and self.enough is not self.rows[-1]:
            lines.append(f"beyond {sized(self.enough.tier_bytes)} more room brings next to nothing")
        return "\n".join(lines)

    def figure(self) -> "Figure":
        """Hit rate and saved seconds over the size of the tier."""
        figure = canvas.new_figure(8, 4)
        axes = figure.subplots()
        places = range(len(self.rows))
        shares = [100 * row.hit_rate for row in self.rows]
        axes.plot(
            places,
            shares,
            color=canvas.BLUE,
            marker="o",
            clip_on=False,
            zorder=3,
            label="prompt tokens not computed, %",
        )
        axes.set_ylim(0, 100)
        axes.set_xticks(places, [sized(row.tier_bytes) for row in self.rows])
        axes.set_xlabel("size of the tier", fontsize=9, color=canvas.INK)
        axes.set_ylabel("% of the prompts' tokens", fontsize=9, color=canvas.BLUE)
        canvas.plain_axes(axes)
        seconds = axes.twinx()
        saved = [row.saved_seconds for row in self.rows]
        seconds.plot(places, saved, color=canvas.ORANGE, marker="s", clip_on=False, zorder=3, label="seconds saved")
        seconds.set_ylabel("seconds saved", fontsize=9, color=canvas.ORANGE)
        seconds.spines[["top"]].set_visible(False)
        seconds.set_ylim(bottom=0)
        title = f"{self.plan.model} on {self.plan.target}: tiers under the trace"
        if self.enough is not None and self.enough is not self.rows[-1]:
            axes.axvline(self.rows.index(self.enough), color=canvas.INK, linewidth=1.0, linestyle=":")
            title += "; dotted: more brings little"
        axes.set_title(title, fontsize=11, color=canvas.INK)
        return figure


def sized(num_bytes: int) -> str:
    return gibibytes(num_bytes) if num_bytes else "none"
