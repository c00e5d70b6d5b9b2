"""What the options for tiers besides the device accept, and what they refuse by name."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.connector_options import CONNECTORS, INSTEAD
from jaxpaged.kv_store.options import KVOffload, offload_of
from jaxpaged.kv_store.peering import Peering
from jaxpaged.kv_store.secrets import read_secrets
from jaxpaged.kv_store.tier_options import TierWish

CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def offload(tiers, transfer):
    return offload_of(EngineConfig.from_options(kv_offload=tiers, kv_transfer_config=transfer).cache)


def test_tiers_are_named_with_their_sizes():
    assert offload(None, {}) is None
    wanted = (TierWish("host", capacity=3 << 29), TierWish("disk", "/a:b/c", 200 << 30))
    assert offload("host=1.5G, disk=/a:b/c:200GiB", {}) == KVOffload(wanted)
    wanted = (
        TierWish("redis", "redis://h:1/2", ttl_s=60),
        TierWish("redis", "unix:///run/redis"),
        TierWish("s3", "s3://b/p", endpoint="http://h:1"),
        TierWish("s3", "s3://b/q"),
    )
    text = "redis=redis://h:1/2?ttl=60,redis=unix:///run/redis,s3=s3://b/p?endpoint=http://h:1,s3=s3://b/q"
    assert offload(text, {}) == KVOffload(wanted)


OWN = {"kv_connector": "SQLite", "kv_connector_module_path": "tests.kv_store.example_connector"}


def test_ones_own_connector_comes_behind_the_tiers_and_several_in_their_order():
    config = {"file": "x"}
    own = TierWish("custom", "SQLite", module=OWN["kv_connector_module_path"], config=config)
    host, disk = TierWish("host", capacity=4096), TierWish("disk", "/d", 1 << 30)
    single = {**OWN, "kv_connector_extra_config": config}
    assert offload(None, single).tiers == (own,)
    assert offload("host=4K,disk=/d:1G", single).tiers == (host, disk, own)
    in_memory = {**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": 4096}}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [single, in_memory]},
    }
    assert offload(None, both) == KVOffload((own, host), "fail")
    both["kv_connector_extra_config"] = {"connectors": [single, CONNECTOR]}
    assert offload("disk=/d:1G", both).tiers == (own, disk)


VLLMS = {
    *("ExampleConnector", "ExampleHiddenStatesConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "NixlConnector"),
    *("NixlPullConnector", "NixlPushConnector", "MultiConnector", "HiSparseConnector", "MoRIIOConnector"),
    *("OffloadingConnector", "DecodeBenchConnector", "MooncakeConnector", "MooncakeStoreConnector"),
    *("FlexKVConnectorV1", "SimpleCPUOffloadConnector", "HF3FSKVConnector"),
    *("SharedStorageConnector", "P2pNcclConnector"),
}
"""The names that its registry has, and had."""
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_vllms_names_stand_for_what_does_their_work_here():
    host = TierWish("host", capacity=1 << 20)
    small = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    assert offload(None, {"kv_connector": "SimpleCPUOffloadConnector", **small}).tiers == (host,)
    for name in ("SharedStorageConnector", "ExampleConnector"):
        at = {"kv_connector": name, "kv_connector_extra_config": {"shared_storage_path": "/kv"}}
        assert offload("host=1M", at).tiers == (host, TierWish("disk", "/kv", 16 << 30))
    default = TierWish("host", capacity=1 << 30)
    peering = Peering("kv_both")
    assert offload(None, NIXL) == KVOffload((default,), peering=peering)
    assert offload(None, several(NIXL, {**CONNECTOR, **small})) == KVOffload((host,), peering=peering)
    assert offload(None, several(OWN, {**NIXL, "kv_role": "kv_producer"})).tiers[0] == default
    assert offload(None, {"kv_connector": "my.module:Mine"}).tiers == (TierWish("custom", "my.module:Mine"),)
    assert VLLMS - {*CONNECTORS} - {*INSTEAD} == set()


def several(*connectors, **more):
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [*connectors]}, **more}


@pytest.mark.parametrize(
    "tier", ["redis=redis://:hush@h:1", "redis=redis://h:1?password=hush", "s3=s3://b?aws_secret_access_key=hush"]
)
def test_passwords_are_refused_where_everybody_reads_them_and_not_repeated(tier):
    with pytest.raises(ConfigError, match="kv_offload_secrets") as caught:
        offload(tier, {})
    assert "hush" not in str(caught.value)


def test_a_file_holds_what_stores_ask_for(tmp_path):
    path = tmp_path / "secrets.json"
    path.write_text('{"redis_password": "hush hush", "page_secret": "sixteen letters."}', encoding="utf-8")
    secrets = read_secrets(str(path))
    assert secrets.redis_password == "hush hush" and secrets.signing == b"sixteen letters."
    assert "hush" not in repr(secrets) and read_secrets(None).signing is None
    bad = {
        "no JSON": "{hush",
        "redis_passwort": '{"redis_passwort": "hush"}',
        "Expected `str": '{"redis_password": 1}',
        "16 at least": '{"page_secret": "hush"}',
    }
    for words, content in bad.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=words) as caught:
            read_secrets(str(path))
        assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secrets(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no tier that needs it"):
        EngineConfig.from_options(kv_offload_secrets=str(path))


def test_vllms_json_means_the_same():
    transfer = {**CONNECTOR, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"cpu_bytes_to_use": 4096}}
    assert offload(None, transfer) == KVOffload((TierWish("host", capacity=4096),), "fail")
    del transfer["kv_connector_extra_config"]
    assert offload("host=4K", transfer) == KVOffload((TierWish("host", capacity=4096),), "fail")


def test_pages_are_rounded_only_where_that_is_asked_for():
    host = (TierWish("host", capacity=1 << 30),)
    extra = lambda **more: {**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, **more}}
    assert offload("host=1G", {}).pages == offload(None, extra()).pages == offload("pages=exact,host=1G", {}).pages
    assert offload("host=1G, pages=int8", {}) == KVOffload(host, pages="int8")
    assert offload(None, extra(pages="fp8")) == KVOffload(host, pages="fp8")
    assert offload("pages=fp8", extra()) == KVOffload(host, pages="fp8")
    assert offload(None, several(extra(pages="int8"), OWN)).pages == "int8"
    of_role = EngineConfig.from_options(kv_offload="pages=int8", kv_role="kv_both").cache.offload
    assert of_role.tiers == host and of_role.pages == "int8"
    for words, tiers, transfer in (
        ("pages='int4'.*exact, int8, fp8", "host=1G,pages=int4", {}),
        ("pages=8", None, extra(pages=8)),
        ("Say it once", "pages=int8", extra(pages="int8")),
        ("Say it once", "host=1G,pages=int8,pages=fp8", {}),
        ("no tier to keep pages in", "pages=int8", {}),
    ):
        with pytest.raises(ConfigError, match=words):
            offload(tiers, transfer)


def test_pages_have_as_many_tokens_as_is_said():
    """vLLM's name for that is the `block_size` of what it offloads."""
    extra = lambda **more: {**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30, **more}}
    assert offload("host=1G", {}).page_tokens is None
    assert offload("page_tokens=48,host=1G,pages=int8", {}) == KVOffload(
        (TierWish("host", capacity=1 << 30),), pages="int8", page_tokens=48
    )
    assert offload(None, extra(block_size=256)).page_tokens == 256
    assert EngineConfig.from_options(kv_offload="page_tokens=64", kv_role="kv_both").cache.offload.page_tokens == 64
    for words, tiers, transfer in (
        ("page_tokens='0'; it must be a number", "host=1G,page_tokens=0", {}),
        ("page_tokens='x'", "host=1G,page_tokens=x", {}),
        ("page_tokens=-4", None, extra(block_size=-4)),
        ("page_tokens=True", None, extra(block_size=True)),
        ("Say it once", "page_tokens=64", extra(block_size=64)),
        ("no tier to keep pages in", "page_tokens=64", {}),
    ):
        with pytest.raises(ConfigError, match=words):
            offload(tiers, transfer)


