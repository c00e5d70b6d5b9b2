"""The tier over LMCache's multi-process server: what is read and written is right, or a miss; nothing stays locked."""

import hashlib
import json
import logging
import os
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.multiprocess import calls, lmcache_mp_pb2
from jaxpaged.kv_store.lmcache.multiprocess import store as store_module
from jaxpaged.kv_store.lmcache.multiprocess.calls import UnfitServerError
from jaxpaged.kv_store.lmcache.multiprocess.leases import Lease, Leases
from jaxpaged.kv_store.lmcache.multiprocess.pool import FOLDER, PREFIX, Pool, Slot
from jaxpaged.kv_store.lmcache.multiprocess.store import MPStore
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from tests.kv_store.lmcache.chunked import MODEL, SPACE, hashes_of, layout_of, pages_of
from tests.kv_store.lmcache.fake_multiprocess import FakeMultiprocessServer
from tests.kv_store.lmcache.test_keys import GOLDEN
from tests.kv_store.lmcache.test_tier import HASHES, HIT, MISS, TOKENS, chunk_of, settled, stored

pytestmark = pytest.mark.skipif(not Path(FOLDER).is_dir(), reason=f"there is no {FOLDER} to share memory in")
FULL = 32
"""Tokens of TOKENS that are in full chunks."""


@pytest.fixture
def server():
    with closing(FakeMultiprocessServer()) as server:
        yield server


def tier_at(server, layout=None, **options):
    store = MPStore(server.url, layout or layout_of(), MODEL, **{"timeout_s": 5.0, **options})
    return LMCacheTier(store, ChunkHasher(), SPACE)


