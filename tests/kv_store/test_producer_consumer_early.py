"""Prompts that are lent while they are computed: pages come as they are there, and whatever happens ends in a miss."""

import contextlib
import threading
import time

import pytest

from jaxpaged.kv_store.channel import MAX_PAGES
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.transfer_params import RemoteSource
from tests.kv_store.test_producer_consumer import MOST, SPACE, eventually, lending, put

KEYS = [PageKey(bytes([i]) * 32, 0) for i in range(6)]


class Following:
    """A consumer that pulls the pages of a lease in a thread."""

    def __init__(self, producer, keys=KEYS):
        self.lease, _ = producer.grant(keys)
        self.consumer = KVConsumer(SPACE, MOST, peers="127.0.0.1")
        self.source, self.came = RemoteSource(producer.host, producer.port, self.lease, 4 * len(keys)), []
        self.consumer.expect(keys, self.source)
        self._thread = threading.Thread(target=self.consumer.pull, args=(keys, lambda key, page: self.came.append(key)))
        self._thread.start()

    def ended(self, seconds=5.0):
        self._thread.join(seconds)
        return not self._thread.is_alive()


@contextlib.contextmanager
def following(keys=KEYS, **options):
    with lending(keys=(), **options) as (producer, store):
        follower = Following(producer, keys)
        try:
            yield producer, store, follower
        finally:
            follower.consumer.close()
            assert follower.ended()


def compute(producer, store, *keys):
    for key in keys:
        put(store, key)
    producer.hold(keys)


def test_pages_come_while_the_prompt_is_computed():
    with following() as (producer, store, follower):
        for i, key in enumerate(KEYS):
            assert not follower.ended(0)
            compute(producer, store, key)
            eventually(lambda: len(follower.came) == i + 1)  # noqa: B023
        assert follower.ended() and follower.came == KEYS
        assert producer.renew(follower.lease) == 30.0, "the prompt is still being computed, and its lease has no end"
        follower.consumer.release(follower.source)
        eventually(lambda: producer.stats()["kv_lease_bytes"] == producer.stats()["kv_leases"] == 0)
        producer.finish(follower.lease, KEYS)
        assert producer.stats()["kv_leases"] == 0, "it was given back before"


def test_pages_that_nobody_knew_of_when_a_prompt_began_are_lent_once_it_is_computed():
    with following(KEYS[:2]) as (producer, store, follower):
        compute(producer, store, *KEYS[:2])
        producer.finish(follower.lease, KEYS[:3])
        compute(producer, store, KEYS[2])
        assert follower.ended()
        follower.consumer.expect(KEYS[2:3], follower.source)
        follower.consumer.pull(KEYS[2:3], lambda key, page: follower.came.append(key))
        assert follower.came == KEYS[:3]


def test_pages_may_come_in_another_order_than_they_are_asked_for():
    with following(KEYS[:3]) as (producer, store, follower):
        for key in (KEYS[1], KEYS[2], KEYS[0]):
            assert not follower.ended(0)
            compute(producer, store, key)
            eventually(lambda: key in follower.came)  # noqa: B023
        assert follower.ended() and set(follower.came) == set(KEYS[:3])


def abort(producer, follower):
    producer.release(follower.lease)


def die(producer, follower):
    for listener in producer._sockets:
        listener.close()
    producer._connections.close()


def expire(producer, follower):
    producer._lease_s = 0.01
    producer.finish(follower.lease, ())


def give_up(producer, follower):
    follower.consumer.release(follower.source)


def miss(producer, follower):
    producer.finish(follower.lease, ())


def say_nothing(producer, follower):
    pass


@pytest.mark.parametrize("event", [abort, die, expire, give_up, miss, say_nothing])
def test_what_ends_in_the_middle_leaves_what_came(event, monkeypatch):
    patience = 0.2 if event in (miss, say_nothing) else 4.0
    monkeypatch.setattr("jaxpaged.kv_store.producer.PAGE_PATIENCE", patience)
    with following() as (producer, store, follower):
        compute(producer, store, *KEYS[:2])
        eventually(lambda: len(follower.came) == 2)
        begin = time.monotonic()
        event(producer, follower)
        assert follower.ended() and follower.came == KEYS[:2]
        assert time.monotonic() - begin < 3
        counters = follower.consumer.usage().counters
        assert (counters.hits, counters.misses, counters.errors) == (2, 4, event is die)
        if event in (abort, expire, give_up):
            eventually(lambda: producer.stats()["kv_leases"] == producer.stats()["kv_lease_bytes"] == 0)


def test_a_lender_that_hangs_costs_one_time_out(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.ANSWER_SECONDS", 0.3)
    with following() as (producer, store, follower):
        compute(producer, store, KEYS[0])
        assert follower.ended() and follower.came == KEYS[:1]
        assert follower.consumer.usage().counters.errors == 1


def test_a_page_that_finds_no_room_is_not_waited_for():
    with following(capacity=1500) as (producer, store, follower):
        compute(producer, store, *KEYS)
        assert follower.ended(2) and len(follower.came) == 1
        assert producer.stats()["kv_lent_refused"] == 5


def test_a_long_prompt_comes_over_several_connections_once_it_is_computed():
    keys = [PageKey(i.to_bytes(32, "big"), 0) for i in range(5 * MAX_PAGES)]
    with lending(keys=(), capacity=1 << 26) as (producer, store):
        store.capacity = 1 << 26
        lease, _ = producer.grant(keys)
        consumer, came, names = KVConsumer(SPACE, MOST, peers="127.0.0.1"), [], set()
        consumer.expect(keys, RemoteSource(producer.host, producer.port, lease, 4 * len(keys)))
        compute(producer, store, *keys)
        producer.finish(lease, keys)

        ask = consumer._ask

        def ask_noted(*question):
            names.add(threading.current_thread().name[:7])
            return ask(*question)

        consumer._ask = ask_noted
        consumer.pull(keys, lambda key, page: came.append(key))
        assert sorted(key.block_hash for key in came) == [key.block_hash for key in keys] and "kv-pull" in names
        assert consumer.usage().counters.hits == len(keys) and producer.stats()["kv_lent_pages"] == len(keys)
        consumer.close()


def test_a_peer_that_answers_nonsense_is_not_believed(monkeypatch):
    import jaxpaged.kv_store.producer as lending_side

    right = lending_side.answer_of

    def answer(*args, **more):
        answer = right(*args, **more)
        answer.there[:] = [place + 60 for place in answer.there]
        return answer

    monkeypatch.setattr(lending_side, "answer_of", answer)
    with following() as (producer, store, follower):
        compute(producer, store, KEYS[0])
        assert follower.ended() and not follower.came and follower.consumer.usage().counters.corrupt == 1
