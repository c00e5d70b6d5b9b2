"""Several tiers as one: what is found where, what moves in the background, and what a slow or broken one costs."""

import threading
import time
from contextlib import closing

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tiers import Tiers
from tests.kv_store.pages import SPACE, key_of, page_of

SIZE = len(page_of(1)[2])
HIT, MISS = Lookup.HIT, Lookup.MISS


class Gated(HostTier):
    """A tier whose writes wait for a gate."""

    name = "gated"

    def __init__(self, capacity=100 * SIZE):
        super().__init__(capacity)
        self.gate = threading.Event()
        self.began = threading.Event()

    def put(self, key, buffers):
        self.began.set()
        assert self.gate.wait(10)
        return super().put(key, buffers)


def put(tier, *numbers):
    return [tier.put(*page_of(number)[:2]) for number in numbers]


def there(tier, *numbers):
    return [n for n in numbers if tier.lookup([key_of(n)]) == [HIT]]


def test_pages_go_to_all_tiers_and_come_back_from_the_lower_ones(tmp_path):
    disk = DiskTier(tmp_path, 100 * SIZE, SPACE)
    host = HostTier(2 * SIZE)
    with closing(Tiers([host, disk])) as tiers:
        assert put(tiers, 1, 2, 3) == [True] * 3
        assert tiers.flush(10)
        assert there(host, 1, 2, 3) == [2, 3] and there(disk, 1, 2, 3) == there(tiers, 1, 2, 3) == [1, 2, 3]
        assert tiers.where([key_of(n) for n in (1, 2, 1, 9)]) == ["disk", "host", "disk", "host"]
        assert bytes(tiers.get(key_of(1))) == page_of(1)[2]
        assert tiers.flush(10)
        assert there(host, 1, 2, 3) == [1, 3]  # promoted
        assert disk.usage()[0].counters.stored == 3  # what was evicted for it was on the disk already
        assert [line.name for line in tiers.usage()] == ["host", "disk"]
        tiers.delete([key_of(1)])
        assert tiers.lookup([key_of(n) for n in (1, 2, 1)]) == [MISS, HIT, MISS]
        assert tiers.get(key_of(1)) is None


def test_a_restart_finds_what_was_put_before_it_was_closed(tmp_path):
    with closing(Tiers([HostTier(9 * SIZE), DiskTier(tmp_path, 100 * SIZE, SPACE)])) as tiers:
        put(tiers, *range(6))
    disk = DiskTier(tmp_path, 100 * SIZE, SPACE)
    assert disk.wait_ready(10)
    with closing(Tiers([HostTier(9 * SIZE), disk])) as tiers:
        assert there(tiers, *range(7)) == [*range(6)]
        assert all(bytes(tiers.get(key_of(n))) == page_of(n)[2] for n in range(6))


def test_a_slow_tier_costs_no_time_and_gets_what_a_faster_one_holds_later():
    slow = Gated()
    with closing(Tiers([HostTier(4 * SIZE), slow], queue_bytes=2 * SIZE, num_threads=1)) as tiers:
        began = time.monotonic()
        assert put(tiers, 1, 2, 3, 4) == [True] * 4
        assert time.monotonic() - began < 5 and slow.began.wait(10)
        assert tiers.usage()[1].counters.dropped == 0 and tiers.usage()[1].num_waiting == 4
        tiers.delete([key_of(4)])
        slow.gate.set()
        assert tiers.flush(10)
        assert there(slow, 1, 2, 3, 4) == [1, 2, 3]


def test_what_no_tier_holds_and_a_queue_has_no_room_for_is_dropped_and_told_of_once(caplog):
    slow = Gated()
    with closing(Tiers([HostTier(3 * SIZE), slow], queue_bytes=2 * SIZE, num_threads=1)) as tiers:
        put(tiers, *range(1, 9))  # 1 and 2 are in the queue, 6 to 8 in the first tier
        assert tiers.usage()[1].counters.dropped == 3 and tiers.usage()[1].num_waiting == 5
        slow.gate.set()
        assert tiers.flush(10)
        assert there(slow, *range(1, 9)) == [1, 2, 6, 7, 8]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "1 pages" in told[0] and "the tier gated" in told[0]


