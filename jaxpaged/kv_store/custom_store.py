"""One's own store of pages as a tier: a class with five methods, found by an entry point or by its module.

    class MyStore:
        def __init__(self, config, namespace): ...         # kv_connector_extra_config, and whose pages these are
        def exist(self, names): ...                        # for each name whether it is there
        def get(self, name): ...                           # the page's bytes, or None
        def put(self, name, page): ...
        def delete(self, names): ...
        def close(self): ...

The entry point is of the group `jaxpaged.kv_connectors`, and its name is the `kv_connector` of `kv_transfer_config`; or
the module that has a class of that name is its `kv_connector_module_path`. Methods are called from threads, several at
a time. Whatever they raise is a miss, or a page that was not kept, and the store is then left alone for a while; every
page that comes is checked. `tests/kv_store/example_connector.py` is a whole one, in a file of SQLite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import Buffer, bytes_of
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.remote_store import RemoteTier


class PageStore(Protocol):
    """What such a class offers. Names are texts of letters, digits, `_` and `/`; pages have up to 4 GiB."""

    def exist(self, names: Sequence[str]) -> Sequence[bool]: ...
    def get(self, name: str) -> Buffer | None: ...
    def put(self, name: str, page: bytes) -> None: ...
    def delete(self, names: Sequence[str]) -> None: ...
    def close(self) -> None: ...


METHODS = ("exist", "get", "put", "delete", "close")


def open_store(name: str, made: Any, config: Mapping[str, Any], namespace: str) -> PageStore:
    """Make the store of a class, or of whatever else makes one. Raises ConfigError where that cannot be done."""
    try:
        store: PageStore = made(config, namespace)
    except ConfigError:
        raise
    except Exception as error:  # it is a stranger's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the kv_connector {name!r} cannot be opened with kv_connector_extra_config {dict(config)!r}: {reason}."
        ) from error
    missing = [each for each in METHODS if not callable(getattr(store, each, None))]
    if missing:
        raise ConfigError(
            f"the kv_connector {name!r} has no method {', '.join(missing)}. A store has {', '.join(METHODS)}."
        )
    return store


class CustomTier(RemoteTier):
    """The pages of one namespace in such a store."""

    failures = (Exception,)

    def __init__(self, name: str, pages: PageStore, namespace: str, secret: bytes | None = None):
        self.name, self.pages = name, pages
        super().__init__(name, namespace, secret=secret)

    def name_of(self, key: PageKey) -> str:
        return f"{self.namespace}/{key.file_name}"

    def exist(self, keys: Sequence[PageKey]) -> list[bool]:
        found = list(map(bool, self.pages.exist([self.name_of(key) for key in keys])))
        if len(found) != len(keys):
            raise ValueError(f"exist gave {len(found)} answers to {len(keys)} names")
        return found

    def fetch(self, key: PageKey) -> Buffer | None:
        return self.pages.get(self.name_of(key))

    def store(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        self.pages.put(self.name_of(key), b"".join(map(bytes_of, buffers)))

    def remove(self, keys: Sequence[PageKey]) -> None:
        self.pages.delete([self.name_of(key) for key in keys])

    def disconnect(self) -> None:
        self.pages.close()
