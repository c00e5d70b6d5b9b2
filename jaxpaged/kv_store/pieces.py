"""How many tokens a page has, and how the blocks of a device are cut into pages, or joined to them.

A page has the same number of tokens in every engine, so engines with blocks of different sizes find each other's pages:
a block is several pages, or a page is several blocks. A *piece* is the smallest number of tokens that is whole blocks
and whole pages; pieces are what travels. A piece is one page and one block where these are equally large.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.page import MAX_TOKENS, PageContent, PageKey

COMMON_TOKENS = 32
"""Tokens of a page where nothing else is said: what devices like as blocks are 16, or multiples of these."""
SMALLEST_JOINED = 16
"""Tokens of a block that is smaller than a page and still shares pages with others, unless a size is asked for."""


class Piece(NamedTuple):
    """The smallest run of tokens that both pages and blocks end with (`pieces.py`), of one group: its pages, and the
    ids of its blocks on the device, empty where one has not its content, or not yet."""

    pages: tuple[PageContent, ...]
    block_ids: tuple[int, ...]


def keys_of(pieces: Iterable[Piece]) -> list[PageKey]:
    """Of all their pages."""
    return [page.key for piece in pieces for page in piece.pages]


@dataclass(frozen=True)
class PieceSize:
    """Of blocks and pages of so many tokens, one of which divides the other. With `is_end` a block is a snapshot behind
    its last token, and that is in the page that ends there; blocks are whole pages then."""

    block_tokens: int
    page_tokens: int
    is_end: bool = False

    @cached_property
    def tokens(self) -> int:
        """Of a piece."""
        return max(self.block_tokens, self.page_tokens)

    @cached_property
    def num_blocks(self) -> int:
        """Of a piece: one, or as many as make a page."""
        return self.tokens // self.block_tokens

    @cached_property
    def num_pages(self) -> int:
        """Of a piece: one, or as many as make a block."""
        return 1 if self.is_end else self.tokens // self.page_tokens

    def page_idxs(self, number: int) -> range:
        """Of all pages of a text, those of piece `number`."""
        end = (number + 1) * self.tokens // self.page_tokens
        return range(end - self.num_pages, end)


def page_tokens_of(asked: int | None, block_sizes: Collection[int], *, has_snapshots: bool = False) -> int:
    """Tokens of the pages of an engine whose blocks have these sizes; `asked` for by the options, if anything. With
    `has_snapshots` a page ends wherever a block does.

    Raises ConfigError for pages that blocks are not made of, nor they of blocks.
    """
    if has_snapshots:
        if asked is not None and any(size % asked for size in block_sizes):
            sizes = ", ".join(map(str, sorted(set(block_sizes))))
            raise ConfigError(
                f"kv_offload has page_tokens={asked}, and block_size is {sizes}: this model has recurrent states, "
                "whose snapshots lie at the ends of blocks, so a block must be whole pages. Give another one of them."
            )
        return asked or math.gcd(*block_sizes)
    if asked is None:
        is_common = all(size == SMALLEST_JOINED or size % COMMON_TOKENS == 0 for size in block_sizes)
        return COMMON_TOKENS if is_common else math.gcd(*block_sizes)
    if asked > MAX_TOKENS or any(size % asked and asked % size for size in block_sizes):
        sizes = ", ".join(map(str, sorted(set(block_sizes))))
        raise ConfigError(
            f"kv_offload has page_tokens={asked}, and block_size is {sizes}: one must be a multiple of the other, and "
            f"a page has at most {MAX_TOKENS} tokens. Give another one of them."
        )
    return asked
