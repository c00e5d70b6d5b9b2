"""What LMCache is told is understood, or refused by name; so are the settings of a tier's address."""

import pytest

from jaxpaged.config.sections import CacheConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.settings import ChunkSettings
from jaxpaged.kv_store.options import offload_of
from jaxpaged.kv_store.tier_options import TierWish


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


def tiers_of(offload=None, extra=None, **transfer):
    if extra is not None:
        transfer = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra, **transfer}
    return offload_of(CacheConfig(kv_offload=offload, kv_transfer_config=transfer)).tiers


def test_settings_of_an_address(monkeypatch):
    url = "lmcache=lm://h:1?model=org/m&chunk_size=64&hash=sha256_cbor&seed=7&world_size=2"
    assert tiers_of("host=1G," + url)[1] == TierWish(
        "lmcache", "lm://h:1", chunks=ChunkSettings("org/m", 64, "sha256_cbor", "7", 2)
    )
    assert tiers_of("lmcache=redis://h:1/2?ttl=60") == (
        TierWish("lmcache", "redis://h:1/2", ttl_s=60, chunks=ChunkSettings()),
    )
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert tiers_of("lmcache=lm://h:1?hash=builtin")[0].chunks == ChunkSettings(algorithm="builtin", seed="3")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("lm://h", "lm://HOST:PORT"),
        ("lm://h:1?ttl=5", "keeps all"),
        ("s3://h", "of LMCache's stores there are lm, grpc, redis"),
        ("lm://h:1?chunk_size=0", "chunk_size is '0'"),
        ("lm://h:1?world_size=x", "world_size is 'x'"),
        ("lm://h:1?hash=sha256", "it hashes pickles"),
        ("lm://h:1?hash=builtin", "PYTHONHASHSEED is not set"),
        ("lm://h:1?chunksize=64", "Did you mean 'chunk_size'"),
        ("lm://me:hush@h:1", "with a name or password in it"),
    ],
)
def test_addresses_that_cannot_be_followed(url, said):
    with pytest.raises(ConfigError, match=said) as caught:
        tiers_of(f"lmcache={url}")
    assert "hush" not in str(caught.value)


def test_lmcaches_own_configuration(monkeypatch, tmp_path):
    remote = {"lmcache.remote_url": "lm://h:1", "lmcache.pre_caching_hash_algorithm": "sha256_cbor"}
    lm = TierWish("lmcache", "lm://h:1", chunks=ChunkSettings())
    assert tiers_of(extra=remote) == (TierWish("host", capacity=5 << 30), lm)
    assert tiers_of(extra={**remote, "lmcache.local_cpu": False}) == (lm,)
    assert tiers_of("disk=/d:1G", extra=remote) == (TierWish("disk", "/d", 1 << 30), lm)
    assert tiers_of(extra={"lmcache.max_local_cpu_size": 0.5}) == (TierWish("host", capacity=1 << 29),)
    path = tmp_path / "lmcache.yaml"
    path.write_text(
        "chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 2\nremote_url: lm://file:1\n", encoding="utf-8"
    )
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "3.0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert tiers_of(extra={"lmcache.remote_url": "redis://h:2"}) == (
        TierWish("host", capacity=3 << 30),
        TierWish("lmcache", "redis://h:2", chunks=ChunkSettings(None, 128, "builtin", "0")),
    )


def test_one_of_several_connectors():
    extra = {
        "lmcache.remote_url": "lm://h:1",
        "lmcache.local_cpu": False,
        "lmcache.pre_caching_hash_algorithm": "sha256_cbor",
    }
    first = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 99}}
    second = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    tiers = tiers_of(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [first, second]})
    assert [tier.kind for tier in tiers] == ["host", "lmcache"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lmcache.remote_url": "lm://h:1"}, "PYTHONHASHSEED is not set"),
        ({"lmcache.remote_url": "lm://h:1?model=x", "lmcache.pre_caching_hash_algorithm": "sha256_cbor"}, "without"),
        (
            {"lmcache.remote_url": "mooncakestore://h:1", "lmcache.pre_caching_hash_algorithm": "sha256_cbor"},
            "of LMCache's stores there are lm",
        ),
        ({"lmcache.use_layerwise": True}, "use_layerwise True; here it is False, since chunks hold all layers"),
        ({"lmcache.remote_serde": "cachegen"}, "remote_serde 'cachegen'"),
        ({"lmcache.local_disk": "/d", "lmcache.max_local_disk_size": 5}, "disk=PATH:SIZE"),
        ({"lmcache.chunk_sise": 5}, "Did you mean 'chunk_size'"),
        ({"lmcache.local_cpu": False}, "names no place"),
        ({"lmcache.local_cpu": "yes"}, "true or false"),
        ({"lmcache.max_local_cpu_size": -1}, "max_local_cpu_size is -1"),
        ({"chunk_size": 5}, "begin with lmcache."),
    ],
)
def test_what_lmcache_would_do_and_is_not_done_here(extra, said):
    with pytest.raises(ConfigError, match=said):
        tiers_of(extra=extra)


