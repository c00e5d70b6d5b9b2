"""A tier in a bucket of S3 or of what speaks like it: an object for each page, `<prefix>/<namespace>/<hash>_g<group>`.

Nothing here removes old pages: give the bucket a lifecycle rule. Credentials come from where they do for every program
that uses AWS: its environment variables, or the machine's role.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from jaxpaged.errors import ConfigError, how_to_install, is_installed
from jaxpaged.kv_store.buffers import Buffer, bytes_of
from jaxpaged.kv_store.page import MAX_HEADER_BYTES, MAX_PAGE_BYTES, PageKey
from jaxpaged.kv_store.remote_store import RemoteTier

NUM_ASKERS = 8


class S3Tier(RemoteTier):
    """Pages in `s3://bucket/prefix`. `endpoint` is the URL of a server other than Amazon's."""

    name = "s3"

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        endpoint: str | None = None,
        config: dict[str, Any] | None = None,
        secret: bytes | None = None,
        timeout_s: float = 5.0,
        retry_after_s: float = 30.0,
        ask_again_s: float = 30.0,
    ):
        if not is_installed("obstore"):
            raise ConfigError(f"A tier in S3 needs the package obstore. To install it, {how_to_install('s3')}.")
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        self._obstore: Any = obstore
        self.bucket = open_bucket(url, endpoint, config or {}, timeout_s)
        self.failures = (BaseError, OSError)
        self.refusals = (PermissionDeniedError, UnauthenticatedError)
        self._askers = ThreadPoolExecutor(NUM_ASKERS, "kv-s3-ask")
        super().__init__(
            url, namespace, secret=secret, retry_after_s=retry_after_s, patience_s=timeout_s, ask_again_s=ask_again_s
        )

    def path_of(self, key: PageKey) -> str:
        return f"{self.namespace}/{key.file_name}"

    def exist(self, keys: Sequence[PageKey]) -> list[bool]:
        return list(self._askers.map(self._exists, keys))

    def _exists(self, key: PageKey) -> bool:
        try:
            self._obstore.head(self.bucket, self.path_of(key))
        except FileNotFoundError:
            return False
        return True

    def fetch(self, key: PageKey) -> Buffer | None:
        try:
            found = self._obstore.get(self.bucket, self.path_of(key))
            if found.meta["size"] > MAX_PAGE_BYTES + MAX_HEADER_BYTES:
                return b""  # no page: it is found to be damaged, and removed
            return memoryview(found.bytes())
        except FileNotFoundError:
            return None

    def store(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self._obstore.put(self.bucket, self.path_of(key), b"".join(map(bytes_of, buffers)))

    def remove(self, keys: Sequence[PageKey]) -> None:
        self._obstore.delete(self.bucket, [self.path_of(key) for key in keys])

    def disconnect(self) -> None:
        self._askers.shutdown(wait=False, cancel_futures=True)


def open_bucket(url: str, endpoint: str | None, config: dict[str, Any], timeout_s: float) -> Any:
    """The store of obstore behind an address. ConfigError for what is none."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r} is no address of a bucket, such as s3://bucket/prefix.")
    options: Any = {"endpoint": endpoint, **config} if endpoint else config
    try:
        return S3Store.from_url(
            url,
            config=options or None,
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=timeout_s),
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
            },
            # Whoever waits for a page would rather compute it than wait for a second attempt.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url} cannot be used as a bucket of pages: {error}.") from None
