"""The tiers in Redis and S3 against real servers: Debian's redis-server, and moto_server, where they are installed."""

import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import closing

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store import redis_tier, s3
from jaxpaged.kv_store.redis_tier import RedisTier
from jaxpaged.kv_store.s3 import S3Tier
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.pages import SPACE, key_of, page_of
from tests.kv_store.test_remote import settled

pytest.importorskip("redis", reason="the extra redis is not installed")
pytest.importorskip("obstore", reason="the extra s3 is not installed")
HIT, MISS = Lookup.HIT, Lookup.MISS
CREDENTIALS = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def started(command, port):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)


def start_redis(port, folder, *more):
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed: apt install redis-server")
    options = ["--port", str(port), "--save", "", "--dir", str(folder), "--bind", "127.0.0.1", *more]
    return started([program, *options], port)


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory):
    process = start_redis(port := free_port(), tmp_path_factory.mktemp("redis"))
    yield port
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def s3_endpoint():
    if (program := shutil.which("moto_server")) is None:
        pytest.skip("moto_server is not on the path: pip install 'moto[server]'")
    process = started([program, "-H", "127.0.0.1", "-p", str(port := free_port())], port)
    endpoint = f"http://127.0.0.1:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/pages", method="PUT")).close()
    yield endpoint
    process.kill()
    process.wait()


def redis_at(port, space=SPACE, **options):
    return closing(RedisTier(f"redis://127.0.0.1:{port}/0", space, **options))


def check_that_two_engines_share(make):
    with make() as ours, make() as theirs:
        assert all(ours.put(*page_of(n)[:2]) for n in (1, 2))
        assert settled(theirs, 1, 2, 3) == [HIT, HIT, MISS]
        assert bytes(theirs.get(key_of(1))) == page_of(1)[2] and theirs.get(key_of(3)) is None
        theirs.delete([key_of(1)])
        deadline = time.monotonic() + 10
        while ours.get(key_of(1)) is not None:
            assert time.monotonic() < deadline
        assert bytes(ours.get(key_of(2))) == page_of(2)[2]
        assert ours.usage()[0].counters.errors == theirs.usage()[0].counters.errors == 0


def test_redis_is_shared(redis_port):
    check_that_two_engines_share(lambda: redis_at(redis_port))


def test_a_server_that_evicts_is_a_miss_and_one_that_is_full_a_dropped_page(redis_port, caplog):
    with redis_at(redis_port, ttl_s=1000) as tier:
        tier.put(*page_of(5)[:2])
        assert 0 < tier.client.ttl(tier.key_name(key_of(5))) <= 1000
        tier.client.flushall()
        assert tier.lookup([key_of(5)]) == [HIT] and tier.get(key_of(5)) is None
        tier.put(*page_of(8)[:2])
        tier.client.config_set("maxmemory", "1")
        assert not tier.put(*page_of(6)[:2])
        assert tier.get(key_of(8)) is not None  # it is full, not dead
        tier.client.config_set("maxmemory", "0")
        assert tier.usage()[0].counters.errors == 1
    assert "OutOfMemoryError" in caplog.text or "OOM" in caplog.text


def test_a_page_that_somebody_damaged_in_redis(redis_port):
    with redis_at(redis_port) as tier:
        tier.put(*page_of(7)[:2])
        tier.client.setrange(tier.key_name(key_of(7)), len(page_of(7)[2]) - 2, b"!")
        assert tier.get(key_of(7)) is None and tier.usage()[0].counters.corrupt == 1
        assert not tier.client.exists(tier.key_name(key_of(7)))


def test_a_server_that_is_killed_stopped_and_started_again(tmp_path):
    process = start_redis(port := free_port(), tmp_path)
    with redis_at(port, timeout_s=0.8, retry_after_s=1.5) as tier:
        assert tier.put(*page_of(1)[:2])
        process.send_signal(19)  # it hangs
        began = time.monotonic()
        assert [tier.get(key_of(1)) for _ in range(20)] == [None] * 20
        assert time.monotonic() - began < 1.5 and tier.usage()[0].counters.errors == 1  # one time-out, once
        process.kill()
        process.wait()
        assert tier.get(key_of(1)) is None and not tier.put(*page_of(2)[:2])
        process = start_redis(port, tmp_path)
        deadline = time.monotonic() + 10
        while not tier.put(*page_of(2)[:2]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert bytes(tier.get(key_of(2))) == page_of(2)[2]
        assert tier.lookup([key_of(1)]) == [HIT] and tier.get(key_of(1)) is None  # it was there before
        assert tier.put(*page_of(1)[:2]) and bytes(tier.get(key_of(1))) == page_of(1)[2]
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_bucket_is_shared(s3_endpoint):
    check_that_two_engines_share(
        lambda: closing(S3Tier("s3://pages/kv", SPACE, endpoint=s3_endpoint, config=CREDENTIALS))
    )


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_a_miss(s3_endpoint, caplog):
    with closing(S3Tier("s3://missing/kv", SPACE, endpoint=s3_endpoint, config=CREDENTIALS)) as tier:
        assert settled(tier, 1) == [MISS] and tier.get(key_of(1)) is None
        assert not tier.put(*page_of(1)[:2])


def test_a_bucket_in_memory(monkeypatch):
    """The same calls of obstore, without a server."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    monkeypatch.setattr(s3, "open_bucket", lambda *arguments: store)
    check_that_two_engines_share(lambda: closing(S3Tier("s3://pages/kv", SPACE)))


@pytest.mark.parametrize("make", [RedisTier, S3Tier])
def test_a_server_that_is_not_there_is_a_miss_at_once(make, caplog):
    port = free_port()
    options = {"endpoint": f"http://127.0.0.1:{port}", "config": CREDENTIALS} if make is S3Tier else {}
    url = "s3://pages/kv" if make is S3Tier else f"redis://:precious@127.0.0.1:{port}"
    with closing(make(url, SPACE, timeout_s=0.5, **options)) as tier:
        assert settled(tier, 1) == [MISS] and tier.get(key_of(1)) is None and not tier.put(*page_of(1)[:2])
        assert tier.usage()[0].counters.errors == 1
    assert len(caplog.records) == 1 and "precious" not in caplog.text


def test_addresses_that_are_none(monkeypatch):
    with pytest.raises(ConfigError, match="no address of a Redis server"):
        RedisTier("http://127.0.0.1", SPACE)
    with pytest.raises(ConfigError, match="no address of a bucket"):
        S3Tier("http://127.0.0.1", SPACE)
    for module, make, url in ((redis_tier, RedisTier, "redis://x"), (s3, S3Tier, "s3://x")):
        monkeypatch.setattr(module, "is_installed", lambda name: False)
        with pytest.raises(ConfigError, match="needs the package .* pip install -e '"):
            make(url, SPACE)
