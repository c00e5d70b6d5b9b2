"""Lends pages to other engines: leases with a time limit, and the socket where consumers ask for pages.

What is lent is held in host memory, whatever tiers evict, until it is given back or the lease ends. A lease is granted
when a prompt begins to be computed, and names its pages, which are held once they are there; consumers wait for them.
Its time begins when the prompt is computed (`finish`).
"""

import dataclasses
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store import shared_memory
from jaxpaged.kv_store.channel import MAX_PAGES, Channel, Get, Gone, Message, Pages, Release, Released, Renew, Renewed
from jaxpaged.kv_store.connections import Connections
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Tier
from jaxpaged.kv_store.tls import TlsFiles, shake_hands

IDLE_SECONDS = 60.0
LISTEN_SECONDS = 1.0
"""How often leases and strangers whose time is over are looked for while nobody connects."""
LONGEST = 20
"""How many times as long as it was granted for a lease may last, however often it is renewed."""
PAGE_PATIENCE = 4.0
"""Seconds that a consumer waits for a page, and when the prompt is computed, for all that are on their way off the
device. It hears within this time that it has to wait on."""
MOST_SENT = 8 << 20
"""Bytes of pages in an answer, unless one alone has more."""


@dataclasses.dataclass
class Lease:
    """Pages that are lent, None for those that are not in memory yet, `until` a time, and by renewals the `latest`; for
    as long as it `is_open`, its prompt is being computed."""

    pages: dict[PageKey, np.ndarray | None]
    until: float = math.inf
    latest: float = math.inf
    is_open: bool = True
    waits_until: float | None = None
    """When consumers stop waiting for what is not there, whichever pages they ask for."""


