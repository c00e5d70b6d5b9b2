"""All adapters that an engine knows: which versions there are, and which of them are in host memory.

An adapter has an id, and what its files are. A request is bound to a version from its arrival to its end. When an
adapter is loaded anew with other content, requests that come from then on get the new version, and those that are there
keep the old one: two versions have two slots. When an adapter is removed, new requests are refused, and those that are
there are finished. A version that no request has any more, and no new one gets, is dropped.

Host memory has `max_cpu_loras` versions. To make place for another one, the one that was used last longest ago is
dropped: of those without requests, or else of those that are in a slot. Pinned ones stay, and so does an old version
with requests, since its files may be others now. What was dropped is read again when a request waits for it, in another
thread and one after the other: its requests are parked meanwhile (`slots.py`), and fail with it when it cannot be read,
or is not what it was.

This module knows neither files nor weights: what reads adapters is given to it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count, islice

from jaxpaged.core.lora.adapter import Adapter, Age
from jaxpaged.core.lora.slots import AdapterSlots
from jaxpaged.core.request import Request
from jaxpaged.errors import RequestError, UsageError
from jaxpaged.messages import LoRAInfo, LoRARequest, LoRAStats

MOST_TOLD = 64
"""Of the adapters with waiting requests at most so many are told by name."""

Version = tuple[int, str, str, str]
"""An adapter's id, name, path and digest."""


def version_of(info: LoRAInfo) -> Version:
    return info.lora_int_id, info.lora_name, info.lora_path, info.digest


