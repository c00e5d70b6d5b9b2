"""Lends pages to other engines: leases with a time limit, and the socket where borrowers ask for pages.

What is lent is held in host memory, whatever tiers evict, until it is given back or the lease ends. A lease names its
pages when it is granted; those that are still on their way to a tier are held once they are there.
"""

import dataclasses
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable

import numpy as np

from jaxpaged.errors import ConfigError, PageError
from jaxpaged.kv_store.channel import Channel, Get, Gone, Message, Page, Release, Released, Renew, Renewed
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Tier
from jaxpaged.kv_store.tls import TlsFiles, shake_hands
from jaxpaged.kv_store.visitors import Visitors

IDLE_SECONDS = 60.0
LONGEST = 20
"""How many times as long as it was granted for a lease may last, however often it is renewed."""
PAGE_PATIENCE = 4.0
"""Seconds that a borrower waits for pages that are on their way off the device, all of a lease together."""


@dataclasses.dataclass
class Lease:
    """Pages that are lent, None for those that are not in memory yet, `until` a time, and by renewals the `latest`."""

    pages: dict[PageKey, np.ndarray | None]
    until: float
    latest: float
    waits_until: float | None = None
    """When borrowers stop waiting for what is not there, whichever pages they ask for."""


class Lender:
    """Leases over the pages of `store`, each for `lease_s` seconds, holding `capacity` bytes in all. `address` is where
    it listens. Raises ConfigError where it cannot."""

    def __init__(
        self, store: Tier, address: tuple[str, int], namespace: str, *, lease_s: float, capacity: int,
        secret: bytes | None = None, tls: TlsFiles | None = None,
    ):  # fmt: skip
        self._tls = None if tls is None else tls.lending()
        self._store, self._namespace, self._secret = store, namespace, secret
        self._lease_s, self._capacity = lease_s, capacity
        self._changed = threading.Condition()  # for everything below; never held during input and output
        self._leases: dict[str, Lease] = {}
        self._wanted: dict[PageKey, set[str]] = {}
        self._visitors = Visitors()
        self._held_bytes, self._closing = 0, False
        self.num_granted = self.num_expired = self.num_released = self.num_pages = self.num_bytes = 0
        self.num_refused = 0  # pages for want of room
        try:
            self._socket = socket.create_server(address, family=family_of(address[0]))
        except OSError as error:
            raise ConfigError(f"kv_address is {address[0]}:{address[1]}, which cannot be used: {error}.") from None
        self._socket.settimeout(1.0)
        self.host, self.port = address[0], self._socket.getsockname()[1]
        threading.Thread(target=self._listen, name="kv-lend", daemon=True).start()

    # ---- leases --------------------------------------------------------------------------------

    def grant(self, keys: Iterable[PageKey]) -> tuple[str, float]:
        """A lease for these pages: its id, and when it ends, in seconds since the epoch."""
        lease, now = os.urandom(16).hex(), time.monotonic()
        with self._changed:
            self._leases[lease] = Lease(dict.fromkeys(keys), now + self._lease_s, now + LONGEST * self._lease_s)
            for key in self._leases[lease].pages:
                self._wanted.setdefault(key, set()).add(lease)
            self.num_granted += 1
        return lease, time.time() + self._lease_s

    def hold(self, keys: Iterable[PageKey]) -> None:
        """These pages are in the store: keep them for the leases that name them. For threads that may wait."""
        for key in keys:
            with self._changed:
                is_wanted = key in self._wanted
            page = self._store.get(key) if is_wanted else None
            if page is None:
                continue
            with self._changed:
                for lease in self._wanted.get(key, ()):
                    self._keep(self._leases[lease], key, np.frombuffer(page, np.uint8))
                self._changed.notify_all()

    def _keep(self, lease: Lease, key: PageKey, page: np.ndarray) -> None:
        if lease.pages[key] is not None:
            return
        if self._held_bytes + page.nbytes > self._capacity:
            self.num_refused += 1
            return
        lease.pages[key] = page
        self._held_bytes += page.nbytes

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
            lease.until = min(now + self._lease_s, lease.latest)
            return max(lease.until - now, 0.0)

    def _end(self, name: str) -> bool:
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        for key, page in lease.pages.items():
            self._held_bytes -= page.nbytes if page is not None else 0
            self._wanted[key].discard(name)
            if not self._wanted[key]:
                del self._wanted[key]
        self._changed.notify_all()
        return True

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self._changed:
            now = time.monotonic()
            for name in [name for name, lease in self._leases.items() if lease.until < now]:
                self.num_expired += self._end(name)

    # ---- borrowers -----------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closing:
            self.expire()
            self._visitors.expire()
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            if self._visitors.admit(connection):
                threading.Thread(target=self._serve, args=(connection,), name="kv-lend", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(IDLE_SECONDS)
            if isinstance(connection, ssl.SSLSocket):
                shake_hands(connection)
            channel = Channel(connection, self._namespace, self._secret, is_server=True, most=0)
            while not self._closing:
                message = channel.receive()
                self._visitors.known(connection)
                channel.send(self._answer(message))
        except PageError as error:
            self._visitors.refused(error)
        except OSError:
            pass
        finally:
            self._visitors.left(connection)
            connection.close()

    def _answer(self, message: Message) -> Message:
        self.expire()
        if isinstance(message, Release):
            return Released(self.release(message.lease))
        if isinstance(message, Renew):
            return Renewed(self.renew(message.lease))
        if not isinstance(message, Get):
            raise PageError(f"It sent {type(message).__name__}, which is no question.")
        page = self._page(message.lease, PageKey(message.block_hash, message.group))
        if isinstance(page, str):
            return Gone(page)
        with self._changed:
            self.num_pages += 1
            self.num_bytes += page.nbytes
        return Page(page)

    def _page(self, name: str, key: PageKey) -> np.ndarray | str:
        """A page, or why it is not there."""
        with self._changed:
            while True:
                lease, now = self._leases.get(name), time.monotonic()
                if lease is None:
                    return "There is no such lease: it has ended, or was given back."
                if key not in lease.pages:
                    return "The lease does not name this page."
                page = lease.pages[key]
                if page is not None:
                    return page
                if lease.waits_until is None:
                    lease.waits_until = now + PAGE_PATIENCE
                left = lease.waits_until - now
                if left <= 0 or self._closing:
                    return "The page was not kept."
                self._changed.wait(left)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is lent now."""
        with self._changed:
            return {
                "kv_leases": len(self._leases), "kv_lease_bytes": self._held_bytes,
                "kv_leases_granted": self.num_granted, "kv_leases_released": self.num_released,
                "kv_leases_expired": self.num_expired, "kv_lent_pages": self.num_pages,
                "kv_lent_bytes": self.num_bytes, "kv_lent_refused": self.num_refused + self._visitors.num_refused,
            }  # fmt: skip

    def close(self) -> None:
        """Borrowers hear no more."""
        with self._changed:
            self._closing = True
            for name in list(self._leases):
                self._end(name)
        self._socket.close()
        self._visitors.close()


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
