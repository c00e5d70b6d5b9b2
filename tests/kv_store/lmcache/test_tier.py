"""The tier over a server that speaks LMCache's bytes: what is read and written is right, or a miss."""

import time
from contextlib import closing
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.lmcache.chunks import Chunk, ChunkIndex
from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.lm import ANSWER, LMStore, request
from jaxpaged.kv_store.lmcache.staging import ChunkReader, Staging
from jaxpaged.kv_store.lmcache.store import DESCRIPTION, description_of
from jaxpaged.kv_store.lmcache.tier import LMCacheTier, best_of
from jaxpaged.kv_store.page import decode, encode, namespace
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tier_events import STORAGE, TierEventLog
from jaxpaged.kv_store.tiers import Tiers
from tests.kv_store.lmcache.chunked import MODEL, SPACE, hashes_of, layout_of, pages_of, values_of
from tests.kv_store.lmcache.fake_server import FakeServer
from tests.kv_store.lmcache.test_keys import GOLDEN

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
TOKENS = list(range(1000, 1040))  # two chunks, and half of one
HASHES = hashes_of(TOKENS)


@pytest.fixture
def server():
    with closing(FakeServer()) as server:
        yield server


def tier_at(server, layout=None, **options):
    layout = layout or layout_of()
    return LMCacheTier(LMStore(server.url, layout, MODEL, **options), ChunkHasher(), SPACE)


