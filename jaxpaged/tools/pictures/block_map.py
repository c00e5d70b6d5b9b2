"""`BlockMap`: which request holds which KV block, what is shared, what is cached, what is free.

    print(llm.blocks())          # one character a block, or a group of blocks
    llm.blocks().save("blocks.png")

In a notebook it shows itself. Where the engine sees, blocks with tokens of a picture are hatched, and the encoder cache
and the pictures are below. Block 0 is not drawn, see `NULL_BLOCK`. A block is drawn as its first kind that holds:
shared by several requests, held by one request, cached (free, but its content can be reused), free.
"""

import html
import math
import shutil
import string
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.messages import CACHED, FREE, SHARED, KVBlockMap
from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.cells import draw_cells, grouped, html_cell

if TYPE_CHECKING:
    from jaxpaged.tools.pictures.seen_pictures import SeenPictures, Thumbnails

CHARACTERS = {FREE: ".", CACHED: "+", SHARED: "#"}
NAMES = {FREE: "free", CACHED: "cached, reusable", SHARED: "shared by several requests"}
COLORS = {FREE: canvas.PALE, CACHED: canvas.GREY, SHARED: canvas.INK}
REQUEST_CHARACTERS = string.ascii_letters + string.digits
REQUEST_COLORS = (
    canvas.BLUE,
    canvas.ORANGE,
    canvas.GREEN,
    canvas.PINK,
    canvas.SKY,
    canvas.RED,
    canvas.YELLOW,
)
NULL_BLOCK = "block 1 is the first shown; block 0 only fills tables where they need no block"
MAX_CELLS = 4096  # of a picture; more blocks than this are drawn in groups
MAX_LEGEND = 10  # requests that a legend names
MAX_NAME_LENGTH = 24  # of a request in a legend
ASPECT = 3.0  # columns per line
LEGEND_COLUMNS = 2  # names of requests may be long
INCHES_A_LINE = 0.2  # of the legend
MAX_LETTER_COLUMNS = 64  # more columns than this leave no room for letters


def character_of(kind: int) -> str:
    return CHARACTERS[kind] if kind < 0 else REQUEST_CHARACTERS[kind % len(REQUEST_CHARACTERS)]


def color_of(kind: int) -> str:
    return COLORS[kind] if kind < 0 else REQUEST_COLORS[kind % len(REQUEST_COLORS)]


