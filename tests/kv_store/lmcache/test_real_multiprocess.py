"""Against LMCache's own multi-process server, and its own client with vLLM's blocks (scripts/lmcache_env.py).

Skipped where that environment was not made, as in test_real_lmcache.py.
"""

import json
import os
import subprocess
import time
import urllib.request
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.multiprocess.calls import UnfitServerError
from jaxpaged.kv_store.lmcache.multiprocess.store import MPStore
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.lmcache.chunked import MODEL, SPACE, hashes_of, layout_of, pages_of, values_of
from tests.kv_store.lmcache.test_real_lmcache import python  # noqa: F401
from tests.kv_store.lmcache.test_tier import TOKENS, settled, stored
from tests.kv_store.test_real_stores import free_port, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PEER = Path(__file__).with_name("multiprocess_peer.py")
FULL = TOKENS[:32]


@contextmanager
def server_of(python, *options, port=None):  # noqa: F811
    """(process, its address, what it says of itself)."""
    port, web = port or free_port(), free_port()
    command = [
        Path(python).with_name("lmcache"),
        "server",
        "--transport",
        "grpc",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(web),
        "--chunk-size",
        "16",
        "--l1-size-gb",
        "0.001",
        "--no-l1-use-lazy",
        "--eviction-policy",
        "LRU",
        "--disable-observability",
        "--disable-metrics",
        "--disable-grpc-metrics",
        *options,
    ]
    process = started(list(map(str, command)), port)

    def status():
        with urllib.request.urlopen(f"http://127.0.0.1:{web}/status", timeout=10) as answer:
            return json.load(answer)

    try:
        yield process, f"grpc://127.0.0.1:{port}", status
    finally:
        process.terminate()
        process.wait()


def shared(name):
    return "--supported-transfer-mode", "engine_driven", "--shm-name", name


@pytest.fixture(scope="module")
def server(python):  # noqa: F811
    with server_of(python, *shared(f"jaxpaged_{os.getpid()}")) as server:
        yield server


def peer(python, url, command, **facts):  # noqa: F811
    layout = layout_of()
    shape = (layout.num_layers, 2, len(FULL), layout.num_heads, layout.head_dim)
    said = {"url": url, "tokens": FULL, "shape": shape, "chunk_size": 16, "block_size": 4, **facts}
    done = subprocess.run(
        [python, PEER, command],
        input=json.dumps(said),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def tier_at(url, model, layout=None):
    return LMCacheTier(MPStore(url, layout or layout_of(), model, timeout_s=60.0), ChunkHasher(), SPACE)


def check_idle(status):
    """Nothing is locked, and no session left."""
    deadline = time.monotonic() + 10
    while True:
        said = status()
        (l1,) = said["storage_manager"]["l1_managers"].values()
        left = said["active_sessions"], l1["read_locked_count"], l1["write_locked_count"], l1["staging_object_count"]
        if not any(left):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_lmcaches_client_reads_what_we_write_and_we_what_it_writes(python, server):  # noqa: F811
    _, url, status = server
    layout, content = layout_of(), values_of(FULL, layout_of()).tobytes().hex()
    with closing(tier_at(url, f"{MODEL}-ours")) as tier:
        stored(tier, FULL)
    got = peer(python, url, "get", model=f"{MODEL}-ours")
    assert got == {"found": 2, "content": content}
    peer(python, url, "put", model=f"{MODEL}-theirs", content=content)
    with closing(tier_at(url, f"{MODEL}-theirs")) as tier:
        tier.introduce(FULL, hashes_of(FULL), 32)
        pages = pages_of(FULL, layout)
        assert settled(tier, list(pages)) == [Lookup.HIT] * len(pages)
        assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
    check_idle(status)


@pytest.mark.parametrize("num_parts", [2, 8])
def test_parts_of_several_workers_are_found_together(server, num_parts):
    _, url, status = server
    layout = layout_of(num_parts)
    for _ in range(2):
        with closing(tier_at(url, MODEL, layout)) as tier:
            pages = stored(tier, FULL)
            assert settled(tier, list(pages)) == [Lookup.HIT] * len(pages)
            assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
    check_idle(status)


def test_a_full_server_evicts_and_locks_none_for_good(server):
    _, url, status = server
    layout = layout_of()
    with closing(tier_at(url, "many")) as tier:
        for start in range(200):  # there is room for about 250 chunks
            text = [start, *range(1000, 1031)]
            hashes = hashes_of(text)
            for end in (16, 32):
                tier.collect(text, hashes, end)
            for key, pieces in pages_of(text, layout).items():
                tier.put(key, pieces)
        counters = tier.usage()[0].counters
        assert counters.stored > 260 and counters.errors == 0 and counters.stored + counters.dropped == 400
        key, pieces = next(iter(pages_of(text, layout).items()))
        assert (got := tier.get(key)) is None or bytes(got) == b"".join(map(bytes, pieces))
    check_idle(status)


def test_a_server_that_would_send_pickles_is_not_used(python):  # noqa: F811
    otherwise = {"--shm-name": shared("")[:2], "engine_driven": shared(f"jaxpaged_{os.getpid()}_x")[2:]}
    for said, options in otherwise.items():
        with ExitStack() as stack:
            _, url, _ = stack.enter_context(server_of(python, *options))
            store = stack.enter_context(closing(MPStore(url, layout_of(), MODEL)))
            with pytest.raises(UnfitServerError, match=said):
                store.connect()


def test_a_server_that_is_killed_and_started_anew(python, caplog):  # noqa: F811
    options, port = shared(f"jaxpaged_{os.getpid()}_again"), free_port()
    store = MPStore(f"grpc://127.0.0.1:{port}", layout_of(), MODEL, timeout_s=10.0, retry_after_s=1.0, renew_s=1.0)
    with closing(LMCacheTier(store, ChunkHasher(), SPACE)) as tier:
        with server_of(python, *options, port=port) as (process, _, _):
            pages = stored(tier, FULL)
            process.kill()
            process.wait()
            assert all(tier.get(key) is None for key in pages)
        assert len(caplog.records) == 1
        with server_of(python, *options, port=port) as (_, _, status):
            other = [7, *FULL[1:]]
            tier.introduce(other, hashes_of(other), 32)
            deadline = time.monotonic() + 30
            while "works again" not in caplog.text:  # the first look-up tries; a miss waits for none of it
                assert set(tier.lookup(list(pages_of(other, layout_of())))) <= {Lookup.MISS, Lookup.PENDING}
                assert time.monotonic() < deadline
                time.sleep(0.05)
            pages = stored(tier, other)
            assert settled(tier, list(pages)) == [Lookup.HIT] * len(pages)
            assert all(bytes(tier.get(key)) == b"".join(map(bytes, pieces)) for key, pieces in pages.items())
            assert len(caplog.records) == 2
            store.leases.close()
            check_idle(status)
