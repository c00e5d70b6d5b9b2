"""A store that hangs costs the first who need it a bounded time, and nobody else any."""

import threading
import time

import pytest

from jaxpaged.kv_connector.base import KVConnectorMetadata
from jaxpaged.kv_connector.offloading import NUM_THREADS, OffloadingConnector
from jaxpaged.kv_store import remote_store
from jaxpaged.kv_store.custom_store import CustomTier
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tiers import Tiers
from tests.worker.test_kv_transfer import SPACE, Made, came, content

CALLS = ("exist", "get", "put", "delete", "close")


class Hanging:
    """A store of pages of which some methods hang until its gate opens."""

    def __init__(self, *hanging):
        self.pages, self.hanging, self.gate = {}, set(hanging), threading.Event()
        self.num_calls = dict.fromkeys(CALLS, 0)

    def _come_to(self, name):
        self.num_calls[name] += 1
        if name in self.hanging:
            assert self.gate.wait(60)

    def exist(self, names):
        self._come_to("exist")
        return [name in self.pages for name in names]

    def get(self, name):
        self._come_to("get")
        return self.pages.get(name)

    def put(self, name, page):
        self._come_to("put")
        self.pages[name] = page

    def delete(self, names):
        self._come_to("delete")

    def close(self):
        self._come_to("close")


class Behind(Made):
    """A worker with such a store behind host memory, or without that."""

    def __init__(self, store, *, has_host=True):
        super().__init__()
        self.tokens = {}
        self.store, self.far = store, CustomTier("far", store, SPACE)
        self.far._patience_s = 0.2
        self.worker.close()
        tiers = Tiers([self.tier, self.far] if has_host else [self.far], close_patience_s=0.2)
        self.open(OffloadingConnector(tiers), self.worker._form)

    def came(self, count, seconds=10):
        """What became of so many loads, in the order in which they ended."""
        ended, deadline = [], time.monotonic() + seconds
        while len(ended) < count and time.monotonic() < deadline:
            output = self.worker.exchange(None, 0.05)
            ended += output.finished_fetches
            for save_id in output.finished_saves:
                self.gathers.end(save_id)
        return [(self.tokens[fetched.load_id], came(fetched)) for fetched in ended]

    def begin(self, content):
        self.tokens[super().begin(content)] = content.token_ids[0]

    def keep(self, *contents):
        """Pages that only the store has."""
        for each in contents:
            self.device.fill(3, 1.0)
            self.save((7, each, 3))
            self.confirm()
            self.settled()
        assert self.connector.tiers.flush(10)
        self.tier.delete([each.key for each in contents])


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(remote_store, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(remote_store, "DISCONNECT_SECONDS", 0.2)


def test_pages_in_host_memory_come_while_a_store_hangs_and_it_is_left_alone_then():
    store = Hanging()
    made = Behind(store)
    far = [content(number) for number in range(1, 9)]
    made.keep(*far)
    near = content(20)
    made.save((7, near, 3))
    made.confirm()
    made.settled()
    assert made.connector.tiers.flush(10)
    store.hanging.add("get")
    for each in far[: 2 * NUM_THREADS]:
        made.begin(each)
    made.begin(near)
    assert made.came(1) == [(20, [True])], "who needs host memory only waited for the store"
    assert {is_there for _, some in made.came(2 * NUM_THREADS) for is_there in some} == {False}
    num_asked = store.num_calls["get"]
    assert made.connector.look_up([each.key for each in far]) == [Lookup.MISS] * 8, "the next request would wait again"
    made.begin(far[-1])
    assert made.came(1) == [(8, [False])] and store.num_calls["get"] == num_asked
    store.gate.set()
    store.hanging.clear()
    made.far._reads._open_until = 0.0
    assert made.connector.look_up([far[0].key]) == [Lookup.HIT]
    made.begin(far[0])
    assert made.came(1) == [(1, [True])], "it answers again"
    made.close()


@pytest.mark.parametrize("has_host", [True, False])
@pytest.mark.parametrize("hanging", [*[(each,) for each in CALLS], CALLS])
def test_whatever_hangs_saving_and_closing_end(hanging, has_host):
    store = Hanging(*hanging)
    made, begin = Behind(store, has_host=has_host), time.monotonic()
    for number in range(12):
        made.connector.look_up([content(number).key])
        made.save((7, content(number), 3))
        made.confirm()
        made.begin(content(number))
    made.worker.start_load_kv(KVConnectorMetadata(discarded=[content(0).key]))
    assert len(made.came(12)) == 12
    assert made.has_room(10)
    made.close()
    assert time.monotonic() - begin < 20
    store.gate.set()
    assert store.num_calls["put"] <= remote_store.NUM_CALLS


def test_a_store_that_does_not_say_what_it_has_is_not_asked_again_for_a_while():
    store = Hanging("exist")
    made = Behind(store)
    keys = [content(number).key for number in range(40)]
    assert made.connector.look_up(keys[:1]) == [Lookup.PENDING]
    deadline = time.monotonic() + 10
    while not made.far._breaker.blocks:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert made.connector.look_up(keys) == [Lookup.MISS] * 40 and store.num_calls["exist"] == 1
    store.gate.set()
    made.close()
