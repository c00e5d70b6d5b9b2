"""The tier of pages that other engines lend: each is asked for by the lease under which a request says it is held.

A peer that cannot be reached, or whose pages are not as they must be, costs one time-out; the rest of its lease is
then a miss. A peer that the operator did not name is never connected to, whoever says that it has pages.
"""

import contextlib
import dataclasses
import logging
import socket
import ssl
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxpaged.errors import PageError
from jaxpaged.kv_store import shared_memory
from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.buffers import Buffer, read_only
from jaxpaged.kv_store.channel import (
    MAX_PAGES,
    Channel,
    Get,
    Message,
    Pages,
    Release,
    Renew,
    Renewed,
    TransportCounters,
)
from jaxpaged.kv_store.page import PageKey, decode
from jaxpaged.kv_store.tier import Counters, Lookup, TierUsage
from jaxpaged.kv_store.tls import TlsFiles, hung_up, hung_up_without, shake_hands
from jaxpaged.kv_store.transfer_params import RemoteSource, is_allowed

logger = logging.getLogger(__name__)

MAX_KEYS = 1 << 16
MAX_PEERS = 256
MAX_IDLE = 16
"""Connections that are kept open without being used."""
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 6.0
RETRY_SECONDS = 5.0
NUM_STRANDS = 4
"""Connections over which the pages of prompts that are computed come."""
NUM_CHECKERS = 4
"""Threads that check pages and hand them on, and answers that wait for that, of a prompt, while further ones come."""
MOST_SILENT = 2
"""Answers without a page, each of which takes a producer's `PAGE_PATIENCE`, before no more are waited for."""
NUM_RENEWERS = 8
"""Peers whose leases are renewed at a time."""
RENEW_SECONDS = 5.0
"""How often leases are renewed for which requests wait."""


