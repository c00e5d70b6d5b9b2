"""Requests whose prompt another engine computed, or goes on from, and leases that the former need while they wait."""

from typing import Any

from jaxpaged.core.request import Request
from jaxpaged.kv_store.transfer_params import RemoteSource, source_of, transfer_params


class Handovers:
    """A request is noted when it arrives and when it ends. What is to be told to other engines is kept until taken."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}  # that others may go on from, and that have no blocks yet
        self._lent: dict[str, tuple[Request, dict[str, Any]]] = {}  # with what is said of their leases
        self._ended: dict[str, tuple[Request, dict[str, Any]]] = {}  # of those, the ones since `take_ended`
        self._sources: dict[int, RemoteSource] = {}  # by the number of the request that waits for what is lent there
        self._needed: list[RemoteSource] = []
        self._released: list[RemoteSource] = []

    def note(self, request: Request) -> None:
        params = transfer_params(request.sampling_params.extra_args)
        source = source_of(params)
        if source is not None:
            self._sources[request.arrival_order] = source
            self._needed.append(source)
        elif params is not None and params.do_remote_decode:
            self._waiting[request.request_id] = request

    def source(self, request: Request) -> RemoteSource | None:
        """Where pages are lent out that a request waits for."""
        return self._sources.get(request.arrival_order)

    def give_back(self, request: Request) -> None:
        """What was lent for a request is not needed any more: it came, or will not come, or the request has ended."""
        source = self._sources.pop(request.arrival_order, None)
        if source is not None:
            self._released.append(source)

    def end(self, request: Request) -> None:
        self.give_back(request)
        self._waiting.pop(request.request_id, None)
        if (lent := self._lent.pop(request.request_id, None)) is not None:
            self._ended[request.request_id] = lent

    def take_begun(self) -> list[Request]:
        """Requests whose prompts other engines may go on from, and that have begun to be computed."""
        if not self._waiting:
            return []
        begun = [request for request in self._waiting.values() if request.blocks[0]]
        for request in begun:
            del self._waiting[request.request_id]
        return begun

    def lent(self, request: Request, said: dict[str, Any]) -> None:
        """Such a prompt is lent; `said` is what answers say of it."""
        self._lent[request.request_id] = request, said

    def take_ended(self) -> dict[str, tuple[Request, dict[str, Any]]]:
        """Requests that have ended, by id, whose prompts are lent, and what was said of that."""
        ended, self._ended = self._ended, {}
        return ended

    def take_needed(self) -> list[RemoteSource]:
        """Leases that requests need from now on."""
        needed, self._needed = self._needed, []
        return needed

    def take_released(self) -> list[RemoteSource]:
        """Leases that nobody needs any more."""
        released, self._released = self._released, []
        return released
