"""Where keys and values are kept besides the device: the options `kv_offload` and `kv_transfer_config`.

`kv_offload` is a list such as "host=8G,disk=PATH:200G", the fastest tier first. `kv_transfer_config` takes vLLM's JSON
for the same: its OffloadingConnector, which keeps `cpu_bytes_to_use` bytes in host memory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpaged.errors import ConfigError, did_you_mean

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
POLICIES = ("recompute", "fail")
CONNECTOR = "OffloadingConnector"
KEYS = ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config")


@dataclass(frozen=True)
class TierWish:
    """One tier: `path` is None for host memory, else the folder of a disk tier."""

    path: str | None
    capacity: int


@dataclass(frozen=True)
class KVOffload:
    """The tiers, fastest first, and what becomes of a request whose pages could not be loaded after all."""

    tiers: tuple[TierWish, ...]
    failure_policy: str = "recompute"


class OffloadOptions(Protocol):
    """What has the two options."""

    @property
    def kv_offload(self) -> str | None: ...

    @property
    def kv_transfer_config(self) -> Mapping[str, Any]: ...


def offload_of(options: OffloadOptions) -> KVOffload | None:
    """What the two options ask for together; None: nothing leaves the device. Raises ConfigError."""
    tiers, transfer = options.kv_offload, options.kv_transfer_config
    extra = checked_transfer(transfer)
    host_bytes = extra.get("cpu_bytes_to_use")
    if tiers and host_bytes is not None:
        raise ConfigError("kv_offload and cpu_bytes_to_use of kv_transfer_config both name tiers. Give one of them.")
    wishes = tuple(map(tier_wish, tiers.split(","))) if tiers else ()
    if host_bytes is not None:
        wishes = (TierWish(None, host_bytes),)
    if not wishes and transfer:
        raise ConfigError(
            "kv_transfer_config names no place for keys and values. Add cpu_bytes_to_use to its "
            "kv_connector_extra_config, or the option kv_offload."
        )
    if len({wish.path for wish in wishes}) < len(wishes):
        raise ConfigError(f"kv_offload is {tiers!r}; it names a tier twice. Name each once.")
    return KVOffload(wishes, transfer.get("kv_load_failure_policy", "recompute")) if wishes else None


def checked_transfer(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The extra config of vLLM's JSON. Raises ConfigError for what is not there."""
    for name in transfer:
        if name not in KEYS:
            raise ConfigError(f"kv_transfer_config has the unknown key {name!r}.{did_you_mean(name, KEYS)}")
    if not transfer:
        return {}
    allowed = {
        "kv_connector": (CONNECTOR,), "kv_role": ("kv_both",), "kv_load_failure_policy": POLICIES,
    }  # fmt: skip
    given = {"kv_connector": None, "kv_role": "kv_both", "kv_load_failure_policy": "recompute", **transfer}
    for name, values in allowed.items():
        if given[name] not in values:
            raise ConfigError(f"kv_transfer_config has {name} {given[name]!r}; it must be one of {', '.join(values)}.")
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping) or set(extra) - {"cpu_bytes_to_use"}:
        raise ConfigError(
            f"kv_transfer_config has kv_connector_extra_config {extra!r}; it can hold cpu_bytes_to_use only. Other "
            "tiers are named by the option kv_offload."
        )
    size = extra.get("cpu_bytes_to_use")
    if size is not None and (type(size) is not int or size <= 0):
        raise ConfigError(f"cpu_bytes_to_use is {size!r}; it must be a number of bytes above 0.")
    return extra


def tier_wish(text: str) -> TierWish:
    """ "host=8G" or "disk=PATH:200G". Raises ConfigError."""
    kind, _, rest = text.strip().partition("=")
    path, _, size = rest.rpartition(":") if kind == "disk" else ("", "", rest)
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", size, re.IGNORECASE)
    if kind not in ("host", "disk") or number is None or (kind == "disk" and not path):
        raise ConfigError(f"kv_offload has {text!r}; a tier is host=SIZE or disk=PATH:SIZE, for example host=8G.")
    capacity = int(float(number[1]) * UNITS[number[2].upper()])
    if capacity <= 0:
        raise ConfigError(f"kv_offload has {text!r}, a tier of no bytes. Give it some, or leave it out.")
    return TierWish(path or None, capacity)
