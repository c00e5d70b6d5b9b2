"""The address at which a trainer offers weights, transfer://HOST:PORT.

Who says which hosts may be asked, and who asks them, read it here, so that they see the same host.
"""

from urllib.parse import urlsplit

from jaxpaged.errors import CheckpointError

SCHEME = "transfer://"


def is_offer(address: str) -> bool:
    return address.startswith(SCHEME)


def offer_address(host: str, port: int) -> str:
    return SCHEME + joined(host, port)


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(address: str) -> tuple[str, int]:
    """Host and port. Raises CheckpointError."""
    try:
        parts = urlsplit(address)
        if is_offer(address) and parts.hostname and parts.port and not parts.path:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise CheckpointError(f"{address!r} is no address. Give transfer://HOST:PORT, as `WeightOffer.address` says it.")
