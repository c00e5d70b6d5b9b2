"""Tiers in other processes: asked in the background, in bounded time, and never believed unchecked."""

import threading
import time
from contextlib import closing

import pytest

from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.page import namespace
from jaxpaged.kv_store.remote_store import NotKept, RemoteTier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.pages import SPACE, key_of, page_of

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Refused(OSError):
    """What the store below says when it is full."""


class Dictionary(RemoteTier):
    """A store that can be told to fail, or to take its time."""

    name = "dictionary"
    refusals = (Refused,)

    def __init__(self, **options):
        self.pages, self.calls, self.error = {}, 0, None
        self.gate = threading.Event()
        self.gate.set()
        super().__init__("somewhere", SPACE, **options)

    def called(self):
        self.calls += 1
        assert self.gate.wait(10)
        if self.error:
            raise self.error

    def exist(self, keys):
        self.called()
        return [key in self.pages for key in keys]

    def fetch(self, key):
        self.called()
        return self.pages.get(key)

    def store(self, key, buffers):
        self.called()
        self.pages[key] = b"".join(map(bytes, buffers))

    def remove(self, keys):
        self.called()
        for key in keys:
            self.pages.pop(key, None)

    def disconnect(self):
        self.pages = None


def settled(tier, *numbers):
    """The answers, once there are any."""
    deadline = time.monotonic() + 10
    while PENDING in (states := tier.lookup([key_of(n) for n in numbers])):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return states


def test_unknown_keys_are_asked_for_in_the_background():
    with closing(Dictionary()) as tier:
        tier.pages[key_of(1)] = page_of(1)[2]  # written by another engine
        tier.gate.clear()
        assert tier.lookup([key_of(1), key_of(2)]) == [PENDING] * 2
        tier.gate.set()
        assert settled(tier, 1, 2) == [HIT, MISS]
        calls = tier.calls
        assert settled(tier, 1, 2) == [HIT, MISS] and tier.calls == calls  # it is remembered
        found = tier.get(key_of(1))
        assert bytes(found) == page_of(1)[2] and found.ctypes.data % 64 == 0
        assert tier.put(*page_of(3)[:2]) and settled(tier, 3) == [HIT]
        assert tier.put(*page_of(3)[:2]) and tier.usage()[0].counters.stored == 1
        assert tier.usage()[0].num_pages == 2


def test_a_no_is_asked_again_after_a_while():
    with closing(Dictionary(ask_again_s=0.05)) as tier:
        assert settled(tier, 1) == [MISS]
        tier.pages[key_of(1)] = page_of(1)[2]
        time.sleep(0.06)
        assert settled(tier, 1) == [HIT]


def test_what_was_evicted_between_look_up_and_get_is_a_miss():
    with closing(Dictionary()) as tier:
        tier.put(*page_of(1)[:2])
        tier.pages.clear()
        assert tier.lookup([key_of(1)]) == [HIT] and tier.get(key_of(1)) is None
        assert tier.lookup([key_of(1)]) == [MISS] and tier.put(*page_of(1)[:2])
        assert tier.usage()[0].counters.errors == tier.usage()[0].counters.corrupt == 0


def test_a_store_that_takes_its_time_is_waited_for_in_bounded_time():
    with closing(Dictionary(patience_s=0.05)) as tier:
        tier.gate.clear()
        began = time.monotonic()
        assert settled(tier, 1) == [MISS]
        assert time.monotonic() - began < 5
        tier.gate.set()


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
def test_damaged_pages_are_misses_and_go(damage, caplog):
    with closing(Dictionary()) as tier:
        whole = page_of(1)[2]
        damaged = {"flip": whole[:-1] + bytes([whole[-1] ^ 1]), "cut": whole[:-1], "other": page_of(2)[2]}[damage]
        for number in (1, 3):
            tier.pages[key_of(number)] = damaged
            assert tier.get(key_of(number)) is None and key_of(number) not in tier.pages
        assert tier.usage()[0].counters.corrupt == 2
    assert len(caplog.records) == 1


