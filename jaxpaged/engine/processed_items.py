"""Processed pictures as an engine core has them: those that are kept for later requests, and requests that wait for
pixels.

A front end in another process sends a core each picture once, by its key. A core that has lost one meanwhile asks for
it, and the request waits; no client sees that. This module knows neither sockets nor what a picture shows.
"""

from collections.abc import Collection, Sequence, Set

import msgspec
import numpy as np

from jaxpaged.engine.embeds_desk import EmbedsDesk
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.multimodal.byte_lru import ByteLRU
from jaxpaged.multimodal.identity import adapted_key


class ProcessedItems(ByteLRU[bytes, np.ndarray]):
    """Pixels by their keys, up to `capacity` bytes."""

    def __init__(self, capacity: int):
        super().__init__(capacity, lambda pixels: pixels.nbytes)


class PixelDesk:
    """Gives requests the pixels of their pictures. `items` are kept for later ones, none before it has a capacity.
    Those that have all may wait on, with `embeds`."""

    def __init__(self, embeds: EmbedsDesk | None = None) -> None:
        self._embeds = embeds
        self.items = ProcessedItems(0)
        self.waiting: dict[str, EngineCoreRequest] = {}
        """The requests that lack pixels, by their ids."""

    @property
    def waiting_ids(self) -> Set[str]:
        """The ids of requests that lack pixels, or wait for embeddings."""
        waiting = self.waiting.keys()
        return waiting if self._embeds is None else waiting | self._embeds.waiting

    def take(self, request: EngineCoreRequest) -> bool:
        """Give a request what is kept of its pixels, and keep what it brings. False: it waits for others."""
        for feature in request.mm_features:
            if feature.pixels is None:
                feature.pixels = self.items.get(feature.key)
            else:
                self.items.put(feature.key, feature.pixels)
        if lacks(request):
            self.waiting[request.request_id] = request
            return False
        name_what_adapters_make(request)
        return True

    def lacking(self, request_id: str) -> Sequence[bytes]:
        """The keys of pictures that a request waits for; none if it does not wait."""
        request = self.waiting.get(request_id)
        return [] if request is None else lacks(request)

    def bring(self, key: bytes, pixels: np.ndarray) -> list[EngineCoreRequest]:
        """Pixels have come; the requests that lacked nothing else."""
        self.items.put(key, pixels)
        complete = []
        for request in list(self.waiting.values()):
            for feature in request.mm_features:
                if feature.key == key and feature.pixels is None:
                    feature.pixels = pixels
            if not lacks(request):
                name_what_adapters_make(request)
                complete.append(self.waiting.pop(request.request_id))
        return complete

    def remove(self, request_ids: Collection[str]) -> list[str]:
        """Of these requests those that waited, and wait no more."""
        removed = [each for each in request_ids if self.waiting.pop(each, None) is not None]
        return removed if self._embeds is None else [*removed, *self._embeds.remove(request_ids)]


def name_what_adapters_make(request: EngineCoreRequest) -> None:
    """Its pictures, whose pixels are there, get the keys of what its adapter makes of them, if that is its own: pixels
    are all requests', and embeddings are not."""
    if (lora := request.lora) is not None and lora.changes_tower:
        of_pixels = request.mm_features
        request.mm_features = [
            msgspec.structs.replace(each, key=adapted_key(each.key, lora.digest)) for each in of_pixels
        ]


def lacks(request: EngineCoreRequest) -> list[bytes]:
    """The keys of its pictures that have no pixels, each once."""
    return list(dict.fromkeys(feature.key for feature in request.mm_features if feature.pixels is None))
