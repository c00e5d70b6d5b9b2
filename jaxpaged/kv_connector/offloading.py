"""The connectors that keep pages in tiers: host memory, disks, stores elsewhere, and those that LMCache uses, too
(`kv_store/tiers.py`)."""

import logging
from collections.abc import Iterable, Sequence, Set
from typing import Any

from jaxpaged.kv_connector.base import KVConnectorBase, KVLoad, KVPage
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.threads import Threads
from jaxpaged.kv_store.tier import ChunkTiers, Lookup, TierUsage
from jaxpaged.kv_store.tier_events import TierEvent, TierEventLog
from jaxpaged.kv_store.tiers import Tiers

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Loads at a time of which one tier has the last pages."""
FAR_READERS = 8
"""Pages of loads that are fetched from one tier at a time, where it is in another process."""
CLOSE_SECONDS = 2.0
"""That closing waits for what is being loaded, which may hang."""


class Loaders:
    """Threads for loads of which one tier has the last pages, so that they wait for no tier behind it. Of one that
    `is_far` several pages are fetched at a time: each takes a round trip."""

    def __init__(self, name: str, num_threads: int, is_far: bool):
        self.threads = Threads(num_threads, f"kv-load-{name}")
        self.readers = Threads(FAR_READERS, f"kv-read-{name}") if is_far else None

    def close(self) -> None:
        for each in (self.threads, self.readers):
            if each is not None:
                each.close(CLOSE_SECONDS, cancels=True)


class OffloadingConnector(KVConnectorBase):
    """Pages in `tiers`, which it owns. Pages that are lost in one tier are looked for in the next."""

    name = "tiers"

    def __init__(self, tiers: Tiers):
        self.tiers = tiers
        self._loaders = [Loaders(tier.name, NUM_THREADS, is_far) for tier, is_far in zip(tiers.tiers, tiers.are_far)]
        self._changes: TierEventLog | None = None  # nobody wants to hear of any

    @property
    def outlives_engine(self) -> bool:
        return self.tiers.is_lasting

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        return self.tiers.lookup(keys)

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey]) -> Sequence[bool]:
        return self.tiers.lacks(keys, under_way)

    def where(self, keys: Sequence[PageKey]) -> Sequence[str]:
        return self.tiers.where(keys)

    def take_events(self) -> Sequence[TierEvent]:
        if self._changes is None:
            self._changes = TierEventLog()
            self.tiers.watch(self._changes)
        return self._changes.take()

    def start_load_kv(self, loads: Sequence[KVLoad], metadata: Any) -> None:
        for load in loads:
            loaders = self._loaders[self.tiers.farthest([page.key for page in load.missing]) or 0]
            if loaders.threads.submit(self._load, load, loaders.readers).cancelled():
                load.finish()  # it was closed meanwhile

    def _load(self, load: KVLoad, readers: Threads | None) -> None:
        try:
            if readers is None:
                for page in load.missing:
                    self._load_page(load, page)
            else:
                for each in [readers.submit(self._load_page, load, page) for page in load.missing]:
                    each.result()
        except Exception:
            logger.exception("loading pages of keys and values failed")
        finally:
            load.finish()

    def _load_page(self, load: KVLoad, page: PageContent) -> None:
        buffer, source = self.tiers.get_from(page.key)
        if buffer is not None and not load.give(page.key, buffer, source, is_checked=True):
            self.tiers.delete([page.key])

    def save_kv(self, pages: Sequence[KVPage]) -> Sequence[bool]:
        return [self.tiers.put(page.content.key, page.buffers) for page in pages]

    def discard(self, keys: Sequence[PageKey]) -> None:
        self.tiers.delete(keys)

    def get_kv_connector_stats(self) -> dict[str, Any]:
        return tier_stats(self.tiers.usage())

    def shutdown(self) -> None:
        for each in self._loaders:
            each.close()
        self.tiers.close()


class LMCacheConnector(OffloadingConnector):
    """The same where some of the tiers are shared with LMCache, which keeps chunks of several pages and names them by
    their tokens: so they are told of the texts whose pages are looked up and saved."""

    name = "lmcache"

    @property
    def chunk_tiers(self) -> ChunkTiers | None:
        return self.tiers


def offloading_to(tiers: Tiers) -> OffloadingConnector:
    """What keeps pages in these tiers."""
    return OffloadingConnector(tiers) if tiers.chunk_tokens is None else LMCacheConnector(tiers)


def tier_stats(lines: Iterable[TierUsage]) -> dict[str, Any]:
    """What tiers hold and have done, by the names of metrics."""
    tiers: dict[str, Any] = {}
    for line in lines:
        same = sum(name.startswith(f"kv_offload_tier_{line.name}") for name in tiers)
        name = f"kv_offload_tier_{line.name}_{same + 1}" if same else f"kv_offload_tier_{line.name}"
        sizes = {"bytes": line.num_bytes, "capacity": line.capacity, "pages": line.num_pages}
        tiers[name] = sizes | vars(line.counters)
    return tiers
