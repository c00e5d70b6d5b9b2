"""What peers may say, and how much of it: everything else is refused, and nothing of it is believed or kept."""

import contextlib
import socket
import time

import msgspec
import pytest

from jaxpaged.errors import PageError
from jaxpaged.kv_store import channel as wire
from jaxpaged.kv_store.channel import MAX_PAGES, Channel, Get, Pages, Renewed
from jaxpaged.kv_store.connections import Connections
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.page import PageHeader, PageKey, encode
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.transfer_params import RemoteSource
from tests.kv_store.test_producer_consumer import (
    KEYS,
    MOST,
    OTHER,
    SECRET,
    SPACE,
    VALUES,
    borrowing,
    channels,
    eventually,
    got,
    hangs_up,
    lending,
    put,
)
from tests.kv_store.test_producer_consumer_early import following

MANY = [PageKey(i.to_bytes(32, "big"), 0) for i in range(MAX_PAGES + 6)]


@contextlib.contextmanager
def asking(producer, secret=None, most=MOST):
    """A channel to a producer, as a consumer's."""
    connection = socket.create_connection((producer.host, producer.port), 5)
    try:
        yield Channel(connection, SPACE, secret, is_server=False, most=most)
    finally:
        connection.close()


@contextlib.contextmanager
def lending_many():
    """A producer, and a lease of more pages than an answer has."""
    with lending(keys=()) as (producer, store):
        lease, _ = producer.grant(MANY)
        for key in MANY:
            put(store, key)
        producer.hold(MANY)
        producer.finish(lease, MANY)
        yield producer, lease


@pytest.mark.parametrize("changes", [{"version": wire.VERSION + 1}, {"nonce": b""}], ids=["version", "nonce"])
def test_greetings_of_others_are_refused(changes, monkeypatch):
    greet = Channel._greet

    def greet_otherwise(channel, own, is_server):
        return greet(channel, own if is_server else msgspec.structs.replace(own, **changes), is_server)

    with lending() as (producer, _):
        monkeypatch.setattr(Channel, "_greet", greet_otherwise)
        with pytest.raises(PageError, match="The peer refuses"), asking(producer):
            pass
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)


def test_a_signed_message_cannot_be_sent_back_to_who_sent_it():
    with channels(SECRET) as (client, _, a, _b):
        client.send(Get("l", [(b"h", 0)]))
        a.sendall(a.recv(1 << 16))
        with pytest.raises(PageError, match="not signed"):
            client.receive()


@pytest.mark.parametrize(
    ("num_message", "num_pages"), [(wire.MAX_MESSAGE + 1, 0), (40, MAX_PAGES + 1)], ids=["long", "many pages"]
)
def test_what_is_announced_is_not_waited_for_where_it_is_too_much(num_message, num_pages):
    with channels(None, most=MOST) as (client, _, a, b):
        a.sendall(wire.HEAD.pack(wire.MAGIC, num_message, num_pages))
        b.settimeout(2)
        with pytest.raises(PageError, match="at most"):
            client.receive()


def test_a_question_and_an_answer_have_so_much_and_no_more(monkeypatch):
    with lending_many() as (producer, lease), asking(producer) as channel:
        question = Get(lease, [(key.block_hash, key.group) for key in MANY])
        channel.send(question)
        answer = channel.receive()
        assert isinstance(answer, Pages) and answer.there == list(range(MAX_PAGES)) and not answer.gone
        monkeypatch.setattr("jaxpaged.kv_store.producer.MOST_SENT", 2 * answer.contents[0].nbytes)
        channel.send(question)
        assert channel.receive().there == [0, 1]
        monkeypatch.setattr("jaxpaged.kv_store.producer.MOST_SENT", 1)
        channel.send(question)
        assert channel.receive().there == [0], "one that alone has more is sent"


def test_what_is_no_question_is_refused():
    with lending() as (producer, _), asking(producer) as channel:
        channel.send(Renewed(1.0))
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)


def test_a_borrower_expects_so_many_pages_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.MAX_KEYS", 4)
    consumer = KVConsumer(SPACE, MOST, peers="127.0.0.1")
    consumer.expect(MANY[:6], RemoteSource("127.0.0.1", 1, "lease", 24))
    assert consumer.lookup(MANY[:6]) == [Lookup.MISS] * 2 + [Lookup.HIT] * 4
    consumer.close()


def test_who_closes_waits_for_no_answer():
    with following() as (_, _, follower):
        eventually(lambda: follower.consumer._busy)
        begin = time.monotonic()
        follower.consumer.close()
        assert follower.ended() and time.monotonic() - begin < 2


def test_a_connection_that_failed_is_not_used_again(monkeypatch):
    with lending() as (producer, _), borrowing(producer) as (consumer, _):
        assert got(consumer, KEYS[0]) is not None
        ((_, channel),) = consumer._idle
        monkeypatch.setattr(channel, "receive", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            got(consumer, KEYS[1])
        assert channel._socket.fileno() == -1 and not consumer._idle


def test_a_peer_that_does_not_answer_is_not_asked_for_other_leases_either():
    with lending() as (producer, _), borrowing(producer) as (consumer, source):
        producer.close()
        for number, key in enumerate(KEYS):
            consumer.expect([key], RemoteSource(source.host, source.port, f"lease {number}", 4))
            assert got(consumer, key) is None
        assert consumer.usage().counters.errors == 1


def test_a_page_of_another_namespace_is_not_used_whoever_lends_it():
    with lending(keys=KEYS[1:]) as (producer, store):
        store.put(KEYS[0], encode(PageHeader(OTHER, KEYS[0], None, (1, 2, 3, 4)), VALUES))
        with borrowing(producer) as (consumer, _):
            assert got(consumer, KEYS[0]) is None and consumer.usage().counters.corrupt == 1


def test_two_lenders_are_told_apart():
    with lending() as (first, _), lending() as (second, _), borrowing(first) as (consumer, _):
        assert got(consumer, KEYS[0]) is not None
        lease, _ = second.grant(KEYS)
        second.finish(lease, KEYS)
        second.hold(KEYS)
        consumer.expect(KEYS, RemoteSource(second.host, second.port, lease, 12))
        assert got(consumer, KEYS[0]) is not None and second.stats()["kv_lent_pages"] == 1


def test_a_lease_that_has_ended_is_neither_given_back_again_nor_kept(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.RENEW_SECONDS", 0.05)
    with lending(lease_s=0.3) as (producer, _), borrowing(producer) as (consumer, source):
        told, renewed = [], []
        monkeypatch.setattr(consumer, "_send_release", told.append)
        monkeypatch.setattr(consumer, "_renew", renewed.append)
        consumer.release(source)
        consumer.release(source)
        consumer.keep_lease(source)
        assert not consumer._kept
        other = RemoteSource(source.host, source.port, "failed", 12)
        consumer.keep_lease(other)
        eventually(lambda: renewed)
        consumer._end(other.lease)
        time.sleep(0.1)
        renewed.clear()
        time.sleep(0.2)
        assert told == [source] and not renewed


def test_strangers_too_are_hung_up_on_at_the_end():
    connections, (ours, theirs) = Connections(), socket.socketpair()
    assert connections.admit(ours)
    connections.close()
    assert hangs_up(theirs)
    ours.close()
    theirs.close()
