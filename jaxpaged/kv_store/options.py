"""Where keys and values are kept besides the device: the options `kv_offload` and `kv_transfer_config`.

`kv_offload` is a list such as "host=8G,disk=PATH:200G,redis=redis://HOST:6379", the fastest tier first; "pages=int8" or
"pages=fp8" in it rounds what leaves the device to 8 bits, and "page_tokens=64" says how many tokens a page has.
`kv_transfer_config` takes vLLM's JSON for the same: its OffloadingConnector, which keeps `cpu_bytes_to_use` bytes in
host memory, or stands for the tiers of `kv_offload`; LMCacheConnectorV1 (`lmcache/settings.py`), LMCacheMPConnector
(`lmcache/multiprocess/settings.py`) and one's own connectors (`custom_store.py`), which come behind those tiers; and
MultiConnector, which names several in the order in which they are asked, and saves to all. `kv_offload_secrets` is a
file with what no command line should hold (`secrets.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.kv_store.connectors import check_connector
from jaxpaged.kv_store.lmcache import settings as lmcache
from jaxpaged.kv_store.lmcache.multiprocess import settings as multiprocess
from jaxpaged.kv_store.lmcache.settings import (
    ChunkSettings,
    address_of,
    lmcache_config,
    settings_of_url,
    whole_number,
)
from jaxpaged.kv_store.peering import Peering, PeeringOptions, peering_of
from jaxpaged.kv_store.transfer_params import ROLES

EXACT = "exact"
PAGES = (EXACT, "int8", "fp8")
"""In which form keys and values are kept: as they are cached, or in 8 bits with a scale for each token and head."""
PAGE_KEYS = {"pages": "pages", "block_size": "page_tokens"}
"""What vLLM's OffloadingConnector may be told of pages, and how that is called here."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LEAST_CAPACITY = 1 << 16
"""Bytes of a tier below which a number without a unit is a slip."""
POLICIES = ("recompute", "fail")
CONNECTOR, MULTI = "OffloadingConnector", "MultiConnector"
INSTEAD = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "P2pNcclConnector",
    "MoRIIOConnector",
)
"""vLLM's connectors whose work a role does here."""
TIERS_INSTEAD = {
    "MooncakeStoreConnector": "a store that engines share is the tier redis=redis://HOST:PORT or s3=s3://BUCKET/PREFIX",
    **dict.fromkeys(
        ("SharedStorageConnector", "ExampleConnector"), "a folder that engines share is the tier disk=PATH:SIZE"
    ),
    "SimpleCPUOffloadConnector": "host memory is the tier host=SIZE",
    "FlexKVConnectorV1": "host memory and a disk are the tiers host=SIZE,disk=PATH:SIZE",
    "HF3FSKVConnector": "a folder that engines share is the tier disk=PATH:SIZE",
}
"""vLLM's connectors whose work a tier does here, and which."""
DEFAULT_TIER = "host=1G"
"""What an engine with a role has besides the device, unless it says so itself."""
ROLE_KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy")
KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config", "kv_connector_module_path")
FORMS = {
    "host": "host=SIZE",
    "disk": "disk=PATH:SIZE",
    "redis": "redis=redis://HOST:PORT",
    "s3": "s3=s3://BUCKET/PREFIX",
    "lmcache": "lmcache=lm://HOST:PORT (or grpc://, redis://)",
}
SCHEMES = {"redis": ("redis", "rediss", "unix"), "s3": ("s3",), "lmcache": ("lm", "grpc", "redis", "rediss", "unix")}
SETTINGS = {"redis": ("ttl",), "s3": ("endpoint",), "lmcache": ("ttl", *lmcache.URL_SETTINGS)}
"""What may stand behind the `?` of a store's address."""


@dataclass(frozen=True)
class TierWish:
    """One tier: "host" or "disk" of so many bytes, or "redis", "s3", "lmcache" or "own", whose stores decide that."""

    kind: str
    place: str = ""
    """The folder of a disk tier, the address of a store without its settings, or the name of one's own connector."""
    capacity: int = 0
    ttl_s: int | None = None
    """Of pages in Redis."""
    endpoint: str | None = None
    """Of a store that speaks like S3 and is not Amazon's."""
    chunks: ChunkSettings | None = None
    """Of a store that is shared with LMCache."""
    module: str | None = None
    """That has the class of one's own connector; None: an entry point has it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What one's own connector is told."""


