"""A tier in Redis or Valkey: a string for each page, `jaxpaged-kv:<namespace>:<hash>_g<group>`.

What it holds at most, and what goes then, are the server's settings (`maxmemory`, `maxmemory-policy allkeys-lru`).
Values end at 512 MB, by the server's default.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxpaged.errors import ConfigError, how_to_install, is_installed
from jaxpaged.kv_store.buffers import Buffer, bytes_of
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.remote_store import RemoteTier

Login = tuple[str | None, str | None]


class RedisTier(RemoteTier):
    """Pages in the server at `url` (`redis://`, `rediss://` or `unix://`). With `ttl_s` they expire after that.
    `login` is (user, password), for addresses that do not hold them."""

    name = "redis"
    client: Any

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        secret: bytes | None = None,
        ttl_s: int | None = None,
        login: Login = (None, None),
        timeout_s: float = 2.0,
        retry_after_s: float = 30.0,
        ask_again_s: float = 30.0,
    ):
        self.client, where, self.failures, self.refusals = connect_redis(url, login, timeout_s)
        self._ttl_s = ttl_s
        super().__init__(
            where, namespace, secret=secret, retry_after_s=retry_after_s, patience_s=timeout_s, ask_again_s=ask_again_s
        )

    def key_name(self, key: PageKey) -> str:
        return f"jaxpaged-kv:{self.namespace}:{key.file_name}"

    def exist(self, keys: Sequence[PageKey]) -> list[bool]:
        pipeline = self.client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(self.key_name(key))
        return [bool(count) for count in pipeline.execute()]

    def fetch(self, key: PageKey) -> Buffer | None:
        return self.client.get(self.key_name(key))

    def store(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self.client.set(self.key_name(key), b"".join(map(bytes_of, buffers)), ex=self._ttl_s)

    def remove(self, keys: Sequence[PageKey]) -> None:
        self.client.unlink(*map(self.key_name, keys))

    def disconnect(self) -> None:
        self.client.close()


def connect_redis(
    url: str, login: Login, timeout_s: float
) -> tuple[Any, str, tuple[type[Exception], ...], tuple[type[Exception], ...]]:
    """(client, the server's address for logs, what its calls raise, and of that what a server says that is alive).

    `login` is (user, password). Raises ConfigError for an address that is none, and where the package is missing.
    """
    if not is_installed("redis"):
        raise ConfigError(f"A tier in Redis needs the package redis. To install it, {how_to_install('redis')}.")
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    address = urlsplit(url)
    where = f"{address.scheme}://{address.hostname or address.path}"  # a password stays out of the log
    given = {name: value for name, value in zip(("username", "password"), login) if value is not None}
    try:
        where += f":{address.port}" if address.port else ""
        client = redis.Redis.from_url(
            url,
            **given,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A connection that a restarted server has forgotten is made again; a time-out is not waited for twice.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
    except ValueError as error:
        raise ConfigError(f"{where} is no address of a Redis server: {error}.") from None
    return client, where, (redis.RedisError, OSError), (redis.ResponseError,)
