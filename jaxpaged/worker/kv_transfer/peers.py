"""Other engines, as the worker's half of KV transfer sees them: to whom it lends pages, and from whom it borrows."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.producer import KVProducer
from jaxpaged.kv_store.tier import Lookup, TierUsage
from jaxpaged.kv_store.transfer_params import RemoteSource, answer_params


class Peers:
    """Either half may be absent, as the engine's role says; both are where there are no other engines."""

    def __init__(self, producer: KVProducer | None = None, consumer: KVConsumer | None = None):
        self._producer, self._consumer = producer, consumer
        self._engine_id = str(uuid.uuid4())

    @property
    def lends(self) -> bool:
        return self._producer is not None

    @property
    def borrows(self) -> bool:
        return self._consumer is not None

    def grant(self, keys: Sequence[PageKey], num_tokens: int) -> dict[str, Any] | None:
        """Lend pages of a prompt that begins to be computed: what an answer says. None where there are none."""
        if self._producer is None or not keys:
            return None
        lease, expiry = self._producer.grant(keys)
        source = RemoteSource(self._producer.host, self._producer.port, lease, num_tokens)
        return answer_params(source, self._engine_id, (), expiry)

    def finish(
        self, said: dict[str, Any], keys: Sequence[PageKey], block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """The prompt is computed, these pages of it: what an answer says now."""
        assert self._producer is not None
        expiry = self._producer.finish(said["remote_request_id"], keys)
        return {**said, "remote_block_ids": [list(ids) for ids in block_ids], "remote_blocks_expiry_time": expiry}

    def take_back(self, said: dict[str, Any]) -> None:
        """The prompt will not be computed after all."""
        if self._producer is not None:
            self._producer.release(said["remote_request_id"])

    def hold(self, keys: Sequence[PageKey]) -> None:
        """These may be in the store now. For threads."""
        if self._producer is not None:
            self._producer.hold(keys)

    def expect(self, keys: Sequence[PageKey], source: RemoteSource) -> None:
        if self._consumer is not None:
            self._consumer.expect(keys, source)

    def keep_lease(self, source: RemoteSource) -> None:
        if self._consumer is not None:
            self._consumer.keep_lease(source)

    def release(self, source: RemoteSource) -> None:
        if self._consumer is not None:
            self._consumer.release(source)

    def lookup(self, keys: Sequence[PageKey], states: list[Lookup]) -> list[Lookup]:
        """What own tiers said of keys, and where they miss, whether another engine lends them."""
        if self._consumer is None:
            return states
        lent = self._consumer.lookup(keys)
        return [there if here is Lookup.MISS else here for here, there in zip(states, lent)]

    def pull(self, keys: Sequence[PageKey], take: Callable[[PageKey, Buffer], None]) -> str:
        """See `KVConsumer.pull`. The name of this tier."""
        if self._consumer is None:
            return ""
        self._consumer.pull(keys, take)
        return self._consumer.name

    def usage(self) -> list[TierUsage]:
        return [] if self._consumer is None else [self._consumer.usage()]

    def stats(self) -> dict[str, Any]:
        return {
            name: value for half in (self._producer, self._consumer) if half for name, value in half.stats().items()
        }

    def close(self) -> None:
        for half in (self._producer, self._consumer):
            if half is not None:
                half.close()