class KVProducer:
    """Leases over the pages of `store`, each for `lease_s` seconds, holding `capacity` bytes in all. `address` is where
    it listens. Raises ConfigError where it cannot."""

    def __init__(
        self,
        store: Tier,
        address: tuple[str, int],
        namespace: str,
        *,
        lease_s: float,
        capacity: int,
        secret: bytes | None = None,
        tls: TlsFiles | None = None,
        shares: bool = True,
        page_tokens: int = 0,
    ):
        """`shares`: engines on this host get pages through memory, unless all is to go by TLS. `page_tokens` of each,
        for who is refused."""
        self._page_tokens = page_tokens
        self._tls = None if tls is None else tls.lending()
        self._store, self._namespace, self._secret = store, namespace, secret
        self._lease_s, self._capacity = lease_s, capacity
        self._changed = threading.Condition()  # for everything below; never held during input and output
        self._leases: dict[str, Lease] = {}
        self._wanted: dict[PageKey, set[str]] = {}
        self._connections = Connections()
        self._held_bytes, self._closing = 0, False
        self.num_granted = self.num_expired = self.num_released = self.num_pages = self.num_bytes = 0
        self.num_refused = 0  # pages for want of room
        try:
            self._socket = socket.create_server(address, family=family_of(address[0]))
        except OSError as error:
            raise ConfigError(f"kv_address is {address[0]}:{address[1]}, which cannot be used: {error}.") from None
        self.host, self.port = address[0], self._socket.getsockname()[1]
        near = shared_memory.listen(self.host, self.port) if shares and tls is None else None
        self._sockets = [self._socket] if near is None else [self._socket, near]
        for listener in self._sockets:
            listener.settimeout(LISTEN_SECONDS)  # before its thread runs, which may be after `close`
            threading.Thread(target=self._listen, args=(listener,), name="kv-lend", daemon=True).start()

    # ---- leases --------------------------------------------------------------------------------

    def grant(self, keys: Iterable[PageKey]) -> tuple[str, float]:
        """A lease for these pages, which may be computed yet: its id, and when it ends at the earliest, in seconds
        since the epoch."""
        name = os.urandom(16).hex()
        with self._changed:
            self._leases[name] = Lease(dict.fromkeys(keys))
            for key in self._leases[name].pages:
                self._wanted.setdefault(key, set()).add(name)
            self.num_granted += 1
        return name, time.time() + self._lease_s

    def finish(self, name: str, keys: Iterable[PageKey]) -> float:
        """All of a prompt is computed, these pages among it: its lease ends in due time, in seconds since the epoch."""
        with self._changed:
            lease, now = self._leases.get(name), time.monotonic()
            if lease is not None:
                lease.is_open, lease.until, lease.latest = False, now + self._lease_s, now + LONGEST * self._lease_s
                for key in keys:
                    lease.pages.setdefault(key)
                    self._wanted.setdefault(key, set()).add(name)
                self._changed.notify_all()
        return time.time() + self._lease_s

    def hold(self, keys: Iterable[PageKey]) -> None:
        """These pages are in the store: keep them for the leases that name them. For threads that may wait."""
        with self._changed:
            wanted = [key for key in keys if any(self._lacks(name, key) for name in self._wanted.get(key, ()))]
        found = [(key, page) for key in wanted if (page := self._store.get(key)) is not None]
        with self._changed:
            for key, page in found:
                for name in tuple(self._wanted.get(key, ())):
                    self._keep(name, key, np.frombuffer(page, np.uint8))
            self._changed.notify_all()

    def _lacks(self, name: str, key: PageKey) -> bool:
        return self._leases[name].pages[key] is None

    def _keep(self, name: str, key: PageKey, page: np.ndarray) -> None:
        pages = self._leases[name].pages
        if pages[key] is not None:
            return
        if self._held_bytes + page.nbytes > self._capacity:
            self.num_refused += 1
            del pages[key]  # nobody is to wait for it
            self._forget(name, key)
            return
        pages[key] = page
        self._held_bytes += page.nbytes

    def _forget(self, name: str, key: PageKey) -> None:
        self._wanted[key].discard(name)
        if not self._wanted[key]:
            del self._wanted[key]

    def release(self, lease: str) -> bool:
        """Let go of what is lent. Whether there was such a lease."""
        with self._changed:
            ended = self._end(lease)
            self.num_released += ended
            return ended

    def renew(self, name: str) -> float:
        """Let a lease begin anew: for how many seconds there will be one, 0 where there is none."""
        with self._changed:
            lease, now = self._leases.get(name), time.monotonic()
            if lease is None:
                return 0.0
            if lease.is_open:
                return self._lease_s
            lease.until = min(now + self._lease_s, lease.latest)
            return max(lease.until - now, 0.0)

    def _end(self, name: str) -> bool:
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        for key, page in lease.pages.items():
            self._held_bytes -= page.nbytes if page is not None else 0
            self._forget(name, key)
        self._changed.notify_all()
        return True

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self._changed:
            now = time.monotonic()
            for name in [name for name, lease in self._leases.items() if lease.until < now]:
                self.num_expired += self._end(name)

    # ---- consumers -----------------------------------------------------------------------------

    def _listen(self, listener: socket.socket) -> None:
        while not self._closing:
            self.expire()
            self._connections.expire()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            is_near = listener is not self._socket
            if is_near and not shared_memory.is_our_user(connection):
                self._connections.refused("it runs as another user")
                connection.close()
                continue
            if self._tls is not None and not is_near:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            if self._connections.admit(connection):
                threading.Thread(target=self._serve, args=(connection,), name="kv-lend", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(IDLE_SECONDS)
            if isinstance(connection, ssl.SSLSocket):
                shake_hands(connection)
            own = self._namespace, self._secret
            channel = Channel(connection, *own, is_server=True, most=0, page_tokens=self._page_tokens)
            while not self._closing:
                message = channel.receive()
                self._connections.known(connection)
                channel.send(self._answer(message))
        except PageError as error:
            self._connections.refused(error)
        except OSError:
            pass
        finally:
            self._connections.left(connection)
            connection.close()

    def _answer(self, message: Message) -> Message:
        self.expire()
        if isinstance(message, Release):
            return Released(self.release(message.lease))
        if isinstance(message, Renew):
            return Renewed(self.renew(message.lease))
        if not isinstance(message, Get):
            raise PageError(f"It sent {type(message).__name__}, which is no question.")
        answer = self._found(message.lease, [PageKey(*key) for key in message.keys[:MAX_PAGES]])
        if isinstance(answer, Pages):
            with self._changed:
                self.num_pages += len(answer.contents)
                self.num_bytes += sum(page.nbytes for page in answer.contents)
        return answer

    def _found(self, name: str, keys: Sequence[PageKey]) -> Pages | Gone:
        """Those of the pages that are there, once one is, or it is time to say something else."""
        with self._changed:
            deadline = time.monotonic() + PAGE_PATIENCE
            while True:
                lease, now = self._leases.get(name), time.monotonic()
                if lease is None:
                    return Gone("There is no such lease: it has ended, or was given back.")
                if not lease.is_open and lease.waits_until is None:
                    lease.waits_until = now + PAGE_PATIENCE
                left = (deadline if lease.waits_until is None else lease.waits_until) - now
                is_over = left <= 0 or self._closing
                answer = answer_of(lease, keys, gives_up=is_over and not lease.is_open)
                if answer.there or is_over or len(answer.gone) == len(keys):
                    return answer
                self._changed.wait(left)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is lent now."""
        with self._changed:
            return {
                "kv_leases": len(self._leases),
                "kv_lease_bytes": self._held_bytes,
                "kv_leases_granted": self.num_granted,
                "kv_leases_released": self.num_released,
                "kv_leases_expired": self.num_expired,
                "kv_lent_pages": self.num_pages,
                "kv_lent_bytes": self.num_bytes,
                "kv_lent_refused": self.num_refused + self._connections.num_refused,
            }

    def close(self) -> None:
        """Borrowers hear no more."""
        with self._changed:
            self._closing = True
            for name in list(self._leases):
                self._end(name)
        for listener in self._sockets:
            listener.close()
        self._connections.close()


def answer_of(lease: Lease, keys: Sequence[PageKey], *, gives_up: bool) -> Pages:
    """What a lease has of these pages. What is not there will never be where it `gives_up`."""
    answer, room = Pages([], [], [], lease.is_open), MOST_SENT
    for place, key in enumerate(keys):
        page = lease.pages.get(key)
        if page is None and (gives_up or key not in lease.pages):
            answer.gone.append(place)
        elif page is not None and (room >= page.nbytes or not answer.there):
            answer.there.append(place)
            answer.contents.append(page)
            room -= page.nbytes
    return answer


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
