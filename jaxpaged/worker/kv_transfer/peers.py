"""Other engines, as the worker's half of KV transfer sees them: to whom it lends pages, and from whom it borrows."""

import uuid
from collections.abc import Sequence
from typing import Any

from jaxpaged.kv_store.borrower import Borrower
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.handover import RemoteSource, answer_params
from jaxpaged.kv_store.lender import Lender
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Lookup, TierUsage


class Peers:
    """Either half may be absent, as the engine's role says; both are where there are no other engines."""

    def __init__(self, lender: Lender | None = None, borrower: Borrower | None = None):
        self._lender, self._borrower = lender, borrower
        self._engine_id = str(uuid.uuid4())

    @property
    def lends(self) -> bool:
        return self._lender is not None

    def grant(
        self, keys: Sequence[PageKey], num_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Lend pages: what the answer says. None where there are none."""
        if self._lender is None or not keys:
            return None
        lease, expiry = self._lender.grant(keys)
        source = RemoteSource(self._lender.host, self._lender.port, lease, num_tokens)
        return answer_params(source, self._engine_id, block_ids, expiry)

    def hold(self, keys: Sequence[PageKey]) -> None:
        """These may be in the store now. For threads."""
        if self._lender is not None:
            self._lender.hold(keys)

    def expect(self, keys: Sequence[PageKey], source: RemoteSource) -> None:
        if self._borrower is not None:
            self._borrower.expect(keys, source)

    def keep_lease(self, source: RemoteSource) -> None:
        if self._borrower is not None:
            self._borrower.keep_lease(source)

    def release(self, source: RemoteSource) -> None:
        if self._borrower is not None:
            self._borrower.release(source)

    def lookup(self, keys: Sequence[PageKey], states: list[Lookup]) -> list[Lookup]:
        """What own tiers said of keys, and where they miss, whether another engine lends them."""
        if self._borrower is None:
            return states
        lent = self._borrower.lookup(keys)
        return [there if here is Lookup.MISS else here for here, there in zip(states, lent)]

    def get(self, key: PageKey) -> tuple[Buffer | None, str]:
        """A page that another engine lends, and the name of this tier."""
        return (None, "") if self._borrower is None else (self._borrower.get(key), self._borrower.name)

    def forget(self, keys: Sequence[PageKey]) -> None:
        if self._borrower is not None:
            self._borrower.delete(keys)

    def usage(self) -> list[TierUsage]:
        return [] if self._borrower is None else [self._borrower.usage()]

    def stats(self) -> dict[str, int]:
        return {} if self._lender is None else self._lender.stats()

    def close(self) -> None:
        for half in (self._lender, self._borrower):
            if half is not None:
                half.close()
