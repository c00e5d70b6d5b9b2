"""What is known of pages without their bytes: keys, what headers must say, and of which texts they are."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxpaged.kv_store.page import PageKey


class PageContent(NamedTuple):
    """The keys and values of one block: of which tokens, behind which block."""

    key: PageKey
    parent: bytes | None
    token_ids: tuple[int, ...]


class ChunkTiers(Protocol):
    """Tiers of which some keep larger pieces than pages, and name them by their tokens: they are told of texts.

    Each method takes a text, the hashes of its units, and where it ends.
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
