"""Where keys and values are kept besides the device: the options `kv_offload`, `kv_transfer_config` and `kv_role`.

`kv_offload` is a list such as "host=8G,disk=PATH:200G,redis=redis://HOST:6379", the fastest tier first
(`tier_options.py`); "pages=int8" or "pages=fp8" in it rounds what leaves the device to 8 bits, and "page_tokens=64"
says how many tokens a page has. `kv_transfer_config` takes vLLM's JSON (`connector_options.py`): connectors that keep
pages come behind those tiers, or stand where the OffloadingConnector of a MultiConnector names them.
`kv_offload_secrets` is a file with what no command line should hold (`secrets.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.connector_options import connector_tiers, read_transfer_config, said_of_pages
from jaxpaged.kv_store.peering import Peering, PeeringOptions, peering_of
from jaxpaged.kv_store.tier_options import TierWish, tier_wish

EXACT = "exact"
PAGES = (EXACT, "int8", "fp8")
"""In which form keys and values are kept: as they are cached, or in 8 bits with a scale for each token and head."""
DEFAULT_TIER = TierWish("host", capacity=1 << 30)
"""What an engine with a role has besides the device, unless it says so itself."""


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
    transfer, peering = read_transfer_config(options.kv_transfer_config), peering_of(options, role_of(options))
    items = [item.strip() for item in options.kv_offload.split(",")] if options.kv_offload else []
    tiers = [item for item in items if not item.startswith(("pages=", "page_tokens="))]
    parts = [item.partition("=") for item in items if item not in tiers]
    said: list[tuple[str, Any]] = [(name, value) for name, _, value in parts]
    settings = page_settings(said + said_of_pages(transfer.connectors))
    wishes = named = tuple(map(tier_wish, tiers))
    if transfer.connectors:
        wishes = connector_tiers(transfer.connectors, named)
    is_bare = not transfer.connectors or transfer.role is not None
    if peering is not None and not named and is_bare and not any(wish.kind == "host" for wish in wishes):
        wishes = (DEFAULT_TIER, *wishes)
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
    return KVOffload(wishes, transfer.failure_policy, options.kv_offload_secrets, peering, **settings)


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


def role_of(options: OffloadOptions) -> str | None:
    """What the engine does for others, by its own option or by vLLM's JSON. Raises ConfigError."""
    of_json = read_transfer_config(options.kv_transfer_config).role
    if None not in (options.kv_role, of_json) and options.kv_role != of_json:
        raise ConfigError(f"kv_role is {options.kv_role}, and kv_transfer_config has another one. Give one of them.")
    return options.kv_role or of_json
