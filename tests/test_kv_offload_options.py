"""What the options for tiers besides the device accept, and what they refuse by name."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.options import KVOffload, TierWish, offload_of

CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def offload(tiers, transfer):
    return offload_of(EngineConfig.from_options(kv_offload=tiers, kv_transfer_config=transfer).cache)


def test_tiers_are_named_with_their_sizes():
    assert offload(None, {}) is None
    wanted = (TierWish(None, 3 << 29), TierWish("/a:b/c", 200 << 30))
    assert offload("host=1.5G, disk=/a:b/c:200GiB", {}) == KVOffload(wanted)


def test_vllms_json_means_the_same():
    transfer = {**CONNECTOR, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {"cpu_bytes_to_use": 4096}}
    assert offload(None, transfer) == KVOffload((TierWish(None, 4096),), "fail")
    del transfer["kv_connector_extra_config"]
    assert offload("host=4K", transfer) == KVOffload((TierWish(None, 4096),), "fail")


@pytest.mark.parametrize(
    ("tiers", "transfer", "words"),
    [
        ("host", {}, "host=SIZE"),
        ("disk=8G", {}, "disk=PATH:SIZE"),
        ("gpu=8G", {}, "gpu=8G"),
        ("host=0", {}, "no bytes"),
        ("host=1G,host=2G", {}, "twice"),
        (None, CONNECTOR, "no place"),
        (None, {**CONNECTOR, "kv_role": "kv_producer"}, "kv_producer"),
        (None, {"kv_connector": "NixlConnector"}, "NixlConnector"),
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
