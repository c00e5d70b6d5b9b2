"""Where embeddings of pictures go besides the device: vLLM's JSON of the option `ec_transfer_config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean, shown

CONNECTOR = "ECExampleConnector"
"""vLLM's name of a folder with a file for each picture."""
INSTEAD = ("ECMooncakeConnector", "ECMooncakeStoreConnector", "ECCPUConnector")
ROLES = {"ec_producer": (True, False), "ec_consumer": (False, True), "ec_both": (True, True)}
"""vLLM's roles: (whether embeddings are written, whether they are read)."""
KEYS = ("ec_connector", "ec_role", "ec_connector_extra_config")
FOLDER, SECONDS, HOST = "shared_storage_path", "load_timeout_s", "cpu_bytes_to_use"
EXTRA_KEYS = (FOLDER, SECONDS, HOST)
LOAD_SECONDS, MOST_SECONDS = 2.0, 600
"""How long a request waits for a file, unless the JSON says it: then its picture is encoded here."""


@dataclass(frozen=True)
class ECTransfer:
    """A folder that engines share, None: there is none; and `host_bytes` of this one's memory before it. `saves`: what
    this one encodes is kept there; `loads`: it looks there before it encodes, and waits at most `load_seconds`."""

    folder: str | None
    saves: bool
    loads: bool
    load_seconds: float = LOAD_SECONDS
    host_bytes: int = 0


def read_ec_transfer(given: Mapping[str, Any]) -> ECTransfer | None:
    """Check the JSON; None where it is empty. Raises ConfigError, which names what is wrong and what to do."""
    if not given:
        return None
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"ec_transfer_config has the unknown key {key!r}.{did_you_mean(str(key), KEYS)}")
    connector = given.get("ec_connector")
    if connector != CONNECTOR:
        name = str(connector)
        instead = f" Engines on several machines share a folder with {CONNECTOR}." if name in INSTEAD else ""
        raise ConfigError(
            f"ec_transfer_config has ec_connector {shown(connector)}.{did_you_mean(name, (CONNECTOR,))} There is the "
            f"{CONNECTOR}, which keeps embeddings of pictures in a folder.{instead}"
        )
    role = given.get("ec_role")
    if role not in ROLES:
        raise ConfigError(f"ec_transfer_config has ec_role {shown(role)}; it must be one of {', '.join(ROLES)}.")
    extra = given.get("ec_connector_extra_config")
    if not isinstance(extra, Mapping) or not (FOLDER in extra or HOST in extra):
        raise ConfigError(
            f"ec_transfer_config has ec_connector_extra_config {shown(extra)}; it must name the folder: "
            f'{{"{FOLDER}": "/mnt/embeddings"}}, or bytes of this engine\'s own memory: {{"{HOST}": 1073741824}}.'
        )
    return read_extra(extra, *ROLES[role])


def read_extra(extra: Mapping[str, Any], saves: bool, loads: bool) -> ECTransfer:
    """What the connector is told. Raises ConfigError."""
    where = "ec_transfer_config has ec_connector_extra_config with"
    for key in extra:
        if key not in EXTRA_KEYS:
            raise ConfigError(f"{where} the unknown key {key!r}.{did_you_mean(str(key), EXTRA_KEYS)}")
    folder, seconds, host_bytes = extra.get(FOLDER), extra.get(SECONDS, LOAD_SECONDS), extra.get(HOST, 0)
    if FOLDER in extra and (not isinstance(folder, str) or not folder):
        raise ConfigError(f"{where} {FOLDER} {shown(folder)}; it must be a folder.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"{where} {SECONDS} {shown(seconds)}; it must be seconds, up to {MOST_SECONDS}.")
    if isinstance(host_bytes, bool) or not isinstance(host_bytes, int) or host_bytes < (FOLDER not in extra):
        raise ConfigError(f"{where} {HOST} {shown(host_bytes)}; it must be a number of bytes.")
    if folder is None and not (saves and loads):
        raise ConfigError(f"{where} {HOST} and no {FOLDER}: what an engine keeps for itself has the ec_role ec_both.")
    return ECTransfer(folder, saves, loads, float(seconds), host_bytes)
