"""Pages on their way: one that is saved, and the pages of a load, each of which is checked when it comes.

This module handles numpy arrays in host memory. It knows neither stores nor devices.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_connector.base import KVCacheLayout, KVFetch
from jaxpaged.kv_store.buffers import Buffer, joined
from jaxpaged.kv_store.page import SCALED, VERSION, PageContent, PageHeader, PageKey, decode, encode, scales_of

logger = logging.getLogger(__name__)

CopyPages = Sequence[tuple[int, Sequence[int], Sequence[np.ndarray]]]
"""For each copy to the device the pool, places of its pieces in the load, and the arrays."""
Targets = dict[PageKey, Sequence[np.ndarray]]
"""Where the layers of each page go, and their scales where there are any."""


class Page:
    """A page that is saved: see `KVPage`. Its header and digests are made here."""

    def __init__(self, layout: KVCacheLayout, content: PageContent, arrays: Sequence[np.ndarray], secret: bytes | None):
        """`arrays`: the values, and the scales where there are any. `secret` signs the page."""
        self.content, self.values = content, arrays[0]
        self.scales = arrays[1] if len(arrays) > 1 else None
        header = PageHeader(layout.namespace, content.key, content.parent, content.token_ids)
        self.buffers = encode(header, self.values, secret, *arrays[1:])


class StoredPage:
    """A page that is a file already: see `KVPage`."""

    def __init__(self, content: PageContent, buffers: Sequence[Buffer], secret: bytes | None):
        self.content, self.buffers = content, list(buffers)
        whole = joined(self.buffers)
        header, self.values = decode(whole, expect_namespace=None, key=content.key, secret=secret, verify=False)
        self.scales = scales_of(whole, header)


class PageChecker:
    """Tells whether bytes are the page that they must be."""

    def __init__(self, layout: KVCacheLayout, secret: bytes | None):
        self._layout, self._secret = layout, secret

    def arrays_of(self, content: PageContent, page: Buffer, *, verify: bool) -> list[np.ndarray]:
        """Views of the values of a page, and of its scales where there are any. Raises PageError."""
        group = self._layout.groups[content.key.group]
        header, values = decode(
            page,
            expect_namespace=self._layout.namespace,
            key=content.key,
            token_ids=content.token_ids,
            dtype=group.dtype,
            shape=group.page_shape,
            version=SCALED if group.has_scales else VERSION,
            secret=self._secret,
            verify=verify,
        )
        scales = scales_of(page, header)
        return [values] if scales is None else [values, scales]


class Load:
    """The pages of a fetch: see `KVLoad`. `stage` makes room for them in host memory once the first one comes."""

    def __init__(
        self,
        fetch: KVFetch,
        checker: PageChecker,
        stage: Callable[[KVFetch], tuple[CopyPages, Targets]],
        on_finish: Callable[["Load"], Any],
    ):
        self.fetch, self.request_id = fetch, fetch.request_id
        self.pages = [page for piece in fetch.pieces for page in piece]
        self.copies: CopyPages = ()
        self.begin, self.end = time.monotonic(), 0.0
        self._has_progressed = False
        self._checker, self._stage, self._on_finish = checker, stage, on_finish
        self._contents = {page.key: page for page in self.pages}
        self._lock = threading.Lock()
        self._targets: Targets | None = None
        self._sources: dict[PageKey, str] = {}
        self._is_finished = False

    def take_progress(self) -> bool:
        """Whether a page has come since the last call."""
        has_progressed, self._has_progressed = self._has_progressed, False
        return has_progressed

    @property
    def sources(self) -> list[str]:
        """Of each page where it came from, "" if it did not come."""
        return [self._sources.get(page.key, "") for page in self.pages]

    @property
    def missing(self) -> list[PageContent]:
        order = sorted(range(len(self.pages)), key=lambda i: self.fetch.ends[i])
        return [self.pages[i] for i in order if self.pages[i].key not in self._sources]

    def give(self, key: PageKey, page: Buffer | Sequence[Buffer], source: str, *, is_checked: bool = False) -> bool:
        content = self._contents.get(key)
        if content is None:
            return False
        try:
            whole = page if isinstance(page, Buffer) else joined(page)
            arrays = self._checker.arrays_of(content, whole, verify=not is_checked)
        except (PageError, TypeError, ValueError) as error:  # the last two of what is no buffer
            logger.warning("a page of keys and values from %s is not used: %s", source, error)
            return False
        targets = self._room()
        if targets is None:
            return False
        for target, part in zip(targets[key], arrays, strict=True):
            target[: len(part)] = part
        self._sources[key] = source or "?"
        self._has_progressed = True
        return True

    def _room(self) -> Targets | None:
        """Where pages go; None once the load has ended."""
        with self._lock:
            if self._is_finished:
                return None
            if self._targets is None:
                self.copies, self._targets = self._stage(self.fetch)
            return self._targets

    def finish(self) -> None:
        with self._lock:
            was_finished, self._is_finished = self._is_finished, True
        if not was_finished:
            self.end = time.monotonic()
            self._on_finish(self)
