"""The tier of pages that other engines lend: each is asked for by the lease under which a request says it is held.

A peer that cannot be reached, or whose pages are not as they must be, costs one time-out; the rest of its lease is
then a miss. A peer that the operator did not name is never connected to, whoever says that it has pages.
"""

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxpaged.errors import PageError
from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.buffers import Buffer, read_only
from jaxpaged.kv_store.channel import Channel, Get, Message, Page, Release, Renew, Renewed
from jaxpaged.kv_store.handover import RemoteSource, is_allowed
from jaxpaged.kv_store.page import PageKey, decode
from jaxpaged.kv_store.tier import Counters, Lookup, TierUsage
from jaxpaged.kv_store.tls import TlsFiles, hung_up, shake_hands

MAX_KEYS = 1 << 16
MAX_PEERS = 256
MAX_IDLE = 16
"""Connections that are kept open without being used."""
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 6.0
RETRY_SECONDS = 5.0
RENEW_SECONDS = 5.0
"""How often leases are renewed for which requests wait."""


class Borrower:
    """Pages of the namespace, of `most` bytes each at most, from engines at `peers` that lend them."""

    name = "p2p"

    def __init__(
        self, namespace: str, most: int, secret: bytes | None = None, *, peers: str, tls: TlsFiles | None = None
    ):
        self._peers, self._tls = peers, None if tls is None else tls.borrowing()
        self._namespace, self._most, self._secret = namespace, most, secret
        self._lock = threading.Lock()  # for everything below; never held during input and output
        self._sources: OrderedDict[PageKey, RemoteSource] = OrderedDict()
        self._failed: OrderedDict[str, None] = OrderedDict()  # leases
        self._kept: dict[str, RemoteSource] = {}  # by lease, those for which requests wait
        self._idle: list[tuple[tuple[str, int], Channel]] = []
        self._breakers: OrderedDict[tuple[str, int], CircuitBreaker] = OrderedDict()
        self._releasing = ThreadPoolExecutor(1, "kv-release")
        self._closing = threading.Event()
        self.counters = Counters()
        threading.Thread(target=self._renew_leases, name="kv-renew", daemon=True).start()

    def expect(self, keys: Sequence[PageKey], source: RemoteSource) -> None:
        """These pages are lent by `source`, as a request says."""
        if not is_allowed(source, self._peers):  # front ends refuse such requests before
            return
        with self._lock:
            for key in keys:
                self._sources[key] = source
            while len(self._sources) > MAX_KEYS:
                self._sources.popitem(last=False)

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        """Whoever lends is taken at its word."""
        with self._lock:
            return [Lookup.HIT if key in self._sources else Lookup.MISS for key in keys]

    def get(self, key: PageKey) -> Buffer | None:
        """The page, checked; None where it did not come as it must be. Blocks."""
        with self._lock:
            source = self._sources.get(key)
            may_ask = source is not None and source.lease not in self._failed and not self._closing.is_set()
        page = None
        if source is not None and may_ask:
            address = source.host, source.port
            breaker = self._breaker(address)
            try:
                if breaker.allows():
                    page = self._checked(key, self._ask(address, Get(source.lease, key.block_hash, key.group)))
                    breaker.succeeded()
            except (OSError, PageError) as error:
                breaker.failed(error)
                self._fail(source, is_page=isinstance(error, PageError))
        with self._lock:
            self.counters.hits += page is not None
            self.counters.misses += page is None
            self.counters.loaded_bytes += memoryview(page).nbytes if page is not None else 0
        return page

    def _checked(self, key: PageKey, answer: Message) -> Buffer | None:
        if not isinstance(answer, Page):
            return None
        decode(answer.content, expect_namespace=self._namespace, key=key, secret=self._secret)
        return read_only(answer.content)

    def _fail(self, source: RemoteSource, is_page: bool) -> None:
        with self._lock:
            self.counters.corrupt += is_page
            self.counters.errors += not is_page
            self._failed[source.lease] = None
            if len(self._failed) > MAX_KEYS:
                self._failed.popitem(last=False)

    def _breaker(self, address: tuple[str, int]) -> CircuitBreaker:
        with self._lock:
            if address not in self._breakers:
                what = f"Pulling keys and values from {address[0]}:{address[1]}"
                self._breakers[address] = CircuitBreaker(what, RETRY_SECONDS)
                if len(self._breakers) > MAX_PEERS:
                    self._breakers.popitem(last=False)
            return self._breakers[address]

    def _ask(self, address: tuple[str, int], question: Message) -> Message:
        """The peer's answer. A connection that it closed meanwhile is made again. Raises OSError and PageError."""
        with self._lock:
            kept = next((pair for pair in self._idle if pair[0] == address), None)
            if kept is not None:
                self._idle.remove(kept)
        if kept is not None:
            with contextlib.suppress(OSError):
                return self._exchange(address, kept[1], question)
        return self._exchange(address, self._connect(address), question)

    def _connect(self, address: tuple[str, int]) -> Channel:
        connection = socket.create_connection(address, CONNECT_SECONDS)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_hostname=address[0], do_handshake_on_connect=False)
        try:
            connection.settimeout(ANSWER_SECONDS)
            if isinstance(connection, ssl.SSLSocket):
                shake_hands(connection)
            return Channel(connection, self._namespace, self._secret, is_server=False, most=self._most)
        except (ConnectionError, ssl.SSLEOFError) as error:
            connection.close()
            raise error if self._tls is None else hung_up(error) from None
        except BaseException:
            connection.close()
            raise

    def _exchange(self, address: tuple[str, int], channel: Channel, question: Message) -> Message:
        try:
            channel.send(question)
            answer = channel.receive()
        except BaseException:
            channel.close()
            raise
        with self._lock:
            is_kept = len(self._idle) < MAX_IDLE and not self._closing.is_set()
            if is_kept:
                self._idle.append((address, channel))
        if not is_kept:
            channel.close()
        return answer

    def keep_lease(self, source: RemoteSource) -> None:
        """Renew a lease until it is released, as often and for as long as its lender lets it be."""
        if not is_allowed(source, self._peers):
            return
        with self._lock:
            if len(self._kept) < MAX_KEYS:
                self._kept[source.lease] = source

    def _renew_leases(self) -> None:
        while not self._closing.wait(RENEW_SECONDS):
            with self._lock:
                kept = [source for lease, source in self._kept.items() if lease not in self._failed]
            for source in kept:
                self._renew(source)

    def _renew(self, source: RemoteSource) -> None:
        address = source.host, source.port
        breaker = self._breaker(address)
        if self._closing.is_set() or not breaker.allows():
            return
        try:
            answer = self._ask(address, Renew(source.lease))
        except (OSError, PageError) as error:
            breaker.failed(error)
            return
        breaker.succeeded()
        if not isinstance(answer, Renewed) or answer.seconds <= 0:
            with self._lock:
                self._kept.pop(source.lease, None)

    def release(self, source: RemoteSource) -> None:
        """Tell the peer, soon, that a lease is not needed any more."""
        with self._lock:
            self._kept.pop(source.lease, None)
            for key in [key for key, each in self._sources.items() if each.lease == source.lease]:
                del self._sources[key]
            if source.lease in self._failed or self._closing.is_set():
                return
        self._releasing.submit(self._send_release, source)

    def _send_release(self, source: RemoteSource) -> None:
        with contextlib.suppress(OSError, PageError):  # the lease ends by itself
            self._ask((source.host, source.port), Release(source.lease))

    def delete(self, keys: Iterable[PageKey]) -> None:
        """Do not ask for these any more."""
        with self._lock:
            for key in keys:
                self._sources.pop(key, None)

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(self.name, 0, 0, len(self._sources), dataclasses.replace(self.counters))

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            idle, self._idle = self._idle, []
        self._releasing.shutdown(cancel_futures=True)
        for _, channel in idle:
            channel.close()
