"""How chunks are shared with LMCache: from the settings of a tier's address, or as LMCache itself is told.

LMCache reads a YAML file that LMCACHE_CONFIG_FILE names, then environment variables LMCACHE_<KEY>, then the keys
`lmcache.<key>` of vLLM's kv_connector_extra_config, each over the ones before. So it is here. What another store, or
another layout, is asked for with is refused by its name. Its multi-process server is told otherwise
(`multiprocess/settings.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.multiprocess.settings import DEFAULT_TIMEOUT_S
from jaxpaged.kv_store.lmcache.multiprocess.settings import SCHEME as MULTIPROCESS_SCHEME

SEED_VARIABLE, FILE_VARIABLE, PREFIX = "PYTHONHASHSEED", "LMCACHE_CONFIG_FILE", "LMCACHE_"
CONNECTOR = "LMCacheConnectorV1"
DEFAULT_CHUNK_SIZE = 256
DEFAULTS = {
    "chunk_size": DEFAULT_CHUNK_SIZE,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "remote_url": None,
    "remote_serde": "naive",
    "pre_caching_hash_algorithm": "builtin",
    "save_decode_cache": True,
    "save_unfull_chunk": False,
    "use_layerwise": False,
    "enable_blending": False,
    "enable_p2p": False,
    "enable_pd": False,
    "local_disk": None,
    "max_local_disk_size": 0.0,
}
"""Keys of LMCache's configuration that are known here, and what they are where nobody says."""
FIXED = {
    "remote_serde": "chunks are read and written as they are",
    "save_decode_cache": "chunks of answers are kept like those of prompts",
    "save_unfull_chunk": "full chunks are kept only",
    "use_layerwise": "chunks hold all layers",
    "enable_blending": "only what a text begins with is reused",
    "enable_p2p": "engines lend pages to each other with kv_role",
    "enable_pd": "prompts are computed elsewhere with kv_role",
    "local_disk": "a disk is a tier of kv_offload: disk=PATH:SIZE",
    "max_local_disk_size": "a disk is a tier of kv_offload: disk=PATH:SIZE",
}
"""Keys that can be as above only, and why."""
IGNORED_VARIABLES = ("LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE", "LMCACHE_USE_EXPERIMENTAL", FILE_VARIABLE)
"""Variables of LMCache that are no keys of its configuration."""


@dataclass(frozen=True)
class ChunkSettings:
    """What a store of chunks is shared by. Raises ConfigError for what cannot be followed."""

    model: str | None = None
    """The model's name in LMCache's names; None: as this engine calls it."""
    chunk_size: int | None = DEFAULT_CHUNK_SIZE
    """Tokens of a chunk; None: as the multi-process server says."""
    algorithm: str = "sha256_cbor"
    seed: str | None = None
    world_size: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long a store may take to answer."""

    def __post_init__(self) -> None:
        if (self.chunk_size is not None and self.chunk_size <= 0) or self.world_size <= 0:
            raise ConfigError(
                f"LMCache's chunk_size is {self.chunk_size} and its world_size {self.world_size}; both must be above 0."
            )
        self.hasher()

    def hasher(self) -> ChunkHasher:
        return ChunkHasher(self.algorithm, self.seed)


URL_SETTINGS = ("model", "chunk_size", "hash", "seed", "world_size")
"""What may stand behind the `?` of an address."""
HASH_SETTINGS = ("hash", "seed")
"""Those that say how chunks are named, which the multi-process server does itself."""


def settings_of_url(settings: Mapping[str, str], scheme: str) -> ChunkSettings:
    """Of a tier of kv_offload. Raises ConfigError."""
    if scheme == MULTIPROCESS_SCHEME:
        for name in HASH_SETTINGS:
            if name in settings:
                raise ConfigError(
                    f"kv_offload has {name} for LMCache's multi-process server, which hashes tokens itself."
                )
        size = settings.get("chunk_size")
        return ChunkSettings(
            model=settings.get("model"),
            chunk_size=None if size is None else whole_number("chunk_size", size),
            world_size=whole_number("world_size", settings.get("world_size", 1)),
        )
    return ChunkSettings(
        model=settings.get("model"),
        chunk_size=whole_number("chunk_size", settings.get("chunk_size", DEFAULT_CHUNK_SIZE)),
        algorithm=settings.get("hash", "sha256_cbor"),
        seed=settings.get("seed", os.environ.get(SEED_VARIABLE)),
        world_size=whole_number("world_size", settings.get("world_size", 1)),
    )


@dataclass(frozen=True)
class LMCacheConfig:
    """What LMCache's configuration asks for: bytes in host memory, 0 for none, and a store elsewhere, if any."""

    host_bytes: int
    remote_url: str | None
    settings: ChunkSettings | None
    says_host: bool
    """Whether host memory is there because somebody said so."""