def test_files_and_variables_that_are_none(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="LMCACHE_CONFIG_FILE is .*cannot be read: FileNotFoundError"):
        tiers_of(extra={})
    (tmp_path / "none.yaml").write_text("- a list", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no keys and values"):
        tiers_of(extra={})
    monkeypatch.delenv("LMCACHE_CONFIG_FILE")
    monkeypatch.setenv("LMCACHE_ENABLE_BLENDING", "true")
    with pytest.raises(ConfigError, match="enable_blending True"):
        tiers_of(extra={})


def multiprocess(**extra):
    extra = {f"lmcache.mp.{key}": value for key, value in extra.items()}
    return tiers_of(kv_connector="LMCacheMPConnector", kv_connector_extra_config=extra, kv_role="kv_both")


def test_the_multi_process_server_is_named_as_vllm_names_it(monkeypatch):
    wish = TierWish("lmcache", "grpc://localhost:5555", chunks=ChunkSettings(chunk_size=None))
    assert multiprocess(host="grpc://localhost") == (wish,)
    same = {"mp_transfer_mode": "auto", "heartbeat_interval": 10.0, "save_decode_cache": True, "lazy_offload": False}
    assert multiprocess(server_urls="grpc://localhost:5555", **same) == (wish,)
    other = multiprocess(host="grpc://[::1]", port=6000, mq_timeout=5, model="org/m", world_size=2)
    settings = ChunkSettings("org/m", None, world_size=2, timeout_s=5.0)
    assert other == (TierWish("lmcache", "grpc://[::1]:6000", chunks=settings),)
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "engine_driven")
    assert multiprocess(server_urls=["grpc://127.0.0.1:1"])[0].place == "grpc://127.0.0.1:1"
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "lmcache_driven")
    with pytest.raises(ConfigError, match="mp_transfer_mode 'lmcache_driven'; here it is 'engine_driven'"):
        multiprocess(host="grpc://localhost")


def test_the_multi_process_server_by_its_address():
    url = "grpc://localhost:1"
    assert tiers_of(f"host=1G,lmcache={url}")[1] == TierWish("lmcache", url, chunks=ChunkSettings(chunk_size=None))
    settings = ChunkSettings("org/m", 64, world_size=2)
    named = tiers_of(f"lmcache={url}?model=org/m&chunk_size=64&world_size=2")
    assert named == (TierWish("lmcache", url, chunks=settings),)
    for setting, said in {"hash=builtin": "hashes tokens itself", "ttl=5": "evicts what was not"}.items():
        with pytest.raises(ConfigError, match=said):
            tiers_of(f"lmcache={url}?{setting}")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "means ZeroMQ; here it is spoken over gRPC"),
        ({"port": 1}, "tcp://localhost:1.*--transport grpc"),
        ({"host": "localhost"}, "means ZeroMQ"),
        ({"host": "grpc://cache.local"}, "must run on this machine"),
        ({"host": "grpc://10.0.0.1", "port": 1}, "must run on this machine"),
        ({"host": "grpc://localhost", "port": "x"}, "grpc://HOST:PORT"),
        ({"host": "grpc://localhost", "port": 99999}, "grpc://HOST:PORT"),
        ({"server_urls": "grpc://localhost:1,grpc://localhost:2"}, "must be one address"),
        ({"server_urls": "grpc://localhost:1", "port": 1}, "must be one address"),
        ({"server_urls": 5}, "must be one address"),
        ({"host": "grpc://localhost", "mq_timeout": 300.0}, "at most 60"),
        ({"host": "grpc://localhost", "mq_timeout": True}, "mq_timeout True"),
        ({"host": "grpc://localhost", "model": 1}, "model 1; it must be a text"),
        ({"host": "grpc://localhost", "world_size": 0}, "world_size is 0"),
        ({"host": "grpc://localhost", "mp_transfer_mode": "lmcache_driven"}, "reads and writes the shared memory"),
        ({"host": "grpc://localhost", "autostart": True}, "autostart True; here it is False"),
        ({"host": "grpc://localhost", "save_decode_cache": False}, "kept like those of prompts"),
        ({"host": "grpc://localhost", "mq_timeuot": 1}, "Did you mean 'lmcache.mp.mq_timeout'"),
    ],
)
def test_what_the_multi_process_server_is_not_used_for(extra, said):
    with pytest.raises(ConfigError, match=said):
        multiprocess(**extra)
    for key in ("lmcache.chunk_size", "model"):
        with pytest.raises(ConfigError, match=f"{key}', which means nothing here"):
            tiers_of(kv_connector="LMCacheMPConnector", kv_connector_extra_config={key: "x"})


def test_who_lends_needs_a_tier_of_pages():
    with pytest.raises(ConfigError, match="Add a tier, such as host=8G"):
        offload_of(CacheConfig(kv_offload="lmcache=lm://h:1", kv_role="kv_producer"))
    assert offload_of(CacheConfig(kv_offload="host=1G,lmcache=lm://h:1", kv_role="kv_producer"))


def test_host_memory_is_named_once():
    with pytest.raises(ConfigError, match="both name tiers"):
        tiers_of("host=1G", extra={"lmcache.max_local_cpu_size": 1.0})