class BlockMap:
    """The KV cache at one moment. `kinds[i]` is what block i + 1 is: the index of its owner, SHARED, CACHED or FREE.
    Owners are requests, and behind them reasons for which blocks are held without one. `thumbnails` has small
    pictures by their keys."""

    def __init__(self, blocks: KVBlockMap, thumbnails: "Thumbnails | None" = None):
        self.block_size = blocks.block_size
        self.request_ids = list(blocks.request_ids)
        self.holds = list(blocks.holds)
        self.kinds = blocks.kinds.tolist()
        self.seen: Any = None  # SeenPictures, where the engine sees
        if blocks.picture is not None:
            from jaxpaged.tools.pictures.seen_pictures import SeenPictures

            self.seen = SeenPictures(blocks, thumbnails)

    @property
    def cells(self) -> list[tuple[int, bool]]:
        """Of each block what it is, and whether it has tokens of a picture."""
        if self.seen is None:
            return [(kind, False) for kind in self.kinds]
        return [(kind, number >= 0) for kind, number in zip(self.kinds, self.seen.of_block, strict=True)]

    @property
    def counts(self) -> dict[str, int]:
        """Blocks by what they are: a request's id, the reason of a hold, or "shared", "cached", "free"."""
        counted, owners = Counter(self.kinds), self.request_ids + self.holds
        by_owner = {owners[kind]: counted[kind] for kind in sorted(counted) if kind >= 0}
        return by_owner | {"shared": counted[SHARED], "cached": counted[CACHED], "free": counted[FREE]}

    def text(self, width: int = 80, max_lines: int = 24) -> str:
        """One character a block, at most `width` a line; when there are too many blocks, one for a group of them.

        A group shows what most of its blocks are. Below the map: what the characters mean, and how many there are.
        """
        group = max(-(-len(self.kinds) // (width * max_lines)), 1)
        cells = "".join(character_of(kind) for kind in grouped(self.kinds, group))
        lines = [cells[i : i + width] for i in range(0, len(cells), width)]
        legend = [f"{character_of(kind)} {label}" for kind, label in self.legend()]
        scale = f"one character is {count_of(group, 'block')} of {self.block_size} tokens"
        pictures = [] if self.seen is None else self.seen.text(width, max_lines)
        return "\n".join([*lines, "", scale, NULL_BLOCK, *legend, *pictures])

    def legend(self) -> list[tuple[int, str]]:
        """(kind, words and number of blocks), requests first; only the first few of many requests."""
        counted = Counter(self.kinds)
        held = [kind for kind in sorted(counted) if kind >= 0]
        lines = [(kind, f"{self._named(kind)}: {count_of(counted[kind], 'block')}") for kind in held[:MAX_LEGEND]]
        if len(held) > MAX_LEGEND:
            rest = held[MAX_LEGEND:]
            blocks = count_of(sum(counted[kind] for kind in rest), "block")
            lines.append((rest[0], f"{self._named(rest[0])} and {len(rest) - 1} more: {blocks}"))
        others = (SHARED, CACHED, FREE)
        return lines + [(kind, f"{NAMES[kind]}: {count_of(counted[kind], 'block')}") for kind in others]

    def save(self, path: str | Path) -> Path:
        """Draw the map as PNG, SVG or PDF. Raises UsageError without matplotlib, or if it cannot be written."""
        path = canvas.check_picture_path(path)
        return canvas.write_figure(draw_blocks(self), path)

    def __repr__(self) -> str:
        return self.text(min(shutil.get_terminal_size().columns, 120))

    def _repr_html_(self) -> str:
        """Coloured cells, with the request as a tooltip; needs no matplotlib."""
        group = max(-(-len(self.kinds) // MAX_CELLS), 1)
        cells = "".join(
            html_cell(color_of(kind), self._title(kind), striped=striped)
            for kind, striped in grouped(self.cells, group)
        )
        legend = " &nbsp; ".join(
            f"{html_cell(color_of(kind), '')} {html.escape(label)}" for kind, label in self.legend()
        )
        scale = f"{count_of(len(self.kinds), 'KV block')} of {self.block_size} tokens"
        scale += f"; a cell is {group} blocks" if group > 1 else ""
        words = f"{scale}; {NULL_BLOCK}"
        seen = "" if self.seen is None else self.seen.html()
        return f'<div style="line-height:13px;max-width:900px">{cells}</div><p>{words}</p><p>{legend}</p>{seen}'

    def _title(self, kind: int) -> str:
        return NAMES[kind] if kind < 0 else " ".join(self.owner(kind))

    def owner(self, kind: int) -> tuple[str, str]:
        """Who holds a block: what it is, and its name."""
        if kind < len(self.request_ids):
            return "request", self.request_ids[kind]
        return "held for", self.holds[kind - len(self.request_ids)]

    def _named(self, kind: int) -> str:
        what, name = self.owner(kind)
        return f"{what} {name if len(name) <= MAX_NAME_LENGTH else f'{name[: MAX_NAME_LENGTH - 1]}…'}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- drawn with matplotlib -------------------------------------------------------------------------


def draw_blocks(blocks: BlockMap) -> Any:
    """A matplotlib figure."""
    group = max(-(-len(blocks.kinds) // MAX_CELLS), 1)
    cells = grouped(blocks.cells, group)
    columns = -(-math.ceil(math.sqrt(max(len(cells), 1) * ASPECT)) // 8) * 8
    lines = max(-(-len(cells) // columns), 1)
    legend_lines = -(-len(blocks.legend()) // LEGEND_COLUMNS)
    height = 10.4 * lines / columns + 1.5 + INCHES_A_LINE * legend_lines
    if blocks.seen is None:
        figure = canvas.new_figure(11, height)
        axes = figure.subplots()
    else:
        figure, axes = figure_with_pictures(blocks.seen, height, columns, [striped for _, striped in cells])
    kinds = [kind for kind, _ in cells]
    draw_cells(axes, [color_of(kind) for kind in kinds], columns)
    if columns <= MAX_LETTER_COLUMNS:
        draw_letters(axes, kinds, columns)
    label_blocks(axes, columns, lines, group)
    title = f"{count_of(len(blocks.kinds), 'KV block')} of {blocks.block_size} tokens, "
    title += f"{count_of(len(blocks.request_ids), 'running request')}"
    if group > 1:
        title += f"; a cell is {group} blocks"
    axes.set_title(title, fontsize=13, color=canvas.INK)
    axes.set_xlabel(NULL_BLOCK, fontsize=9, color=canvas.INK)
    draw_legend(figure, blocks)
    return figure


def figure_with_pictures(seen: "SeenPictures", height: float, columns: int, striped: list[bool]) -> tuple[Any, Any]:
    """A figure with the encoder cache and pictures below, and its axes for blocks, on which some are hatched."""
    from jaxpaged.tools.pictures.seen_pictures import draw_below, hatch_blocks, height_below

    below = height_below(seen, columns)
    figure = canvas.new_figure(11, height + sum(below))
    axes, *others = figure.subplots(3, 1, height_ratios=(height, *below))
    hatch_blocks(axes, striped, columns)
    draw_below(others, seen, columns)
    return figure, axes


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
