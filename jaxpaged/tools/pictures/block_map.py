"""`BlockMap`: which request holds which KV block, what is shared, what is cached, what is free.

    print(llm.blocks())          # one character a block, or a group of blocks
    llm.blocks().save("blocks.png")

In a notebook it shows itself. Block 0 is not drawn, see `NULL_BLOCK`. A block is drawn as its first kind that holds:
shared by several requests, held by one request, cached (free, but its content can be reused), free.
"""

import html
import shutil
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpaged.messages import CACHED, FREE, SHARED, KVBlockMap
from jaxpaged.tools.pictures import canvas

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


def character_of(kind: int) -> str:
    return CHARACTERS[kind] if kind < 0 else REQUEST_CHARACTERS[kind % len(REQUEST_CHARACTERS)]


def color_of(kind: int) -> str:
    return COLORS[kind] if kind < 0 else REQUEST_COLORS[kind % len(REQUEST_COLORS)]


class BlockMap:
    """The KV cache at one moment. `kinds[i]` is what block i + 1 is: the index of its owner, SHARED, CACHED or FREE.
    Owners are requests, and behind them reasons for which blocks are held without one."""

    def __init__(self, blocks: KVBlockMap):
        self.block_size = blocks.block_size
        self.request_ids = list(blocks.request_ids)
        self.holds = list(blocks.holds)
        self.kinds = blocks.kinds.tolist()

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
        return "\n".join([*lines, "", scale, NULL_BLOCK, *legend])

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
        return canvas.write_figure(self._figure(), path)

    def _figure(self) -> Any:
        from jaxpaged.tools.pictures.block_plot import draw_blocks

        return draw_blocks(self)

    def __repr__(self) -> str:
        return self.text(min(shutil.get_terminal_size().columns, 120))

    def _repr_html_(self) -> str:
        """Coloured cells, with the request as a tooltip; needs no matplotlib."""
        group = max(-(-len(self.kinds) // MAX_CELLS), 1)
        cells = "".join(html_cell(kind, self._title(kind)) for kind in grouped(self.kinds, group))
        legend = " &nbsp; ".join(f"{html_cell(kind, '')} {html.escape(label)}" for kind, label in self.legend())
        scale = f"{count_of(len(self.kinds), 'KV block')} of {self.block_size} tokens"
        scale += f"; a cell is {group} blocks" if group > 1 else ""
        words = f"{scale}; {NULL_BLOCK}"
        return f'<div style="line-height:13px;max-width:900px">{cells}</div><p>{words}</p><p>{legend}</p>'

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


def grouped(kinds: Sequence[int], group: int) -> list[int]:
    """What most blocks of each group of neighbours are."""
    if group == 1:
        return list(kinds)
    return [Counter(kinds[i : i + group]).most_common(1)[0][0] for i in range(0, len(kinds), group)]


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def html_cell(kind: int, title: str) -> str:
    style = f"display:inline-block;width:11px;height:11px;margin:1px;background:{color_of(kind)}"
    return f'<span title="{html.escape(title)}" style="{style}"></span>'