def known(tier, tokens=TOKENS):
    """The keys of a text's full chunks, which are looked for."""
    tier.introduce(tokens, hashes_of(tokens), len(tokens))
    return list(pages_of(tokens[: len(tokens) // 16 * 16], tier.layout))


def eventually(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_what_one_engine_puts_another_one_gets(server, num_parts):
    layout = layout_of(num_parts)
    with closing(tier_at(server, layout)) as tier:
        pages = stored(tier)
        assert tier.usage()[0].counters.stored == 2
    assert server.idle()
    whole = np.frombuffer(chunk_of(TOKENS, layout), layout.dtype).reshape(layout.shape)
    for worker, part in enumerate(layout.parts(whole)):
        assert server.content(MODEL, num_parts, worker, TOKENS[:16]) == part.tobytes()
    assert len(server.objects) == 2 * num_parts and not server.contexts
    server.calls.clear()
    with closing(tier_at(server, layout)) as tier:
        keys = known(tier)
        assert settled(tier, keys) == [HIT] * len(keys)
        assert server.calls["Lookup"] == 1 and sum(server.locks.values()) == 2 * num_parts
        assert all(bytes(tier.get(key)) == b"".join(map(bytes, pages[key])) for key in keys)
        assert server.calls["PrepareRetrieve"] == 2 * num_parts, "each part of each chunk is fetched once"
        assert server.calls["Lookup"] == 1 and server.idle() and not len(tier._store.leases)


def test_chunks_that_another_client_wrote_are_read(server):
    layout = layout_of()
    for number in (0, 1):
        server.keep(MODEL, 1, 0, TOKENS[: 16 * number + 16], chunk_of(TOKENS, layout, number))
    with closing(tier_at(server)) as tier:
        keys, pages = known(tier), pages_of(TOKENS, layout)
        assert settled(tier, keys) == [HIT] * len(keys)
        assert all(bytes(tier.get(key)) == b"".join(map(bytes, pages[key])) for key in keys)
        assert not tier.collect(TOKENS, HASHES, 32), "it is there"
    assert server.idle()


def test_a_chunk_without_those_before_it_is_not_found(server):
    server.keep(MODEL, 1, 0, TOKENS[:32], chunk_of(TOKENS, layout_of(), 1))
    with closing(tier_at(server)) as tier:
        assert set(settled(tier, known(tier))) == {MISS}
    assert server.idle()


def test_one_look_up_serves_all_chunks_of_a_text_and_others_have_their_own(server):
    texts = [[*range(start, start + 64)] for start in (0, 5000)]
    texts.append([*texts[0][:32], *range(9000, 9032)])
    with closing(tier_at(server)) as tier:
        for text in texts:
            stored(tier, text)
    server.calls.clear()
    with closing(tier_at(server)) as tier:
        keys = list(dict.fromkeys(key for text in texts for key in known(tier, text)))
        tier._store._in_use()
        tier.lookup(keys)
        assert set(settled(tier, keys)) == {HIT}
        assert server.calls["Lookup"] == 3 and len(tier._store.leases) == 3
        for key in keys:
            assert tier.get(key) is not None
        eventually(lambda: sum(server.locks.values()) == 2)  # two texts begin alike, and were looked for apart
    assert server.idle(), "what is not read is unlocked at the end"


def test_what_is_found_is_unlocked_after_a_while_and_asked_for_again(server):
    with closing(tier_at(server)) as tier:
        stored(tier)
    with closing(tier_at(server, hold_s=0.3)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT} and not server.idle()
        eventually(server.idle)
        server.objects.clear()
        eventually(lambda: set(tier.lookup(keys)) == {MISS})
        assert server.idle() and tier.get(keys[0]) is None


def test_a_chunk_that_is_not_locked_any_more_is_looked_for_alone(server):
    with closing(tier_at(server)) as tier:
        stored(tier)
    server.calls.clear()
    with closing(tier_at(server)) as tier:
        last = tier.introduce(TOKENS, HASHES, 32)
        for number, each in enumerate((last.before, last)):
            assert tier._store.fetch(each).tobytes() == chunk_of(TOKENS, tier.layout, number)
            assert server.calls["Lookup"] == number + 1 and server.idle()
        server.objects.popitem()
        assert tier._store.fetch(last) is None and server.idle()


def test_a_closed_tier_leaves_nothing_behind(server):
    with closing(tier_at(server)) as tier:
        stored(tier)
    tier = tier_at(server)
    assert HIT in settled(tier, known(tier)) and not server.idle()
    tier.close()
    assert server.idle() and not server.contexts


# ---- what a server may say -------------------------------------------------------------------------------------


def says(change):
    """An answer of PrepareStore or PrepareRetrieve whose place was changed."""

    def mangle(said):
        context = msgspec.msgpack.decode(said.encoded_context)
        said.encoded_context = msgspec.msgpack.encode(change(context, context["slots"][0]))
        return said

    return mangle


def raw(content):
    def mangle(said):
        said.encoded_context = content
        return said

    return mangle


def with_pickle(said):
    said.data = b"\x80\x04N."
    return said


BAD_PLACES = {
    "negative": says(lambda context, slot: {**context, "slots": [{**slot, "offset": -1}]}),
    "behind the end": says(lambda context, slot: {**context, "slots": [{**slot, "offset": (1 << 20) - 8}]}),
    "far away": says(lambda context, slot: {**context, "slots": [{**slot, "offset": (1 << 64) - 1}]}),
    "too long": says(lambda context, slot: {**context, "slots": [{**slot, "length": 1 << 40}]}),
    "too short": says(lambda context, slot: {**context, "slots": [{**slot, "length": slot["length"] - 2}]}),
    "another shape": says(lambda context, slot: {**context, "slots": [{**slot, "shape": [2, 3, 32, 4]}]}),
    "another type": says(lambda context, slot: {**context, "slots": [{**slot, "dtype": "float16"}]}),
    "no number": says(lambda context, slot: {**context, "slots": [{**slot, "offset": "0"}]}),
    "several": says(lambda context, slot: {**context, "slots": [slot, slot]}),
    "another chunk's": says(lambda context, slot: {**context, "chunk_indices": [1]}),
    "a list": raw(msgspec.msgpack.encode([1])),
    "no msgpack": raw(b"\xc1\x00"),
}


@pytest.mark.parametrize("mangle", BAD_PLACES.values(), ids=BAD_PLACES.keys())
def test_places_to_read_from_that_cannot_be_are_misses_and_one_line(server, mangle, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    with closing(tier_at(server)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT}
        server.mangle["PrepareRetrieve"] = mangle
        assert [tier.get(key) for key in keys] == [None] * len(keys)
        counters = tier.usage()[0].counters
        assert counters.corrupt >= 1 and counters.hits == 0 and set(settled(tier, keys)) == {MISS}
    assert server.idle() and len(warnings(caplog)) == 1


def test_a_pickle_is_not_read(server, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    server.mangle["PrepareRetrieve"] = with_pickle
    with closing(tier_at(server)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT} and tier.get(keys[0]) is None
    assert server.idle() and "sends a pickle. It is not read" in warnings(caplog)[0]


@pytest.mark.parametrize("mangle", BAD_PLACES.values(), ids=BAD_PLACES.keys())
def test_places_to_write_to_that_cannot_be_are_not_written(server, mangle, caplog):
    server.mangle["PrepareStore"] = mangle
    with closing(tier_at(server)) as tier:
        tier.collect(TOKENS, HASHES, 16)
        for key, pieces in pages_of(TOKENS[:16], tier.layout).items():
            tier.put(key, pieces)
        assert tier.usage()[0].counters.stored == 0 and tier.usage()[0].counters.dropped == 1
    assert not any(Path(server.path).read_bytes()), "it was written all the same"
    assert not server.calls["CommitStore"] and not server.sessions
    assert not server.calls["UnregisterKvCacheEngineDrivenContext"], "LMCache would show what was not written"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("count", [-1, 3, 1 << 40])
def test_counts_that_cannot_be_are_misses(server, count, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    server.mangle["QueryPrefetchStatus"] = lambda said: lmcache_mp_pb2.QueryPrefetchStatusResponse(chunk_count=count)
    with closing(tier_at(server)) as tier:
        assert set(settled(tier, known(tier))) == {MISS}
    assert server.idle() and f"says that it has {count} of 2 chunks" in "".join(warnings(caplog))


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("", 0, "--shm-name NAME"),
        ("../etc/passwd", 10, "LMCache's begins with"),
        (f"{PREFIX}../x", 10, "LMCache's begins with"),
        ("psm_other", 10, "LMCache's begins with"),
        (f"{PREFIX}a\0b", 10, "LMCache's begins with"),
        (PREFIX + "x" * 300, 10, "LMCache's begins with"),
        (f"{PREFIX}jaxpaged_none", 10, "must run on the same machine"),
    ],
)
def test_memory_that_is_not_used(server, name, size, said):
    response = lmcache_mp_pb2.RegisterKvCacheEngineDrivenContextResponse(shm_name=name, pool_size=size)
    server.mangle["RegisterKvCacheEngineDrivenContext"] = lambda _: response
    with closing(MPStore(server.url, layout_of(), MODEL)) as store, pytest.raises(UnfitServerError, match=said):
        store.connect()


@pytest.mark.parametrize("size", [0, -1, (1 << 20) + 1])
def test_memory_of_another_size_is_not_used(server, size):
    with pytest.raises(UnfitServerError, match="it has 1048576"):
        Pool(server.name, size)


def test_a_link_is_no_memory(server, tmp_path):
    name = f"{PREFIX}jaxpaged_link"
    (tmp_path / name).symlink_to(server.path)
    with pytest.raises(OSError, match="symbolic link"):
        Pool(name, 16, str(tmp_path))
    assert Pool("/" + server.name, 16).is_at(server.name, 16)


def test_servers_that_were_started_otherwise_say_what_is_wrong():
    otherwise = {
        "chunks of 32 tokens, and this engine of 16": {"chunk_size": 32},
        "--supported-transfer-mode engine_driven": {"serves": ("Controller", "Lookup")},
    }
    for said, options in otherwise.items():
        with ExitStack() as stack:
            server = stack.enter_context(closing(FakeMultiprocessServer(**options)))
            tier = stack.enter_context(closing(tier_at(server)))
            with pytest.raises(UnfitServerError, match=said):
                tier._store.connect()


# ---- what may happen to it ------------------------------------------------------------------------------------


def test_a_server_that_is_gone_costs_one_attempt(server, caplog):
    with closing(tier_at(server, timeout_s=0.5)) as tier:
        server.close()
        assert set(settled(tier, known(tier))) == {MISS}
        began = time.monotonic()
        for key, pieces in pages_of(TOKENS, tier.layout).items():
            tier.collect(TOKENS, HASHES, 16)
            tier.put(key, pieces)
        assert time.monotonic() - began < 5 and tier.usage()[0].counters.stored == 0
    assert len(warnings(caplog)) == 1


METHODS = [
    "GetChunkSize",
    "RegisterKvCacheEngineDrivenContext",
    "Lookup",
    "QueryPrefetchStatus",
    "PrepareRetrieve",
    "CommitRetrieve",
    "EndSession",
    "PrepareStore",
    "CommitStore",
    "FreeLookupLocks",
]


@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_hangs_holds_nobody_up(server, method, caplog):
    other = [7, *TOKENS[1:]]
    with closing(tier_at(server)) as tier:
        stored(tier)
    ends = threading.Event()
    server.before[method] = lambda: ends.wait(20)
    began = time.monotonic()
    with closing(tier_at(server, timeout_s=0.5, hold_s=1.0)) as tier:
        keys = known(tier)
        states = settled(tier, keys)
        got = [tier.get(key) for key in keys]
        hashes = hashes_of(other)
        tier.collect(other, hashes, 16)
        for key, pieces in pages_of(other[:16], tier.layout).items():
            tier.put(key, pieces)
        kept = tier.usage()[0].counters.stored
    assert time.monotonic() - began < 10
    assert any(each is None for each in got) is (method in METHODS[:5]) and (HIT in states) is (method in METHODS[4:])
    ends.set()
    if method not in ("Lookup", "QueryPrefetchStatus"):  # what is stored while these hang may be
        assert kept == (0 if method in [*METHODS[:2], "PrepareRetrieve", "PrepareStore", "CommitStore"] else 1)
        assert len(warnings(caplog)) == (method not in ("CommitRetrieve", "EndSession", "FreeLookupLocks"))


def test_a_look_up_that_takes_too_long_is_a_miss_and_unlocks_what_it_found(server):
    with closing(tier_at(server)) as tier:
        stored(tier)
    server.is_slow_to_look = True
    with closing(tier_at(server, timeout_s=0.3)) as tier:
        assert set(settled(tier, known(tier))) == {MISS}
        eventually(server.idle)


def test_memory_that_is_cut_short_costs_a_chunk_and_not_the_process(server, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    with closing(tier_at(server)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT}
        os.truncate(server.path, 0)
        assert tier.get(keys[0]) is None
        assert "took its memory away" in warnings(caplog)[0]
    pool = Pool.__new__(Pool)
    pool.capacity, pool._file = 16, os.open(server.path, os.O_RDWR)
    with pytest.raises(ConnectionError, match="took its memory away"):
        pool.write(Slot(0, 16, (), ""), memoryview(bytes(16)))
    os.close(pool._file)
    assert os.stat(server.path).st_size == 0


def test_a_server_that_was_started_anew_is_told_again(server):
    with closing(tier_at(server, renew_s=0.0, retry_after_s=0.2)) as tier:
        stored(tier)
        server.start_anew()
        other = [7, *TOKENS[1:]]
        tier.introduce(other, hashes_of(other), 32)
        eventually(lambda: tier.lookup(known(tier, other)) and len(server.contexts) >= 1)
        time.sleep(0.2)
        stored_before = tier.usage()[0].counters.stored
        assert tier.collect(other, hashes_of(other), 16)
        for key, pieces in pages_of(other[:16], tier.layout).items():
            assert tier.put(key, pieces)
        assert tier.usage()[0].counters.stored == stored_before + 1
        assert server.content(MODEL, 1, 0, other[:16]) == chunk_of(other, tier.layout)


def test_a_server_that_answers_again_is_told_of_ends_again(server):
    def refuse():
        raise RuntimeError("not now")

    with closing(tier_at(server, renew_s=0.0)) as tier:
        stored(tier)
        first, *_, last = known(tier)
        server.before["CommitRetrieve"] = refuse
        assert tier.get(first) is not None
        del server.before["CommitRetrieve"]
        num_ended = server.calls["EndSession"]
        assert tier.get(last) is not None and server.calls["EndSession"] > num_ended


@pytest.mark.parametrize("method", ["PrepareStore", "PrepareRetrieve"])
def test_a_place_in_new_memory_is_not_looked_for_in_the_old_one(server, method):
    """The server ends, another one knows the number already, and names a place, while a transfer is under way."""
    with closing(tier_at(server, renew_s=0.3)) as tier:
        stored(tier)
        number = tier._store._registration.instance_id
        keys = known(tier)

        def start_anew():
            if server.before.pop(method, None):
                contexts, objects, locks = server.contexts, server.objects, server.locks
                server.start_anew(stop=False)
                server.contexts, server.objects, server.locks = contexts, objects, locks
                time.sleep(0.4)
                tier._store.connect()

        server.before[method] = start_anew
        old = os.open(server.path, os.O_RDONLY)
        before = hashlib.sha256(os.pread(old, server.capacity, 0)).digest()
        if method == "PrepareStore":
            other = [7, *TOKENS[1:]]
            tier.collect(other, hashes_of(other), 16)
            kept = [tier.put(key, pieces) for key, pieces in pages_of(other[:16], tier.layout).items()]
            assert not kept[-1] and server.calls["CommitStore"] == 2
        else:
            assert tier.get(keys[0]) is None, "it was read from memory that is nobody's"
        assert hashlib.sha256(os.pread(old, server.capacity, 0)).digest() == before
        os.close(old)
        assert tier._store._registration.instance_id != number


@pytest.mark.parametrize("is_written", [False, True])
def test_a_server_without_room_is_used_on(is_written, caplog):
    part = layout_of().part_bytes
    with closing(FakeMultiprocessServer(capacity=part + part // 2)) as server, closing(tier_at(server)) as tier:
        if is_written:
            server.capacity *= 8  # there is room, but somebody else is writing this chunk
            server.writes[MODEL, 1, 0, tuple(TOKENS[:16])] = (0, part)
            server.end = part
            server.capacity //= 8
        else:
            stored(tier, [5, *TOKENS[1:16]])
        tier.collect(TOKENS, HASHES, 16)
        kept = [tier.put(key, pieces) for key, pieces in pages_of(TOKENS[:16], tier.layout).items()]
        assert not kept[-1] and tier.usage()[0].counters.dropped == 1 and tier.usage()[0].counters.errors == 0
        assert tier._store.lookup([chunk(TOKENS)]) != [HIT]
        server.writes.clear()
        server.objects.clear()
        server.end = 0
        if is_written:
            server.keep(MODEL, 1, 0, TOKENS[:16], chunk_of(TOKENS, tier.layout))
        tier.collect(TOKENS, HASHES, 16)
        assert all(tier.put(key, pieces) for key, pieces in pages_of(TOKENS[:16], tier.layout).items())
    assert not warnings(caplog)


def chunk(tokens):
    return Chunk(None, np.asarray(tokens[:16], np.uint32), tuple(hashes_of(tokens[:16])), 0)


@pytest.mark.parametrize("is_held_up", ["before", "while it is copied"])
def test_what_was_copied_for_too_long_is_not_used(server, monkeypatch, is_held_up):
    with closing(tier_at(server)) as tier:
        stored(tier)
        content, write = Path(server.path).read_bytes(), Pool.write

        def write_slowly(pool, slot, content):
            write(pool, slot, content)
            time.sleep(0.3)

        if is_held_up == "before":
            monkeypatch.setattr(store_module, "COPY_S", -1.0)
            assert tier.get(known(tier)[0]) is None
        else:
            monkeypatch.setattr(store_module, "COPY_S", 0.2)
            monkeypatch.setattr(Pool, "write", write_slowly)
        other = [7, *TOKENS[1:]]
    with closing(tier_at(server)) as tier:
        tier.collect(other, hashes_of(other), 16)
        for key, pieces in pages_of(other[:16], tier.layout).items():
            tier.put(key, pieces)
        assert tier.usage()[0].counters.stored == 0 and server.calls["CommitStore"] == 2
    assert is_held_up != "before" or Path(server.path).read_bytes() == content, "it was written all the same"


def test_parts_that_were_not_read_since_one_was_wrong_are_unlocked(server):
    layout = layout_of(2)
    with closing(tier_at(server, layout)) as tier:
        stored(tier)
    server.mangle["PrepareRetrieve"] = with_pickle
    with closing(tier_at(server, layout)) as tier:
        keys = known(tier, TOKENS[:16])
        assert set(settled(tier, keys)) == {HIT} and tier.get(keys[0]) is None
        assert server.idle(), "of both parts"


def test_what_the_server_does_not_keep_is_not_stored(server, caplog):
    server.mangle["CommitStore"] = lambda said: lmcache_mp_pb2.CommitStoreResponse(success=False)
    with closing(tier_at(server)) as tier:
        tier.collect(TOKENS, HASHES, 16)
        kept = [tier.put(key, pieces) for key, pieces in pages_of(TOKENS[:16], tier.layout).items()]
        assert not kept[-1] and tier.usage()[0].counters.stored == 0
    assert "does not keep what it had a place for" in warnings(caplog)[0]


def test_answers_have_a_limit(server, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    server.mangle["PrepareRetrieve"] = raw(bytes(calls.MAX_ANSWER_BYTES + 1))
    with closing(tier_at(server)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT} and tier.get(keys[0]) is None
        assert tier.usage()[0].counters.corrupt == 0 and tier.usage()[0].counters.errors == 1
    assert "RESOURCE_EXHAUSTED" in warnings(caplog)[0]


def test_what_the_server_has_forgotten_meanwhile_is_a_miss_and_no_mistake(server, caplog):
    with closing(tier_at(server)) as tier:
        stored(tier)
    with closing(tier_at(server)) as tier:
        keys = known(tier)
        assert set(settled(tier, keys)) == {HIT}
        server.mangle["PrepareRetrieve"] = lambda said: said.__class__(success=False)
        assert tier.get(keys[0]) is None
        counters = tier.usage()[0].counters
        assert counters.corrupt == counters.errors == 0 and not warnings(caplog)


def test_no_proxy_is_asked_and_a_connection_that_was_closed_is_not_there(server, monkeypatch):
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    connection = calls.Calls(f"127.0.0.1:{server.port}", 5.0)
    assert connection.ask("GetChunkSize").chunk_size == 16
    connection.close()
    with pytest.raises(ConnectionError, match="was not asked"):
        connection.ask("GetChunkSize")


def test_many_threads_of_two_engines_read_and_write_the_same(server):
    texts = [[number, *range(1000, 1031)] for number in range(6)]
    wrong = []

    def work(seed):
        with closing(tier_at(server)) as tier:
            for text in np.random.default_rng(seed).permutation(texts).tolist() * 3:
                pages = pages_of(text, tier.layout)
                tier.introduce(text, hashes_of(text), 32)
                for key, state in zip(pages, settled(tier, list(pages))):
                    got = tier.get(key) if state is HIT else None
                    if got is not None and bytes(got) != b"".join(map(bytes, pages[key])):
                        wrong.append(key)
                for end in (16, 32):
                    tier.collect(text, hashes_of(text), end)
                for key, pieces in pages.items():
                    tier.put(key, pieces)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(server.objects) == 12 and server.idle()


# ---- its parts -------------------------------------------------------------------------------------------------


def test_leases_are_read_once_each_and_the_oldest_go():
    ended = []
    chunks = [chunk([n, *range(15)]) for n in range(4)]
    for number, each in enumerate(chunks):
        each.number = number
    held = Leases(ended.append, 60.0, max_leases=2)
    first = Lease("first", np.zeros(0), chunks)
    held.add(first)
    assert held.take(chunks[1]) is first and held.take(chunks[1]) is None
    assert first.runs() == [(0, 1), (2, 4)]
    held.done(first)
    others = [Lease(name, np.zeros(0), chunks[:1]) for name in ("second", "third")]
    for lease in others:
        held.add(lease)
    eventually(lambda: ended == [first])
    assert held.take(chunks[2]) is None and held.take(chunks[0]) is others[1]
    held.done(others[1])
    assert ended == [first, others[1]]
    held.close()
    assert ended == [first, *others[::-1]] and not len(held)


def test_a_lease_that_is_read_from_ends_after_that():
    ended = []
    held = Leases(ended.append, 0.0)
    lease = Lease("one", np.zeros(0), [chunk(TOKENS), chunk([7, *TOKENS])])
    with held._changed:
        held.add(lease)
        assert held.take(chunk(TOKENS)) is lease
    time.sleep(0.1)
    assert not ended
    held.done(lease)
    eventually(lambda: ended == [lease])
    held.close()


def test_numbers_of_fields_and_names_of_methods_are_lmcaches():
    theirs = GOLDEN["multiprocess"]
    for message in lmcache_mp_pb2.DESCRIPTOR.message_types_by_name.values():
        fields = {
            field.name: [field.number, field.type, field.is_repeated, field.has_presence] for field in message.fields
        }
        assert fields.items() <= dict(json.loads(theirs["messages"][message.full_name])).items()
    methods = {
        f"{service.full_name}.{method.name}": f"{method.input_type.full_name} -> {method.output_type.full_name}"
        for service in lmcache_mp_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert len(methods) == 11 and methods.items() <= theirs["methods"].items()


def test_stubs_are_generated_from_the_messages_as_they_are():
    folder = Path(calls.__file__).parent
    digest = hashlib.sha256((folder / "lmcache_mp.proto").read_bytes()).hexdigest()
    assert digest in (folder / "lmcache_mp_pb2.py").read_text(encoding="utf-8")[:400], "run scripts/generate_grpc_stubs"
