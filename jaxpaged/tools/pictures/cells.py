"""Cells of maps, one for each of many like things, or for a group of neighbours: in HTML, and with matplotlib."""

import html
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxpaged.tools.pictures import canvas


def grouped[T](kinds: Sequence[T], group: int) -> list[T]:
    """What most blocks of each group of neighbours are."""
    if group == 1:
        return list(kinds)
    return [Counter(kinds[i : i + group]).most_common(1)[0][0] for i in range(0, len(kinds), group)]


def html_cell(color: str, title: str, *, striped: bool = False) -> str:
    background = f"repeating-linear-gradient(45deg,{color} 0 3px,white 3px 4.5px)" if striped else color
    style = f"display:inline-block;width:11px;height:11px;margin:1px;background:{background}"
    return f'<span title="{html.escape(title)}" style="{style}"></span>'


def draw_cells(axes: Any, colors: list[str], columns: int) -> None:
    """Cells from the upper left, line by line; the axes count cells."""
    from matplotlib.colors import to_rgb

    lines = max(-(-len(colors) // columns), 1)
    padded = [*colors, *["white"] * (columns * lines - len(colors))]
    image = [[to_rgb(color) for color in padded[i * columns : (i + 1) * columns]] for i in range(lines)]
    axes.imshow(image, interpolation="nearest", aspect="equal")
    axes.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(lines + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2 if columns < 70 else 0.6)
    axes.tick_params(which="both", length=0, labelsize=9, colors=canvas.INK)
    axes.spines[:].set_visible(False)
