"""LMCache's layout in Redis, against Debian's server where it is installed."""

import pytest

from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.redis_store import RedisChunkStore
from jaxpaged.kv_store.lmcache.store import DESCRIPTION, description_of
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.lmcache.chunked import MODEL, SPACE, hashes_of, layout_of
from tests.kv_store.lmcache.test_tier import TOKENS, chunk_of, settled, stored
from tests.kv_store.test_real_stores import free_port, start_redis

redis = pytest.importorskip("redis", reason="the extra redis is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = start_redis(port := free_port(), tmp_path_factory.mktemp("redis"))
    yield redis.Redis(port=port)
    process.kill()
    process.wait()


def tier_at(server, layout, **options):
    port = server.connection_pool.connection_kwargs["port"]
    return LMCacheTier(RedisChunkStore(f"redis://127.0.0.1:{port}", layout, MODEL, **options), ChunkHasher(), SPACE)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_is_written_is_lmcaches_layout_and_is_read(server, num_parts):
    server.flushall()
    layout = layout_of(num_parts)
    writer = tier_at(server, layout, ttl_s=100)
    pages = stored(writer, TOKENS[:32])
    writer.close()
    hasher = ChunkHasher()
    chunk_hash = hasher.hash(hasher.root, TOKENS[:16])
    name = f"{MODEL}@{num_parts}@{num_parts - 1}@{chunk_hash:x}@bfloat16"
    assert server.get(name + "metadata") == DESCRIPTION.pack(*description_of(layout))
    assert 0 < server.ttl(name + "kv_bytes") <= 100 and len(server.keys()) == 2 * 2 * num_parts
    if num_parts == 1:
        assert server.get(name + "kv_bytes") == chunk_of(TOKENS, layout)
    reader = tier_at(server, layout)
    reader.introduce(TOKENS, hashes_of(TOKENS), 32)
    assert settled(reader, list(pages)) == [Lookup.HIT] * len(pages)
    assert all(bytes(reader.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
    reader.close()


@pytest.mark.parametrize("damage", ["bytes gone", "short", "long", "metadata long", "metadata other", "metadata gone"])
def test_what_is_gone_or_another_is_a_miss(server, damage, caplog):
    server.flushall()
    layout = layout_of()
    writer = tier_at(server, layout)
    pages = stored(writer, TOKENS[:16])
    writer.close()
    (metadata,), (content,) = server.keys("*metadata"), server.keys("*kv_bytes")
    if damage.endswith("gone"):
        server.delete(content if damage == "bytes gone" else metadata)
    elif damage in ("short", "long"):
        server.set(content, server.get(content) + b"x" if damage == "long" else server.get(content)[:-1])
    else:
        described = server.get(metadata)
        server.set(metadata, described + b"x" if damage == "metadata long" else described[:-4] + b"\1\0\0\0")
    reader = tier_at(server, layout)
    reader.introduce(TOKENS, hashes_of(TOKENS), 16)
    keys = list(pages)
    states = settled(reader, keys)
    assert states == [Lookup.MISS if damage == "metadata gone" else Lookup.HIT] * len(keys)
    assert reader.get(keys[0]) is None and settled(reader, keys) == [Lookup.MISS] * len(keys)
    counters = reader.usage()[0].counters
    is_damaged = "gone" not in damage
    assert (counters.corrupt, counters.errors, counters.hits) == (int(is_damaged), 0, 0)
    assert len(caplog.records) == int(is_damaged) and bool(server.exists(metadata)) == (damage == "bytes gone")
    reader.close()
