"""What a tier is: a store of pages, in this process, on a disk, or elsewhere, behind one interface.

A tier serves one namespace and may be used by any number of threads. Its failures are its own: whatever happens to the
store behind it, callers see a miss or a page that was not kept, `usage` counts it, and the log has a line. Only what is
wrong from the start (a path that is no folder, a capacity of nothing) raises ConfigError, when the tier is made.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier_events import TierEventLog


class Lookup(enum.Enum):
    """What a tier says of a key at once."""

    HIT = "hit"
    """The page was there a moment ago. `get` may still find that it has gone, and answers None."""
    MISS = "miss"
    PENDING = "pending"
    """It is being written, or a store elsewhere is being asked: ask again. This ends in bounded time."""


@dataclass
class Counters:
    """What a tier has done so far. Each grows only."""

    hits: int = 0
    """`get`s that gave a page."""
    misses: int = 0
    stored: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evictions: int = 0
    dropped: int = 0
    """Pages that were not kept: not admitted, too large, too many under way, or the store is failing."""
    corrupt: int = 0
    """Pages that were damaged or another's: each was deleted, and was a miss."""
    errors: int = 0
    """Failures of the store: disk full, no answer in time, no permission."""


@dataclass(frozen=True)
class TierUsage:
    """One tier at one moment. `capacity` is 0 where the store itself decides."""

    name: str
    num_bytes: int
    capacity: int
    num_pages: int
    counters: Counters
    num_waiting: int = 0
    """Pages that are on their way into it."""


class Tier(Protocol):
    """A store of pages. All methods but `get`, `put` and `close` return at once, without input or output."""

    name: str
    """`host`, `disk`, `redis`, `s3`: for logs, metrics and events."""

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        """For each key whether its page is here, from an index in memory: cheap enough for a scheduler."""
        ...

    def get(self, key: PageKey) -> Buffer | None:
        """The page's bytes, read-only, or None. Blocks, so it is for threads that do nothing else.

        The buffer is the caller's for as long as it is held, whatever is evicted meanwhile, and begins at a multiple
        of 64 bytes. Tiers outside of this process's memory have checked the whole page, so `decode` need not verify it
        again; host memory is taken at its word.
        """
        ...

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> bool:
        """Keep a page, given in pieces (`page.encode`). Whether it is here now, or was before. Blocks.

        The bytes are copied or written out before this returns. Content is named by its key, so a page that is here
        is not written again.
        """
        ...

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Count these as used now: they are evicted later. Unknown keys make no difference."""
        ...

    def delete(self, keys: Iterable[PageKey]) -> None:
        """Forget these pages, and remove them soon. Unknown keys make no difference."""
        ...

    def watch(self, log: TierEventLog) -> None:
        """Tell of every page that is here, comes, and goes from now on."""
        ...

    def usage(self) -> list[TierUsage]:
        """One line for each tier that this consists of, in their order."""
        ...

    def close(self) -> None:
        """Finish what is under way, in bounded time, and release threads and files. Pages that outlive it stay."""
        ...


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
