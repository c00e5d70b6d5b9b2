"""What tiers of pages in other processes have in common: they are asked in the background, and pages are checked."""

import abc
from collections.abc import Iterable
from typing import Any

from jaxpaged.kv_store.asked import AskedStore
from jaxpaged.kv_store.buffers import Buffer, joined, read_only
from jaxpaged.kv_store.changes import STORAGE, ChangeLog
from jaxpaged.kv_store.page import PageKey, decode


class RemoteTier(AskedStore[PageKey, Buffer], abc.ABC):
    """A tier whose store is reached by a connection. Subclasses say how, and what errors that may end in."""

    def __init__(self, where: str, namespace: str, *, secret: bytes | None = None, **waits: Any):
        """`waits`: how long what is waited for (`AskedStore`)."""
        self.namespace, self._secret = namespace, secret
        self._log: ChangeLog | None = None
        super().__init__(where, **waits)

    def checked(self, key: PageKey, content: Buffer) -> Buffer:
        """The page in aligned memory."""
        page = read_only(joined([content]))
        decode(page, expect_namespace=self.namespace, key=key, secret=self._secret)
        return page

    def noted(self, key: PageKey, is_there: bool) -> None:
        if self._log is not None:
            self._log.note(STORAGE, key, is_there)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """What the store evicts follows from what is read."""
        return

    def watch(self, log: ChangeLog) -> None:
        """What the store evicts is not heard of before it is missed."""
        with self._changed:
            self._log = log
