"""Against LMCache itself: its server, and its connector classes in a process of their own (scripts/lmcache_env.py).

Skipped where that environment was not made; JAXPAGED_LMCACHE_ENV names another folder than the script's.
"""

import importlib.util
import json
import os
import subprocess
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.lm import LMStore
from jaxpaged.kv_store.lmcache.redis_store import RedisChunkStore
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.lmcache.chunked import MODEL, SPACE, hashes_of, layout_of, pages_of
from tests.kv_store.lmcache.test_tier import TOKENS, chunk_of, settled, stored
from tests.kv_store.test_real_stores import free_port, start_redis, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PEER = Path(__file__).with_name("lmcache_peer.py")


@pytest.fixture(scope="module")
def python():
    """Of the environment that has LMCache."""
    spec = importlib.util.spec_from_file_location("lmcache_env", PEER.parents[3] / "scripts" / "lmcache_env.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = Path(os.environ.get("JAXPAGED_LMCACHE_ENV", script.DEFAULT_ENV)) / "bin" / "python"
    if not found.exists():
        pytest.skip("LMCache is not installed: scripts/lmcache_env.py makes an environment with it")
    return found


def peer(python, url, command, **facts):
    """Have LMCache's own connector put or get chunks. What it says."""
    layout = layout_of()
    said = {"url": url, "model": MODEL, "tokens": TOKENS, "shape": layout.shape, "chunk_size": 16, **facts}
    done = subprocess.run(
        [python, PEER, command],
        input=json.dumps(said),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def server_of(kind, python, folder):
    port = free_port()
    if kind == "lm":
        process = started([python, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], port)
    else:
        process = start_redis(port, folder)
    try:
        yield f"{kind}://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def tier_at(url):
    layout = layout_of()
    store = LMStore(url, layout, MODEL) if url.startswith("lm:") else RedisChunkStore(url, layout, MODEL)
    return LMCacheTier(store, ChunkHasher(), SPACE)


@pytest.mark.parametrize("kind", ["lm", "redis"])
def test_lmcaches_connector_reads_what_we_write_and_we_what_it_writes(kind, python, tmp_path):
    layout = layout_of()
    with server_of(kind, python, tmp_path) as url:
        with closing(tier_at(url)) as tier:
            stored(tier, TOKENS[:16])
        ours = peer(python, url, "get")
        assert ours["exists"] == [True, False]
        assert bytes.fromhex(ours["chunks"][0]) == chunk_of(TOKENS, layout) and ours["shapes"][0] == list(layout.shape)
        second = chunk_of(TOKENS, layout, 1)
        peer(python, url, "put", number=1, content=np.frombuffer(second, np.uint8).tobytes().hex())
        with closing(tier_at(url)) as tier:
            tier.introduce(TOKENS, hashes_of(TOKENS), 32)
            pages = pages_of(TOKENS[:32], layout)
            assert settled(tier, list(pages)) == [Lookup.HIT] * len(pages)
            assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