@dataclass(frozen=True)
class KVOffload:
    """The tiers, fastest first, and what becomes of a request whose pages could not be loaded after all."""

    tiers: tuple[TierWish, ...]
    failure_policy: str = "recompute"
    secrets_file: str | None = None
    peering: Peering | None = None
    """None: it has nothing to do with other engines."""
    pages: str = EXACT
    """One of PAGES."""
    page_tokens: int | None = None
    """Of a page; None: what suits the blocks (`pieces.py`)."""


class OffloadOptions(PeeringOptions, Protocol):
    """What has the options."""

    @property
    def kv_offload(self) -> str | None: ...

    @property
    def kv_transfer_config(self) -> Mapping[str, Any]: ...

    @property
    def kv_offload_secrets(self) -> str | None: ...

    @property
    def kv_role(self) -> str | None: ...


def offload_of(options: OffloadOptions) -> KVOffload | None:
    """What the options ask for together; None: nothing leaves the device. Raises ConfigError."""
    transfer, peering = options.kv_transfer_config, peering_of(options, role_of(options))
    items = [item.strip() for item in options.kv_offload.split(",")] if options.kv_offload else []
    has_connector = bool(transfer) and not says_role(transfer)
    tiers = [item for item in items if not item.startswith(("pages=", "page_tokens="))]
    parts = [item.partition("=") for item in items if item not in tiers]
    said: list[tuple[str, Any]] = [(name, value) for name, _, value in parts]
    settings = page_settings(said + (said_of_pages(transfer) if has_connector else []))
    if peering is not None and not has_connector:
        tiers = tiers or [DEFAULT_TIER]
    named = tuple(map(tier_wish, tiers))
    wishes = connector_tiers(transfer, named) if has_connector else named
    if len({(wish.kind, wish.place) for wish in wishes}) < len(wishes):
        raise ConfigError(f"kv_offload is {options.kv_offload!r}; it names a tier twice. Name each once.")
    if not wishes:
        if settings:
            raise ConfigError(
                f"kv_offload is {options.kv_offload!r}, which names no tier to keep pages in. Add one, such as host=8G."
            )
        if options.kv_offload_secrets is not None:
            raise ConfigError(
                "kv_offload_secrets is given, but no tier that needs it. Add kv_offload, or leave it out."
            )
        return None
    if peering is not None and peering.lends and all(wish.kind == "lmcache" for wish in wishes):
        raise ConfigError("the engine lends pages, and LMCache's stores hold chunks only. Add a tier, such as host=8G.")
    policy = transfer.get("kv_load_failure_policy", "recompute")
    return KVOffload(wishes, policy, options.kv_offload_secrets, peering, **settings)


