"""Engines that lend pages to each other: the protocol over real sockets, and what peers may not do."""

import contextlib
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from jaxpaged.errors import ConfigError, PageError, RequestError
from jaxpaged.kv_store import channel as wire
from jaxpaged.kv_store.channel import Channel, Get, Gone
from jaxpaged.kv_store.connections import Connections
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import PageHeader, PageKey, decode, encode, namespace
from jaxpaged.kv_store.producer import KVProducer
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.transfer_params import (
    RemoteSource,
    answer_params,
    check_request,
    checked_address,
    source_of,
    transfer_params,
)

SPACE, OTHER = namespace(weights="a"), namespace(weights="b")
SECRET = b"sixteen letters."
VALUES = np.arange(2 * 2 * 4 * 2 * 8, dtype=np.float32).reshape(2, 2, 4, 2, 8)
KEYS = [PageKey(bytes([i]) * 32, 0) for i in range(3)]
MOST = 1 << 20


def put(store, key, secret=None):
    store.put(key, encode(PageHeader(SPACE, key, None, (1, 2, 3, 4)), VALUES + key.block_hash[0], secret))


@contextlib.contextmanager
def lending(secret=None, lease_s=30.0, capacity=1 << 20, keys=KEYS, tls=None, shares=True):
    store = HostTier(1 << 20)
    producer = KVProducer(
        store,
        ("127.0.0.1", 0),
        SPACE,
        lease_s=lease_s,
        capacity=capacity,
        secret=secret,
        tls=tls,
        shares=shares,
        page_tokens=32,
    )
    for key in keys:
        put(store, key, secret)
    try:
        yield producer, store
    finally:
        producer.close()


@contextlib.contextmanager
def channels(secret, most=0):
    """Both ends of a connection that have greeted each other: (client, server, the server's socket, the client's)."""
    a, b = socket.socketpair()
    ready = []
    thread = threading.Thread(target=lambda: ready.append(Channel(a, SPACE, secret, is_server=True, most=0)))
    thread.start()
    client = Channel(b, SPACE, secret, is_server=False, most=most)
    thread.join()
    [server] = ready
    try:
        yield client, server, a, b
    finally:
        client.close()
        server.close()


@contextlib.contextmanager
def borrowing(producer, space=SPACE, secret=None, most=MOST, peers="127.0.0.1", tls=None, shares=True):
    """A consumer, and a source whose lease names all keys, of a prompt that is computed."""
    lease, _ = producer.grant(KEYS)
    producer.finish(lease, KEYS)
    producer.hold(KEYS)
    consumer = KVConsumer(space, most, secret, peers=peers, tls=tls, shares=shares, page_tokens=24)
    source = RemoteSource(producer.host, producer.port, lease, 12)
    consumer.expect(KEYS, source)
    try:
        yield consumer, source
    finally:
        consumer.close()


def got(consumer, key):
    pages = {}
    consumer.pull([key], pages.__setitem__)
    return pages.get(key)


