"""The pixels of requests on their way to an engine core in another process: each picture crosses once, as a rule.

What the core has is guessed, by what it was sent. A wrong guess is no error: the core asks, and until it has said what
it lacks, the pixels of a request are held here. This module knows no sockets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from jaxpaged.engine.process.wire import Item, Wanted
from jaxpaged.messages import EngineCoreRequest, MultiModalFeature
from jaxpaged.multimodal.byte_lru import ByteLRU

Pixels = Mapping[bytes, np.ndarray]
"""By key."""


def without_pixels(features: Sequence[MultiModalFeature]) -> tuple[list[MultiModalFeature], Pixels]:
    """Features as they cross, and the pixels that were in them."""
    pixels = {each.key: each.pixels for each in features if each.pixels is not None}
    return [msgspec.structs.replace(each, pixels=None) for each in features], pixels


class PixelSender:
    """For one core, which keeps `capacity_bytes` of pictures, besides those of requests that it has. `count` hears of
    how many bytes more, or less, these are."""

    def __init__(self, capacity_bytes: int, count: Callable[[int], None] = lambda num_bytes: None):
        self._held: dict[str, Pixels] = {}  # by request
        self._in_core: dict[str, int] = {}  # by request, bytes that the core has, or will have, until it ends
        self._count = count
        self._sent = ByteLRU[bytes, int](capacity_bytes, int)  # bytes of what the core has, as far as is known

    def __len__(self) -> int:
        """Requests whose pixels are held."""
        return len(self._held)

    @property
    def num_requests(self) -> int:
        """Requests with pixels that have not ended."""
        return len(self._in_core)

    def hold(self, requests: Iterable[EngineCoreRequest], pixels: Pixels) -> None:
        """These requests will be sent, and need these pixels."""
        num_bytes = sum(each.nbytes for each in pixels.values())
        for request in requests:  # which have the pixels together
            self._held[request.request_id] = pixels
            self._in_core[request.request_id], num_bytes = num_bytes, 0
            self._count(self._in_core[request.request_id])

    def ahead(self, request: EngineCoreRequest) -> Iterator[Item]:
        """What is sent before a request: pixels that the core was not sent yet, or has let go since."""
        for key, pixels in self._held.get(request.request_id, {}).items():
            if self._sent.get(key) is None:
                self._sent.put(key, pixels.nbytes)
                yield Item(request.request_id, key, pixels)

    def wanted(self, wanted: Wanted) -> list[Item]:
        """What the core lacks of a request that it has; the rest of its pixels is let go."""
        pixels = self._held.pop(wanted.request_id, {})
        return [Item(wanted.request_id, key, pixels[key]) for key in wanted.keys if key in pixels]

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            if (num_bytes := self._in_core.pop(request_id, None)) is not None:
                self._count(-num_bytes)

    def lose_core(self) -> None:
        """The next core has nothing."""
        self.end(list(self._in_core))
        self._sent.clear()
