"""What vLLM's connector for LMCache's multi-process server is told: the keys `lmcache.mp.*` of LMCache 0.5.6."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxpaged.errors import ConfigError, did_you_mean

CONNECTOR, SCHEME = "LMCacheMPConnector", "grpc"
PREFIX = "lmcache.mp."
MODE_VARIABLE = "LMCACHE_MP_TRANSFER_MODE"
DEFAULT_PORT = 5555
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 2.0, 60.0
HOW_TO_START = (
    "Start it as: lmcache server --transport grpc --supported-transfer-mode engine_driven --shm-name NAME "
    "--no-l1-use-lazy --l1-size-gb SIZE --eviction-policy LRU"
)
PLACES = ("host", "port", "server_urls")
OWN_KEYS = ("model", "world_size")
"""Keys that LMCache takes from the engine around it; here they say whose chunks these are."""
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mp_transfer_mode": (("auto", "engine_driven"), "this engine reads and writes the shared memory itself"),
    "save_decode_cache": ((True,), "chunks of answers are kept like those of prompts"),
    "heartbeat_interval": ((10, 10.0), "the engine is registered anew when it is used"),
    "nonblocking_lookup_status": ((True,), "nobody waits for a look-up"),
    "eager_prefetch": ((False,), "a prompt is looked up when its turn comes"),
    "isolated_ipc": ((False,), "memory is shared"),
    "use_vmm_api": ((False,), "there are no handles of a GPU's memory"),
    "hash_algorithm": (("blake3",), "tokens are hashed by the server"),
    "lazy_offload": ((False,), "chunks are stored when they are computed"),
    "transfer_intermediate_tensors": ((False,), "keys and values are stored only"),
    "autostart": ((False,), "the server is started by whoever runs it"),
}
"""Keys that can have these values only, and why."""
KEYS = (*PLACES, "mq_timeout", *OWN_KEYS, *FIXED)


@dataclass(frozen=True)
class ServerConfig:
    """Where the server is, as `grpc://HOST:PORT`, how long it has for an answer, and whose chunks are used."""

    url: str
    timeout_s: float
    model: str | None
    world_size: Any


def server_config(extra: Mapping[str, Any]) -> ServerConfig:
    """What `kv_connector_extra_config` says. Raises ConfigError for what is not done here."""
    for key in extra:
        if not key.startswith(PREFIX) or key.removeprefix(PREFIX) not in KEYS:
            known = [PREFIX + each for each in KEYS]
            raise ConfigError(
                f"kv_connector_extra_config of the {CONNECTOR} has the key {key!r}, which means nothing here."
                f"{did_you_mean(key, known)} There are {', '.join(known)}."
            )
    said = {key.removeprefix(PREFIX): value for key, value in extra.items()}
    if MODE_VARIABLE in os.environ:
        said.setdefault("mp_transfer_mode", os.environ[MODE_VARIABLE])
    for key, (values, why) in FIXED.items():
        if key in said and said[key] not in values:
            raise ConfigError(
                f"kv_connector_extra_config has {PREFIX}{key} {said[key]!r}; here it is {values[-1]!r}, since {why}. "
                "Leave it out."
            )
    model = said.get("model")
    if not isinstance(model, str | None):
        raise ConfigError(f"kv_connector_extra_config has {PREFIX}model {model!r}; it must be a text.")
    return ServerConfig(url_of(said), timeout_of(said), model, said.get("world_size", 1))


def timeout_of(said: Mapping[str, Any]) -> float:
    seconds = said.get("mq_timeout", DEFAULT_TIMEOUT_S)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"kv_connector_extra_config has {PREFIX}mq_timeout {seconds!r}; it must be a number of seconds above 0, "
            f"and at most {MAX_TIMEOUT_S:g}: so long a server that hangs may hold threads up."
        )
    return float(seconds)


def url_of(said: Mapping[str, Any]) -> str:
    """The one server that is named, in one of two ways."""
    if said.get("server_urls"):
        urls = said["server_urls"]
        urls = [url.strip() for url in urls.split(",")] if isinstance(urls, str) else urls
        if not isinstance(urls, list) or len(urls) != 1 or {"host", "port"} & set(said):
            raise ConfigError(
                f"kv_connector_extra_config has {PREFIX}server_urls {urls!r}; it must be one address, and there can be "
                f"no {PREFIX}host and {PREFIX}port then: one server keeps all parts of a chunk here."
            )
        url = str(urls[0])
    else:
        url = f"{said.get('host', 'tcp://localhost')}:{said.get('port', DEFAULT_PORT)}"
    address_of(url)
    return url


def address_of(url: str) -> str:
    """HOST:PORT of `grpc://HOST:PORT`. Raises ConfigError for other transports, and for other machines."""
    try:
        address = urlsplit(url)
        host, port = address.hostname, address.port
    except ValueError:
        raise ConfigError(f"{url!r} is no address of LMCache's multi-process server: {SCHEME}://HOST:PORT.") from None
    if address.scheme != SCHEME:
        raise ConfigError(
            f"LMCache's multi-process server is asked for at {url!r}, which means ZeroMQ; here it is spoken over gRPC. "
            f"{HOW_TO_START}, and give {PREFIX}host as {SCHEME}://localhost."
        )
    if not host or not port or address.path not in ("", "/") or address.query or address.username:
        raise ConfigError(f"{url!r} is no address of LMCache's multi-process server: {SCHEME}://HOST:PORT.")
    if not is_loopback(host):
        raise ConfigError(
            f"LMCache's multi-process server is asked for at {host!r}. It shares memory with engines, so it must run "
            f"on this machine: {SCHEME}://localhost:{port}."
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