def test_pages_of_a_store_that_others_write_to_need_the_secret():
    with closing(Dictionary(secret=b"ours")) as tier:
        for number, secret in ((1, None), (2, b"theirs"), (3, b"ours")):
            tier.pages[key_of(number)] = page_of(number, secret)[2]
        assert [tier.get(key_of(n)) is not None for n in (1, 2, 3)] == [False, False, True]
        assert tier.usage()[0].counters.corrupt == 2


def test_a_page_of_another_namespace_under_our_key_is_none():
    with closing(Dictionary()) as tier:
        tier.pages[key_of(1)] = page_of(1, space=namespace(weights="v2"))[2]
        assert tier.get(key_of(1)) is None and tier.usage()[0].counters.corrupt == 1


def test_a_dead_store_costs_one_attempt_and_is_asked_again_later(caplog):
    with closing(Dictionary(retry_after_s=0.2)) as tier:
        tier.put(*page_of(1)[:2])
        tier.error = ConnectionError("nobody there")
        calls = tier.calls
        assert tier.get(key_of(1)) is None
        assert [tier.get(key_of(n)) for n in range(5)] == [None] * 5
        assert tier.lookup([key_of(7)]) == [MISS] and not tier.put(*page_of(8)[:2])
        assert tier.calls == calls + 1
        counters = tier.usage()[0].counters
        assert (counters.errors, counters.dropped, counters.misses) == (1, 1, 6)
        tier.error = None
        time.sleep(0.21)
        assert tier.get(key_of(1)) is not None and tier.put(*page_of(8)[:2])
    assert ["left alone" in record.message for record in caplog.records] == [True, False]


def test_a_full_store_is_read_from_all_the_same(caplog):
    with closing(Dictionary()) as tier:
        tier.put(*page_of(1)[:2])
        tier.error = Refused("out of memory")
        assert not tier.put(*page_of(2)[:2])
        tier.error = None
        assert not tier.put(*page_of(3)[:2])
        assert tier.get(key_of(1)) is not None
    assert len(caplog.records) == 1 and "Writing pages" in caplog.records[0].message


def test_deleted_pages_are_removed_also_when_it_is_closed():
    tier = Dictionary()
    pages = tier.pages
    tier.put(*page_of(1)[:2])
    tier.put(*page_of(2)[:2])
    tier.delete([key_of(1)])
    assert tier.lookup([key_of(1), key_of(2)]) == [MISS, HIT]
    tier.close()
    assert list(pages) == [key_of(2)]
    assert not tier.put(*page_of(3)[:2]) and tier.get(key_of(2)) is None


def test_a_breaker_lets_one_attempt_through_at_a_time():
    now = [0.0]
    breaker = CircuitBreaker("x", 10, clock=lambda: now[0])
    assert breaker.allows() and not breaker.is_open
    breaker.failed("y")
    assert not breaker.allows() and breaker.is_open
    now[0] = 10
    assert [breaker.allows(), breaker.allows()] == [True, False]
    now[0] = 20
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()


def test_the_answer_yes_can_hold_for_a_while_only():
    with closing(Dictionary()) as tier:
        tier.found_for_s = 0.3
        assert tier.put(*page_of(1)[:2]) and tier.lookup([key_of(1)]) == [HIT]
        time.sleep(0.2)
        assert tier.get(key_of(1)) is not None
        time.sleep(0.2)
        assert tier.lookup([key_of(1)]) == [PENDING], "that it was read makes no answer newer"
        assert settled(tier, 1) == [HIT]
        tier.pages.clear()
        time.sleep(0.4)
        assert settled(tier, 1) == [MISS]
        time.sleep(0.4)
        assert tier.lookup([key_of(1)]) == [MISS] and tier.put(*page_of(1)[:2]) and tier.pages


def test_what_there_is_no_room_for_is_no_failure(caplog):
    with closing(Dictionary()) as tier:
        tier.error = NotKept("not now")
        assert not tier.put(*page_of(1)[:2])
        tier.error = None
        assert tier.put(*page_of(2)[:2]) and tier.get(key_of(2)) is not None
        counters = tier.usage()[0].counters
        assert (counters.dropped, counters.errors, counters.stored) == (1, 0, 1)
    assert not caplog.records