class KVConsumer:
    """Pages of the namespace, of `most` bytes each at most, from engines at `peers` that lend them."""

    name = "p2p"

    def __init__(
        self,
        namespace: str,
        most: int,
        secret: bytes | None = None,
        *,
        peers: str,
        tls: TlsFiles | None = None,
        shares: bool = True,
        page_tokens: int = 0,
    ):
        """`shares`: pages of engines on this host come through memory, unless all is to go by TLS. `page_tokens` of
        each, for who is refused."""
        self._shares, self._page_tokens = shares and tls is None, page_tokens
        self._peers, self._tls = peers, None if tls is None else tls.borrowing()
        self._namespace, self._most, self._secret = namespace, most, secret
        self._lock = threading.Lock()  # for everything below; never held during input and output
        self._sources: OrderedDict[PageKey, RemoteSource] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()  # leases that failed, or were given back
        self._kept: dict[str, RemoteSource] = {}  # by lease, those for which requests wait
        self._renewing: set[tuple[str, int]] = set()  # peers that are being told
        self._idle: list[tuple[tuple[str, int], Channel]] = []
        self._busy: set[Channel] = set()
        self._breakers: OrderedDict[tuple[str, int], CircuitBreaker] = OrderedDict()
        self._releasing = ThreadPoolExecutor(1, "kv-release")
        self._strands = ThreadPoolExecutor(NUM_STRANDS, "kv-pull")
        self._checkers = ThreadPoolExecutor(NUM_CHECKERS, "kv-check")
        self._renewers = ThreadPoolExecutor(NUM_RENEWERS, "kv-renew")
        self._closing = threading.Event()
        self.counters, self._transports = Counters(), TransportCounters()
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

    def pull(self, keys: Sequence[PageKey], take: Callable[[PageKey, Buffer], None]) -> None:
        """Ask for pages, and give those that come, checked, to `take`, in any thread and order. Blocks for as long as
        they are being computed, if they come one after the other in the order of `keys`."""
        by_source: dict[RemoteSource, list[PageKey]] = {}
        with self._lock:
            for key in keys:
                if (source := self._sources.get(key)) is not None:
                    by_source.setdefault(source, []).append(key)
        num_hits, num_bytes = 0, 0

        def count(key: PageKey, page: Buffer) -> None:
            nonlocal num_hits, num_bytes
            take(key, page)
            with self._lock:
                num_hits += 1
                num_bytes += memoryview(page).nbytes

        for source, some in by_source.items():
            self._pull(source, some, count)
        with self._lock:
            self.counters.hits += num_hits
            self.counters.misses += len(keys) - num_hits
            self.counters.loaded_bytes += num_bytes

    def _pull(self, source: RemoteSource, keys: list[PageKey], take: Callable[[PageKey, Buffer], None]) -> None:
        """Follow a prompt that is being computed; once it is, ask for the rest over several connections."""
        num_silent, checks = 0, deque[Future[None]]()
        while keys and num_silent < MOST_SILENT:
            answer = self._some(source, keys[:MAX_PAGES])
            if answer is None:
                break
            try:
                checks.append(self._checkers.submit(self._check, source, keys[:MAX_PAGES], answer, take))
            except RuntimeError:  # it was closed meanwhile
                break
            if len(checks) > NUM_CHECKERS:
                checks.popleft().result()
            done = {*answer.there, *answer.gone}
            num_silent = 0 if done else num_silent + 1
            keys = [key for place, key in enumerate(keys) if place not in done]
            if not answer.is_open and len(keys) > MAX_PAGES:
                parts = [keys[start : start + MAX_PAGES] for start in range(0, len(keys), MAX_PAGES)]
                list(self._strands.map(lambda part: self._pull(source, part, take), parts))
                break
        for check in checks:
            check.result()

    def _some(self, source: RemoteSource, keys: list[PageKey]) -> Pages | None:
        """What a producer says to a question. None: nothing more comes from there."""
        address, breaker = (source.host, source.port), self._breaker((source.host, source.port))
        with self._lock:
            may_ask = source.lease not in self._ended and not self._closing.is_set()
        if not may_ask or not breaker.allows():
            return None
        try:
            answer = self._ask(address, Get(source.lease, [(key.block_hash, key.group) for key in keys]))
            if not isinstance(answer, Pages):
                return None
            places = range(len(keys))
            if len(answer.there) != len(answer.contents) or not {*answer.there, *answer.gone} <= set(places):
                raise PageError(f"The peer answers {answer.there} and {answer.gone} to {len(keys)} questions.")
        except (OSError, PageError) as error:
            self._fail(source, error)
            return None
        return answer

    def _check(
        self, source: RemoteSource, keys: list[PageKey], answer: Pages, take: Callable[[PageKey, Buffer], None]
    ) -> None:
        """Give the pages of an answer, up to one that is wrong, to `take`. One that is wrong ends the lease."""
        try:
            for place, page in zip(answer.there, answer.contents):
                decode(page, expect_namespace=self._namespace, key=keys[place], secret=self._secret)
                take(keys[place], read_only(page))
        except PageError as error:
            self._fail(source, error)
        else:
            self._breaker((source.host, source.port)).succeeded()

    def _fail(self, source: RemoteSource, error: OSError | PageError) -> None:
        self._breaker((source.host, source.port)).failed(error)
        with self._lock:
            self.counters.corrupt += isinstance(error, PageError)
            self.counters.errors += isinstance(error, OSError)
            self._end(source.lease)

    def _end(self, lease: str) -> None:
        self._ended[lease] = None
        if len(self._ended) > MAX_KEYS:
            self._ended.popitem(last=False)

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
        """Through memory if the peer is on this host and lets us, else by TCP."""
        near = shared_memory.connect(*address, CONNECT_SECONDS) if self._shares else None
        if near is not None:
            try:
                return self._greeted(near)
            except TimeoutError:
                raise
            except OSError as error:  # it has no memory for us
                logger.info("No memory is shared with the engine at %s:%d: %s", *address, error)
        connection = socket.create_connection(address, CONNECT_SECONDS)
        if self._tls is None:
            try:
                return self._greeted(connection)
            except ConnectionError as error:
                raise hung_up_without(error) from None
        try:
            return self._greeted(
                self._tls.wrap_socket(connection, server_hostname=address[0], do_handshake_on_connect=False)
            )
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise hung_up(error) from None

    def _greeted(self, connection: socket.socket) -> Channel:
        try:
            connection.settimeout(ANSWER_SECONDS)
            if isinstance(connection, ssl.SSLSocket):
                shake_hands(connection)
            return Channel(
                connection,
                self._namespace,
                self._secret,
                is_server=False,
                most=self._most,
                page_tokens=self._page_tokens,
                transports=self._transports,
            )
        except BaseException:
            connection.close()
            raise

    def _exchange(self, address: tuple[str, int], channel: Channel, question: Message) -> Message:
        with self._lock:
            self._busy.add(channel)
        try:
            channel.send(question)
            answer = channel.receive()
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._busy.discard(channel)
        with self._lock:
            is_kept = len(self._idle) < MAX_IDLE and not self._closing.is_set()
            if is_kept:
                self._idle.append((address, channel))
        if not is_kept:
            channel.close()
        return answer

    def keep_lease(self, source: RemoteSource) -> None:
        """Renew a lease until it is released, as often and for as long as its producer lets it be."""
        if not is_allowed(source, self._peers):
            return
        with self._lock:
            if len(self._kept) < MAX_KEYS and source.lease not in self._ended:
                self._kept[source.lease] = source

    def _renew_leases(self) -> None:
        while not self._closing.wait(RENEW_SECONDS):
            by_peer: dict[tuple[str, int], list[RemoteSource]] = {}
            with self._lock:
                for lease, source in self._kept.items():
                    if lease not in self._ended and (source.host, source.port) not in self._renewing:
                        by_peer.setdefault((source.host, source.port), []).append(source)
                self._renewing.update(by_peer)
            for peer, sources in by_peer.items():
                with contextlib.suppress(RuntimeError):  # it is being closed
                    self._renewers.submit(self._renew_all, peer, sources)

    def _renew_all(self, peer: tuple[str, int], sources: list[RemoteSource]) -> None:
        """Those of one peer, in a thread of its own, so that one that hangs costs the leases of others nothing."""
        try:
            for source in sources:
                self._renew(source)
        finally:
            with self._lock:
                self._renewing.discard(peer)

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
        if not is_allowed(source, self._peers):
            return
        with self._lock:
            self._kept.pop(source.lease, None)
            for key in [key for key, each in self._sources.items() if each.lease == source.lease]:
                del self._sources[key]
            if source.lease in self._ended or self._closing.is_set():
                return
            self._end(source.lease)
        self._releasing.submit(self._send_release, source)

    def _send_release(self, source: RemoteSource) -> None:
        with contextlib.suppress(OSError, PageError):  # the lease ends by itself
            self._ask((source.host, source.port), Release(source.lease))

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(self.name, 0, 0, len(self._sources), dataclasses.replace(self.counters))

    def stats(self) -> dict[str, dict[str, int]]:
        """See `TransportCounters.stats`."""
        return self._transports.stats()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            idle, self._idle = self._idle, []
            for channel in self._busy:
                channel.hang_up()
        for threads in (self._releasing, self._strands, self._renewers):
            threads.shutdown(cancel_futures=True)
        self._checkers.shutdown()
        for _, channel in idle:
            channel.close()
