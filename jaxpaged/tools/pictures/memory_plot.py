"""Draws the memory of a planned device: one bar, what fills it, and what is left."""

from typing import TYPE_CHECKING

from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.plan_report import gib, memory_parts
from jaxpaged.tools.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"weights": canvas.BLUE, "KV blocks": canvas.GREEN, "temporaries": canvas.ORANGE, "free": canvas.PALE}

write_figure = canvas.write_figure


def draw_memory(plan: Plan) -> "Figure":
    """A matplotlib figure. What does not fit stands beyond the line that marks the end of the memory."""
    figure = canvas.new_figure(9, 2.4)
    axes = figure.subplots()
    left = 0.0
    for what, size in memory_parts(plan):
        width = size / 2**30
        axes.barh(0, width, left=left, color=COLORS[what], label=f"{what}  {gib(size)}")
        left += width
    memory = plan.device.memory / 2**30
    axes.axvline(memory, color=canvas.INK, linewidth=1.2)
    axes.axvline(plan.usable_bytes / 2**30, color=canvas.INK, linewidth=1.0, linestyle=":")
    axes.set_xlim(0, max(left, memory) * 1.02)
    axes.set_ylim(-0.6, 0.6)
    axes.set_yticks([])
    axes.set_xlabel("GiB of one device; dotted: what gpu_memory_utilization allows", fontsize=9, color=canvas.INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=canvas.INK)
    verdict = "" if plan.fits else ": does not fit"
    title = f"{plan.model} on {plan.target}, {plan.devices_per_engine} x {plan.device.name}{verdict}"
    axes.set_title(title, fontsize=12, color=canvas.INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, frameon=False, fontsize=9)
    return figure
