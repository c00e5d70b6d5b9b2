"""What LMCache is told is understood, or refused by name; so are the settings of a tier's address."""

import pytest

from jaxpaged.config.sections import CacheConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.settings import ChunkSettings
from jaxpaged.kv_store.options import TierWish, offload_of


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
        ("s3://h", "of LMCache's stores there are lm, redis"),
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


def test_the_multi_process_server_is_refused_by_name():
    with pytest.raises(ConfigError, match="LMCacheMPConnector.*multi-process server is not spoken here"):
        tiers_of(kv_connector="LMCacheMPConnector", kv_connector_extra_config={"lmcache.mp.port": 1})


def test_who_lends_needs_a_tier_of_pages():
    with pytest.raises(ConfigError, match="Add a tier, such as host=8G"):
        offload_of(CacheConfig(kv_offload="lmcache=lm://h:1", kv_role="kv_producer"))
    assert offload_of(CacheConfig(kv_offload="host=1G,lmcache=lm://h:1", kv_role="kv_producer"))


def test_host_memory_is_named_once():
    with pytest.raises(ConfigError, match="both name tiers"):
        tiers_of("host=1G", extra={"lmcache.max_local_cpu_size": 1.0})