class AdapterBook:
    """The adapters of an engine. `age`: of requests, as the queues have it. `read` begins to read an adapter's files
    into host memory, under the number that `lora_int_id` is; `drop` takes a number's weights out of it."""

    def __init__(
        self,
        max_loras: int,
        max_cpu_loras: int,
        age: Age,
        read: Callable[[LoRARequest], Future[LoRAInfo]],
        drop: Callable[[int], object],
    ):
        self.slots = AdapterSlots(max_loras, age)
        self._max_residents, self._age, self._read, self._drop = max_cpu_loras, age, read, drop
        self._known: dict[int, Adapter] = {}  # the versions that new requests get, by id
        self._versions: dict[Version, Adapter] = {}  # all
        self._residents: OrderedDict[Adapter, None] = OrderedDict()  # the one that was used last longest ago first
        self.numbers = count(1)  # what the workers call versions
        self._came: deque[tuple[LoRAInfo, int]] = deque()  # what another thread has read, and its number
        self._reading: dict[Adapter, Future[LoRAInfo]] = {}
        self._num_hits = self._num_misses = self._num_evictions = 0

    # ---- what users ask for --------------------------------------------------------------------

    def check_new(self, request: LoRARequest) -> LoRAInfo | None:
        """What is known of the adapter of a request to load one; None when it has to be read. Raises RequestError for
        an id that another adapter has. From any thread."""
        known = self._known.get(request.lora_int_id)
        if known is None or request.load_inplace:
            return None
        if known.info.lora_name != request.lora_name:
            raise RequestError(
                f"lora_int_id {request.lora_int_id} is that of the adapter {known.info.lora_name!r}, and "
                f"{request.lora_name!r} cannot have it, too. Choose another.",
                "lora_request",
            )
        return known.info if request.lora_path in ("", known.info.lora_path) else None

    def come(self, info: LoRAInfo, number: int) -> None:
        """An adapter was read under this number, and `info` has its own id. From any thread."""
        self._came.append((info, number))

    def remove(self, lora_int_id: int) -> bool:
        """New requests do not get the adapter any more. False: there is no such one."""
        self._take_what_came()
        adapter = self._known.pop(lora_int_id, None)
        if adapter is None:
            return False
        adapter.is_removed, adapter.is_pinned = True, False
        self._drop_unused(adapter)
        return True

    def infos(self) -> list[LoRAInfo]:
        """Of all adapters that new requests may have."""
        self._take_what_came()
        return [adapter.info for adapter in self._known.values()]

    def restore(self, infos: Iterable[LoRAInfo]) -> None:
        """Know these adapters, unless they are known: they are read when a request waits for them."""
        self._take_what_came()
        for info in infos:
            if info.lora_int_id not in self._known:
                self._make_current(self._versions.get(version_of(info)) or self._new(info, next(self.numbers)))

    def pin(self, lora_int_id: int) -> bool:
        """An adapter stays in host memory until it is removed. False: there is no such one. Raises UsageError when all
        places are pinned."""
        self._take_what_came()
        adapter = self._known.get(lora_int_id)
        if adapter is None:
            return False
        if not adapter.is_pinned:
            if sum(each.is_pinned for each in self._known.values()) >= self._max_residents:
                raise UsageError(f"{self._all_pinned} {adapter.info.lora_name!r} cannot be pinned, too.")
            adapter.is_pinned = True
        return True

    # ---- requests ------------------------------------------------------------------------------

    def check(self, request_id: str, info: LoRAInfo) -> None:
        """Raise RequestError unless a new request can have this adapter."""
        self._take_what_came()
        if self._find(info) is None:
            raise RequestError(
                f"the LoRA adapter {info.lora_name!r} of request {request_id!r} is not loaded, or no more. Load it "
                "first.",
                "lora_request",
            )

    def _find(self, info: LoRAInfo) -> Adapter | None:
        """The version that a request asks for, or if there is none any more, the one that has come in its place."""
        adapter = self._versions.get(version_of(info))
        if adapter is not None and not adapter.is_removed:
            return adapter
        current = self._known.get(info.lora_int_id)
        return current if current is not None and current.info.lora_name == info.lora_name else None

    def bind(self, request: Request) -> None:
        """A request has come, and `check` has let it pass."""
        assert request.lora is not None, "it has no adapter"
        adapter = self._find(request.lora)
        assert adapter is not None, "`check` refuses such requests"
        request.adapter, request.lora = adapter, adapter.info
        adapter.num_requests += 1
        if adapter.is_resident:
            self._residents.move_to_end(adapter)
        is_hit = adapter.is_resident or adapter.is_loaded
        self._num_hits += is_hit
        self._num_misses += not is_hit

    def end(self, adapter: Adapter) -> None:
        """A request of the adapter has ended, and is in no queue any more."""
        adapter.num_requests -= 1
        if not (adapter.num_requests or adapter.is_current):
            self._drop_unused(adapter)

    # ---- before a step -------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether `settle` may have something to do."""
        return bool(self._came or self._reading or self.slots.unread)

    def wait(self, seconds: float) -> bool:
        """Wait until something is read, so many seconds at most. False: nothing is being read."""
        if self._reading:
            wait(self._reading.values(), seconds, FIRST_COMPLETED)
        return bool(self._reading)

    def settle(self) -> list[tuple[Request, str]]:
        """Take what was read. Returns the requests that cannot have their adapter, and why."""
        self._take_what_came()
        failed: list[tuple[Request, str]] = []
        for adapter in [each for each, future in self._reading.items() if future.done()]:
            if (reason := self._end_read(adapter, self._reading.pop(adapter))) is not None:
                failed += [(request, reason) for request in adapter.parked]
        if self.slots.unread and sum(each.is_pinned for each in self._residents) >= self._max_residents:
            failed += [(request, self._all_pinned) for each in self.slots.unread for request in each.parked]
        return failed

    def read_next(self) -> None:
        """Begin to read the adapter of the oldest request that waits for that, if there is a place for it."""
        if self.slots.unread and not self._reading and self._make_place():
            adapter = self.slots.unread.first
            self.slots.leave_line(adapter)
            adapter.is_being_read = True
            request = LoRARequest(adapter.info.lora_name, adapter.number, adapter.info.lora_path)
            self._reading[adapter] = self._read(request)

    def _end_read(self, adapter: Adapter, future: Future[LoRAInfo]) -> str | None:
        """A version was read again. Returns why it was not, or is none."""
        reason, name = None, adapter.info.lora_name
        if (error := future.exception()) is not None:
            reason = f"the LoRA adapter {name!r} cannot be read: {str(error) or type(error).__name__}"
        elif future.result().digest != adapter.info.digest:
            self._drop(adapter.number)
            reason = (
                f"the files of the LoRA adapter {name!r} in {adapter.info.lora_path} have changed since it was loaded. "
                "Load it anew with load_inplace."
            )
        elif self._versions.get(version_of(adapter.info)) is adapter:
            adapter.is_resident = True
            self._residents[adapter] = None
        else:  # nobody wants it any more
            self._drop(adapter.number)
        adapter.is_being_read = False
        self.slots.enter_line(adapter)
        return reason

    # ---- versions ------------------------------------------------------------------------------

    def _take_what_came(self) -> None:
        while self._came:
            info, number = self._came.popleft()
            adapter = self._versions.get(version_of(info)) or self._new(info, number)
            self._make_current(adapter)
            if adapter.is_resident or adapter.is_being_read:
                if adapter.number != number:
                    self._drop(number)
            elif self._make_place():
                self.slots.leave_line(adapter)
                adapter.number, adapter.is_resident = number, True
                self._residents[adapter] = None
                self.slots.enter_line(adapter)
            else:
                self._drop(number)

    def _new(self, info: LoRAInfo, number: int) -> Adapter:
        adapter = self._versions[version_of(info)] = Adapter(info, number, self._age)
        return adapter

    def _make_current(self, adapter: Adapter) -> None:
        """New requests get this version."""
        before = self._known.get(adapter.info.lora_int_id)
        self._known[adapter.info.lora_int_id] = adapter
        adapter.is_removed = adapter.is_superseded = False
        if before is not None and before is not adapter:
            before.is_superseded = True
            adapter.is_pinned, before.is_pinned = before.is_pinned, False
            self._drop_unused(before)

    def _drop_unused(self, adapter: Adapter) -> None:
        """Forget a version that new requests do not get, unless there are requests that have it."""
        if adapter.num_requests:
            return
        del self._versions[version_of(adapter.info)]
        if adapter.slot:
            self.slots.free(adapter)
        if adapter.is_resident:
            self._drop_resident(adapter)

    # ---- host memory ---------------------------------------------------------------------------

    @property
    def _all_pinned(self) -> str:
        return (
            f"host memory keeps max_cpu_loras = {self._max_residents} LoRA adapters, and all of them are pinned. Raise "
            "it, or remove one."
        )

    def _make_place(self) -> bool:
        """Have room for one more version in host memory. False: all that are there are needed."""
        if len(self._residents) + len(self._reading) < self._max_residents:
            return True
        kept = [each for each in self._residents if not each.is_pinned]
        victim = next((each for each in kept if not each.num_requests), None)
        if victim is None:
            victim = next((each for each in kept if each.is_loaded and each.is_current), None)
        if victim is None:
            return False
        self._drop_resident(victim)
        self._num_evictions += 1
        return True

    def _drop_resident(self, adapter: Adapter) -> None:
        if adapter.slot and not adapter.is_loaded:
            self.slots.free(adapter)
        self.slots.leave_line(adapter)
        adapter.is_resident = False
        del self._residents[adapter]
        self.slots.enter_line(adapter)
        self._drop(adapter.number)

    # ---- how it is -----------------------------------------------------------------------------

    def stats(self) -> LoRAStats:
        """Adapters with running and waiting requests now, and what was counted since the start."""
        slots = self.slots
        running = {each.info.lora_name: each.num_running for each in slots.holders if each.num_running}
        waiting = {each.info.lora_name: len(each.queued) for each in slots.holders if each.queued}
        for adapter in islice(slots.parking, MOST_TOLD):
            name = adapter.info.lora_name
            waiting[name] = waiting.get(name, 0) + len(adapter.parked)
        return LoRAStats(
            max_loras=slots.num_slots,
            running=running,
            waiting=waiting,
            num_loads=slots.num_loads,
            num_evictions=slots.num_evictions,
            num_host_hits=self._num_hits,
            num_host_misses=self._num_misses,
            num_host_evictions=self._num_evictions,
        )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that every version, every request and every place is accounted for. `requests` are all that there
        are."""
        own = Counter(request.adapter for request in requests if request.adapter is not None)
        assert all(own[each] == each.num_requests for each in self._versions.values())
        assert set(own) <= set(self._versions.values())
        assert all(each.is_current or each.num_requests for each in self._versions.values())
        assert all(self._versions[version_of(each.info)] is each and each.is_current for each in self._known.values())
        assert set(self._residents) == {each for each in self._versions.values() if each.is_resident}
        assert len(self._residents) + len(self._reading) <= self._max_residents
        assert all(each.is_resident or each.is_loaded for each in self.slots.holders)
