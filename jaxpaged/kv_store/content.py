"""What is known of pages without their bytes: keys, what headers must say, and of which texts they are."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from jaxpaged.kv_store.page import PageKey


class PageContent(NamedTuple):
    """The keys and values of one page: of which tokens, behind which page."""

    key: PageKey
    parent: bytes | None
    token_ids: tuple[int, ...]


class Piece(NamedTuple):
    """The smallest run of tokens that both pages and blocks end with (`cut.py`), of one group: its pages, and the ids
    of its blocks on the device, empty where one has not its content, or not yet."""

    pages: tuple[PageContent, ...]
    block_ids: tuple[int, ...]


def keys_of(pieces: Iterable[Piece]) -> list[PageKey]:
    """Of all their pages."""
    return [page.key for piece in pieces for page in piece.pages]


class ChunkTiers(Protocol):
    """Tiers of which some keep larger pieces than pages, and name them by their tokens: they are told of texts.

    Each method takes a text, the hashes of its pages, and where it ends.
    """

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a piece; None: no tier keeps such."""
        ...

    def introduce(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> None:
        """Pages of its full chunks may be looked up."""
        ...

    def collect(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> bool:
        """The chunk that ends there is computed. Whether all of its pages are wanted, those that were put too."""
        ...
