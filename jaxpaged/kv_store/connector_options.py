"""Connectors as vLLM's JSON names them, in the option `kv_transfer_config`.

vLLM's own names stand for what does their work here (CONNECTORS), or are refused with a sentence that says what to use
(INSTEAD). Any other name is a stranger's: "my_package.module:MyConnector", or a class's name with
`kv_connector_module_path`, or the name of an entry point of the group `jaxpaged.kv_connectors`.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.kv_store.lmcache import settings as lmcache
from jaxpaged.kv_store.lmcache.multiprocess import settings as multiprocess
from jaxpaged.kv_store.lmcache.settings import ChunkSettings, lmcache_config, whole_number
from jaxpaged.kv_store.tier_options import TierWish, store_wish
from jaxpaged.kv_store.transfer_params import ROLES

GROUP = "jaxpaged.kv_connectors"
"""Entry points of packages that have connectors."""
POLICIES = ("recompute", "fail")
OFFLOADING, SIMPLE_OFFLOADING, MULTI = "OffloadingConnector", "SimpleCPUOffloadConnector", "MultiConnector"
FOLDERS = ("SharedStorageConnector", "ExampleConnector")
BETWEEN_ENGINES = ("NixlConnector", "NixlPullConnector")
CONNECTORS = (
    OFFLOADING,
    SIMPLE_OFFLOADING,
    *FOLDERS,
    lmcache.CONNECTOR,
    multiprocess.CONNECTOR,
    *BETWEEN_ENGINES,
    MULTI,
)
"""vLLM's names that stand for something here."""
FOLDER_BYTES = 16 << 30
"""Capacity of the folder of a SharedStorageConnector, which vLLM lets grow without a limit."""
_PEERS = (
    "engines give each other pages over TCP, with the request fields of vLLM's NixlConnector. Use that name, or "
    "--kv-role alone"
)
INSTEAD = {
    "NixlPushConnector": f"a decode engine pulls pages, and none are pushed: {_PEERS}",
    **dict.fromkeys(("MooncakeConnector", "P2pNcclConnector", "MoRIIOConnector"), _PEERS),
    "MooncakeStoreConnector": "a store that engines share is the tier redis=redis://HOST:PORT or s3=s3://BUCKET/PREFIX"
    " of --kv-offload",
    "FlexKVConnectorV1": "host memory and a disk are --kv-offload host=SIZE,disk=PATH:SIZE",
    "HF3FSKVConnector": "a folder that engines share is --kv-offload disk=PATH:SIZE",
    "HiSparseConnector": "host memory is --kv-offload host=SIZE, for layers that attend to all tokens",
    "DecodeBenchConnector": "decoding alone is measured by jaxpaged bench with prompts of few tokens",
    "ExampleHiddenStatesConnector": "hidden states are not saved; a pooling model gives them with --runner pooling",
}
"""vLLM's names that stand for nothing here, and what to use."""
KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config", "kv_connector_module_path")
ROLE_KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")
PAGE_KEYS = {"pages": "pages", "block_size": "page_tokens"}
"""What vLLM's OffloadingConnector may be told of pages, and how that is called here."""
EXTRA_KEYS = {
    OFFLOADING: ("cpu_bytes_to_use", *PAGE_KEYS),
    SIMPLE_OFFLOADING: ("cpu_bytes_to_use",),
    **dict.fromkeys(FOLDERS, ("shared_storage_path",)),
    **dict.fromkeys(BETWEEN_ENGINES, ()),
}
"""What the `kv_connector_extra_config` of each may hold; others check theirs themselves."""


@dataclass(frozen=True)
class TransferConfig:
    """What the JSON says, checked. Connectors between engines are the `role`; `connectors` are the others, in order."""

    role: str | None = None
    connectors: tuple[Mapping[str, Any], ...] = ()
    failure_policy: str = "recompute"


def read_transfer_config(transfer: Mapping[str, Any]) -> TransferConfig:
    """Check the JSON. Raises ConfigError, which names what is wrong and what to do."""
    if not transfer:
        return TransferConfig()
    policy = one_of(transfer, "kv_load_failure_policy", POLICIES, "recompute")
    name = transfer.get("kv_connector")
    if name is None and "kv_role" in transfer:
        check_role_alone(transfer)
        return TransferConfig(transfer["kv_role"], (), policy)
    connectors = several_connectors(transfer) if name == MULTI else [transfer]
    for each in connectors:
        check_connector(each)
    roles = {each.get("kv_role", "kv_both") for each in connectors if each["kv_connector"] in BETWEEN_ENGINES}
    if len(roles) > 1:
        raise ConfigError(f"kv_transfer_config has connectors between engines with {len(roles)} roles. Name one.")
    rest = tuple(each for each in connectors if each["kv_connector"] not in BETWEEN_ENGINES)
    return TransferConfig(next(iter(roles), None), rest, policy)