def lmcache_config(extra: Mapping[str, Any]) -> LMCacheConfig:
    """What LMCache would do, told so. Raises ConfigError for what is not done here."""
    said = {**keys_of_file(os.environ.get(FILE_VARIABLE)), **keys_of_variables(), **keys_of_extra(extra)}
    for key, value in said.items():
        check_key(key, value)
    keys = {**DEFAULTS, **said}
    gigabytes = number_above_0("max_local_cpu_size", keys["max_local_cpu_size"]) if keys["local_cpu"] else 0.0
    remote, settings = keys["remote_url"], None
    if remote is not None:
        settings = ChunkSettings(
            model=said.get("model"),
            chunk_size=whole_number("chunk_size", keys["chunk_size"]),
            algorithm=str(keys["pre_caching_hash_algorithm"]),
            seed=os.environ.get(SEED_VARIABLE),
            world_size=whole_number("world_size", said.get("world_size", 1)),
        )
    says_host = bool({"local_cpu", "max_local_cpu_size"} & set(said))
    return LMCacheConfig(int(gigabytes * (1 << 30)), remote, settings, says_host)


OWN_KEYS = ("model", "world_size")
"""Keys that LMCache takes from the engine around it; here they say whose chunks these are."""


def check_key(key: str, value: Any) -> None:
    """Raise ConfigError for a key, or its value, that means nothing here."""
    if key not in DEFAULTS and key not in OWN_KEYS:
        raise ConfigError(
            f"LMCache's configuration has the key {key!r}, which means nothing here."
            f"{did_you_mean(key, (*DEFAULTS, *OWN_KEYS))} There are {', '.join((*DEFAULTS, *OWN_KEYS))}."
        )
    if key in FIXED and value != DEFAULTS[key]:
        raise ConfigError(
            f"LMCache's configuration has {key} {value!r}; here it is {DEFAULTS[key]!r}, since {FIXED[key]}. Leave it "
            "out."
        )
    if key == "local_cpu" and not isinstance(value, bool):
        raise ConfigError(f"LMCache's configuration has {key} {value!r}; it must be true or false.")
    if key in ("remote_url", "model", "pre_caching_hash_algorithm") and not isinstance(value, str | None):
        raise ConfigError(f"LMCache's configuration has {key} {value!r}; it must be a text.")


def keys_of_file(path: str | None) -> dict[str, Any]:
    """What the file says that LMCACHE_CONFIG_FILE names."""
    if path is None:
        return {}
    import yaml  # it takes a while to import, and most engines do without

    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{FILE_VARIABLE} is {path!r}, which cannot be read: {type(error).__name__}.") from None
    if said is not None and not isinstance(said, dict):
        raise ConfigError(f"{FILE_VARIABLE} is {path!r}, which holds no keys and values.")
    return {str(key): value for key, value in (said or {}).items()}


def keys_of_variables() -> dict[str, Any]:
    """What environment variables say, as YAML would."""
    import yaml

    said: dict[str, Any] = {}
    for name, text in os.environ.items():
        if name.startswith(PREFIX) and name not in IGNORED_VARIABLES:
            said[name.removeprefix(PREFIX).lower()] = yaml.safe_load(text)
    return said


def keys_of_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What kv_connector_extra_config says."""
    for key in extra:
        if not key.startswith("lmcache."):
            raise ConfigError(
                f"kv_connector_extra_config of the {CONNECTOR} has the key {key!r}; LMCache's keys begin with lmcache."
            )
    return {key.removeprefix("lmcache."): value for key, value in extra.items()}


def whole_number(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool) and int(value) == float(value) and int(value) > 0:
            return int(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"LMCache's {name} is {value!r}; it must be a whole number above 0.")


def number_above_0(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 20:
        return float(value)
    raise ConfigError(f"LMCache's {name} is {value!r}; it must be a number of GiB above 0.")


def address_of(url: str, scheme: str) -> tuple[str, int]:
    """(host, port). Raises ConfigError."""
    try:
        address = urlsplit(url)
        if address.scheme == scheme and address.hostname and address.port and address.path in ("", "/"):
            return address.hostname, address.port
    except ValueError:
        pass
    raise ConfigError(f"{url!r} is no address of a server of LMCache; such a one is {scheme}://HOST:PORT.")
