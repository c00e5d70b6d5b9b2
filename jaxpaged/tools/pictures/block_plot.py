"""Draws a block map with matplotlib: a grid of coloured cells and a legend."""

import math
from typing import TYPE_CHECKING, Any

from jaxpaged.messages import CACHED, FREE
from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.block_map import (
    MAX_CELLS,
    NULL_BLOCK,
    BlockMap,
    character_of,
    color_of,
    count_of,
    grouped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASPECT = 3.0  # columns per line
LEGEND_COLUMNS = 2  # names of requests may be long
INCHES_A_LINE = 0.2  # of the legend
MAX_LETTER_COLUMNS = 64  # more columns than this leave no room for letters


def draw_blocks(blocks: BlockMap) -> "Figure":
    """A matplotlib figure."""
    group = max(-(-len(blocks.kinds) // MAX_CELLS), 1)
    cells = grouped(blocks.kinds, group)
    columns = -(-math.ceil(math.sqrt(max(len(cells), 1) * ASPECT)) // 8) * 8
    lines = max(-(-len(cells) // columns), 1)
    legend_lines = -(-len(blocks.legend()) // LEGEND_COLUMNS)
    figure = canvas.new_figure(11, 10.4 * lines / columns + 1.5 + INCHES_A_LINE * legend_lines)
    axes = figure.subplots()
    draw_cells(axes, cells, columns, lines)
    if columns <= MAX_LETTER_COLUMNS:
        draw_letters(axes, cells, columns)
    label_blocks(axes, columns, lines, group)
    title = f"{count_of(len(blocks.kinds), 'KV block')} of {blocks.block_size} tokens, "
    title += f"{count_of(len(blocks.request_ids), 'running request')}"
    if group > 1:
        title += f"; a cell is {group} blocks"
    axes.set_title(title, fontsize=13, color=canvas.INK)
    axes.set_xlabel(NULL_BLOCK, fontsize=9, color=canvas.INK)
    draw_legend(figure, blocks)
    return figure


def draw_cells(axes: Any, cells: list[int], columns: int, lines: int) -> None:
    """Cells from the upper left, line by line; the axes count blocks."""
    from matplotlib.colors import to_rgb

    padded = [*map(color_of, cells), *["white"] * (columns * lines - len(cells))]
    image = [[to_rgb(color) for color in padded[i * columns : (i + 1) * columns]] for i in range(lines)]
    axes.imshow(image, interpolation="nearest", aspect="equal")
    axes.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(lines + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2 if columns < 70 else 0.6)
    axes.tick_params(which="both", length=0, labelsize=9, colors=canvas.INK)
    axes.spines[:].set_visible(False)


def label_blocks(axes: Any, columns: int, lines: int, group: int) -> None:
    """Block ids: that of a line's first block on the left, what to add to it below."""
    shown_lines = range(0, lines, -(-lines // 12))
    axes.set_yticks(list(shown_lines), [str(1 + line * columns * group) for line in shown_lines])
    shown_columns = range(0, columns, max(columns // 8, 1))
    axes.set_xticks(list(shown_columns), [f"+{column * group}" for column in shown_columns])
    axes.set_ylabel("block id", fontsize=10, color=canvas.INK)


def draw_letters(axes: Any, cells: list[int], columns: int) -> None:
    """The letter of its request on every cell: there are more requests than colours."""
    from matplotlib.colors import to_rgb

    size = min(480 / columns, 11)
    for i, kind in enumerate(cells):
        if kind not in (FREE, CACHED):
            red, green, blue = to_rgb(color_of(kind))
            color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else canvas.INK
            place = (i % columns, i // columns)
            axes.text(*place, character_of(kind), ha="center", va="center", fontsize=size, color=color)


def draw_legend(figure: Any, blocks: BlockMap) -> None:
    from matplotlib.patches import Patch

    edge = {FREE: canvas.GREY}
    patches = [
        Patch(
            facecolor=color_of(kind),
            edgecolor=edge.get(kind, color_of(kind)),
            label=f"{character_of(kind)}   {label}",
        )
        for kind, label in blocks.legend()
    ]
    figure.legend(handles=patches, fontsize=9, frameon=False, ncols=LEGEND_COLUMNS, loc="outside lower center")
