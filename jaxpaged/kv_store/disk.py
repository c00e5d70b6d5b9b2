"""A tier of files in a folder, which outlives the engine and may be shared with others.

An index in memory says what is there: filled by a scan of the folder in the background, kept by this engine's own
writes, and brought up to date every `rescan_s` seconds with what other engines wrote and removed. The capacity is the
folder's: pages of other namespaces, which an engine with other weights left, are counted and evicted as well.

Files are never synced: checksums find what a power failure cut off. With a tier in host memory before this one they go
around the operating system's page cache (`direct_io.py`); without, through it, which is what keeps pages in memory
then.
"""

import contextlib
import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store import page_folder
from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.buffers import Buffer, read_only, total_bytes
from jaxpaged.kv_store.direct_io import read_all
from jaxpaged.kv_store.page import MAX_HEADER_BYTES, MAX_PAGE_BYTES, PageKey, decode
from jaxpaged.kv_store.policy import Policy, SecondUse, policy_named
from jaxpaged.kv_store.tier import Counters, Lookup, TierUsage
from jaxpaged.kv_store.tier_events import TierEventLog, WatchedDict

logger = logging.getLogger(__name__)

SCAN_PATIENCE_S = 10.0
MAX_SPARED = 64
"""How many pages that others used meanwhile are spared in one search for room."""
BATCH = 256
"""How many pages enter the index at once: look-ups come between."""
QUIET = 20
"""A scan is followed by at least so many times its length without one."""


@dataclasses.dataclass
class Entry:
    """A file in the index. `since` is when it came in (monotonic), `used_ns` its last use as far as we know."""

    num_bytes: int
    used_ns: int
    since: float


