"""Engines behind the proxy: which one gets a request, by what it has computed before and by how much it has to do.

This module knows no HTTP but the client, and nothing of what is asked.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.kv_store.breaker import CircuitBreaker

CHUNK_BYTES, MOST_CHUNKS = 1024, 64
"""Of a prompt, by whose beginnings an engine is chosen."""
MAX_REMEMBERED = 1 << 16
MOST_BEHIND = 4
"""An engine that knows a prompt's beginning is chosen unless it has so many requests more than the idlest one."""
RETRY_SECONDS = 2.0
REACH_SECONDS = 5.0


class Backend:
    """One engine. `is_up` turns false when it does not answer, and one request in `RETRY_SECONDS` tries it again."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: Mapping[str, Any]):
        """Raises UsageError for what is no URL, and for certificates that are none."""
        self.client = HttpClient(url, {"User-Agent": "jaxpaged-proxy", **headers}, **tls)
        self.url = self.client.base_url
        self.breaker = CircuitBreaker(f"The engine at {self.url}", RETRY_SECONDS)
        self.num_under_way = self.num_requests = self.num_failures = 0
        self.says_early = True  # where a prompt is lent, in a stream while it is computed, as far as we know

    def failed(self, error: OSError) -> None:
        """It could not be reached, or its response broke off."""
        self.num_failures += 1
        self.breaker.failed(words_of(error))

    async def reach(self) -> bool:
        """Whether it can be asked now, by a connection that its next request has."""
        try:
            await self.client.reach(REACH_SECONDS)
        except OSError as error:
            self.failed(error)
            return False
        self.breaker.succeeded()
        return True


class Backends:
    """Engines of one kind. All get these headers; `tls`: how they are reached, as `HttpClient` takes it."""

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str] | None = None, tls: Mapping[str, Any] | None = None
    ):
        self.all = [Backend(url, headers or {}, tls or {}) for url in urls]
        self._known: OrderedDict[bytes, Backend] = OrderedDict()  # beginnings, and who had them last

    def choose(self, beginnings: Sequence[bytes], tried: Collection[Backend] = ()) -> Backend | None:
        """Who is to get a prompt with these `beginnings`; None where nobody is up that was not `tried`."""
        left = sorted((each for each in self.all if each not in tried), key=lambda each: each.num_under_way)
        if not left:
            return None
        most = left[0].num_under_way + MOST_BEHIND
        familiar = next((self._known[each] for each in reversed(beginnings) if each in self._known), None)
        if familiar in left and familiar.num_under_way < most:
            left.remove(familiar)
            left.insert(0, familiar)
        return next((each for each in left if each.breaker.allows()), None)

    def remember(self, beginnings: Sequence[bytes], backend: Backend) -> None:
        """It has computed a prompt with these beginnings."""
        for each in beginnings:
            self._known[each] = backend
            self._known.move_to_end(each)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)

    async def close(self) -> None:
        for each in self.all:
            await each.client.close()


def words_of(error: OSError) -> str:
    """What happened, for people."""
    match error:
        case ConnectionRefusedError():
            return "nothing listens there"
        case TimeoutError():
            return "there was no answer in time"
        case _:
            return str(error) or type(error).__name__


def beginnings_of(prompt: bytes) -> list[bytes]:
    """Digests of a prompt's beginnings, shortest first."""
    digest, found = hashlib.blake2b(digest_size=16), []
    for start in range(0, min(len(prompt) - CHUNK_BYTES + 1, MOST_CHUNKS * CHUNK_BYTES), CHUNK_BYTES):
        digest.update(prompt[start : start + CHUNK_BYTES])
        found.append(digest.digest())
    return found
