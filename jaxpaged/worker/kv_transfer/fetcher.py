"""Brings the pages of a load together in host memory: from own tiers, and what these lack from other engines."""

import logging
import time
from collections.abc import Sequence
from itertools import batched
from typing import Any

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.page import PageContent, PageKey, decode, scales_of
from jaxpaged.kv_store.threads import Threads
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.worker.kv_transfer.copies import Copies
from jaxpaged.worker.kv_transfer.peers import Peers

logger = logging.getLogger(__name__)

CopyPages = list[tuple[int, list[int], tuple[np.ndarray, ...]]]
"""For each copy to the device the pool, places of its pieces in the load, and the arrays."""
Target = Sequence[np.ndarray]
"""Where the layers of a page go, and their scales where there are any."""


class PageFetcher:
    """For any number of threads."""

    def __init__(
        self, copies: Copies, num_pools: int, store: Tiers, peers: Peers, namespace: str, secret: bytes | None
    ):
        self._copies, self._num_pools, self._store, self._peers = copies, num_pools, store, peers
        self._namespace, self._secret = namespace, secret

    def fetch(self, load: Any, readers: Threads | None) -> tuple[list[str], CopyPages]:
        """Names of the tiers that had the pages, empty for those that did not come, and what copies take. Blocks.
        `readers` fetch several pages from own tiers at a time."""
        pool_of, copies = self._copies.pool_of, CopyPages()
        targets: dict[PageKey, Target] = {}
        try:
            for pool_idx in range(self._num_pools):
                places = [i for i, pages in enumerate(load.pieces) if pool_of[pages[0].key.group] == pool_idx]
                for some in map(list, batched(places, self._copies.most(pool_idx))):
                    pages = [page for i in some for page in load.pieces[i]]
                    arrays = self._copies.empty(pool_idx, len(some))
                    targets.update((page.key, target) for page, *target in zip(pages, *arrays))
                    copies.append((pool_idx, some, arrays))
            if readers is None:
                sources = [self._fetch_own(load, page, targets[page.key]) for page in load.pages]
            else:
                asked = [readers.submit(self._fetch_own, load, page, targets[page.key]) for page in load.pages]
                sources = [each.result() for each in asked]
            if self._peers.borrows:
                self._pull(load, sources, targets)
        except Exception:
            logger.exception("loading %d pages of keys and values failed", len(load.pages))
            return [""] * len(load.pages), []
        return sources, copies

    def _pull(self, load: Any, sources: list[str], targets: dict[PageKey, Target]) -> None:
        """Fetch from other engines what own tiers do not have, in the order in which prompts are computed."""
        missing = sorted((i for i, source in enumerate(sources) if not source), key=lambda i: load.ends[i])
        places = {load.pages[i].key: i for i in missing}
        came = []

        def take(key: PageKey, buffer: Buffer) -> None:
            if self._unpack(buffer, load.pages[places[key]], targets[key]):
                came.append(places[key])
            load.news = time.monotonic()

        name = self._peers.pull(list(places), take)
        for place in came:
            sources[place] = name

    def _fetch_own(self, load: Any, content: PageContent, target: Target) -> str:
        """Fill `target` with a page. The name of the own tier that had it as it must be, "" where none does."""
        buffer, source = self._store.get_from(content.key)
        if buffer is None:
            return ""
        load.news = time.monotonic()
        if self._unpack(buffer, content, target):
            return source
        self._store.delete([content.key])
        return ""

    def _unpack(self, buffer: Buffer, content: PageContent, target: Target) -> bool:
        """Fill `target` with a page, if it is the one that it must be. Its bytes were checked."""
        form = self._copies.form
        wanted: dict[str, Any] = {
            "expect_namespace": self._namespace,
            "key": content.key,
            "secret": self._secret,
            "token_ids": content.token_ids,
            "dtype": form.page_dtype.name,
            "shape": self._copies.shape(content.key.group),
            "version": form.version,
        }
        try:
            header, values = decode(buffer, verify=False, **wanted)
        except PageError as error:
            logger.warning("a page of keys and values is not used: %s", error)
            return False
        for array, part in zip(target, [values, scales_of(buffer, header)] if form.is_scaled else [values]):
            array[: len(part)] = part
        return True