def test_a_page_that_goes_from_the_first_tier_while_a_slow_one_reads_it_is_not_lost():
    slow, host = Gated(), HostTier(2 * SIZE)
    with closing(Tiers([host, slow], queue_bytes=SIZE, num_threads=1)) as tiers:
        read, is_read, goes_on = host.get, threading.Event(), threading.Event()

        def slow_get(key):
            is_read.set()
            assert goes_on.wait(10)
            return read(key)

        host.get = slow_get
        put(tiers, 1, 2)
        slow.gate.set()
        assert is_read.wait(10)
        put(tiers, 3, 4)  # 2 goes, which nobody has read yet
        goes_on.set()
        assert tiers.flush(10)
        assert there(slow, 1, 2, 3, 4) == [1, 2, 3, 4]


def test_closing_goes_on_while_pages_are_written():
    class Slow(HostTier):
        name = "slow"

        def put(self, key, buffers):
            time.sleep(0.05)
            return super().put(key, buffers)

    slow = Slow(99 * SIZE)
    tiers = Tiers([HostTier(99 * SIZE), slow], num_threads=1, close_patience_s=1.0, queue_bytes=SIZE)
    put(tiers, *range(30))  # which takes longer than the patience with one
    stored = slow._pages
    slow.close = lambda: None
    tiers.close()
    assert len(stored) == 30


def test_a_page_on_its_way_can_be_had_and_can_be_called_back():
    slow = Gated()
    with closing(Tiers([HostTier(SIZE), slow], num_threads=1)) as tiers:
        put(tiers, 1, 2, 3)
        assert slow.began.wait(10)
        assert there(tiers, 1, 2, 3) == [1, 2, 3]
        assert [bytes(tiers.get(key_of(n))) for n in (1, 2)] == [page_of(n)[2] for n in (1, 2)]
        tiers.delete([key_of(1), key_of(2)])  # one is being written, one waits
        assert there(tiers, 1, 2, 3) == [3]
        assert put(tiers, 1) == [True] and there(tiers, 1) == [1]
        tiers.delete([key_of(1)])
        slow.gate.set()
        assert tiers.flush(10)
        deadline = time.monotonic() + 10
        while there(slow, 1, 2, 3) != [3]:
            assert time.monotonic() < deadline


def test_closing_is_bounded_by_its_patience():
    slow = Gated()
    tiers = Tiers([HostTier(9 * SIZE), slow], num_threads=1, close_patience_s=0.1)
    put(tiers, 1, 2)
    began = time.monotonic()
    tiers.close()
    assert time.monotonic() - began < 5
    assert tiers.usage()[1].counters.dropped == 1  # the other is still being written
    slow.gate.set()


def test_a_tier_that_raises_stops_no_other(caplog):
    class Broken(HostTier):
        name = "broken"

        def put(self, key, buffers):
            raise RuntimeError("a mistake in a tier")

    third = HostTier(9 * SIZE)
    with closing(Tiers([HostTier(9 * SIZE), Broken(1), third])) as tiers:
        put(tiers, 1, 2)
        assert tiers.flush(10)
        assert there(third, 1, 2) == [1, 2]
        assert tiers.usage()[1].counters.dropped == 2
    assert sum("a mistake in a tier" in record.message for record in caplog.records) == 1


def test_a_first_tier_that_refuses_leaves_it_to_the_next():
    with closing(Tiers([HostTier(SIZE // 2), HostTier(9 * SIZE)])) as tiers:
        assert put(tiers, 1) == [True]
        assert tiers.flush(10)
        assert bytes(tiers.get(key_of(1))) == page_of(1)[2]
    with closing(Tiers([HostTier(SIZE)])) as one:
        assert put(one, 1) == [True] and there(one, 1) == [1]
    with pytest.raises(ConfigError, match="no tier"):
        Tiers([])


def test_promotion_copies_nothing():
    lower = HostTier(9 * SIZE)
    upper = HostTier(9 * SIZE)
    with closing(Tiers([upper, lower])) as tiers:
        put(lower, 1)
        page = tiers.get(key_of(1))
        assert tiers.flush(10)
        assert upper.get(key_of(1)).ctypes.data == page.ctypes.data
