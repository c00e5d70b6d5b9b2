"""What stores ask of those who use them, from a file: `kv_offload_secrets`, a JSON object of texts.

    redis_username, redis_password    what the Redis tier says to its server
    page_secret                       signs pages: those that others wrote without it are refused

Nothing here is ever printed. Credentials of S3 come from where every program that uses AWS finds them.
"""

import json
from pathlib import Path

import msgspec

from jaxpaged.errors import ConfigError

LEAST_PAGE_SECRET = 16
"""Letters of a secret that pages are signed with, at least."""


class Secrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says."""

    redis_username: str | None = None
    redis_password: str | None = None
    page_secret: str | None = None

    def __repr__(self) -> str:
        return "Secrets(...)"

    @property
    def signing(self) -> bytes | None:
        """What pages are signed with."""
        return self.page_secret.encode() if self.page_secret is not None else None


def read_secrets(path: str | None) -> Secrets:
    """What a file says; nothing without one. Raises ConfigError, which holds no secret."""
    if path is None:
        return Secrets()
    try:
        secrets = msgspec.convert(json.loads(Path(path).read_text(encoding="utf-8")), Secrets)
    except OSError as error:
        raise ConfigError(f"kv_offload_secrets is {path!r}, which cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, msgspec.ValidationError) else "it is no JSON"
        names = ", ".join(Secrets.__struct_fields__)
        raise ConfigError(f"kv_offload_secrets is {path!r}: {reason}. It must hold an object of {names}.") from None
    if secrets.page_secret is not None and len(secrets.page_secret) < LEAST_PAGE_SECRET:
        raise ConfigError(
            f"kv_offload_secrets is {path!r}, whose page_secret has {len(secrets.page_secret)} letters; it must have "
            f"{LEAST_PAGE_SECRET} at least."
        )
    return secrets
