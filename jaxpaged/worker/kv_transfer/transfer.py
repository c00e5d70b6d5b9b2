"""What carries keys and values between the devices and a connector: copies around steps, and threads that move bytes.

Steps and copies are links of one chain of arrays, each of which takes what the one before returns. So a block may be
given out again once its gather is dispatched, and read by the step after its scatter; there is no other fence. What was
gathered is handed to the connector only when the step that computed it is confirmed. This module does not decide what
travels.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import batched, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.errors import PageError, UsageError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_connector.base import (
    FinishedFetch,
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVFetch,
    KVSave,
    KVWrite,
)
from jaxpaged.kv_connector.pages import CopyPages, Load, Page, PageChecker, StoredPage, Targets
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.prefix_file import PlacedPage, PrefixFile, PrefixHeader, PrefixInfo, info_of, write_prefix
from jaxpaged.kv_store.threads import Threads
from jaxpaged.messages import ModelRunnerOutput
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.kv_transfer.copies import Copies
from jaxpaged.worker.kv_transfer.forms import PageForm

logger = logging.getLogger(__name__)

NUM_THREADS = 2
THREADS_TO_LEND = 4
"""The same where others wait: a checksum takes a thread longer than all else that happens to a page."""
SAVED_BYTES = 4 << 20
"""Bytes of pages of a copy that the connector gets at a time, so that who waits for some of them need not for all."""
SAVE_SECONDS = 30.0
"""That closing waits for what is being saved, which may hang."""
SIZES = tuple(1 << power for power in range(14, 37, 2))
"""Bounds of the sizes that are counted, 16 KiB to 64 GiB."""


class Gathered(NamedTuple):
    """Pages on their way off the device: `pages` has a row for each of those of `save`."""

    save: KVSave
    pages: tuple[Any, ...]
    discarded: set[PageKey]


class Moved:
    """Bytes that went one way, with the seconds that threads took for them, and how many operations moved how many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes, self.seconds, self.sizes = 0, 0.0, dict.fromkeys(SIZES, 0)

    def add(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.seconds += seconds
            bound = next((size for size in SIZES if num_bytes <= size), SIZES[-1])
            self.sizes[bound] += bool(num_bytes)


class Losses:
    """Pages that were not kept, by the reason: the log has a line for the first of each, and the rest is counted."""

    def __init__(self) -> None:
        self._lock, self._told, self.num_pages = threading.Lock(), set[str](), 0

    def add(self, num_pages: int, reason: str, error: Exception | None = None) -> None:
        if not num_pages:
            return
        with self._lock:
            self.num_pages += num_pages
            is_news = reason not in self._told
            self._told.add(reason)
        if is_news:
            logger.warning(
                "%d pages of keys and values are not kept: %s. The metric jaxpaged:kv_offload_pages_dropped counts "
                "further ones, and the log does not.",
                num_pages,
                reason,
                exc_info=error,
            )


class KVTransferWorker:
    """What carries out transfers between the KV cache of `device` and `connector`, which it owns.

    Pages have the form `form`, and are signed with `secret`, if there is one. `model` is a name for people.
    """

    def __init__(
        self,
        device: Device,
        kv_cache: KVCacheConfig,
        connector: KVConnector,
        namespace: str,
        form: PageForm,
        *,
        secret: bytes | None = None,
        model: str = "",
    ):
        self.connector, self._form, self._secret = connector, form, secret
        self._copies = Copies(device, kv_cache, form)
        self.layout = self._copies.layout(namespace, model)
        connector.register_kv_caches(self.layout)
        self._checker = PageChecker(self.layout, secret)
        self._unconfirmed: deque[Gathered] = deque()
        self._under_way = 0  # saves of which the end is not known
        self._ended_saves: deque[int] = deque()
        self._loads: dict[int, Load] = {}  # from their beginning until they are written, or not
        self._ended_loads: deque[Load] = deque()
        self._news, self._losses = threading.Event(), Losses()
        self._savers = Threads(THREADS_TO_LEND if connector.others_wait else NUM_THREADS, "kv-save")
        self.num_saved = self.num_loaded = self.num_lost = 0  # pages
        self._moved = {"load": Moved(), "store": Moved()}

    # ---- around steps --------------------------------------------------------------------------

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Ahead of a step: keep what is confirmed, dispatch the copies that come first, and begin to fetch."""
        if metadata.discarded:
            self._discard(metadata.discarded)
        self._confirm(metadata.confirmed)
        reason = "their blocks are needed sooner than the connector takes what they hold"
        self._losses.add(len(metadata.given_up), reason)
        for each in metadata.before_step:
            self._write(each) if isinstance(each, KVWrite) else self._gather(each)
        loads = [Load(fetch, self._checker, self._stage, self._end_load) for fetch in metadata.fetches]
        self._loads |= {load.fetch.load_id: load for load in loads}
        if loads or metadata.connector is not None:
            self.connector.start_load_kv(loads, metadata.connector)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        """Behind a step: dispatch the copies of what it computes."""
        for save in metadata.after_step:
            self._gather(save)

    def get_finished(self) -> KVConnectorOutput:
        """What has become of loads and saves since the last call."""
        self._news.clear()
        loads = [self._ended_loads.popleft() for _ in range(len(self._ended_loads))]
        fetches = [FinishedFetch(load.fetch.load_id, load.sources, load.end - load.begin) for load in loads]
        progressed = [load_id for load_id, load in self._loads.items() if load.take_progress()]
        saves = [self._ended_saves.popleft() for _ in range(len(self._ended_saves))]
        return KVConnectorOutput(fetches, progressed, saves)

    def read(self, output: ModelRunnerOutput) -> None:
        """Add this to the result of a step."""
        output.kv_connector_output = self.get_finished()

    def exchange(self, metadata: KVConnectorMetadata | None, seconds: float) -> KVConnectorOutput:
        """Do what `metadata` says without a step, and wait at most so many seconds for a load or a save to end."""
        if metadata is not None:
            self.start_load_kv(metadata)
            self.wait_for_save(metadata)
            self._confirm(metadata.confirmed)
        if seconds > 0:
            self._news.wait(seconds)
        return self.get_finished()

    def revoke(self) -> None:
        """A step has failed: what is not confirmed is never kept."""
        self._ended_saves.extend(gathered.save.save_id for gathered in self._unconfirmed)
        self._under_way -= len(self._unconfirmed)
        self._unconfirmed.clear()

    # ---- saving --------------------------------------------------------------------------------

    def _gather(self, save: KVSave) -> None:
        pages = self._copies.gather(save.pool, save.block_ids)
        self._under_way += 1
        self._unconfirmed.append(Gathered(save, start_copy(pages), set()))

    def _confirm(self, before: int) -> None:
        """The steps before number `before` are done. What they computed may be kept."""
        while self._unconfirmed and self._unconfirmed[0].save.step_id < before:
            self._savers.submit(self._save, self._unconfirmed.popleft())

    def _discard(self, keys: Sequence[PageKey]) -> None:
        for gathered in self._unconfirmed:
            gathered.discarded.update(keys)
        self._savers.submit(self.connector.discard, list(keys))

    def _save(self, gathered: Gathered) -> None:
        """In a thread: wait for the bytes, and give the pages to the connector."""
        begin, num_bytes, num_lost, num_left = time.monotonic(), 0, 0, 0
        contents = gathered.save.pages
        try:
            rows = list(zip(contents, *[np.asarray(array) for array in gathered.pages]))
            wanted = [row for row in rows if row[0] is not None and row[0].key not in gathered.discarded]
            num_left = len(wanted)
            for some in batched(wanted, self._pages_at_a_time(wanted)):
                pages = [self._page(content, arrays) for content, *arrays in some]
                kept = [bool(each) for each in self.connector.save_kv(pages)]
                num_left -= len(some)
                self.num_saved += sum(kept)
                num_lost += kept.count(False)
                num_bytes += sum(
                    self._copies.page_bytes(page.content.key.group) for page, is_kept in zip(pages, kept) if is_kept
                )
            self._losses.add(num_lost, "no tier takes them, which fail, are full, or are too small for a page")
        except Exception as error:
            self._losses.add(num_left + num_lost, f"saving them fails with {type(error).__name__}", error)
        finally:
            self._moved["store"].add(num_bytes, time.monotonic() - begin)
            self._end_save(gathered.save.save_id)

    def _pages_at_a_time(self, wanted: Sequence[Any]) -> int:
        largest = max((self._copies.page_bytes(row[0].key.group) for row in wanted), default=1)
        return max(SAVED_BYTES // largest, 1)

    def _page(self, content: PageContent, arrays: Sequence[np.ndarray]) -> Page:
        num_layers = self._copies.shape(content.key.group)[0]
        return Page(self.layout, content, [array[:num_layers] for array in arrays], self._secret)

    def _end_save(self, save_id: int) -> None:
        self._under_way -= 1
        self._ended_saves.append(save_id)
        self._news.set()

    # ---- loading -------------------------------------------------------------------------------

    def _stage(self, fetch: KVFetch) -> tuple[CopyPages, Targets]:
        """Host memory for the pages of a load, by the copies that take them to the device."""
        copies: list[tuple[int, list[int], tuple[np.ndarray, ...]]] = []
        targets: Targets = {}
        pool_of = [self._copies.pool_of[piece[0].key.group] for piece in fetch.pieces]
        for pool in sorted(set(pool_of)):
            places = [i for i, each in enumerate(pool_of) if each == pool]
            for some in map(list, batched(places, self._copies.most(pool))):
                arrays = self._copies.empty(pool, len(some))
                pages = [page for i in some for page in fetch.pieces[i]]
                targets.update((page.key, target) for page, *target in zip(pages, *arrays))
                copies.append((pool, some, arrays))
        return copies, targets

    def _end_load(self, load: Load) -> None:
        """In a thread of the connector's."""
        sources = load.sources
        came = [page for page, source in zip(load.pages, sources) if source]
        num_bytes = sum(self._copies.page_bytes(page.key.group) for page in came)
        self._moved["load"].add(num_bytes, load.end - load.begin)
        self.num_loaded += len(came)
        self.num_lost += len(sources) - len(came)
        self._ended_loads.append(load)
        self._news.set()

    def _write(self, write: KVWrite) -> None:
        """Dispatch the copies of a load to the blocks of each of its pieces, 0 for none; or forget it."""
        load = self._loads.pop(write.load_id, None)
        if load is None:
            return
        for pool, places, pages in load.copies if write.block_ids else ():
            ids = [block_id for i in places for block_id in write.block_ids[i]]
            if any(ids):
                self._copies.scatter(pool, ids, pages)

    # ---- files ---------------------------------------------------------------------------------

    def save_prefix(
        self, path: Path, token_ids: Sequence[int], pieces: Sequence[tuple[Sequence[PlacedPage], Sequence[int]]]
    ) -> PrefixInfo:
        """Write pieces, each its pages and the ids of its blocks, which nobody overwrites meanwhile, to a file. Raises
        UsageError."""
        pages = [page for some, _ in pieces for page in some]
        form = self._copies.form_of({page.content.key.group for page in pages})
        header = PrefixHeader(
            self.layout.namespace,
            self.layout.model,
            tuple(token_ids),
            form.page_dtype.name,
            tuple(pages),
            tuple(self._copies.shape(page.content.key.group) for page in pages),
            is_scaled=form.is_scaled,
        )
        return write_prefix(path, header, self._read_pages(pieces), self._secret)

    def _read_pages(self, pieces: Sequence[tuple[Sequence[PlacedPage], Sequence[int]]]) -> Iterator[list[np.ndarray]]:
        """The values of pages, and their scales where there are any, one copy after the other."""
        for pool_idx, members in groupby(pieces, lambda piece: self._copies.pool_of[piece[0][0].content.key.group]):
            for some in batched(members, self._copies.most(pool_idx)):
                gathered = self._copies.gather(pool_idx, [block_id for _, ids in some for block_id in ids])
                pages = [page for placed, _ in some for page in placed]
                for page, *arrays in zip(pages, *map(np.asarray, gathered)):
                    yield [array[: self._copies.shape(page.content.key.group)[0]] for array in arrays]

    def load_prefix(self, path: Path) -> PrefixInfo:
        """Give a file's pages to the connector. Raises UsageError, and PageError for one that must not be used."""
        file = PrefixFile(path, self._secret)
        if file.header.namespace != self.layout.namespace:
            lengths, own = {len(page.content.token_ids) for page in file.header.pages}, self._form.page_tokens
            raise PageError(
                f"{path} is not used: it holds keys and values of {file.header.model!r}, namespace "
                f"{file.header.namespace[:12]}; this engine has {self.layout.model!r}, namespace "
                f"{self.layout.namespace[:12]}. "
                f"Its pages have {', '.join(map(str, sorted(lengths)))} tokens, and this engine's {own}. Weights, "
                "configuration, cache type, and size and form of pages must be the same."
            )
        contents = {page.content.key: page.content for page in file.header.pages}
        pages = (StoredPage(contents[key], buffers, self._secret) for key, buffers in file.pages())
        num_kept = sum(map(bool, (self.connector.save_kv([page])[0] for page in pages)))
        if num_kept < len(file.header.pages):
            raise UsageError(
                f"the tiers of kv_offload kept {num_kept} of the {len(file.header.pages)} pages of {path}. Give them "
                "room."
            )
        return info_of(file.header)

    # ---- what it tells, and the end -------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and those of the connector."""
        moved: dict[str, Any] = {}
        for verb, each in self._moved.items():
            moved |= {
                f"kv_offload_{verb}_bytes": each.num_bytes,
                f"kv_offload_{verb}_seconds": each.seconds,
                f"kv_offload_{verb}_sizes": dict(each.sizes),
            }
        return {
            **moved,
            "kv_offload_pages_saved": self.num_saved,
            "kv_offload_pages_loaded": self.num_loaded,
            "kv_offload_pages_dropped": self._losses.num_pages,
            "kv_offload_pages_lost": self.num_lost,
            "kv_offload_copies_under_way": self._under_way,
            **self.connector.get_kv_connector_stats(),
        }

    def close(self) -> None:
        """Keep what is confirmed, and let go of threads and of the connector."""
        self._savers.close(SAVE_SECONDS)
        self.connector.shutdown()
