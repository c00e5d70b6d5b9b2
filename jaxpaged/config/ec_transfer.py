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
FOLDER, SECONDS = "shared_storage_path", "load_timeout_s"
LOAD_SECONDS = 2.0
"""How long a request waits for a file, unless the JSON says it: then its picture is encoded here."""


@dataclass(frozen=True)
class ECTransfer:
    """A folder that engines share. `saves`: what this one encodes is written there; `loads`: it looks there before it
    encodes, and waits at most `load_seconds`."""

    folder: str
    saves: bool
    loads: bool
    load_seconds: float = LOAD_SECONDS


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
    folder = extra.get(FOLDER) if isinstance(extra, Mapping) else None
    if not isinstance(extra, Mapping) or not isinstance(folder, str) or not folder:
        raise ConfigError(
            f"ec_transfer_config has ec_connector_extra_config {shown(extra)}; it must name the folder: "
            f'{{"{FOLDER}": "/mnt/embeddings"}}.'
        )
    if unknown := [key for key in extra if key not in (FOLDER, SECONDS)]:
        raise ConfigError(
            f"ec_transfer_config has ec_connector_extra_config with the unknown key {unknown[0]!r}."
            f"{did_you_mean(str(unknown[0]), (FOLDER, SECONDS))}"
        )
    seconds = extra.get(SECONDS, LOAD_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 600:
        raise ConfigError(f"ec_transfer_config has {SECONDS} {shown(seconds)}; it must be seconds, up to 600.")
    return ECTransfer(folder, *ROLES[role], float(seconds))