def one_of(given: Mapping[str, Any], key: str, values: tuple[str, ...], default: str) -> str:
    value = given.get(key, default)
    if value not in values:
        raise ConfigError(f"kv_transfer_config has {key} {value!r}; it must be one of {', '.join(values)}.")
    return str(value)


def check_role_alone(transfer: Mapping[str, Any]) -> None:
    """Raise ConfigError for the JSON of an engine between others that has more than a role."""
    one_of(transfer, "kv_role", ROLES, "")
    for key in transfer:
        if key not in ROLE_KEYS:
            raise ConfigError(
                f"kv_transfer_config has a role and the key {key!r}.{did_you_mean(key, ROLE_KEYS)} Places are "
                "named by kv_offload and kv_address."
            )


def several_connectors(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of a MultiConnector. Raises ConfigError for what is no list of them."""
    check_keys(transfer)
    extra = transfer.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) and set(extra) == {"connectors"} else None
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        raise ConfigError(
            f"kv_transfer_config has kv_connector_extra_config {extra!r}; that of a {MULTI} holds connectors, a list "
            "of objects with a kv_connector each."
        )
    are_between = any(each.get("kv_connector") in BETWEEN_ENGINES for each in listed)
    one_of(transfer, "kv_role", ROLES if are_between else ("kv_both",), "kv_both")
    for each in listed:
        if each.get("kv_connector") == MULTI:
            raise ConfigError(f"kv_transfer_config has a {MULTI} in a {MULTI}. Name its connectors in the outer one.")
        if "kv_load_failure_policy" in each:
            raise ConfigError(f"a connector of a {MULTI} has a kv_load_failure_policy. Give one, beside the list.")
    return listed


def check_keys(transfer: Mapping[str, Any]) -> None:
    for key in transfer:
        if key not in KEYS:
            raise ConfigError(f"kv_transfer_config has the unknown key {key!r}.{did_you_mean(key, KEYS)}")


def check_connector(transfer: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is not there in the JSON of one connector."""
    check_keys(transfer)
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if not isinstance(name, str) or not isinstance(module, str | None):
        raise ConfigError(f"kv_transfer_config has the kv_connector {name!r} of {module!r}; both must be names.")
    if name in INSTEAD:
        raise ConfigError(f"kv_transfer_config has kv_connector {name!r}; here {INSTEAD[name]}.")
    one_of(transfer, "kv_role", ROLES if name in BETWEEN_ENGINES else ("kv_both",), "kv_both")
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"kv_transfer_config has kv_connector_extra_config {extra!r}; it must be an object.")
    if name not in CONNECTORS:
        check_stranger(name, module)
    elif module is not None:
        raise ConfigError(
            f"kv_transfer_config has the {name}, which is vLLM's, and a kv_connector_module_path, {module!r}. Leave "
            "out the one that is not meant."
        )
    for key in extra:
        if name in EXTRA_KEYS and key not in EXTRA_KEYS[name]:
            allowed = ", ".join(EXTRA_KEYS[name]) or "nothing"
            raise ConfigError(
                f"kv_transfer_config has kv_connector_extra_config {dict(extra)!r}; that of the {name} can hold "
                f"{allowed}.{did_you_mean(key, EXTRA_KEYS[name])} Tiers are named by the option kv_offload."
            )
    size = extra.get("cpu_bytes_to_use") if name in EXTRA_KEYS else None
    if size is not None and (type(size) is not int or size <= 0):
        raise ConfigError(f"cpu_bytes_to_use is {size!r}; it must be a number of bytes above 0.")
    if name in FOLDERS and (not isinstance(path := extra.get("shared_storage_path"), str) or not path):
        raise ConfigError(
            f"the {name} has shared_storage_path {path!r}; it must be a folder. Add it to its "
            'kv_connector_extra_config, or give kv_offload "disk=PATH:SIZE".'
        )


# ---- strangers' ------------------------------------------------------------------------------------


