"""The connector between engines: a prompt that one has computed is lent, and another goes on from it.

A request with `do_remote_decode` has the pages of its prompt lent out from its first step on: its outputs say where. A
request with `do_remote_prefill` pulls such pages, and keeps their lease alive while it waits. What such requests say is
in `kv_store/transfer_params.py`. What is lent is read from the stores of other connectors, so this one comes after
them where several are combined.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.kv_connector.base import KVConnectorBase, KVLoad, KVPage, KVRequest
from jaxpaged.kv_connector.offloading import CLOSE_SECONDS, tier_stats
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.consumer import KVConsumer
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import keys_of
from jaxpaged.kv_store.producer import KVProducer
from jaxpaged.kv_store.threads import Threads
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.transfer_params import (
    PARAMS,
    RemoteSource,
    TransferParams,
    answer_params,
    source_of,
    transfer_params,
)

logger = logging.getLogger(__name__)

NUM_THREADS = 64
"""Loads at a time: most of them wait for prompts that are being computed."""


class PeersConnector(KVConnectorBase):
    """Either half may be absent, as the engine's role says."""

    name = "p2p"

    def __init__(self, producer: KVProducer | None = None, consumer: KVConsumer | None = None):
        self._producer, self._consumer = producer, consumer
        self.others_wait = producer is not None
        self._engine_id = str(uuid.uuid4())
        self._waiting: set[str] = set()  # requests whose prompts others go on from, and that have no blocks yet
        self._lent: dict[str, dict[str, Any]] = {}  # by request, what is said of its lease
        self._told: dict[str, dict[str, Any]] = {}  # of those, since `take_params`
        self._sources: dict[str, RemoteSource] = {}  # by the request that waits for what is lent there
        self._loaders = Threads(NUM_THREADS, "kv-load-peers")
        self._holders = Threads(1, "kv-hold")

    @property
    def outlives_engine(self) -> bool:
        return False

    # ---- the scheduler's side ------------------------------------------------------------------

    def on_new_request(self, request: KVRequest) -> None:
        params = params_of(request.kv_transfer_params)
        source = source_of(params)
        if source is not None:
            self._sources[request.request_id] = source
            if self._consumer is not None:
                self._consumer.keep_lease(source)
        elif params is not None and params.do_remote_decode:
            self._waiting.add(request.request_id)

    def expect_request(self, params: Mapping[str, Any], is_coming: bool) -> None:
        try:
            source = source_of(params_of(params))
        except RequestError:
            return  # nobody can come with these
        if source is not None and self._consumer is not None:
            (self._consumer.keep_lease if is_coming else self._consumer.release)(source)

    def before_look_up(self, request: KVRequest, pages: Sequence[tuple[PageKey, int]]) -> None:
        source = self._sources.get(request.request_id)
        if source is not None and self._consumer is not None:
            self._consumer.expect([key for key, end in pages if end <= source.num_tokens], source)

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        return [Lookup.MISS] * len(keys) if self._consumer is None else self._consumer.lookup(keys)

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey]) -> Sequence[bool]:
        return [False] * len(keys)  # it keeps none itself

    def must_load(self, request: KVRequest) -> bool:
        """What another engine has computed for a request is always loaded."""
        return request.request_id in self._sources

    def update_state_after_alloc(
        self, request: KVRequest, pages: Sequence[PageContent], num_external_tokens: int
    ) -> None:
        """Lend a prompt from its first step on."""
        if num_external_tokens or request.request_id not in self._waiting:
            return
        self._waiting.discard(request.request_id)
        num_tokens, pieces = request.prompt_pieces()
        keys = keys_of(pieces)
        if self._producer is None or not keys:
            return
        lease, expiry = self._producer.grant(keys)
        source = RemoteSource(self._producer.host, self._producer.port, lease, num_tokens)
        said = answer_params(source, self._engine_id, (), expiry)
        self._lent[request.request_id] = self._told[request.request_id] = said
        request.save_prompt()
        self._hold(keys)

    def load_finished(self, request: KVRequest) -> None:
        source = self._sources.pop(request.request_id, None)
        if source is not None and self._consumer is not None:
            self._consumer.release(source)

    def request_finished(self, request: KVRequest, is_computed: bool) -> dict[str, Any] | None:
        self.load_finished(request)
        self._waiting.discard(request.request_id)
        self._told.pop(request.request_id, None)
        said = self._lent.pop(request.request_id, None)
        if said is None or self._producer is None:
            return None
        if not is_computed:
            self._producer.release(said["remote_request_id"])
            return None
        pieces = [piece for piece in request.prompt_pieces()[1] if piece.block_ids]
        block_ids: list[list[int]] = [[] for _ in self.layout.groups]
        for piece in pieces:
            block_ids[piece.pages[0].key.group] += piece.block_ids
        keys = keys_of(pieces)
        expiry = self._producer.finish(said["remote_request_id"], keys)
        request.save_prompt()
        self._hold(keys)
        return {**said, "remote_block_ids": block_ids, "remote_blocks_expiry_time": expiry}

    def take_params(self) -> dict[str, dict[str, Any]]:
        told, self._told = self._told, {}
        return told

    def _hold(self, keys: Sequence[PageKey]) -> None:
        """These may be in the stores already, which a thread finds out."""
        if self._producer is not None:
            self._holders.submit(self._producer.hold, keys)

    # ---- the worker's side ---------------------------------------------------------------------

    def start_load_kv(self, loads: Sequence[KVLoad], metadata: Any) -> None:
        for load in loads:
            if self._consumer is None or self._loaders.submit(self._load, load, self._consumer).cancelled():
                load.finish()

    def _load(self, load: KVLoad, consumer: KVConsumer) -> None:
        def take(key: PageKey, page: Buffer) -> None:
            load.give(key, page, self.name, is_checked=True)

        try:
            consumer.pull([page.key for page in load.missing], take)
        except Exception:
            logger.exception("pulling pages of keys and values from another engine failed")
        finally:
            load.finish()

    def save_kv(self, pages: Sequence[KVPage]) -> Sequence[bool]:
        """Pages that the connectors before this one have kept are lent."""
        if self._producer is not None:
            self._producer.hold([page.content.key for page in pages])
        return [False] * len(pages)

    def discard(self, keys: Sequence[PageKey]) -> None:
        pass

    def get_kv_connector_stats(self) -> dict[str, Any]:
        halves = [half for half in (self._producer, self._consumer) if half is not None]
        tiers = [] if self._consumer is None else [self._consumer.usage()]
        return tier_stats(tiers) | {name: value for half in halves for name, value in half.stats().items()}

    def shutdown(self) -> None:
        for half in (self._producer, self._consumer):
            if half is not None:
                half.close()
        for threads in (self._holders, self._loaders):
            threads.close(CLOSE_SECONDS, cancels=True)


def params_of(given: Mapping[str, Any] | None) -> TransferParams | None:
    return transfer_params({PARAMS: given})