@pytest.mark.parametrize(
    ("tiers", "transfer", "words"),
    [
        ("host", {}, "host=SIZE"),
        ("disk=8G", {}, "disk=PATH:SIZE"),
        ("gpu=8G", {}, "gpu=8G"),
        ("host=0", {}, "no bytes"),
        ("host=8", {}, "which is 8 bytes: too few for a page. Give a unit, such as host=8G"),
        ("disk=/a/b:200", {}, "such as disk=/a/b:200G"),
        ("host=1G,host=2G", {}, "twice"),
        (None, several(), "a list of"),
        (None, several("x"), "a list of"),
        (None, several(several(OWN)), "outer one"),
        (None, several(OWN, OWN), "twice"),
        (None, several(CONNECTOR), "no place"),
        (None, several(OWN, {**OWN, "kv_load_failure_policy": "fail"}), "beside the list"),
        (None, several(OWN, kv_role="kv_producer"), "kv_producer"),
        (None, {**OWN, "kv_connector_extra_config": 3}, "an object"),
        (None, {"kv_connector": "OffloadingConector"}, "OffloadingConnector.*entry point"),
        (None, {**OWN, "kv_connector_module_path": 3}, "must be names"),
        (None, {**CONNECTOR, "kv_connector_module_path": "x"}, "kv_connector_module_path, 'x'"),
        ("redis=http://h", {}, "redis=redis://HOST:PORT"),
        ("s3=s3://", {}, "s3=s3://BUCKET"),
        ("redis=redis://h?tll=1", {}, "tll"),
        ("redis=redis://h?ttl=0", {}, "ttl='0'"),
        ("s3=s3://b?endpoint=h:1", {}, "endpoint='h:1'"),
        (None, CONNECTOR, "no place"),
        (None, {**CONNECTOR, "kv_role": "kv_producer"}, "kv_producer"),
        (None, {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}, "over TCP.*--kv-role alone"),
        (None, several(CONNECTOR, {"kv_connector": "NixlPushConnector"}), "none are pushed"),
        (None, {**NIXL, "kv_connector_extra_config": {"backends": ["UCX"]}}, "NixlConnector can hold nothing"),
        (None, {**NIXL, "kv_role": "both"}, "kv_role 'both'"),
        (None, several(NIXL, {**NIXL, "kv_role": "kv_producer"}), "2 roles"),
        (None, {"kv_connector": "MooncakeStoreConnector"}, "redis=redis://HOST:PORT"),
        (None, {"kv_connector": "SharedStorageConnector"}, "shared_storage_path None; it must be a folder"),
        (None, several(OWN, {"kv_connector": "HF3FSKVConnector"}), "disk=PATH:SIZE"),
        (None, {"kv_connector": "my.module:Mine", "kv_connector_module_path": "x"}, "Leave the latter out"),
        (None, {"kv_connector": "my.module:"}, "one's own is 'module:Class'"),
        (None, {**CONNECTOR, "kv_rolle": "kv_both"}, "kv_rolle"),
        ("host=1G", {**CONNECTOR, "kv_load_failure_policy": "retry"}, "retry"),
        (None, {**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": -1}}, "cpu_bytes_to_use"),
        (None, {**CONNECTOR, "kv_connector_extra_config": {"spec_name": "x"}}, "spec_name"),
        ("host=1G", {**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}, "one of them"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tiers, transfer, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(kv_offload=tiers, kv_transfer_config=transfer)


def test_vllms_short_form_is_a_tier_of_host_memory():
    cache = lambda **options: EngineConfig.from_options(**options).cache
    for size, capacity in ((4, 4 << 30), (0.5, 1 << 29), (12.0, 12 << 30)):
        assert cache(kv_offloading_size=size).offload.tiers == (TierWish("host", capacity=capacity),)
    assert cache(kv_offloading_size=None, kv_offloading_backend="native").offload is None
    for options in (
        {"kv_offloading_size": "much"},
        {"kv_offloading_size": 4, "kv_offload": "host=1G"},
        {"kv_offloading_size": -1},
    ):
        with pytest.raises(ConfigError):
            cache(**options)
    assert cache(kv_offload="host=65536").offload.tiers == (TierWish("host", capacity=1 << 16),)
    assert cache(kv_offload="host=80B").offload.tiers == (TierWish("host", capacity=80),)


def test_roles():
    cache = lambda **options: EngineConfig.from_options(**options).cache
    assert cache(kv_role="kv_both").offload.tiers == (TierWish("host", capacity=1 << 30),)
    peering = Peering("kv_producer", address=("h", 5600), lease_seconds=5.0)
    wanted = KVOffload((TierWish("host", capacity=1 << 20),), peering=peering)
    options = {"kv_offload": "host=1M", "kv_address": "h:5600", "kv_lease_seconds": 5.0}
    assert cache(**options, kv_role="kv_producer").offload == wanted
    assert not cache(kv_role="kv_both", kv_transport="tcp").offload.peering.shares
    of_json = cache(kv_transfer_config={"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"})
    assert of_json.role == "kv_consumer" and of_json.load_failure_policy == "fail"
    for words, options in {
        "must be one of kv_producer": {"kv_role": "producer"},
        "Give one of them": {"kv_role": "kv_producer", "kv_transfer_config": NIXL},
        "HOST:PORT": {"kv_role": "kv_both", "kv_address": "everywhere"},
        "kv_lease_seconds": {"kv_lease_seconds": 0.0},
        "has nothing to do with other engines": {"kv_address": "127.0.0.1:1"},
        "kv_peers 10.0.0.1": {"kv_peers": "10.0.0.1"},
        "kv_transport tcp": {"kv_transport": "tcp"},
        "gets what is offered there": {"kv_transport": "jax", "kv_role": "kv_both"},
        "auto, tcp": {"kv_transport": "shm", "kv_role": "kv_both"},
    }.items():
        with pytest.raises(ConfigError, match=words):
            cache(**options)
