"""The tier in memory: its limits, and what its readers keep."""

import threading

import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store import host
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import decode
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.pages import SPACE, key_of, page_of, values_of

SIZE = len(page_of(1)[2])


def test_pages_come_back_until_they_are_evicted():
    gone = []
    tier = HostTier(3 * SIZE, on_evict=lambda key, buffer: gone.append((key, bytes(buffer))))
    for number in (1, 2, 3):
        assert tier.put(*page_of(number)[:2])
    held = tier.get(key_of(1))
    assert tier.put(*page_of(4)[:2])
    assert gone == [(key_of(2), page_of(2)[2])]
    assert tier.lookup([key_of(n) for n in (1, 2, 3, 4)]) == [Lookup.HIT, Lookup.MISS, Lookup.HIT, Lookup.HIT]
    assert tier.get(key_of(2)) is None
    tier.delete([key_of(1), key_of(2)])
    _, values = decode(held, expect_namespace=SPACE, key=key_of(1))  # what was handed out stays
    assert np.array_equal(values, values_of(1)) and values.ctypes.data % 64 == 0
    with pytest.raises((ValueError, TypeError)):
        held[0] = 1
    (usage,) = tier.usage()
    assert (usage.num_bytes, usage.num_pages, usage.capacity) == (2 * SIZE, 2, 3 * SIZE)
    counted = usage.counters
    assert (counted.stored, counted.hits, counted.misses, counted.evictions) == (4, 1, 1, 1)
    tier.close()
    assert tier.usage()[0].num_bytes == 0


def test_touched_pages_stay():
    tier = HostTier(2 * SIZE)
    for number in (1, 2):
        tier.put(*page_of(number)[:2])
    tier.touch([key_of(1), key_of(9)])
    tier.put(*page_of(3)[:2])
    assert tier.lookup([key_of(1), key_of(2)]) == [Lookup.HIT, Lookup.MISS]


def test_what_cannot_fit_is_dropped_and_evicts_nothing():
    tier = HostTier(SIZE)
    tier.put(*page_of(1)[:2])
    assert not tier.put(*page_of(2, layers=3)[:2])
    assert tier.lookup([key_of(1)]) == [Lookup.HIT]
    assert tier.usage()[0].counters.dropped == 1
    with pytest.raises(ConfigError, match="capacity of 0"):
        HostTier(0)


def test_pages_are_admitted_when_they_come_again():
    tier = HostTier(3 * SIZE, second_use=True)
    assert [tier.put(*page_of(number)[:2]) for number in (1, 1, 2, 1)] == [False, True, False, True]


def test_a_page_that_is_being_written_is_pending_and_keeps_its_room(monkeypatch):
    copying, go_on = threading.Event(), threading.Event()
    joined = host.joined

    def slowly(buffers):
        copying.set()
        assert go_on.wait(10)
        return joined(buffers)

    monkeypatch.setattr(host, "joined", slowly)
    tier = HostTier(2 * SIZE - 1)
    kept = []
    writer = threading.Thread(target=lambda: kept.append(tier.put(*page_of(1)[:2])))
    writer.start()
    assert copying.wait(10)
    assert tier.lookup([key_of(1)]) == [Lookup.PENDING] and tier.get(key_of(1)) is None
    assert tier.put(*page_of(1)[:2])  # the same content is on its way
    assert not tier.put(*page_of(2)[:2])
    tier.delete([key_of(1)])
    assert tier.lookup([key_of(1)]) == [Lookup.MISS]
    go_on.set()
    writer.join()
    assert kept == [False]
    assert tier.lookup([key_of(1)]) == [Lookup.MISS] and tier.usage()[0].num_bytes == 0
    assert tier.put(*page_of(1)[:2]) and tier.lookup([key_of(1)]) == [Lookup.HIT]


def test_memory_that_cannot_be_had_leaves_the_books_right(monkeypatch):
    def fails(buffers):
        raise MemoryError

    tier = HostTier(SIZE)
    monkeypatch.setattr(host, "joined", fails)
    with pytest.raises(MemoryError):
        tier.put(*page_of(1)[:2])
    assert tier.usage()[0].num_bytes == 0 and tier.lookup([key_of(1)]) == [Lookup.MISS]
