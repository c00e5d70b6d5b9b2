"""Which adapters have a slot on the devices, and so which requests may be in a step.

A step computes with the adapters that are in slots. A request whose adapter has none is parked: it is in no queue, so
it is no barrier to others, however many there are, and costs nothing until its adapter gets a slot. Then all of the
adapter's requests are queued, each where its age puts it.

Who gets a slot. A slot is free when no request of its adapter is queued, or runs; of free ones the one that was used
last longest ago is given to the adapter of the oldest parked request. Only an adapter in host memory can have one.

Nobody is parked for ever. An adapter whose requests are still parked after `MOST_PASSED` requests with adapters were
admitted closes the slot of another one, whose running requests need the fewest tokens: that one's requests that are
younger than the oldest parked one are parked, too. So a parked request waits for `MOST_PASSED` admissions, for those of
the other adapter that are older, and until those that run there end; and as long for each adapter before it that waits
so, unless several slots get free at a time.

Why a slot may be given out while steps that read it are in flight: a load is a link in the chain of steps, like a block
that is given out again (`kv_cache/manager.py`). It replaces the weights behind all steps that were dispatched before.
What a slot has is loaded with the first step that needs it. When the devices have lost their slots, nothing runs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpaged.core.by_age import ByAge
from jaxpaged.core.lora.adapter import Adapter, Age
from jaxpaged.core.request import Request
from jaxpaged.core.request_queue import Openings, RequestQueue

MOST_PASSED = 64
"""So many requests with adapters may be admitted while one is parked, before a slot is closed for it."""


class AdapterQueue:
    """The waiting requests of an attention rank: `queue` has those that may be in the next step, the others are parked.
    Its length counts both."""

    def __init__(self, queue: RequestQueue, slots: "AdapterSlots"):
        """`queue` keeps requests in the order of their age, in whatever order they come."""
        self._queue, self._slots = queue, slots
        self._num_parked = 0

    def add(self, request: Request) -> None:
        if request.adapter is None:
            self._queue.add(request)
        elif self._slots.may_queue(request.adapter, request):
            self._enqueue(request.adapter, request)
        else:
            self.park(request.adapter, request)

    add_preempted = add

    def remove(self, request: Request) -> None:
        adapter = request.adapter
        if adapter is not None and request not in adapter.queued:
            self._slots.remove_parked(adapter, request)
            self._num_parked -= 1
            return
        self._queue.remove(request)
        if adapter is not None:
            del adapter.queued[request]
            self._slots.note_less(adapter)

    def park(self, adapter: Adapter, request: Request) -> None:
        self._slots.add_parked(adapter, request)
        self._num_parked += 1

    def unpark(self, adapter: Adapter, request: Request) -> None:
        """Queue a request that is parked no more."""
        self._num_parked -= 1
        self._enqueue(adapter, request)

    def _enqueue(self, adapter: Adapter, request: Request) -> None:
        self._queue.add(request)
        adapter.queued[request] = None
        self._slots.note_more(adapter)

    def openings(self, num_rows: int) -> Openings:
        return self._queue.openings(num_rows)

    def is_short(self, request: Request) -> bool:
        return self._queue.is_short(request)

    def __len__(self) -> int:
        return len(self._queue) + self._num_parked

    def __iter__(self):
        """The queued requests, the next one first, and then the parked ones of all adapters."""
        yield from self._queue
        yield from self._slots.parked_of(self)

    def check_integrity(self) -> None:
        """Assert that every request is in one place."""
        queued, parked = list(self._queue), list(self._slots.parked_of(self))
        assert all(r.adapter is None or (r in r.adapter.queued and r.adapter.slot) for r in queued)
        assert len(parked) == self._num_parked and not set(queued) & set(parked)


class AdapterSlots:
    """Slots 1 to `num_slots` of all attention ranks, and the requests that are parked for want of one. `age`: of
    requests, as the queues have it."""

    def __init__(self, num_slots: int, age: Age):
        self.num_slots, self._age = num_slots, age
        self._empty = list(range(num_slots, 0, -1))  # slots that nobody has, the next one last
        self.holders: dict[Adapter, None] = {}
        # Of them those without queued and running requests, the one that was used last longest ago first.
        self._idle: OrderedDict[Adapter, None] = OrderedDict()
        oldest: Callable[[Adapter], Any] = lambda adapter: age(adapter.parked.first)
        self.wanting = ByAge(oldest)  # adapters in host memory with parked requests, and without a slot
        self.unread = ByAge(oldest)  # those that are not in host memory, nor being read
        self._queues: list[AdapterQueue] = []  # of each rank
        self._parking: dict[Adapter, None] = {}  # adapters with parked requests
        self.num_admitted = 0  # requests with adapters, since the start
        self.num_loads = self.num_evictions = 0

    def queue(self, queue: RequestQueue) -> AdapterQueue:
        """The waiting requests of the next rank."""
        self._queues.append(AdapterQueue(queue, self))
        return self._queues[-1]

    # ---- requests ------------------------------------------------------------------------------

    def may_queue(self, adapter: Adapter, request: Request) -> bool:
        """Whether a request may be in a step."""
        return bool(adapter.slot) and (adapter.closes_before is None or self._age(request) < adapter.closes_before)

    def begin_row(self, adapter: Adapter) -> None:
        """A request of the adapter is admitted."""
        self.num_admitted += 1
        adapter.num_running += 1
        self.note_more(adapter)

    def end_row(self, adapter: Adapter) -> None:
        """A request that ran has ended, or was preempted."""
        adapter.num_running -= 1
        self.note_less(adapter)

    def note_more(self, adapter: Adapter) -> None:
        self._idle.pop(adapter, None)

    def note_less(self, adapter: Adapter) -> None:
        if adapter.slot and not adapter.is_open:
            self._idle[adapter] = None

    # ---- parked requests -----------------------------------------------------------------------

    def add_parked(self, adapter: Adapter, request: Request) -> None:
        self.leave_line(adapter)
        if not adapter.parked:
            adapter.num_passed_before = self.num_admitted
            self._parking[adapter] = None
        adapter.parked.add(request)
        self.enter_line(adapter)

    def remove_parked(self, adapter: Adapter, request: Request) -> None:
        self.leave_line(adapter)
        adapter.parked.remove(request)
        self.enter_line(adapter)
        if not adapter.parked:
            del self._parking[adapter]
            self._call_off(adapter)

    def parked_of(self, queue: AdapterQueue) -> Iterable[Request]:
        """Those of one rank."""
        number = self._queues.index(queue)
        return (request for adapter in self._parking for request in adapter.parked if request.rank == number)

    @property
    def parking(self) -> Iterable[Adapter]:
        """The adapters with parked requests, in the order in which they had the first one."""
        return self._parking

    def _line(self, adapter: Adapter) -> ByAge[Adapter] | None:
        """Where an adapter waits for its turn; None where it does not."""
        if not adapter.parked or adapter.slot or adapter.is_being_read:
            return None
        return self.wanting if adapter.is_resident else self.unread

    def leave_line(self, adapter: Adapter) -> None:
        """Call it before anything changes that says where an adapter waits, and `enter_line` afterwards."""
        if (line := self._line(adapter)) is not None:
            line.remove(adapter)

    def enter_line(self, adapter: Adapter) -> None:
        if (line := self._line(adapter)) is not None:
            line.add(adapter)

    # ---- a step --------------------------------------------------------------------------------

    def assign(self, running: Callable[[], Iterable[Request]]) -> None:
        """Give free slots to the adapters that wait for one, and close one for each that has waited too long.
        `running`: the requests that run."""
        while self.wanting:
            if self._empty:
                self._give(self._empty.pop(), self.wanting.first)
            elif self._idle:
                self._give(self._evict(next(iter(self._idle))), self.wanting.first)
            else:
                self._close_slots(running)
                if not self._idle:
                    return

    def take_loads(self, adapters: Iterable[Adapter]) -> list[tuple[int, int]]:
        """What must be loaded before a step in which these adapters are: slots, and adapters by the workers' number."""
        loads = []
        for adapter in adapters:
            if not adapter.is_loaded:
                adapter.is_loaded = True
                loads.append((adapter.slot, adapter.number))
        self.num_loads += len(loads)
        return loads

    def _give(self, slot: int, adapter: Adapter) -> None:
        self.leave_line(adapter)
        adapter.slot, adapter.is_loaded = slot, False
        self.holders[adapter] = None
        self._call_off(adapter)
        self._unpark_all(adapter)

    def _unpark_all(self, adapter: Adapter) -> None:
        """Queue the parked requests of an adapter that has a slot."""
        if adapter.parked:
            parked = list(adapter.parked)
            adapter.parked.clear()
            del self._parking[adapter]
            for request in parked:
                self._queues[request.rank].unpark(adapter, request)

    def _evict(self, adapter: Adapter) -> int:
        """Take the slot of an adapter without queued and running requests. Returns it."""
        del self._idle[adapter]
        del self.holders[adapter]
        slot, adapter.slot = adapter.slot, 0
        self.num_evictions += adapter.is_loaded
        adapter.is_loaded, adapter.closes_before = False, None
        if (waits := adapter.closed_for) is not None:
            waits.victim = adapter.closed_for = None
        self.enter_line(adapter)  # what was parked since its slot was closed
        return slot

    def _close_slots(self, running: Callable[[], Iterable[Request]]) -> None:
        """For each adapter that has waited too long, close a slot that is not closed yet, while there are any."""
        for adapter in self.wanting:
            if self.num_admitted - adapter.num_passed_before < MOST_PASSED:
                return
            if adapter.victim is None and not self._close_slot_for(adapter, running()):
                return

    def _close_slot_for(self, adapter: Adapter, running: Iterable[Request]) -> bool:
        """Close the slot that gets free first. False: all are closed."""
        num_left = {each: 0 for each in self.holders if each.closes_before is None}
        if not num_left:
            return False
        for request in running:
            if request.adapter in num_left:
                left = request.max_total_tokens - request.num_tokens
                num_left[request.adapter] = max(num_left[request.adapter], left)
        victim = min(num_left, key=num_left.__getitem__)
        adapter.victim, victim.closed_for = victim, adapter
        victim.closes_before = self._age(adapter.parked.first)
        for request in [each for each in victim.queued if not self.may_queue(victim, each)]:
            queue = self._queues[request.rank]
            queue.remove(request)
            queue.park(victim, request)
        return True

    def _call_off(self, adapter: Adapter) -> None:
        """An adapter waits no more for the slot of another one, which opens again."""
        victim, adapter.victim = adapter.victim, None
        if victim is not None:
            victim.closed_for = victim.closes_before = None
            self._unpark_all(victim)

    # ---- the devices lose them -----------------------------------------------------------------

    def lose(self) -> None:
        """The devices have nothing in their slots any more. No request runs. What is in host memory will be loaded
        again; an adapter that is not there loses its slot."""
        for adapter in list(self.holders):
            adapter.is_loaded = False
            if not adapter.is_resident:
                self.free(adapter)

    def free(self, adapter: Adapter) -> None:
        """Take the slot of an adapter that has one; its queued requests are parked."""
        assert not adapter.num_running, f"{adapter} runs"
        queued = list(adapter.queued)
        for request in queued:
            self._queues[request.rank].remove(request)
        self._empty.append(self._evict(adapter))
        for request in queued:
            self._queues[request.rank].park(adapter, request)

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Assert that every slot and every request is accounted for."""
        slots = sorted([*self._empty, *(adapter.slot for adapter in self.holders)])
        assert slots == list(range(1, self.num_slots + 1)), f"slots {slots}"
        for adapter in self.holders:
            own = sum(request.adapter is adapter for request in running)
            assert own == adapter.num_running and (adapter in self._idle) == (not adapter.is_open)
            assert not adapter.parked or adapter.closes_before is not None
            assert adapter.is_loaded or adapter.is_resident
        assert all(request.adapter is None or request.adapter.slot for request in running)
        for adapter in self._parking:
            line = self._line(adapter)
            assert adapter.parked and (line is None or adapter in list(line))
            assert adapter.victim is None or (adapter.victim.closed_for is adapter and adapter.victim.slot)
        assert all(adapter in self._parking for line in (self.wanting, self.unread) for adapter in line)
        for adapter in self.holders:
            assert (adapter.closed_for is None) == (adapter.closes_before is None)
            assert adapter.closed_for is None or adapter.closed_for.victim is adapter
        for queue in self._queues:
            queue.check_integrity()
