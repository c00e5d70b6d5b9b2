"""Pages between engines on one host come through memory that the kernel frees, whoever is killed, and else by TCP."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from jaxpaged.errors import PageError
from jaxpaged.kv_store import shared_memory
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.channel import Pages
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.page import decode
from jaxpaged.kv_store.transfer_params import RemoteSource
from tests.kv_store.test_producer_consumer import (
    KEYS,
    SECRET,
    SPACE,
    VALUES,
    borrowing,
    channels,
    eventually,
    got,
    lending,
)

pytestmark = pytest.mark.skipif(not shared_memory.IS_HERE, reason="it is Linux's")


def is_near(consumer):
    return [channel.is_near for _, channel in consumer._idle]


def carried(consumer):
    """Pages and bytes by what carried them, where there were any."""
    pages, num_bytes = map(consumer.stats().get, ("kv_borrowed_pages", "kv_borrowed_bytes"))
    return {name: (count, num_bytes[name]) for name, count in pages.items() if count}


@pytest.mark.parametrize("secret", [None, SECRET])
def test_pages_of_an_engine_on_this_host_come_through_memory(secret):
    with lending(secret) as (producer, _), borrowing(producer, secret=secret) as (consumer, source):
        for key in KEYS:
            _, values = decode(got(consumer, key), expect_namespace=SPACE, key=key, secret=secret)
            np.testing.assert_array_equal(values, VALUES + key.block_hash[0])
        assert is_near(consumer) == [True]
        assert carried(consumer) == {"shared_memory": (3, consumer.usage().counters.loaded_bytes)}
        consumer.release(source)
        eventually(lambda: producer.stats()["kv_leases"] == 0)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_either_side_may_keep_to_tcp(side):
    lends, borrows = side != "producer", side != "consumer"
    with lending(shares=lends) as (producer, _), borrowing(producer, shares=borrows) as (consumer, _):
        assert got(consumer, KEYS[0]) is not None and is_near(consumer) == [False]
        assert carried(consumer) == {"tcp": (1, consumer.usage().counters.loaded_bytes)}


def test_what_the_kernel_does_not_allow_goes_by_tcp(monkeypatch):
    def refuse(*args):
        raise PermissionError("not allowed")

    with lending() as (producer, _), borrowing(producer) as (consumer, _):
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            assert got(consumer, KEYS[0]) is not None and is_near(consumer) == [False]
        assert producer.stats()["kv_lent_refused"] == 0


def test_another_user_is_refused_on_both_sides(monkeypatch):
    with lending() as (producer, _), borrowing(producer) as (consumer, _):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert shared_memory.connect(producer.host, producer.port, 1.0) is None
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(shared_memory.name_of(producer.host, producer.port))
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
        assert producer.stats()["kv_lent_refused"] >= 1
        assert got(consumer, KEYS[0]) is not None and is_near(consumer) == [False]


def test_what_does_not_fit_comes_over_the_socket(monkeypatch):
    monkeypatch.setattr(shared_memory, "ARENA_BYTES", 1 << 16)
    pages = [np.full(size, size % 251, np.uint8) for size in (40_000, 30_000, 20_000, 1, 70_000)]
    with channels(None, most=1 << 22) as (client, server, _, _):
        for _ in range(3):
            thread = threading.Thread(target=server.send, args=(Pages(pages, list(range(5)), [], False),))
            thread.start()
            contents = client.receive().contents
            thread.join()
            assert all(np.array_equal(page, content) for page, content in zip(pages, contents, strict=True))
            assert all(content.ctypes.data % 64 == 0 for content in contents)
        assert carried(client._transports) == {"shared_memory": (9, 3 * 60_001), "unix": (6, 3 * 100_000)}


def test_a_copy_is_handed_out_and_not_the_memory_itself():
    with channels(None, most=1 << 22) as (client, server, _, _):
        server.send(Pages([np.full(1000, 1, np.uint8)], [0], [], False))
        (first,) = client.receive().contents
        server.send(Pages([np.full(1000, 2, np.uint8)], [0], [], False))
        (second,) = client.receive().contents
        assert (first == 1).all() and (second == 2).all()
        with pytest.raises(ValueError, match="read-only"):
            client._arena._bytes[:] = 0


def test_memory_that_is_not_there_or_too_small_is_no_page():
    with channels(None, most=1 << 22) as (client, server, _, _):
        server._arena.put = lambda page: True
        server.send(Pages([aligned_empty(shared_memory.ARENA_BYTES // 4)] * 5, list(range(5)), [], False))
        with pytest.raises(PageError, match="in memory that has"):
            client.receive()
    with channels(None, most=1 << 22) as (client, server, _, _):
        client._arena = None
        server.send(Pages([aligned_empty(10)], [0], [], False))
        with pytest.raises(PageError, match="there is none"):
            client.receive()


@pytest.mark.parametrize(
    ("flags", "size", "words"),
    [(os.MFD_ALLOW_SEALING, 4096, "keeps its size"), (None, 0, "keeps its size"), ("sealed", 1 << 40, "at most")],
)
def test_memory_that_might_shrink_or_is_too_large_is_not_read(flags, size, words):
    a, b = socket.socketpair()
    if flags is None:
        a.sendall(b"m")
    else:
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        if flags == "sealed":
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, shared_memory.SEALS)
        socket.send_fds(a, [b"m"], [descriptor])
        os.close(descriptor)
    with pytest.raises(PageError, match=words):
        shared_memory.accept(b)
    a.close()
    b.close()


def test_memory_is_sealed():
    a, b = socket.socketpair()
    shared_memory.offer(a)
    _, (descriptor,), _, _ = socket.recv_fds(b, 1, 1)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with mmap.mmap(descriptor, 4096) as there:
        assert there[:1] == b"\0"
    for each in (a, b):
        each.close()
    os.close(descriptor)


LENDER = """
    import sys, time
    from tests.kv_store.test_producer_consumer import KEYS, lending
    with lending() as (producer, store):
        lease, _ = producer.grant(KEYS)
        producer.hold(KEYS[:2])
        print(producer.port, lease, flush=True)
        time.sleep(60)
"""


def test_a_killed_lender_leaves_nothing_and_what_came_is_whole():
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(LENDER)], stdout=subprocess.PIPE, text=True)
    try:
        port, lease = process.stdout.readline().split()
        consumer, before = KVConsumer(SPACE, 1 << 20, peers="127.0.0.1"), set(os.listdir("/dev/shm"))
        consumer.expect(KEYS, RemoteSource("127.0.0.1", int(port), lease, 12))
        came = {}
        thread = threading.Thread(target=consumer.pull, args=(KEYS, came.__setitem__))
        thread.start()
        eventually(lambda: len(came) == 2)
        assert [channel.is_near for channel in consumer._busy] == [True]
        process.send_signal(signal.SIGKILL)
        thread.join(5)
        assert not thread.is_alive() and set(came) == set(KEYS[:2])
        for key, page in came.items():
            np.testing.assert_array_equal(decode(page, expect_namespace=SPACE, key=key)[1], VALUES + key.block_hash[0])
        assert set(os.listdir("/dev/shm")) == before
        assert shared_memory.connect("127.0.0.1", int(port), 1.0) is None
        consumer.close()
    finally:
        process.kill()
        process.communicate()