def check_stranger(name: str, module: str | None) -> None:
    """Raise ConfigError for a name by which nothing can be found. Nothing is imported."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        if module is not None:
            raise ConfigError(
                f"kv_transfer_config has the kv_connector {name!r}, which names its module, and a "
                f"kv_connector_module_path, {module!r}. Leave the latter out."
            )
        return
    installed = sorted(installed_connectors())
    if module is None and name not in installed:
        every = [*CONNECTORS, *installed]
        raise ConfigError(
            f"kv_transfer_config has the kv_connector {name!r}.{did_you_mean(name, every)} There are "
            f"{', '.join(every)}; one's own is 'module:Class', has a kv_connector_module_path, or is an entry point of "
            f"the group {GROUP}."
        )


def installed_connectors() -> dict[str, Any]:
    """The entry points of installed packages, by name."""
    from importlib.metadata import entry_points  # it takes a while to import, and most engines have none

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def load_class(name: str, module: str | None) -> Any:
    """A stranger's class, or whatever has that name. Raises ConfigError where it cannot be imported."""
    place, _, attribute = name.rpartition(":")
    try:
        if place or module is not None:
            return getattr(importlib.import_module(place or str(module)), attribute)
        return installed_connectors()[name].load()
    except Exception as error:  # importing runs a stranger's code
        raise ConfigError(
            f"the kv_connector {name!r} cannot be opened: {type(error).__name__}: {error}. Its module must be "
            "importable where the engine runs (an installed package, or a folder of PYTHONPATH)."
        ) from error


# ---- as tiers --------------------------------------------------------------------------------------


def said_of_pages(connectors: tuple[Mapping[str, Any], ...]) -> list[tuple[str, Any]]:
    """What connectors say of pages: of their form, and as `block_size` of how many tokens."""
    extras = [each.get("kv_connector_extra_config", {}) for each in connectors if each["kv_connector"] == OFFLOADING]
    return [(name, extra[key]) for extra in extras for key, name in PAGE_KEYS.items() if key in extra]


def connector_tiers(connectors: tuple[Mapping[str, Any], ...], named: tuple[TierWish, ...]) -> tuple[TierWish, ...]:
    """The tiers of connectors, among them those that kv_offload has `named`. Raises ConfigError."""
    wishes: list[TierWish | None] = []  # None: the named ones
    for each in connectors:
        name, extra = each["kv_connector"], each.get("kv_connector_extra_config", {})
        if name in (OFFLOADING, SIMPLE_OFFLOADING):
            size = extra.get("cpu_bytes_to_use")
            wishes.append(TierWish("host", capacity=size) if size is not None else None)
        elif name in FOLDERS:
            wishes.append(TierWish("disk", extra["shared_storage_path"], FOLDER_BYTES))
        elif name == lmcache.CONNECTOR:
            wishes += lmcache_wishes(extra, named)
        elif name == multiprocess.CONNECTOR:
            wishes.append(multiprocess_wish(extra))
        else:
            wishes.append(TierWish("custom", name, module=each.get("kv_connector_module_path"), config=dict(extra)))
    if named and None not in wishes:
        if any(wish is not None and wish.kind == "host" for wish in wishes):
            raise ConfigError(
                "kv_offload and cpu_bytes_to_use of kv_transfer_config both name tiers. Give one of them."
            )
        wishes.insert(0, None)
    if not named and None in wishes:
        raise ConfigError(
            "kv_transfer_config names no place for keys and values. Add cpu_bytes_to_use to its "
            "kv_connector_extra_config, or the option kv_offload."
        )
    return tuple(each for wish in wishes for each in (named if wish is None else (wish,)))


def lmcache_wishes(extra: Mapping[str, Any], named: tuple[TierWish, ...]) -> list[TierWish | None]:
    """What LMCache is told to keep, and where; its host memory gives way to tiers that kv_offload has `named`."""
    config = lmcache_config(extra)
    if named and config.says_host and config.host_bytes:
        raise ConfigError("kv_offload and LMCache's max_local_cpu_size both name tiers. Give one of them.")
    wishes: list[TierWish | None] = []
    if not named and config.host_bytes:
        wishes.append(TierWish("host", capacity=config.host_bytes))
    if config.remote_url is not None:
        wish = store_wish("lmcache", config.remote_url)
        if "?" in config.remote_url:
            raise ConfigError(f"LMCache's remote_url is {config.remote_url!r}; it is an address without settings.")
        wishes.append(replace(wish, chunks=config.settings))
    if not wishes and not named:
        raise ConfigError("LMCache's configuration names no place: local_cpu is false, and there is no remote_url.")
    return wishes


def multiprocess_wish(extra: Mapping[str, Any]) -> TierWish:
    """LMCache's multi-process server, whose own memory is the tier."""
    config = multiprocess.server_config(extra)
    settings = ChunkSettings(
        config.model, None, world_size=whole_number("world_size", config.world_size), timeout_s=config.timeout_s
    )
    return TierWish("lmcache", config.url, chunks=settings)
