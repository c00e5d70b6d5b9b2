"""What an engine has to do with other engines: the options `kv_role`, `kv_address`, `kv_peers`, `kv_ssl_*`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.tls import TlsFiles
from jaxpaged.kv_store.transfer_params import (
    CONSUMES,
    DEFAULT_ADDRESS,
    DEFAULT_LEASE_SECONDS,
    DEFAULT_PEERS,
    PRODUCES,
    checked_address,
)

DEFAULT_TRANSPORT = "auto"
TRANSPORTS = (DEFAULT_TRANSPORT, "tcp", "jax")
REFUSED = {
    "jax": "jax.experimental.transfer knows no keys, certificates or leases: whoever reaches its port gets what is "
    "offered there, and who asks for what is not, or asks who hangs, waits without end. Use auto or tcp."
}
"""Transports that there might be, and why there are not."""


@dataclass(frozen=True)
class Peering:
    """kv_producer, kv_consumer or kv_both, where and for how long it lends, and the only engines that it asks."""

    role: str
    address: tuple[str, int] = checked_address(DEFAULT_ADDRESS)
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    peers: str = DEFAULT_PEERS
    tls: TlsFiles | None = None
    shares: bool = True
    """Whether engines on one host give each other pages through memory."""

    @property
    def lends(self) -> bool:
        return self.role in PRODUCES

    @property
    def borrows(self) -> bool:
        return self.role in CONSUMES


class PeeringOptions(Protocol):
    """What has the options."""

    @property
    def kv_address(self) -> str: ...

    @property
    def kv_lease_seconds(self) -> float: ...

    @property
    def kv_peers(self) -> str: ...

    @property
    def kv_transport(self) -> str: ...

    @property
    def kv_ssl_certfile(self) -> str | None: ...

    @property
    def kv_ssl_keyfile(self) -> str | None: ...

    @property
    def kv_ssl_ca_certs(self) -> str | None: ...


DEFAULTS: Mapping[str, Any] = {
    "kv_address": DEFAULT_ADDRESS,
    "kv_lease_seconds": DEFAULT_LEASE_SECONDS,
    "kv_peers": DEFAULT_PEERS,
    "kv_transport": DEFAULT_TRANSPORT,
    "kv_ssl_certfile": None,
    "kv_ssl_keyfile": None,
    "kv_ssl_ca_certs": None,
}


def peering_of(options: PeeringOptions, role: str | None) -> Peering | None:
    """What the options ask of an engine of this role. Raises ConfigError."""
    if role is None:
        given = [f"{name} {getattr(options, name)}" for name in DEFAULTS if getattr(options, name) != DEFAULTS[name]]
        if given:
            raise ConfigError(
                f"given are {', '.join(given)}, but the engine has nothing to do with other engines. Give it a "
                "kv_role, or leave them out."
            )
        return None
    if options.kv_transport in REFUSED:
        raise ConfigError(f"kv_transport is {options.kv_transport}: {REFUSED[options.kv_transport]}")
    address, shares = checked_address(options.kv_address), options.kv_transport != "tcp"
    return Peering(role, address, options.kv_lease_seconds, options.kv_peers, tls_of(options, role), shares)


def tls_of(options: PeeringOptions, role: str) -> TlsFiles | None:
    """The files of TLS; None: nothing is encrypted. Raises ConfigError for some without the others."""
    files = TlsFiles(options.kv_ssl_certfile, options.kv_ssl_keyfile, options.kv_ssl_ca_certs)
    if files == TlsFiles():
        return None
    if files.certificate is None and (files.key is not None or role in PRODUCES):
        raise ConfigError(
            f"kv_ssl_keyfile is {files.key} and kv_ssl_ca_certs {files.authorities}, without a certificate for an "
            f"engine whose kv_role is {role}. Add kv_ssl_certfile, or leave them out."
        )
    if files.authorities is None and role in CONSUMES:
        raise ConfigError(
            f"kv_ssl_certfile is {files.certificate}, but an engine whose kv_role is {role} must know who signs those "
            "of other engines. Add kv_ssl_ca_certs, which may be that certificate itself."
        )
    return files