def said_of_pages(transfer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What vLLM's JSON, whose connectors were checked, says of pages: of their form, and as `block_size` of how many
    tokens."""
    connectors = several_connectors(transfer) if transfer.get("kv_connector") == MULTI else [transfer]
    extras = [each.get("kv_connector_extra_config", {}) for each in connectors if each.get("kv_connector") == CONNECTOR]
    return [(name, extra[key]) for extra in extras for key, name in PAGE_KEYS.items() if key in extra]


def page_settings(said: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `pages` and `page_tokens` that are asked for, by whichever option. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for name, value in said:
        if name in settings:
            raise ConfigError(
                f"{name} is said to be {settings[name]} and {value!r:.40}. Say it once, in kv_offload or elsewhere."
            )
        if name == "page_tokens" and str(value).isdecimal() and int(value) > 0:
            value = int(value)
        elif name == "page_tokens" or value not in PAGES:
            allowed = "a number of tokens above 0" if name == "page_tokens" else f"one of {', '.join(PAGES)}"
            raise ConfigError(f"kv_offload (or kv_transfer_config) has {name}={value!r:.40}; it must be {allowed}.")
        settings[name] = value
    return settings


def says_role(transfer: Mapping[str, Any]) -> bool:
    """Whether vLLM's JSON names no connector but a role."""
    return transfer.get("kv_connector") is None and "kv_role" in transfer


def role_of(options: OffloadOptions) -> str | None:
    """What the engine does for others, by its own option or by vLLM's JSON. Raises ConfigError."""
    transfer, role = options.kv_transfer_config, options.kv_role
    check_named(transfer.get("kv_connector"))
    if says_role(transfer):
        for key, values in {"kv_role": ROLES, "kv_load_failure_policy": POLICIES}.items():
            if key in transfer and transfer[key] not in values:
                raise ConfigError(
                    f"kv_transfer_config has {key} {transfer[key]!r}; it must be one of {', '.join(values)}."
                )
        for key in transfer:
            if key not in ROLE_KEYS:
                raise ConfigError(
                    f"kv_transfer_config has a role and the key {key!r}.{did_you_mean(key, ROLE_KEYS)} Places are "
                    "named by kv_offload and kv_address."
                )
        if role not in (None, transfer["kv_role"]):
            raise ConfigError(f"kv_role is {role}, and kv_transfer_config has another one. Give one of them.")
        role = transfer["kv_role"]
    return role


def check_named(name: Any) -> None:
    """Raise ConfigError for a connector of vLLM's whose work something else does here."""
    if name in INSTEAD:
        raise ConfigError(
            f"kv_transfer_config has kv_connector {name!r}; here engines lend pages to each other over TCP. Leave "
            "kv_connector out, and keep kv_role (or use --kv-role); tiers beside it are those of kv_offload."
        )
    if isinstance(name, str) and name in TIERS_INSTEAD:
        raise ConfigError(
            f"kv_transfer_config has kv_connector {name!r}; here {TIERS_INSTEAD[name]}. Leave the connector out, and "
            "give kv_offload."
        )


def connector_tiers(transfer: Mapping[str, Any], named: tuple[TierWish, ...]) -> tuple[TierWish, ...]:
    """The tiers of vLLM's JSON, among them those that kv_offload has `named`. Raises ConfigError."""
    connectors = [transfer]
    if transfer.get("kv_connector") == MULTI:
        connectors = several_connectors(transfer)
    wishes: list[TierWish | None] = []  # None: the named ones
    for each in connectors:
        check_transfer(each)
        extra = each.get("kv_connector_extra_config", {})
        if each["kv_connector"] == CONNECTOR:
            size = extra.get("cpu_bytes_to_use")
            wishes.append(TierWish("host", capacity=size) if size is not None else None)
        elif each["kv_connector"] == lmcache.CONNECTOR:
            wishes += lmcache_wishes(extra, named)
        elif each["kv_connector"] == multiprocess.CONNECTOR:
            wishes.append(multiprocess_wish(extra))
        else:
            wishes.append(custom_wish(each))
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


def several_connectors(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of a MultiConnector. Raises ConfigError for what is no list of them."""
    check_transfer({**transfer, "kv_connector": CONNECTOR, "kv_connector_extra_config": {}})
    extra = transfer.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, Mapping) and set(extra) == {"connectors"} else None
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        raise ConfigError(
            f"kv_transfer_config has kv_connector_extra_config {extra!r}; that of a {MULTI} holds connectors, a list "
            "of objects with a kv_connector each."
        )
    for each in listed:
        check_named(each.get("kv_connector"))
        if each.get("kv_connector") == MULTI:
            raise ConfigError(f"kv_transfer_config has a {MULTI} in a {MULTI}. Name its connectors in the outer one.")
        if "kv_load_failure_policy" in each:
            raise ConfigError(f"a connector of a {MULTI} has a kv_load_failure_policy. Give one, beside the list.")
    return listed


def check_transfer(transfer: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is not there in the JSON of one connector."""
    for key in transfer:
        if key not in KEYS:
            raise ConfigError(f"kv_transfer_config has the unknown key {key!r}.{did_you_mean(key, KEYS)}")
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if not isinstance(name, str) or not isinstance(module, str | None):
        raise ConfigError(f"kv_transfer_config has the kv_connector {name!r} of {module!r}; both must be names.")
    allowed = {"kv_role": ("kv_both",), "kv_load_failure_policy": POLICIES}
    given = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **transfer}
    for key, values in allowed.items():
        if given[key] not in values:
            raise ConfigError(f"kv_transfer_config has {key} {given[key]!r}; it must be one of {', '.join(values)}.")
    extra = given.get("kv_connector_extra_config", {})
    if name != CONNECTOR:
        if name not in (lmcache.CONNECTOR, multiprocess.CONNECTOR):
            check_connector(name, module, (CONNECTOR, MULTI, lmcache.CONNECTOR, multiprocess.CONNECTOR))
        if not isinstance(extra, Mapping):
            raise ConfigError(f"kv_transfer_config has kv_connector_extra_config {extra!r}; it must be an object.")
        return
    if not isinstance(extra, Mapping) or set(extra) - {"cpu_bytes_to_use", *PAGE_KEYS} or module is not None:
        raise ConfigError(
            f"kv_transfer_config has kv_connector_extra_config {extra!r} and kv_connector_module_path {module!r}; for "
            f"the {CONNECTOR} it can hold cpu_bytes_to_use, block_size and pages only. Other tiers are named by the "
            "option kv_offload."
        )
    size = extra.get("cpu_bytes_to_use")
    if size is not None and (type(size) is not int or size <= 0):
        raise ConfigError(f"cpu_bytes_to_use is {size!r}; it must be a number of bytes above 0.")


def custom_wish(transfer: Mapping[str, Any]) -> TierWish:
    name, module = transfer["kv_connector"], transfer.get("kv_connector_module_path")
    return TierWish("own", name, module=module, config=dict(transfer.get("kv_connector_extra_config", {})))


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


def tier_wish(text: str) -> TierWish:
    """ "host=8G", "disk=PATH:200G", "redis=redis://HOST:PORT/0?ttl=3600", "s3=s3://BUCKET/PREFIX?endpoint=URL". Raises
    ConfigError."""
    kind, _, rest = text.strip().partition("=")
    if kind in SCHEMES:
        return store_wish(kind, rest)
    path, _, size = rest.rpartition(":") if kind == "disk" else ("", "", rest)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", size, re.IGNORECASE)
    if kind not in FORMS or number is None or (kind == "disk" and not path):
        raise ConfigError(f"kv_offload has {text!r}; a tier is {', '.join(FORMS.values())}, for example host=8G.")
    capacity = int(float(number[1]) * UNITS[number[2].upper()])
    if capacity <= 0:
        raise ConfigError(f"kv_offload has {text!r}, a tier of no bytes. Give it some, or leave it out.")
    if capacity < LEAST_CAPACITY and not size[-1:].isalpha():
        raise ConfigError(
            f"kv_offload has {text!r}, which is {capacity} bytes: too few for a page. Give a unit, such as "
            f"{kind}={f'{path}:' if path else ''}{size}G."
        )
    return TierWish(kind, path, capacity)


def store_wish(kind: str, url: str) -> TierWish:
    """A tier in another process. What is wrong is said without the address where it may hold a password."""
    address = urlsplit(url)
    settings = dict(parse_qsl(address.query, keep_blank_values=True))
    if "@" in address.netloc or any(re.search("user|pass|key|secret|token", name) for name in settings):
        raise ConfigError(
            f"kv_offload has the address of a {kind} tier with a name or password in it, where every user of this "
            "machine can read it. Put that of Redis into the file that kv_offload_secrets names, that of S3 into "
            "the environment as for every program that uses AWS."
        )
    if kind == "lmcache" and address.scheme not in SCHEMES[kind]:
        raise ConfigError(
            f"kv_offload has {f'{kind}={url}'!r}; of LMCache's stores there are {', '.join(SCHEMES[kind])}."
        )
    if address.scheme not in SCHEMES[kind] or not (address.netloc or address.scheme == "unix") or address.fragment:
        raise ConfigError(f"kv_offload has {f'{kind}={url}'!r}; such a tier is {FORMS[kind]}.")
    for name in settings:
        if name not in SETTINGS[kind]:
            known = SETTINGS[kind]
            raise ConfigError(f"kv_offload has the unknown setting {name!r} of {kind}.{did_you_mean(name, known)}")
    ttl, endpoint = settings.get("ttl"), settings.get("endpoint")
    if ttl is not None and not re.fullmatch("[1-9][0-9]{0,8}", ttl):
        raise ConfigError(f"kv_offload has ttl={ttl!r}; it must be a number of seconds above 0.")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"kv_offload has endpoint={endpoint!r}; it must be an address with http:// or https://.")
    place = url.partition("?")[0]
    if kind == "lmcache" and address.scheme in ("lm", multiprocess.SCHEME):
        if address.scheme == "lm":
            address_of(place, "lm")
        else:
            multiprocess.address_of(place)
        if ttl is not None:
            keeps = "keeps all" if address.scheme == "lm" else "evicts what was not used for longest"
            raise ConfigError(f"kv_offload has ttl for an {address.scheme}:// server, which {keeps}. Leave it out.")
    chunks = settings_of_url(settings, address.scheme) if kind == "lmcache" else None
    return TierWish(kind, place, ttl_s=int(ttl) if ttl else None, endpoint=endpoint, chunks=chunks)