def settled(tier, keys):
    deadline = time.monotonic() + 10
    while PENDING in (states := tier.lookup(keys)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return states


def stored(tier, token_ids=TOKENS):
    """Put all pages of a text, as an engine does."""
    pages, hashes = pages_of(token_ids, tier.layout), hashes_of(token_ids)
    for end in range(16, len(token_ids) + 1, 16):
        tier.collect(token_ids, hashes, end)
    for key, pieces in pages.items():
        if tier.lacks([key]) == [True]:
            assert tier.put(key, pieces)
    return pages


def chunk_of(token_ids, layout, number=0):
    """What LMCache has of a chunk of a text."""
    values = values_of(token_ids, layout)[:, :, 16 * number : 16 * number + 16]
    return np.ascontiguousarray(values.transpose(1, 0, 2, 3, 4)).tobytes()


def test_the_bytes_on_the_wire_are_lmcaches():
    length, shape = 2 * 3 * 256 * 32 * 2, GOLDEN["shape"]
    described, wire = (length, 1, 3, *shape), GOLDEN["wire"]
    assert request(1, GOLDEN["name"], described).hex() == wire["put"]
    assert request(2, GOLDEN["name"]).hex() == wire["get"] and request(3, GOLDEN["name"]).hex() == wire["exist"]
    assert ANSWER.unpack(bytes.fromhex(wire["found"])) == (200, *described, 0)
    assert ANSWER.unpack(bytes.fromhex(wire["not_found"]))[0] == 400
    assert DESCRIPTION.pack(*described).hex() == wire["redis_metadata"]


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_what_one_engine_puts_another_one_gets(server, num_parts):
    layout = layout_of(num_parts)
    with closing(tier_at(server, layout)) as tier:
        pages = stored(tier)
        assert tier.usage()[0].counters.stored == 2 and tier.usage()[0].name == "lmcache"
    names = {name for name in server.chunks if name.startswith(f"{MODEL}@{num_parts}@{num_parts - 1}@")}
    assert len(names) == 2 and len(server.chunks) == 2 * num_parts
    with closing(tier_at(server, layout)) as tier:
        keys = list(pages)
        assert tier.lookup(keys) == [MISS] * len(keys), "nothing is known of their tokens"
        tier.introduce(TOKENS, HASHES, len(TOKENS))
        first = [
            key
            for key, pieces in pages.items()
            if min(decode(b"".join(pieces), expect_namespace=SPACE, key=key)[0].token_ids) < 1032
        ]
        assert settled(tier, keys) == [HIT if key in first else MISS for key in keys]
        gets = len(server.commands)
        for key in first:
            assert bytes(tier.get(key)) == b"".join(map(bytes, pages[key]))
        assert len(server.commands) == gets + 2 * num_parts, "each part of each chunk is fetched once"


def test_a_chunk_that_lmcache_wrote_is_read(server):
    layout, hasher = layout_of(), ChunkHasher()
    names = []
    with closing(tier_at(server)) as tier:
        parent = hasher.root
        for number in (0, 1):
            parent = hasher.hash(parent, TOKENS[16 * number : 16 * number + 16])
            names.append(f"{MODEL}@1@0@{parent:x}@bfloat16")
            server.chunks[names[-1]] = (description_of(layout), chunk_of(TOKENS, layout, number))
        tier.introduce(TOKENS, HASHES, 32)
        pages = pages_of(TOKENS[:32], layout)
        assert settled(tier, list(pages)) == [HIT] * len(pages)
        assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
    with closing(tier_at(server)) as tier:
        expected = {name: server.chunks.pop(name) for name in names}
        stored(tier)
        assert server.chunks == expected, "what is written is what LMCache writes"


def test_texts_that_part_within_a_chunk_have_both(server):
    other = [*TOKENS[:8], *range(2000, 2024)]
    with closing(tier_at(server)) as tier:
        stored(tier)
        shared = list(pages_of(TOKENS[:8], tier.layout))
        assert settled(tier, shared) == [HIT] * 4 and tier.lacks(shared) == [False] * 4
        assert tier.collect(other, hashes_of(other), 16) and tier.lacks(shared) == [True] * 4
        stored(tier, other)
        assert len(server.chunks) == 4
        assert not tier.collect(other, hashes_of(other), 16), "it is there"


@pytest.mark.parametrize(
    "mangle",
    {
        "length": lambda answer, content: (ANSWER.pack(200, 1 << 30, *ANSWER.unpack(answer)[2:]), content),
        "negative length": lambda answer, content: (ANSWER.pack(200, -1, *ANSWER.unpack(answer)[2:]), content),
        "type": lambda answer, content: (
            ANSWER.pack(*ANSWER.unpack(answer)[:3], 4, *ANSWER.unpack(answer)[4:]),
            content,
        ),
        "layout": lambda answer, content: (
            ANSWER.pack(*ANSWER.unpack(answer)[:2], 6, *ANSWER.unpack(answer)[3:]),
            content,
        ),
        "shape": lambda answer, content: (ANSWER.pack(*ANSWER.unpack(answer)[:4], 1, 6, 16, 8, 0), content),
        "truncated": lambda answer, content: (answer, content[:-1]),
        "truncated answer": lambda answer, content: (answer[:20], b""),
        "code": lambda answer, content: (ANSWER.pack(500, *ANSWER.unpack(answer)[1:]), content),
        "nothing": lambda answer, content: (b"", b""),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_bad_answers_are_misses_and_one_line(server, mangle, caplog):
    with closing(tier_at(server)) as tier:
        pages = stored(tier)
    with closing(tier_at(server, timeout_s=1.0)) as tier:
        tier.introduce(TOKENS, HASHES, 32)
        keys = [key for key in pages if settled(tier, [key]) == [HIT]]
        server.mangle = mangle[1]
        assert [tier.get(key) for key in keys] == [None] * len(keys)
        counters = tier.usage()[0].counters
        assert counters.corrupt + counters.errors >= 1 and counters.hits == 0
        assert settled(tier, keys) == [MISS] * len(keys)
    assert len(caplog.records) == 1 and caplog.records[0].levelname == "WARNING"


def test_a_server_that_is_gone_costs_one_attempt(server, caplog):
    with closing(tier_at(server, timeout_s=0.3)) as tier:
        server.close()
        tier.introduce(TOKENS, HASHES, 32)
        assert settled(tier, list(pages_of(TOKENS, tier.layout))) == [MISS] * 20
        began = time.monotonic()
        for key, pieces in pages_of(TOKENS, tier.layout).items():
            tier.collect(TOKENS, HASHES, 16)
            tier.put(key, pieces)
        assert time.monotonic() - began < 5 and tier.usage()[0].counters.stored == 0
    assert len(caplog.records) == 1


def test_behind_host_memory_every_chunk_is_written_though_pages_are_shared(server):
    other = [*TOKENS[:8], *range(2000, 2024)]
    tiers = Tiers([HostTier(1 << 20), tier_at(server)])
    with closing(tiers):
        for text in (TOKENS, other):
            hashes = hashes_of(text)
            pages = pages_of(text, layout_of())
            for end in (16, 32):
                assert tiers.collect(text, hashes, end)
            lacking = tiers.lacks(list(pages))
            assert all(lacking[:8])
            for key, pieces in pages.items():
                tiers.put(key, pieces)
        assert tiers.flush(10) and len(server.chunks) == 4


def test_a_page_is_there_if_any_chunk_that_has_it_is():
    assert [best_of(states) for states in ([MISS, PENDING, HIT], [PENDING, MISS], [MISS], [])] == [
        HIT,
        PENDING,
        MISS,
        MISS,
    ]


def test_events_tell_of_the_pages_of_a_chunk(server):
    with closing(tier_at(server)) as tier:
        log = TierEventLog()
        tier.watch(log)
        pages = stored(tier)
        changes = log.take()
        assert {change.key for change in changes} == {key for key in pages if tier.lookup([key]) == [HIT]}
        assert {(change.medium, change.is_there) for change in changes} == {(STORAGE, True)} and len(changes) == 16
        tier.delete([changes[0].key])
        assert len(log.take()) == 8


def test_known_chunks_and_those_under_way_are_bounded():
    layout = layout_of()
    index = ChunkIndex(layout, ChunkHasher(), max_chunks=3)
    texts = [[n, *range(15)] for n in range(5)]
    for text in texts:
        index.introduce(text, hashes_of(text), 16)
    assert len(index._chunks) == 3 and len(index._of_page) == 3 * 8
    staging = Staging(layout.empty, layout.num_bytes, max_bytes=1)
    chunks = [index.introduce(text, hashes_of(text), 16)[0] for text in texts[2:]]
    for chunk in chunks:
        staging.want(chunk, index.keys(chunk))
        staging.place(chunk, index.keys(chunk)[0], lambda array: None)
    assert staging.num_dropped == 1 and not staging.wanting(index.keys(chunks[0])[1], chunks[:1])
    fetched = []
    reader = ChunkReader(lambda chunk: fetched.append(chunk) or np.zeros(1), 6, layout.num_bytes, max_bytes=1)
    for chunk in [*chunks, *chunks]:
        reader.read(chunk)
    assert len(fetched) == 6 and len(reader._held) == 2


def test_pages_with_scales_come_back_with_them_and_those_without_end_the_chunk(server):
    layout = replace(layout_of(dtype=np.dtype(ml_dtypes.float8_e4m3fn)), has_scales=True)
    with closing(tier_at(server, layout)) as tier:
        stored(tier, TOKENS[:16])
    assert {said[2] for said, _ in server.chunks.values()} == {6}
    with closing(tier_at(server, layout)) as tier:
        tier.introduce(TOKENS, HASHES, 16)
        pages = pages_of(TOKENS[:16], layout)
        assert settled(tier, [*pages]) == [HIT] * len(pages)
        assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
        others = [*range(2000, 2016)]
        for key, pieces in pages_of(others, replace(layout, has_scales=False)).items():
            assert tier.collect(others, hashes_of(others), 16) and not tier.put(key, pieces)


def test_pages_of_another_type_or_shape_end_the_chunk_that_they_would_be_part_of(server):
    with closing(tier_at(server)) as tier:
        key, pieces = next(iter(pages_of(TOKENS, layout_of(dtype=np.dtype(np.float16))).items()))
        header, values = decode(
            b"".join(map(bytes, pages_of(TOKENS, tier.layout)[key])), expect_namespace=SPACE, key=key
        )
        other = pages_of(TOKENS, tier.layout, namespace(weights="v2"))[key]
        for wrong in (pieces, other, encode(header, values.reshape(*values.shape[:3], 2, -1))):
            assert tier.collect(TOKENS, HASHES, 16) and tier.lacks([key]) == [True]
            assert not tier.put(key, wrong) and tier.lacks([key]) == [False]


def test_what_is_deleted_or_known_no_more_is_neither_collected_nor_remembered(server):
    with closing(tier_at(server)) as tier:
        stored(tier)
        (chunk,) = tier._chunks_of(key := next(iter(pages_of(TOKENS, tier.layout))))
        assert tier._store.lookup([chunk]) == [HIT]
        other = [5, *TOKENS]
        assert tier.collect(other, hashes_of(other), 16)
        tier.delete(list(pages_of(other[:4], tier.layout)))
        assert not tier._staging._fillings
        assert tier.collect(other, hashes_of(other), 16) and len(tier._staging._fillings) == 1
        tier._index._max_chunks = 1
        third = [6, *TOKENS]
        tier.introduce(third, hashes_of(third), 16)
        assert not tier._staging._fillings and tier.get(key) is None
        assert tier._store.lookup([chunk]) != [HIT], "it is asked for anew"


def test_what_is_not_there_is_not_asked_for_again_and_what_is_not_kept_is_told(server, monkeypatch):
    with closing(tier_at(server)) as tier:
        tier.introduce(TOKENS, HASHES, 32)
        pages = pages_of(TOKENS[:16], tier.layout)
        assert set(settled(tier, list(pages))) == {MISS}
        num_asked = len(server.commands)
        assert all(tier.get(key) is None for key in pages) and len(server.commands) == num_asked
        assert tier.collect(TOKENS, HASHES, 16)
        monkeypatch.setattr(tier._store, "put_array", lambda chunk, content: False)
        assert [tier.put(key, pieces) for key, pieces in pages.items()] == [True] * 7 + [False]


def test_the_latest_of_the_chunks_that_have_a_page_comes_first():
    index, other = ChunkIndex(layout_of(), ChunkHasher()), [*TOKENS[:8], *range(2000, 2008)]
    chunks = [index.introduce(text, hashes_of(text), 16)[0] for text in (TOKENS, other)]
    assert index.chunks_of(index.keys(chunks[0])[0]) == chunks[::-1]


def test_a_text_has_all_its_tokens():
    index = ChunkIndex(layout_of(), ChunkHasher())
    chunk, _ = index.introduce(TOKENS, HASHES, 39)
    assert isinstance(chunk, Chunk) and chunk.number == 1 and chunk.beginning().tolist() == TOKENS[:32]


@pytest.mark.parametrize("url", ["lm://host", "lm://:80", "http://host:1", "lm://host:1/x", "lm://host:99999"])
def test_addresses_are_checked(url):
    with pytest.raises(ConfigError, match="lm://HOST:PORT"):
        LMStore(url, layout_of(), MODEL)
