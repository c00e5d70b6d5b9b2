"""Tiers as the option `kv_offload` names them: "host=8G", "disk=PATH:200G", "redis=redis://HOST:6379", ..."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.kv_store.lmcache import settings as lmcache
from jaxpaged.kv_store.lmcache.multiprocess import settings as multiprocess
from jaxpaged.kv_store.lmcache.settings import ChunkSettings, address_of, settings_of_url

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LEAST_CAPACITY = 1 << 16
"""Bytes of a tier below which a number without a unit is a slip."""
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
    """One tier: "host" or "disk" of so many bytes; those of "redis", "s3", "lmcache" and "custom" decide that."""

    kind: str
    place: str = ""
    """The folder of a disk tier, the address of a store without its settings, or a stranger's connector by its name."""
    capacity: int = 0
    ttl_s: int | None = None
    """Of pages in Redis."""
    endpoint: str | None = None
    """Of a store that speaks like S3 and is not Amazon's."""
    chunks: ChunkSettings | None = None
    """Of a store that is shared with LMCache."""
    module: str | None = None
    """That has the class of a stranger's connector; None: its name says so, or an entry point has it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What a stranger's connector is told."""


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