def eventually(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_pages_are_fetched_under_a_lease_and_given_back(secret):
    with lending(secret) as (producer, store), borrowing(producer, secret=secret) as (consumer, source):
        store.delete(KEYS)  # what is lent stays, whatever tiers forget
        assert consumer.lookup([*KEYS, PageKey(b"x" * 32, 0)]) == [Lookup.HIT] * 3 + [Lookup.MISS]
        for key in KEYS:
            _, values = decode(got(consumer, key), expect_namespace=SPACE, key=key, secret=secret)
            np.testing.assert_array_equal(values, VALUES + key.block_hash[0])
        stats = producer.stats()
        assert stats["kv_lent_pages"] == 3 and stats["kv_lease_bytes"] == stats["kv_lent_bytes"] > 0
        consumer.release(source)
        assert consumer.lookup(KEYS) == [Lookup.MISS] * 3, "it would be asked for in vain"
        eventually(lambda: producer.stats()["kv_leases_released"] == 1)
        assert producer.stats()["kv_lease_bytes"] == producer.stats()["kv_leases"] == 0
        consumer.expect(KEYS, source)
        assert got(consumer, KEYS[0]) is None, "the lease has ended"
        assert consumer.usage().counters.hits == 3


def test_a_page_that_is_still_on_its_way_is_waited_for():
    with lending(keys=KEYS[:2]) as (producer, store), borrowing(producer) as (consumer, _):
        came = []
        thread = threading.Thread(target=lambda: came.append(got(consumer, KEYS[2])))
        thread.start()
        put(store, KEYS[2])
        producer.hold([KEYS[2]])
        thread.join(5)
        assert came[0] is not None


def test_what_never_comes_is_waited_for_once(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.producer.PAGE_PATIENCE", 0.3)
    with lending(keys=KEYS[:1]) as (producer, _), borrowing(producer) as (consumer, _):
        begin = time.monotonic()
        assert [got(consumer, key) is None for key in KEYS] == [False, True, True]
        assert 0.2 < time.monotonic() - begin < 0.55


def test_a_peer_that_nobody_allowed_is_never_asked():
    with lending() as (producer, _), borrowing(producer, peers="10.0.0.1, 127.0.0.1:1") as (consumer, _):
        assert consumer.lookup(KEYS) == [Lookup.MISS] * 3 and got(consumer, KEYS[0]) is None
        assert producer.stats()["kv_lent_pages"] == 0


def test_a_lease_ends_with_its_time_and_memory_is_bounded():
    with lending(lease_s=0.05) as (producer, _), borrowing(producer) as (consumer, _):
        time.sleep(0.1)
        assert got(consumer, KEYS[0]) is None
        assert producer.stats()["kv_leases_expired"] == 1 and producer.stats()["kv_lease_bytes"] == 0
    with lending(capacity=1500) as (producer, _), borrowing(producer):
        assert 0 < producer.stats()["kv_lease_bytes"] <= 1500 and producer.stats()["kv_lent_refused"] == 2


def test_two_leases_of_one_page_end_apart():
    with lending() as (producer, _), borrowing(producer) as (_, first), borrowing(producer) as (consumer, _):
        assert producer.release(first.lease) and not producer.release(first.lease)
        assert got(consumer, KEYS[0]) is not None
        consumer.expect(KEYS, RemoteSource(producer.host, producer.port, "unknown", 12))
        assert got(consumer, KEYS[0]) is None


@pytest.mark.parametrize(
    ("space", "secret", "most"),
    [(OTHER, None, MOST), (SPACE, SECRET, MOST), (SPACE, None, 100)],
    ids=["namespace", "secret", "size"],
)
def test_peers_that_differ_refuse_each_other_and_nothing_is_used(space, secret, most, caplog):
    with lending() as (producer, _), borrowing(producer, space, secret, most) as (consumer, _):
        assert got(consumer, KEYS[0]) is None and got(consumer, KEYS[1]) is None
        assert consumer.usage().counters.corrupt == 1 and "left alone" in caplog.text
        if most == MOST:  # the producer says so in its own time, and not into the log of the next test
            eventually(lambda: "A consumer of keys and values is refused" in caplog.text)
        assert ("with 32 and 24 tokens in a page" in caplog.text) == (space is OTHER)


def test_another_version_and_another_secret_are_refused(monkeypatch, caplog):
    with lending(SECRET) as (producer, _), borrowing(producer, secret=b"another of sixteen") as (consumer, _):
        assert got(consumer, KEYS[0]) is None
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
        assert "not signed with our page_secret" in caplog.text
    with lending() as (producer, _):
        connection = socket.create_connection((producer.host, producer.port), 5)
        monkeypatch.setattr(Channel, "_greet", greet_as_the_next_version)
        with pytest.raises(PageError, match="version"):
            Channel(connection, SPACE, None, is_server=False, most=MOST)
        connection.close()


def test_a_lease_lasts_as_long_as_somebody_waits_for_it_but_not_for_ever(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.RENEW_SECONDS", 0.05)
    with lending(lease_s=0.3) as (producer, _), borrowing(producer) as (consumer, source):
        consumer.keep_lease(source)
        time.sleep(0.9)
        assert got(consumer, KEYS[0]) is not None and producer.stats()["kv_leases_expired"] == 0
        consumer.release(source)
        eventually(lambda: producer.stats()["kv_leases_released"] == 1)
        assert not consumer._kept
        monkeypatch.setattr("jaxpaged.kv_store.producer.LONGEST", 2)
        lease, _ = producer.grant(KEYS)
        producer.finish(lease, KEYS)
        consumer.keep_lease(RemoteSource(producer.host, producer.port, lease, 12))
        eventually(lambda: not consumer._kept)  # it hears that there is none
        assert producer.stats()["kv_leases_expired"] == 1 and producer.renew(lease) == 0


def test_leases_of_strangers_are_not_kept(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.RENEW_SECONDS", 0.05)
    with lending() as (producer, _), borrowing(producer, peers="10.0.0.1") as (consumer, source):
        consumer.keep_lease(source)
        assert not consumer._kept


def test_a_peer_that_hangs_does_not_let_the_leases_of_others_end(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.RENEW_SECONDS", 0.05)
    with (
        lending(lease_s=0.4) as (producer, _),
        borrowing(producer) as (consumer, source),
        contextlib.ExitStack() as stack,
    ):
        for i in range(3):
            hangs = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            consumer.keep_lease(RemoteSource("127.0.0.1", hangs.getsockname()[1], f"hangs {i}", 12))
        consumer.keep_lease(source)
        time.sleep(1.0)
        assert got(consumer, KEYS[0]) is not None and producer.stats()["kv_leases_expired"] == 0


def test_a_stranger_is_told_nothing_of_a_lease_either():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        consumer = KVConsumer(SPACE, MOST, peers="10.0.0.1")
        consumer.release(RemoteSource("127.0.0.1", stranger.getsockname()[1], "lease", 12))
        consumer.close()
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.accept()


def greet_as_the_next_version(channel, own, is_server):
    if is_server:
        return original_greet(channel, own, is_server)
    return original_greet(channel, msgspec.structs.replace(own, version=wire.VERSION + 1), is_server)


original_greet = Channel._greet


def test_a_flipped_bit_is_found_and_the_rest_of_the_lease_is_not_asked_for(monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.consumer.RETRY_SECONDS", 0.0)  # other leases of the peer are
    with lending() as (producer, _), borrowing(producer) as (consumer, source):
        lease = producer._leases[source.lease]
        damaged = lease.pages[KEYS[0]].copy()
        damaged[-3] ^= 1
        lease.pages[KEYS[0]] = damaged
        assert got(consumer, KEYS[0]) is None and got(consumer, KEYS[1]) is None
        assert consumer.usage().counters.corrupt == 1 and producer.stats()["kv_lent_pages"] == 1


def test_a_peer_that_is_gone_costs_little():
    with lending() as (producer, _), borrowing(producer) as (consumer, _):
        assert got(consumer, KEYS[0]) is not None
        producer.close()
        begin = time.monotonic()
        assert [got(consumer, key) for key in KEYS] == [None] * 3
        assert time.monotonic() - begin < 2 and consumer.usage().counters.errors == 1


def test_a_lender_that_ends_before_its_threads_begin_ends_quietly(monkeypatch):
    began = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: began.append(thread))
        producer = KVProducer(HostTier(1), ("127.0.0.1", 0), SPACE, lease_s=1.0, capacity=1)
    producer.close()
    producer._closing = False  # so that they come to wait, as when they are at it already
    assert len(began) == len(producer._sockets)
    for thread in began:
        thread.run()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + b" " * 64, wire.HEAD.pack(b"JPKV", 1 << 30, 0), wire.HEAD.pack(b"JPKV", 4, 1)]
)
def test_strangers_are_hung_up_on(said):
    with lending() as (producer, _), borrowing(producer) as (consumer, _):
        with socket.create_connection((producer.host, producer.port), 5) as connection:
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        eventually(lambda: producer.stats()["kv_lent_refused"] == 1)
        assert got(consumer, KEYS[0]) is not None, "others are served"


def hangs_up(connection):
    connection.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_a_flood_of_strangers_keeps_no_borrower_out_and_costs_one_line(monkeypatch, caplog):
    monkeypatch.setattr("jaxpaged.kv_store.connections.MAX_STRANGERS", 4)
    with lending() as (producer, _), borrowing(producer) as (consumer, _), contextlib.ExitStack() as stack:
        assert got(consumer, KEYS[0]) is not None
        connect = lambda: stack.enter_context(socket.create_connection((producer.host, producer.port), 5))
        strangers = [connect() for _ in range(40)]
        assert all(hangs_up(each) for each in strangers[:36])
        assert got(consumer, KEYS[1]) is not None, "on the connection that it has"
        for _, channel in consumer._idle:
            channel.close()
        assert got(consumer, KEYS[2]) is not None, "on a new one"
        assert producer.stats()["kv_lent_refused"] >= 36 and caplog.text.count("is refused") == 1
        monkeypatch.setattr("jaxpaged.kv_store.connections.ASK_SECONDS", 0.05)
        strangers[-1].sendall(wire.HEAD.pack(wire.MAGIC, 100, 0))  # as slow as it likes to be
        assert hangs_up(strangers[-1])
        assert got(consumer, KEYS[0]) is not None


def test_who_comes_when_all_places_are_taken_is_refused(monkeypatch, caplog):
    monkeypatch.setattr("jaxpaged.kv_store.connections.MAX_CONNECTIONS", 2)
    now, connections = [100.0], Connections(lambda: now[0])
    pairs = [socket.socketpair() for _ in range(4)]
    (first, _), (second, _), (third, theirs), (fourth, _) = pairs
    assert connections.admit(first) and connections.admit(second)
    connections.known(first)
    assert connections.admit(third) and hangs_up(pairs[1][1]), "a stranger leaves for another one"
    connections.known(third)
    assert not connections.admit(fourth) and connections.num_refused == 2, "a consumer does not"
    now[0] += 61
    connections.expire()  # consumers may be silent
    connections.refused("It is none of ours.")
    assert caplog.text.count("is refused") == 2 and "none of ours. So were 1 more" in caplog.text
    connections.left(first)
    connections.close()
    assert connections.admit(fourth) and hangs_up(theirs)
    for each in (end for pair in pairs for end in pair):
        each.close()


def test_a_signed_message_cannot_be_repeated():
    with channels(SECRET) as (client, server, _, b):
        frame = client._encoder.encode(Get("l", [(b"h", 0)]))[0]
        head = wire.HEAD.pack(wire.MAGIC, len(frame), 0)
        twice = head + frame + client._tag(0, head + frame)
        b.sendall(twice * 2)
        assert server.receive() == Get("l", [(b"h", 0)])
        with pytest.raises(PageError, match="not signed"):
            server.receive()


def test_what_requests_may_say():
    source = RemoteSource("127.0.0.1", 5600, "lease", 12)
    said = answer_params(source, "engine", [[1, 2], [3]], 1.0)
    params = {"kv_transfer_params": {**said, "from_another_version": 1}}
    assert source_of(transfer_params(params)) == source
    check_request(params, "kv_consumer", "127.0.0.1")
    check_request(params, "kv_both", "a, 127.0.0.1:5600")
    check_request({"kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}, "kv_producer", "")
    for role, peers, changes, words in (
        (None, "127.0.0.1", {}, "no kv_role"),
        ("kv_producer", "127.0.0.1", {}, "do_remote_prefill.*kv_role is kv_producer"),
        ("kv_consumer", "127.0.0.1", {"remote_host": "10.0.0.1"}, "kv_peers does not"),
        ("kv_consumer", "127.0.0.1:1", {}, "kv_peers does not"),
        ("kv_consumer", "127.0.0.1", {"remote_port": 1 << 16}, "as it is"),
        ("kv_consumer", "127.0.0.1", {"remote_request_id": None}, "as it is"),
        ("kv_consumer", "127.0.0.1", {"remote_port": "x"}, "remote_port"),
        ("kv_both", "127.0.0.1", {"do_remote_decode": True}, "one of them"),
    ):
        with pytest.raises(RequestError, match=words):
            check_request({"kv_transfer_params": {**said, **changes}}, role, peers)
    with pytest.raises(RequestError, match="kv_transfer_params"):
        transfer_params({"kv_transfer_params": [1]})


def test_addresses():
    assert checked_address("127.0.0.1:0") == ("127.0.0.1", 0) and checked_address("[::1]:7") == ("::1", 7)
    for bad in ("", "host", "host:x", "host:70000", "0.0.0.0:1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            checked_address(bad)
    with lending() as (producer, _), pytest.raises(ConfigError, match="cannot be used"):
        KVProducer(HostTier(1), ("127.0.0.1", producer.port), SPACE, lease_s=1.0, capacity=1)
    assert isinstance(Gone("x"), wire.Message)
