"""Opens the tiers that the options name, for the keys and values of one engine."""

from dataclasses import replace

from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import KVCacheConfig, StateSpec
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.options import KVOffload
from jaxpaged.kv_store.page import namespace
from jaxpaged.kv_store.tier import Tier
from jaxpaged.kv_store.tiers import Tiers
from jaxpaged.worker.device import Device
from jaxpaged.worker.kv_transfer.transfer import KVTransferWorker
from jaxpaged.worker.programs.blueprint import Blueprint

SCAN_SECONDS = 5.0
"""How long the start waits for the disk tier to find its pages; those that it finds later are there later."""


def check_offload(kv_cache: KVCacheConfig) -> None:
    """Raise ConfigError for a cache whose blocks cannot leave the device."""
    if any(isinstance(group.spec, StateSpec) for group in kv_cache.groups):
        raise ConfigError("kv_offload: recurrent states cannot be kept outside of the device yet. Leave it out.")


def open_transfer(
    offload: KVOffload, blueprint: Blueprint, kv_cache: KVCacheConfig, device: Device, weights_version: str
) -> KVTransferWorker:
    """The worker's half. Raises ConfigError for a folder that can hold no pages."""
    space = namespace_of(blueprint, kv_cache, weights_version)
    tiers: list[Tier] = []
    for wish in offload.tiers:
        if wish.path is None:
            tiers.append(HostTier(wish.capacity))
        else:
            disk = DiskTier(wish.path, wish.capacity, space, facts={"model": blueprint.config.model.model})
            disk.wait_ready(SCAN_SECONDS)
            tiers.append(disk)
    return KVTransferWorker(device, kv_cache, Tiers(tiers), space, blueprint.kv_dtype)


def namespace_of(blueprint: Blueprint, kv_cache: KVCacheConfig, weights_version: str) -> str:
    """Of all that keys and values depend on besides tokens. `few_rows` says how sums are computed on one machine, not
    what they are; it does count where an engine promises bits."""
    config = blueprint.config
    bits = config.compile.deterministic
    return namespace(
        weights=(weights_version, config.load.load_format, config.model.seed if not weights_version else 0),
        decoders=tuple(str(each if bits else replace(each, few_rows="")) for each in blueprint.decoders),
        quantization=config.model.quantization,
        groups=tuple(str((replace(g.spec, stored_dim=None) if hasattr(g.spec, "stored_dim") else g.spec,
                          g.layer_idxs)) for g in kv_cache.groups),
        dtype=blueprint.kv_dtype.name,
        speculation=str(blueprint.speculation),
    )  # fmt: skip
