"""Responses that the server keeps: bounded in number and in bytes, in memory only, gone when the server stops.

Every response has an owner, and only its owner can ask for it: the digest of the API key with which it was made. This
module knows nothing of how responses are made.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.responses.protocol import Response
from jaxpaged.entrypoints.http.transport.sending import KEEP_ALIVE
from jaxpaged.serving.errors import RETRY_SECONDS, ErrorKind, ServingError

MAX_FORGOTTEN = 10_000
"""Ids of dropped responses that are remembered, to tell their owners what became of them."""


class StoredResponse:
    """A response, and the items of the conversation up to it.

    One in the background has the task that makes it, and if `has_events` its events too, which clients read from here.
    """

    def __init__(self, response: Response, owner: bytes, items: list[dict[str, Any]], has_events: bool = False):
        self.response = response
        self.owner = owner
        self.items = items
        self.has_events = has_events
        self.task: asyncio.Task[None] | None = None
        self.is_running = False
        self.num_bytes = 0
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()

    def add_events(self, frames: Iterable[bytes]) -> None:
        self._frames += frames
        self._wake()

    def end(self) -> None:
        """The response will not change any more."""
        self.is_running = False
        self._wake()

    async def cancel(self) -> None:
        """End the task that makes the response, if that has not ended by itself."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Events with numbers above `after`, those to come included. Who leaves does not end the response."""
        place = after + 1
        if place >= len(self._frames):
            yield KEEP_ALIVE  # the response begins although there is nothing to say yet
        while True:
            changed = self._changed
            while place < len(self._frames):
                yield self._frames[place]
                place += 1
            if not self.is_running:
                return
            await changed.wait()

    def measure(self, encode: Callable[[Any], bytes] = msgspec.json.encode) -> int:
        """Bytes, as JSON."""
        return len(encode([self.response, self.items])) + sum(map(len, self._frames))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResponseStore:
    """At most `max_count` responses and `max_bytes` bytes of them; the oldest that are finished go first.

    Running ones count, and are not dropped: only they can exceed the bytes, which are measured when they end.
    """

    def __init__(self, max_count: int, max_bytes: int):
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # oldest first
        self._forgotten: OrderedDict[str, bytes] = OrderedDict()  # id -> owner
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_enabled(self) -> bool:
        return self._max_count > 0

    def check_room(self) -> None:
        """Raise ServingError when there is no place for another running one."""
        if sum(stored.is_running for stored in self._kept.values()) >= self._max_count:
            raise ServingError(
                f"{self._max_count} responses run in the background, and no more are kept. Try again later.",
                kind=ErrorKind.TOO_MANY,
                retry_after=RETRY_SECONDS,
            )

    def put(self, stored: StoredResponse, size: int | None = None) -> None:
        """Keep a response, or measure again one that is kept. `size`: it has been measured."""
        self._kept[stored.response.id] = stored
        size = stored.measure() if size is None else size
        self.num_bytes += size - stored.num_bytes
        stored.num_bytes = size
        self._drop_oldest()

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """Raises ServingError for an id that is not kept, or is another owner's."""
        stored = self._kept.get(response_id)
        if stored is not None and stored.owner == owner:
            return stored
        if self._forgotten.get(response_id) == owner:
            raise ServingError(
                f"The response {response_id!r} was dropped: this server keeps {self._max_count} responses and "
                f"{self._max_bytes} bytes of them, the newest ones. Send the conversation as input.",
                "response_id",
                kind=ErrorKind.NOT_FOUND,
            )
        raise ServingError(
            f"The response {response_id!r} is not known. It may have been made without store, with another API "
            "key, or before the server was started.",
            "response_id",
            kind=ErrorKind.NOT_FOUND,
        )

    def remove(self, stored: StoredResponse) -> None:
        """Forget a response."""
        if self._kept.pop(stored.response.id, None) is not None:
            self.num_bytes -= stored.num_bytes

    def _drop_oldest(self) -> None:
        finished = iter([each for each in self._kept.values() if not each.is_running] if self._is_full() else [])
        while self._is_full() and (stored := next(finished, None)) is not None:
            self.remove(stored)
            self._forgotten[stored.response.id] = stored.owner
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _is_full(self) -> bool:
        return len(self._kept) > self._max_count or self.num_bytes > self._max_bytes
