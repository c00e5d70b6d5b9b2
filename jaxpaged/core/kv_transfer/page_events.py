"""What routers are told of pages that come into tiers and leave them.

A page that has a block's hash is told without tokens: the device's own event of that hash has them. Where pages and
blocks are not as large, pages have hashes that no event of the device names, so tokens and parent are told with them:
of pages that requests here had lately, since tiers know none, and that tokens alone name. Likewise which weights
computed a page is told once there were others than the first ones.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from jaxpaged.core.kv_cache.events import BlockRemoved, BlockStored, KVCacheEvent, of_weights
from jaxpaged.core.kv_cache.groups import CacheGroup
from jaxpaged.core.kv_transfer.pieces import Pieces
from jaxpaged.core.request import Request
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.tier_events import TierEvent

MOST_KNOWN = 1 << 14
"""Pages of which something is remembered."""


class Known(NamedTuple):
    """What is told with a page: its tokens, and the name of the weights that computed it; None: nothing."""

    page: PageContent | None = None
    weights: str | None = None


NOTHING = Known()


class PageEvents:
    """Of the groups of a cache. `is_heard`: somebody takes them."""

    def __init__(self, groups: Sequence[CacheGroup], pieces: Pieces, is_heard: bool):
        self._groups, self._page_tokens = groups, pieces.page_tokens
        self._is_heard, self._tells_tokens = is_heard, not pieces.are_named_alike
        self._known: OrderedDict[PageKey, Known] = OrderedDict()

    def note(self, request: Request, pages: Iterable[PageContent]) -> None:
        """A request has these, or looks for them."""
        tells_tokens, weights = self._tells_tokens and request.has_only_tokens, request.weights_label
        if not self._is_heard or not (tells_tokens or weights is not None):
            return
        for page in pages:
            self._known[page.key] = Known(page if tells_tokens else None, weights)
            self._known.move_to_end(page.key)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def of(self, changes: Sequence[TierEvent]) -> list[KVCacheEvent]:
        """An event for every run of changes of one kind; one for each page where tokens are told."""
        events: list[KVCacheEvent] = []
        kind = lambda change: (change.medium, change.key.group, change.is_there)
        for (medium, g, is_there), run in groupby(changes, kind):
            if g >= len(self._groups):
                continue  # a file that somebody put there
            keys = [change.key for change in run]
            if not is_there:
                hashes = [key.block_hash for key in keys]
                events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=g))
                continue
            for known, some in groupby(keys, lambda key: self._known.get(key, NOTHING)):
                stored = self._stored(medium, g, [key.block_hash for key in some], known.page)
                events.append(of_weights(stored, known.weights))
        return events

    def _stored(self, medium: str, g: int, hashes: list[bytes], page: PageContent | None) -> BlockStored:
        spec = self._groups[g].spec
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if page is None else page.parent,
            token_ids=[] if page is None else list(page.token_ids),
            block_size=self._page_tokens,
            medium=medium,
            group_idx=g,
            kv_cache_spec_kind=spec.kind,
            kv_cache_spec_sliding_window=spec.window,
        )