class DiskTier:
    """Pages as files below `root`, at most `capacity` bytes of them. `facts` are written beside them, for people.

    Raises ConfigError when `root` can be no folder of pages. A folder that cannot be written to serves what it has.
    """

    name = "disk"

    def __init__(
        self,
        root: str | os.PathLike[str],
        capacity: int,
        namespace: str,
        *,
        facts: Mapping[str, Any] | None = None,
        secret: bytes | None = None,
        policy: str = "lru",
        second_use: bool = False,
        around_cache: bool = False,
        rescan_s: float = 30.0,
        retry_after_s: float = 30.0,
    ):
        if capacity <= 0:
            raise ConfigError(f"The disk tier has a capacity of {capacity} bytes. Give it some, or leave it out.")
        if not re.fullmatch("[0-9a-f]{12,128}", namespace):
            raise ConfigError(f"The namespace is {namespace!r:.80}; it must be hexadecimal digits, 12 at least.")
        self.root, self.capacity, self.namespace = Path(root), capacity, namespace
        self.counters = Counters()
        self._secret, self._rescan_s, self._around_cache = secret, rescan_s, around_cache
        self._policy: Policy[str] = policy_named(policy, capacity)
        self._admission: SecondUse[str] | None = SecondUse() if second_use else None
        self._lock = threading.Lock()  # for everything below; never held during input and output
        self._index = WatchedDict[str, Entry]()
        self._used = 0  # bytes of pages, of those being written, and of those that are to be removed
        self._being_written: set[str] = set()
        self._doomed: dict[str, int] = {}
        self._complained: set[str] = set()
        self._scanned: dict[str, int] = {}  # the scanning thread's own
        self._ready, self._work, self._closing = threading.Event(), threading.Event(), False
        self._writes = CircuitBreaker(f"Writing pages to {self.root}", retry_after_s)
        self._prepare(dict(facts or {}))
        self._thread = threading.Thread(target=self._keep_up, name="kv-disk", daemon=True)
        self._thread.start()

    def _prepare(self, facts: dict[str, Any]) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.scandir(self.root).close()
        except OSError as error:
            raise ConfigError(f"{self.root} cannot hold pages: {error}. Choose another folder.") from None
        try:
            page_folder.write_config(self.root, self.namespace, facts)
        except OSError as error:
            self._failed_to_write(error)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for the first scan of the folder, until which unknown pages are misses. Whether it has ended."""
        return self._ready.wait(timeout_s)

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        names = [page_folder.file_of(self.namespace, key) for key in keys]
        with self._lock:
            return [self._state(name) for name in names]

    def _state(self, name: str) -> Lookup:
        if name in self._index:
            return Lookup.HIT
        return Lookup.PENDING if name in self._being_written else Lookup.MISS

    # ---- reading ------------------------------------------------------------------------------------

    def get(self, key: PageKey) -> Buffer | None:
        name = page_folder.file_of(self.namespace, key)
        with self._lock:
            is_known = name in self._index
        page = self._read(name, key) if is_known else None
        with self._lock:
            if page is None:
                self.counters.misses += 1
                return None
            self.counters.hits += 1
            self.counters.loaded_bytes += total_bytes([page])
            self._policy.touch(name)
        self._mark_used(name)
        return page

    def _read(self, name: str, key: PageKey) -> Buffer | None:
        """The checked content of a file. One that is damaged is removed, one that has gone is forgotten."""
        try:
            with open(self.root / name, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_PAGE_BYTES + MAX_HEADER_BYTES:
                    raise PageError(f"{name} has {size} bytes, more than any page.")
                page = read_all(file.fileno(), size, around_cache=self._around_cache)
            decode(page, expect_namespace=self.namespace, key=key, secret=self._secret)
        except FileNotFoundError:
            self._forget(name)
            return None
        except PageError as error:
            self._complain("damaged", f"A page in {self.root} is removed: {error}")
            self._forget(name)
            with self._lock:
                self.counters.corrupt += 1
            with contextlib.suppress(OSError):
                (self.root / name).unlink()
            return None
        except OSError as error:
            self._complain("read", f"Reading pages from {self.root} failed: {error}")
            with self._lock:
                self.counters.errors += 1
            return None
        return read_only(page)

    def _mark_used(self, name: str) -> None:
        """Let a restart and other engines know, by the file's time, that it was used now."""
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.root / name, ns=(now, now))
            with self._lock:
                if name in self._index:
                    self._index[name].used_ns = now

    def _forget(self, name: str, only: Entry | None = None) -> None:
        """Take a page out of the index; if `only` is given, unless it was written again since."""
        with self._lock:
            if name in self._index and only in (None, self._index[name]):
                self._policy.remove(name)
                self._used -= self._index.pop(name).num_bytes

    # ---- writing ------------------------------------------------------------------------------------

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> bool:
        name, size = page_folder.file_of(self.namespace, key), total_bytes(buffers)
        if self._ready.wait(SCAN_PATIENCE_S):
            with self._lock:
                if self._state(name) is not Lookup.MISS:
                    self._policy.touch(name)
                    return True
                admitted = self._admission is None or self._admission.admits(name)
                begins = admitted and size <= self.capacity and self._writes.allows() and not self._closing
                if begins:
                    self._being_written.add(name)
            if begins and self._write(name, size, buffers):
                return True
        with self._lock:
            self.counters.dropped += 1
        return False

    def _write(self, name: str, size: int, buffers: Sequence[Buffer]) -> bool:
        """Make room, write, and enter the page. Whether all of it went well."""
        reserved = written = False
        try:
            reserved = self._reserve(size)
            if reserved:
                page_folder.write_page(self.root, name, buffers, around_cache=self._around_cache)
                written = True
                self._writes.succeeded()
        except OSError as error:
            self._failed_to_write(error)
        finally:
            with self._lock:
                self._being_written.discard(name)
                if written:
                    self._used -= self._doomed.pop(name, 0)
                    self._enter(page_folder.PageFile(name, size, time.time_ns()))
                    self.counters.stored += 1
                    self.counters.stored_bytes += size
                elif reserved:
                    self._used -= size
        return written

    def _enter(self, page: page_folder.PageFile) -> None:
        self._index[page.name] = Entry(page.num_bytes, page.used_ns, time.monotonic())
        self._policy.insert(page.name, page.num_bytes)

    def _reserve(self, size: int) -> bool:
        """Count `size` more bytes, once pages have been removed for them. False when that much cannot go.

        Raises OSError when a file cannot be removed.
        """
        with self._lock:
            if self._used + size <= self.capacity:
                self._used += size
                return True
        with page_folder.making_room(self.root):
            for attempt in range(1 << 30):
                with self._lock:
                    if self._used + size <= self.capacity:
                        self._used += size
                        return True
                    if not self._index:
                        return False
                    name = self._policy.evict()
                    entry = self._index.pop(name)
                self._remove(name, entry, spare=attempt < MAX_SPARED)
        return False

    def _remove(self, name: str, entry: Entry, spare: bool) -> None:
        """Remove a file that was chosen to go, unless `spare` and another engine has used it since."""
        try:
            used_ns = os.stat(self.root / name).st_mtime_ns
            is_spared = spare and used_ns > entry.used_ns
            if not is_spared:
                os.unlink(self.root / name)
        except FileNotFoundError:
            is_spared = False
        except OSError:
            self._enter_again(page_folder.PageFile(name, entry.num_bytes, entry.used_ns))
            raise
        if is_spared:
            self._enter_again(page_folder.PageFile(name, entry.num_bytes, used_ns))
            return
        with self._lock:
            self._used -= entry.num_bytes
            self.counters.evictions += 1

    def _enter_again(self, page: page_folder.PageFile) -> None:
        """A page that was to go stays. Whoever wrote or found it in between has counted it."""
        with self._lock:
            if self._state(page.name) is Lookup.MISS:
                self._enter(page)
            else:
                self._used -= page.num_bytes

    def _failed_to_write(self, error: OSError) -> None:
        self._writes.failed(error)
        with self._lock:
            self.counters.errors += 1

    def _complain(self, kind: str, message: str) -> None:
        """One line in the log for each kind of trouble; `usage` counts the rest."""
        with self._lock:
            is_news = kind not in self._complained
            self._complained.add(kind)
        if is_news:
            logger.warning("%s Further ones are counted, not logged.", message)

    def touch(self, keys: Iterable[PageKey]) -> None:
        names = [page_folder.file_of(self.namespace, key) for key in keys]
        with self._lock:
            for name in names:
                self._policy.touch(name)

    def delete(self, keys: Iterable[PageKey]) -> None:
        names = [page_folder.file_of(self.namespace, key) for key in keys]
        with self._lock:
            for name in names:
                if (entry := self._index.pop(name, None)) is not None:
                    self._policy.remove(name)
                    self._doomed[name] = entry.num_bytes
        self._work.set()

    def watch(self, log: TierEventLog) -> None:
        with self._lock:
            self._index.watch(page_folder.teller(self.namespace, log))

    def usage(self) -> list[TierUsage]:
        with self._lock:
            counters = dataclasses.replace(self.counters)
            return [TierUsage(self.name, self._used, self.capacity, len(self._index), counters)]

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._work.set()
        self._thread.join(SCAN_PATIENCE_S)

    # ---- the thread that keeps up with the folder -----------------------------------------------------

    def _keep_up(self) -> None:
        """Scan the folder, now and then again; remove what was deleted; stay within the capacity."""
        next_scan = 0.0
        while True:
            began = time.monotonic()
            if began >= next_scan and not self._closing:
                try:
                    if not self._ready.is_set():
                        with contextlib.suppress(OSError):  # in a folder that is read-only they stay
                            page_folder.remove_leftovers(self.root)
                    self._scan()
                except OSError as error:
                    self._complain("scan", f"Scanning {self.root} for pages failed: {error}")
                    with self._lock:
                        self.counters.errors += 1
                self._ready.set()
                took = time.monotonic() - began
                next_scan = time.monotonic() + max(self._rescan_s, QUIET * took)
                self._shrink()
            self._remove_doomed()
            if self._closing:
                return
            self._work.wait(max(next_scan - time.monotonic(), 0.0))
            self._work.clear()

    def _scan(self) -> None:
        """Bring the index up to date with the folders of pages that changed since they were looked at."""
        began = time.monotonic()
        found: list[page_folder.PageFile] = []
        looked_at: set[str] = set()
        present = {space: page_folder.fanouts(self.root, space) for space in page_folder.spaces(self.root)}
        changed = {name: at for fanouts in present.values() for name, at in fanouts if self._scanned.get(name) != at}
        all_fanouts = {name for fanouts in present.values() for name, _ in fanouts}
        for name, changed_ns in changed.items():
            if self._closing:
                return
            # A file that comes within a tick of the file system's clock would not change the time again.
            settled = time.time_ns() - changed_ns > 2 * 10**9
            self._scanned[name] = changed_ns if settled else -1
            looked_at.add(name)
            found += page_folder.pages_in(self.root, name)
        found.sort(key=lambda page: page.used_ns)
        for start in range(0, len(found), BATCH):
            with self._lock:
                for page in found[start : start + BATCH]:
                    if self._state(page.name) is Lookup.MISS and page.name not in self._doomed:
                        self._enter(page)
                        self._used += page.num_bytes
        with self._lock:
            entries = list(self._index.items())
        names = {page.name for page in found}
        for name, entry in entries:
            fanout = name.rpartition("/")[0]
            if entry.since < began and name not in names and (fanout in looked_at or fanout not in all_fanouts):
                self._forget(name, entry)

    def _shrink(self) -> None:
        """Stay within the capacity: it may be smaller than when the pages were written, or others write too."""
        try:
            self._reserve(0)
        except OSError as error:
            self._failed_to_write(error)

    def _remove_doomed(self) -> None:
        while True:
            with self._lock:
                if not self._doomed:
                    return
                name, num_bytes = self._doomed.popitem()
                self._used -= num_bytes
            try:
                os.unlink(self.root / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._complain("delete", f"Removing pages from {self.root} failed: {error}.")
                with self._lock:
                    self.counters.errors += 1
