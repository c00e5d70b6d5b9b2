"""Pictures in a map of KV blocks: which blocks have tokens of one, and the encoder cache beside them.

What a block is otherwise, and who holds it, `BlockMap` knows. Letters: H rows, W columns, C channels (3).
"""

import html
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxpaged.messages import KVBlockMap
from jaxpaged.tools.pictures import canvas
from jaxpaged.tools.pictures.cells import draw_cells, grouped, html_cell

NONE = -1
PAGE_CHARACTERS = string.digits[1:] + string.ascii_uppercase
MOST_SHOWN = 10
"""Pictures that are named, and shown small."""
MAX_PAGES = 2048
"""Cells of the encoder cache; more pages than this are drawn in groups."""
PICTURE_INCHES = 1.3


class Thumbnails(Protocol):
    """Where pictures are to be had."""

    def thumbnail(self, key: bytes) -> np.ndarray | None:
        """uint8 [H, W, 3] of the picture with this key; None where it is gone."""


class SeenPictures:
    """The pictures of a `KVBlockMap`. `of_block[i]` and `pages[i]` are the index of the picture that block i + 1, or
    page i of the encoder cache, has; `NONE` if it has none."""

    def __init__(self, blocks: KVBlockMap, thumbnails: Thumbnails | None):
        assert blocks.picture is not None and blocks.encoder_picture is not None and blocks.encoder_held is not None
        self.names = [key.hex()[:8] for key in blocks.picture_keys]
        self.of_block: list[int] = blocks.picture[1:].tolist()
        self.pages: list[int] = blocks.encoder_picture.tolist()
        self._num_blocks = Counter(self.of_block)
        self._num_pages = Counter(self.pages)
        self._held = set(blocks.encoder_picture[blocks.encoder_held].tolist())
        self.thumbnails = [
            None if thumbnails is None else thumbnails.thumbnail(key) for key in blocks.picture_keys[:MOST_SHOWN]
        ]

    @property
    def num_pages_used(self) -> int:
        return len(self.pages) - self._num_pages[NONE]

    @property
    def title(self) -> str:
        """What the encoder cache is, and how full."""
        return f"encoder cache: {self.num_pages_used} of {len(self.pages)} pages in use"

    def lines(self) -> list[str]:
        """A line for each picture: its character, its key's beginning, and where it is; only the first few of many."""
        lines = [f"{page_character(number)} {self.where(number)}" for number in range(len(self.names))[:MOST_SHOWN]]
        more = len(self.names) - MOST_SHOWN
        return [*lines, f"and {more} more pictures"] if more > 0 else lines

    def where(self, number: int) -> str:
        """A picture's number and key, the blocks of requests and the pages of the encoder cache that have it."""
        pages = self._num_pages[number]
        state = (" held" if number in self._held else " cached, reusable") if pages else ""
        return (
            f"picture {number + 1} ({self.names[number]}): KV blocks {self._num_blocks[number]}, pages {pages}{state}"
        )

    def text(self, width: int, max_lines: int) -> list[str]:
        """The encoder cache, one character a page or a group of pages, under a line that says so."""
        group = max(-(-len(self.pages) // (width * max_lines)), 1)
        cells = "".join(page_character(number) for number in grouped(self.pages, group))
        scale = f"{self.title}; one character is {group} of them"
        return ["", scale, *(cells[i : i + width] for i in range(0, len(cells), width)), *self.lines()]

    def html(self) -> str:
        """The encoder cache, and the first pictures themselves."""
        from jaxpaged.multimodal.thumbnails import data_url

        group = max(-(-len(self.pages) // MAX_PAGES), 1)
        titles = {number: html.escape(self.where(number)) for number in range(len(self.names))} | {NONE: "free"}
        cells = "".join(html_cell(page_color(number), titles[number]) for number in grouped(self.pages, group))
        figures = []
        for number, pixels in enumerate(self.thumbnails):
            seen = "" if pixels is None else f'<img src="{data_url(pixels)}" alt="" style="max-height:72px"><br>'
            where = f"{html_cell(page_color(number), '')} {titles[number]}"
            figures.append(f'<span style="display:inline-block;margin:4px;vertical-align:bottom">{seen}{where}</span>')
        scale = f"{self.title}{f'; a cell is {group} pages' if group > 1 else ''}"
        words = f"striped blocks have tokens of a picture; {scale}"
        return f'<p>{words}</p><div style="line-height:13px;max-width:900px">{cells}</div><div>{"".join(figures)}</div>'


def page_character(number: int) -> str:
    return "." if number == NONE else PAGE_CHARACTERS[number % len(PAGE_CHARACTERS)]


def page_color(number: int) -> str:
    colors = (canvas.GREEN, canvas.PINK, canvas.ORANGE, canvas.SKY, canvas.RED, canvas.YELLOW, canvas.BLUE)
    return canvas.PALE if number == NONE else colors[number % len(colors)]


# ---- drawn with matplotlib -------------------------------------------------------------------------


def height_below(seen: SeenPictures, columns: int) -> tuple[float, float]:
    """Inches for the encoder cache and for pictures, where a line has so many cells."""
    lines = max(-(-min(len(seen.pages), MAX_PAGES) // columns), 1)
    return 0.6 + 10.4 * lines / columns, PICTURE_INCHES


def hatch_blocks(axes: Any, striped: Sequence[bool], columns: int) -> None:
    """Stripes on some cells, which are squares around whole numbers."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((i % columns - 0.5, i // columns - 0.5), 1, 1) for i, has in enumerate(striped) if has]
    axes.add_collection(PatchCollection(squares, facecolor="none", edgecolor=(1, 1, 1, 0.6), linewidth=0, hatch="///"))


def draw_below(places: Sequence[Any], seen: SeenPictures, columns: int) -> None:
    """The encoder cache as cells, and the first pictures, each in a frame of its colour."""
    pages, pictures = places
    group = max(-(-len(seen.pages) // MAX_PAGES), 1)
    draw_cells(pages, [page_color(number) for number in grouped(seen.pages, group)], columns)
    pages.set_xticks([])
    pages.set_yticks([])
    pages.set_title(f"hatched blocks have tokens of a picture; {seen.title}", fontsize=10, color=canvas.INK)
    pictures.set_axis_off()
    for number, pixels in enumerate(seen.thumbnails):
        place = pictures.inset_axes((number / MOST_SHOWN, 0, 0.9 / MOST_SHOWN, 1))
        place.set_xticks([])
        place.set_yticks([])
        for spine in place.spines.values():
            spine.set(color=page_color(number), linewidth=2)
        place.set_xlabel(f"picture {number + 1}", fontsize=8, color=canvas.INK)
        if pixels is not None:
            place.imshow(pixels)
