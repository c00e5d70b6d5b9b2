"""The worker's half of KV transfer: dispatches copies between steps, and moves bytes in threads.

Steps and copies are links of one chain of arrays, each of which takes what the one before returns. So a block may be
given out again once its gather is dispatched, and read by the step after its scatter; there is no other fence. What was
gathered is handed to a tier only when the step that computed it is confirmed. The bytes that were gathered and are not
stored yet are limited; who saves is told what found no room. This module does not decide what travels.
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
from jaxpaged.kv_store.page import PageContent, PageHeader, PageKey, encode
from jaxpaged.kv_store.pieces import Piece, keys_of
from jaxpaged.kv_store.prefix_file import PlacedPage, PrefixFile, PrefixHeader, PrefixInfo, info_of, write_prefix
from jaxpaged.kv_store.threads import Threads
from jaxpaged.kv_store.tier import ChunkTiers, Lookup
from jaxpaged.kv_store.tier_events import TierEvent, TierEventLog
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.kv_store.transfer_params import RemoteSource
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.kv_transfer.copies import Copies
from jaxpaged.worker.kv_transfer.fetcher import CopyPages, PageFetcher
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.peers import Peers

logger = logging.getLogger(__name__)

ROOM = 256 << 20
"""Bytes that are gathered and not stored yet, after which no other gather begins."""
ROOM_TO_LEND = 2 << 30
"""The same where others wait for what is gathered: what is not saved they must compute."""
NUM_THREADS = 2
THREADS_TO_LEND = 4
"""The same where others wait: a checksum takes a thread longer than all else that happens to a page."""
FAR_READERS = 8
"""Pages of loads that are fetched from one tier at a time, where it is in another process."""
TOLD_BYTES = 4 << 20
"""Bytes of pages of a copy after which consumers hear of them, while the rest of it is stored."""
THREADS_TO_BORROW = 64
"""Loads at a time where other engines lend: most of them wait for prompts that are being computed."""
CLOSE_SECONDS, SAVE_SECONDS = 2.0, 30.0
"""That closing waits for what is being loaded, and for what is being stored, which may hang."""
SIZES = tuple(1 << power for power in range(14, 37, 2))
"""Bounds of the sizes that are counted, 16 KiB to 64 GiB."""


class Gathered(NamedTuple):
    """Pages on their way off the device, computed by the steps up to `step_id`. `contents`: of the rows of `pages` in
    turn, None for one that the store has."""

    step_id: int
    contents: Sequence[PageContent | None]
    pages: tuple[Any, ...]
    num_bytes: int
    discarded: set[PageKey]

    @property
    def keys(self) -> list[PageKey]:
        return [content.key for content in self.contents if content is not None]


class Fetched(NamedTuple):
    """Pages of a load in host memory: for each of its copies the pool, places in the load, and the arrays. `sources`
    are the names of the tiers that had the pages, empty for those that did not come."""

    load: Any
    came: list[bool]
    sources: list[str]
    copies: CopyPages
    seconds: float


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


class Room:
    """How many gathers are under way, and their bytes. Another one may begin while these are fewer than `most`."""

    def __init__(self, most: int):
        self._most, self._changed = most, threading.Condition()
        self.num_bytes = self.num_gathers = 0

    @property
    def is_there(self) -> bool:
        return self.num_bytes < self._most

    def take(self, num_bytes: int) -> None:
        with self._changed:
            self.num_bytes += num_bytes
            self.num_gathers += 1

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self.num_bytes -= num_bytes
            self.num_gathers -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Sleep until a gather ends, at most so long, unless there is room already. Whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_there, max(seconds, 0.0))


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


class KVTransferWorker:
    """What carries out transfers over the KV cache of `device`. It owns the store.

    Pages have the form `form`, and are signed with `secret`, if there is one. `model` is a name for people.
    """

    def __init__(
        self,
        device: Device,
        kv_cache: KVCacheConfig,
        store: Tiers,
        namespace: str,
        form: PageForm,
        *,
        secret: bytes | None = None,
        model: str = "",
        peers: Peers | None = None,
    ):
        """`peers`: other engines, to lend to or to borrow from."""
        self._peers = peers or Peers()
        self.chunk_tiers: ChunkTiers = store
        self.page_tokens = form.page_tokens
        self._copies, self._form, self._store, self._namespace = Copies(device, kv_cache, form), form, store, namespace
        self._num_groups = len(kv_cache.groups)
        self._secret, self._model = secret, model
        num_pools = len(kv_cache.pools)
        self._fetcher = PageFetcher(self._copies, num_pools, store, self._peers, namespace, secret)
        self._unconfirmed: deque[Gathered] = deque()
        self._fetched: deque[Fetched] = deque()
        self._news = threading.Event()
        self._room, self._losses = Room(ROOM_TO_LEND if self._peers.lends else ROOM), Losses()
        self._under_way: set[PageKey] = set()  # gathered and not stored yet
        self._savers = Threads(THREADS_TO_LEND if self._peers.lends else NUM_THREADS, "kv-save")
        self._loaders = [Loaders(tier.name, NUM_THREADS, is_far) for tier, is_far in zip(store.tiers, store.are_far)]
        self._consumers = Loaders("peers", THREADS_TO_BORROW, is_far=True) if self._peers.borrows else None
        self.num_saved = self.num_loaded = self.num_lost = 0  # pages
        self._changes: TierEventLog | None = None  # nobody wants to hear of any
        self._copied = [0, 0]  # since it was asked for: off the devices, and to them
        self._moved = {"load": Moved(), "store": Moved()}

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        """See `Tier.lookup`."""
        return self._peers.lookup(keys, self._store.lookup(keys))

    def where(self, keys: Sequence[PageKey]) -> list[str]:
        """See `Tiers.where`."""
        return self._store.where(keys)

    # ---- other engines -------------------------------------------------------------------------

    def expect(self, keys: Sequence[PageKey], source: RemoteSource) -> None:
        """Another engine lends these pages."""
        self._peers.expect(keys, source)

    def keep_lease(self, source: RemoteSource) -> None:
        """A request waits for what another engine lends: it is to be lent until `release`."""
        self._peers.keep_lease(source)

    def release(self, source: RemoteSource) -> None:
        """What it lends is not needed any more."""
        self._peers.release(source)

    def lend(self, num_tokens: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Lend pages of a prompt that begins to be computed. What an answer says of it; None where there is nothing to
        lend."""
        keys = keys_of(pieces)
        said = self._peers.grant(keys, num_tokens)
        if said is not None:
            self._savers.submit(self._peers.hold, keys)
        return said

    def finish_lending(self, said: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
        """The prompt is computed; those of its pieces with blocks are saved next. What an answer says now."""
        keys = keys_of([piece for piece in pieces if piece.block_ids])
        block_ids: list[list[int]] = [[] for _ in range(self._num_groups)]
        for piece in pieces:
            block_ids[piece.pages[0].key.group] += piece.block_ids
        said = self._peers.finish(said, keys, block_ids)
        self._savers.submit(self._peers.hold, keys)
        return said

    def take_back(self, said: dict[str, Any]) -> None:
        """The prompt will not be computed after all."""
        self._peers.take_back(said)

    # ---- saving --------------------------------------------------------------------------------

    @property
    def outlives_engine(self) -> bool:
        """Whether a tier keeps pages when this engine has ended."""
        return self._store.is_lasting

    @property
    def has_room(self) -> bool:
        """Whether another copy off the devices may begin now."""
        return self._room.is_there

    def wait_for_room(self, seconds: float) -> bool:
        """Sleep until a copy ends that is under way, at most so long. Whether another one may begin."""
        return self._room.wait(seconds)

    def save[S: tuple[int, Piece]](self, saves: Sequence[S]) -> list[S]:
        """Dispatch copies of pieces, each with the step that computes it: before the next step, behind those steps.
        Those for which there is no room now."""
        lacking = iter(self._lacks(saves))
        by_pool: dict[int, list[tuple[S, list[PageContent | None]]]] = {}
        for save in saves:
            wanted = [page if next(lacking) else None for page in save[1].pages]
            if any(wanted):
                pool_idx = self._copies.pool_of[save[1].pages[0].key.group]
                by_pool.setdefault(pool_idx, []).append((save, wanted))
        left = set[int]()
        for pool_idx, missing in by_pool.items():
            for some in batched(missing, self._copies.most(pool_idx)):
                if self._room.is_there:
                    self._gather(pool_idx, some)
                else:
                    left.update(id(save) for save, _ in some)
        return [save for save in saves if id(save) in left]

    def _lacks(self, saves: Sequence[tuple[int, Piece]]) -> list[bool]:
        """Whether each page of these is to be brought to the store."""
        return self._store.lacks(keys_of([piece for _, piece in saves]), self._under_way)

    def _gather(self, pool_idx: int, saves: Sequence[tuple[tuple[int, Piece], list[PageContent | None]]]) -> None:
        contents = [page for _, wanted in saves for page in wanted]
        block_ids = [block_id for (_, piece), _ in saves for block_id in piece.block_ids]
        pages, num_bytes = self._copies.gather(pool_idx, block_ids), self._copies.num_bytes(pool_idx, len(saves))
        self._room.take(num_bytes)
        step_id = max(step_id for (step_id, _), _ in saves)
        self._copied[0] += len(block_ids)
        self._unconfirmed.append(Gathered(step_id, contents, start_copy(pages), num_bytes, set()))
        self._under_way.update(self._unconfirmed[-1].keys)

    def give_up(self, saves: Sequence[tuple[int, Piece]]) -> None:
        """These will not be saved: their content is lost next."""
        reason = "their blocks are needed sooner than the tiers take what they hold"
        self._losses.add(sum(self._lacks(saves)), reason)

    def confirm(self, before: int | None) -> None:
        """The steps before number `before` are done, None: all are. What they computed may be stored."""
        while self._unconfirmed and (before is None or self._unconfirmed[0].step_id < before):
            self._savers.submit(self._store_pages, self._unconfirmed.popleft())

    def revoke(self) -> None:
        """A step has failed: what is not confirmed is never stored."""
        for gathered in self._unconfirmed:
            self._under_way.difference_update(gathered.keys)
            self._room.give_back(gathered.num_bytes)
        self._unconfirmed.clear()

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Keep these pages no longer."""
        wrong = set(keys)
        for gathered in self._unconfirmed:
            gathered.discarded.update(wrong)
        self._savers.submit(self._store.delete, list(keys))

    def _store_pages(self, gathered: Gathered) -> None:
        """In a thread: wait for the bytes, and put the pages into the store."""
        begin, num_bytes, untold, num_lost = time.monotonic(), 0, list[PageKey](), 0
        try:
            pages = [np.asarray(array) for array in gathered.pages]
            for content, *page in zip(gathered.contents, *pages):
                if content is None or content.key in gathered.discarded:
                    continue
                values, *scales = (array[: self._copies.shape(content.key.group)[0]] for array in page)
                header = PageHeader(self._namespace, content.key, content.parent, content.token_ids)
                if self._store.put(content.key, encode(header, values, self._secret, *scales)):
                    self.num_saved += 1
                    num_bytes += self._copies.page_bytes(content.key.group)
                    untold.append(content.key)
                    if len(untold) * self._copies.page_bytes(content.key.group) >= TOLD_BYTES:
                        self._peers.hold(untold)
                        untold.clear()
                else:
                    num_lost += 1
            self._losses.add(num_lost, "no tier takes them, which fail, are full, or are too small for a page")
        except Exception as error:
            self._losses.add(len(gathered.keys), f"saving them fails with {type(error).__name__}", error)
        finally:
            self._moved["store"].add(num_bytes, time.monotonic() - begin)
            self._under_way.difference_update(gathered.keys)
            self._room.give_back(gathered.num_bytes)
            self._peers.hold(gathered.keys)

    # ---- loading -------------------------------------------------------------------------------

    def load(self, load: Any) -> None:
        """Fetch the `pages` of a load in a thread."""
        number = self._store.farthest([page.key for page in load.pages])
        loaders = self._consumers if number is None and self._consumers is not None else self._loaders[number or 0]
        loaders.threads.submit(self._fetch, load, loaders.readers, time.monotonic())

    def _fetch(self, load: Any, readers: Threads | None, begin: float) -> None:
        started = time.monotonic()
        sources, copies = self._fetcher.fetch(load, readers)
        came = list(map(bool, sources))
        num_bytes = sum(self._copies.page_bytes(page.key.group) for page, ok in zip(load.pages, came) if ok)
        self._moved["load"].add(num_bytes, time.monotonic() - started)
        self.num_loaded += sum(came)
        self.num_lost += len(came) - sum(came)
        self._fetched.append(Fetched(load, came, sources, copies, time.monotonic() - begin))
        self._news.set()

    def take_fetched(self) -> list[Fetched]:
        """The loads whose bytes are there, or will never be."""
        self._news.clear()
        return [self._fetched.popleft() for _ in range(len(self._fetched))]

    def wait(self, seconds: float) -> None:
        """Sleep until a load is there, at most so long."""
        self._news.wait(seconds)

    def write(self, fetched: Fetched, block_ids: Sequence[Sequence[int]]) -> None:
        """Dispatch the copies of a load to the blocks of each of its pieces, 0 for none: before the next step."""
        for pool_idx, places, pages in fetched.copies:
            ids = [block_id for i in places for block_id in block_ids[i]]
            self._copied[1] += sum(block_id > 0 for block_id in ids)
            self._copies.scatter(pool_idx, ids, pages)

    def take_changes(self) -> list[TierEvent]:
        """What came into the tiers and left them since the last call; of the first call, all that is there."""
        if self._changes is None:
            self._changes = TierEventLog()
            self._store.watch(self._changes)
        return self._changes.take()

    def take_copied(self) -> tuple[int, int]:
        """Blocks whose copies off the devices, and to them, were dispatched since the last call."""
        (num_off, num_to), self._copied = self._copied, [0, 0]
        return num_off, num_to

    # ---- files ---------------------------------------------------------------------------------

    def write_file(
        self, path: Path, token_ids: Sequence[int], pieces: Sequence[tuple[Sequence[PlacedPage], Sequence[int]]]
    ) -> PrefixInfo:
        """Write pieces, each its pages and the ids of its blocks, which nobody overwrites meanwhile, to a file. Raises
        UsageError."""
        pages = [page for some, _ in pieces for page in some]
        shapes = [self._copies.shape(page.content.key.group) for page in pages]
        header = PrefixHeader(
            self._namespace,
            self._model,
            tuple(token_ids),
            self._form.page_dtype.name,
            tuple(pages),
            tuple(shapes),
            is_scaled=self._form.is_scaled,
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

    def read_file(self, path: Path) -> PrefixInfo:
        """Put a file's pages into the store. Raises UsageError, and PageError for one that must not be used."""
        file = PrefixFile(path, self._secret)
        if file.header.namespace != self._namespace:
            lengths, own = {len(page.content.token_ids) for page in file.header.pages}, self._form.page_tokens
            raise PageError(
                f"{path} is not used: it holds keys and values of {file.header.model!r}, namespace "
                f"{file.header.namespace[:12]}; this engine has {self._model!r}, namespace {self._namespace[:12]}. "
                f"Its pages have {', '.join(map(str, sorted(lengths)))} tokens, and this engine's {own}. Weights, "
                "configuration, cache type, and size and form of pages must be the same."
            )
        num_kept = sum(self._store.put(key, buffers) for key, buffers in file.pages())
        if num_kept < len(file.header.pages):
            raise UsageError(
                f"the tiers of kv_offload kept {num_kept} of the {len(file.header.pages)} pages of {path}. Give them "
                "room."
            )
        return info_of(file.header)

    # ---- what it tells, and the end -------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what the tiers hold."""
        sizes = lambda line: {"bytes": line.num_bytes, "capacity": line.capacity, "pages": line.num_pages}
        lines = [*self._store.usage(), *self._peers.usage()]
        tiers: dict[str, Any] = {}
        for line in lines:
            same = sum(name.startswith(f"kv_offload_tier_{line.name}") for name in tiers)
            name = f"kv_offload_tier_{line.name}_{same + 1}" if same else f"kv_offload_tier_{line.name}"
            tiers[name] = sizes(line) | vars(line.counters)
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
            "kv_offload_copies_under_way": self._room.num_gathers,
            **tiers,
            **self._peers.stats(),
        }

    def close(self) -> None:
        """Store what is confirmed, and let go of threads and tiers."""
        self._peers.close()
        for each in [*self._loaders, self._consumers]:
            if each is not None:
                each.close()
        self._savers.close(SAVE_SECONDS)
        self._store.close()
