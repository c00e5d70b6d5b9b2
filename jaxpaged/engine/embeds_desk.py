"""Requests that wait for embeddings of their pictures, which another engine may have computed.

A request waits before it is scheduled, for a few seconds at most. What does not come is encoded by the engine itself;
the request notices nothing of it.
"""

from collections.abc import Callable, Iterable, Set
from concurrent.futures import wait

import msgspec

from jaxpaged.messages import EngineCoreRequest
from jaxpaged.multimodal.embeds_folder import EmbedsFolder, EmbedsLoad


class EmbedsDesk:
    """Gives requests the embeddings that are in a folder. `space` names what embeddings depend on, as the weights are
    now."""

    def __init__(self, folder: EmbedsFolder, space: Callable[[], str]):
        self._folder, self._space = folder, space
        self._waiting: dict[str, EngineCoreRequest] = {}
        self._loads: dict[bytes, EmbedsLoad] = {}  # of pictures that requests wait for

    @property
    def waiting(self) -> Set[str]:
        """The ids of requests that wait."""
        return self._waiting.keys()

    def take(self, request: EngineCoreRequest, is_encoded: Callable[[bytes], bool]) -> bool:
        """Look for the embeddings of a request's pictures, but for those of which the device has them. False: it
        waits."""
        if not self._folder.transfer.loads:
            return True
        for feature in request.mm_features:
            if not (feature.is_embeds or feature.key in self._loads or is_encoded(feature.key)):
                load = self._folder.load(self._space(), feature.key, feature.num_embeds)
                if load is not None:
                    self._loads[feature.key] = load
        if not any(feature.key in self._loads for feature in request.mm_features):
            return True
        self._waiting[request.request_id] = request
        return False

    def ready(self) -> list[EngineCoreRequest]:
        """The requests that wait no longer, in the order in which they came, with the embeddings that have come."""
        found = []
        for name, request in list(self._waiting.items()):
            loads = [self._loads[each.key] for each in request.mm_features if each.key in self._loads]
            if all(load.future.done() or load.is_late for load in loads):
                request.mm_features = [
                    msgspec.structs.replace(each, embeds=load.embeds) if (load := self._loads.get(each.key)) else each
                    for each in request.mm_features
                ]
                found.append(self._waiting.pop(name))
        self._forget_loads()
        return found

    def wait(self, seconds: float) -> None:
        """Wait until a load ends, or is late, so many seconds at most."""
        loads = [load for load in self._loads.values() if load.seconds_left]
        if loads:
            left = min([load.seconds_left for load in loads])
            wait([load.future for load in loads], min(seconds, left), "FIRST_COMPLETED")

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Of these requests those that waited, and wait no more."""
        removed = [each for each in request_ids if self._waiting.pop(each, None) is not None]
        if removed:
            self._forget_loads()
        return removed

    def forget(self) -> None:
        """The weights are others: what comes is of no use."""
        for load in self._loads.values():
            self._folder.abandon(load)
        self._loads = {}

    def _forget_loads(self) -> None:
        """Of pictures that nobody waits for."""
        awaited = {feature.key for request in self._waiting.values() for feature in request.mm_features}
        for key in [each for each in self._loads if each not in awaited]:
            load = self._loads.pop(key)
            if not load.future.done():
                self._folder.abandon(load)
