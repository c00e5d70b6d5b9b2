"""Processed pictures by what they were made of, so that a repeated one is not decoded again, and clients' names.

A picture is found by the digest of its source and of the options. A client's uuid is only a name for that digest: it
belongs to the cache salt that it came with, and to the bytes that it was first given for. This module neither decodes
nor counts memory: `ByteBudget` does, and asks it to let go.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.errors import RequestError, shown
from jaxpaged.multimodal.byte_lru import ByteLRU
from jaxpaged.multimodal.processes import KeyedPicture

MOST_NAMES = 1 << 16
"""Names of clients that are remembered: about 20 MB."""


def item_digest(source: bytes, options: Mapping[str, Any]) -> bytes:
    """Of a source's digest and all that a request says of how it is processed."""
    return hashlib.sha256(source + encode_cbor(options)).digest()


class ProcessorCache:
    """At most `capacity_bytes` of processed pictures, the one that was used last goes last. For several threads."""

    def __init__(self, capacity_bytes: int):
        self._items = ByteLRU[bytes, KeyedPicture](capacity_bytes, lambda item: item.pixels.nbytes)
        self._names: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
        self._lock = threading.RLock()  # an array may be freed at any time, and then others of these are called

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        return self._items.num_bytes

    @property
    def queries(self) -> int:
        return self._items.queries

    @property
    def hits(self) -> int:
        return self._items.hits

    def get(self, digest: bytes) -> KeyedPicture | None:
        """By `item_digest`."""
        with self._lock:
            return self._items.get(digest)

    def find(self, key: bytes) -> KeyedPicture | None:
        """By the key of a picture, to look at it: all items are gone through, and it counts as no use."""
        with self._lock:
            return next((item for item in self._items.values() if item.key == key), None)

    def put(self, digest: bytes, item: KeyedPicture) -> None:
        """Keep an item, unless it alone is larger than the cache."""
        with self._lock:
            self._items.put(digest, item)

    def evict(self, num_bytes: int) -> None:
        """Let go of so many bytes, the oldest first. What a request holds is freed only with it."""
        with self._lock:
            self._items.shrink_to(self._items.num_bytes - num_bytes)

    def clear(self) -> None:
        """Forget all items. Names stay bound to their bytes."""
        with self._lock:
            self._items.clear()

    # ---- names that clients give

    def bind(self, uuid: str, salt: str | None, digest: bytes, field: str) -> None:
        """Let a name stand for the source with this digest. Raises RequestError when it stands for another."""
        with self._lock:
            bound = self._names.setdefault((salt, uuid), digest)
            self._names.move_to_end((salt, uuid))
            if len(self._names) > MOST_NAMES:
                self._names.popitem(last=False)
        if bound != digest:
            raise RequestError(
                f"{field} has the uuid {shown(uuid)}, under which another picture was given before. Give it a uuid of "
                "its own.",
                field,
            )

    def named(self, uuid: str, salt: str | None) -> bytes | None:
        """The digest of the source that a name stands for."""
        with self._lock:
            digest = self._names.get((salt, uuid))
            if digest is not None:
                self._names.move_to_end((salt, uuid))
            return digest
