"""Several connectors as one: pages are looked up in all, in their order, loaded from the first that has them, page by
page, and saved to all."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jaxpaged.kv_connector.base import (
    KVCacheLayout,
    KVConnector,
    KVConnectorBase,
    KVConnectorWorker,
    KVLoad,
    KVPage,
    KVRequest,
)
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.tier import ChunkTiers, Lookup
from jaxpaged.kv_store.tier_events import TierEvent


class MultiConnector(KVConnectorBase):
    """The `connectors`, the first one to be asked first. It owns them."""

    name = "multi"

    def __init__(self, connectors: Sequence[KVConnector]):
        self.connectors = list(connectors)
        self.others_wait = any(each.others_wait for each in self.connectors)

    @property
    def chunk_tiers(self) -> ChunkTiers | None:
        """Those of the first connector that has such."""
        return next((tiers for each in self.connectors if (tiers := each.chunk_tiers) is not None), None)

    @property
    def outlives_engine(self) -> bool:
        return any(each.outlives_engine for each in self.connectors)

    # ---- the scheduler's side ------------------------------------------------------------------

    def on_new_request(self, request: KVRequest) -> None:
        for each in self.connectors:
            each.on_new_request(request)

    def expect_request(self, params: Mapping[str, Any], is_coming: bool) -> None:
        for each in self.connectors:
            each.expect_request(params, is_coming)

    def before_look_up(self, request: KVRequest, pages: Sequence[tuple[PageKey, int]]) -> None:
        for each in self.connectors:
            each.before_look_up(request, pages)

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        """HIT where one connector has a page; else PENDING where one does not know."""
        states = dict.fromkeys(keys, Lookup.MISS)
        for each in self.connectors:
            asked = [key for key, state in states.items() if state is not Lookup.HIT]
            for key, state in zip(asked, each.look_up(asked)) if asked else ():
                if state is not Lookup.MISS:
                    states[key] = state
        return [states[key] for key in keys]

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey]) -> Sequence[bool]:
        return [any(each) for each in zip(*[each.lacks(keys, under_way) for each in self.connectors])]

    def where(self, keys: Sequence[PageKey]) -> Sequence[str]:
        names: dict[PageKey, str] = {}
        for each in self.connectors:
            here = [key for key, state in zip(keys, each.look_up(keys)) if state is Lookup.HIT and key not in names]
            names |= zip(here, each.where(here))
        first = self.connectors[0]
        return [names[key] if key in names else first.where([key])[0] for key in keys]

    def must_load(self, request: KVRequest) -> bool:
        return any(each.must_load(request) for each in self.connectors)

    def update_state_after_alloc(
        self, request: KVRequest, pages: Sequence[PageContent], num_external_tokens: int
    ) -> None:
        for each in self.connectors:
            each.update_state_after_alloc(request, pages, num_external_tokens)

    def load_finished(self, request: KVRequest) -> None:
        for each in self.connectors:
            each.load_finished(request)

    def build_connector_meta(self) -> Any:
        """Of each connector; None where none says anything."""
        said = [each.build_connector_meta() for each in self.connectors]
        return said if any(each is not None for each in said) else None

    def request_finished(self, request: KVRequest, is_computed: bool) -> dict[str, Any] | None:
        return merged(each.request_finished(request, is_computed) or {} for each in self.connectors) or None

    def take_params(self) -> dict[str, dict[str, Any]]:
        return merged(each.take_params() for each in self.connectors)

    def take_events(self) -> Sequence[TierEvent]:
        return [change for each in self.connectors for change in each.take_events()]

    # ---- the worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, layout: KVCacheLayout) -> None:
        self.layout = layout
        for each in self.connectors:
            each.register_kv_caches(layout)

    def start_load_kv(self, loads: Sequence[KVLoad], metadata: Any) -> None:
        said = metadata or [None] * len(self.connectors)
        first, *behind = self.connectors
        first.start_load_kv([ChainedLoad(load, behind) for load in loads], said[0])
        for each, own in zip(behind, said[1:]):
            if own is not None:
                each.start_load_kv((), own)

    def save_kv(self, pages: Sequence[KVPage]) -> Sequence[bool]:
        """Whether any of them keeps each. A connector that lends what others keep comes behind these."""
        return [any(each) for each in zip(*[each.save_kv(pages) for each in self.connectors])]

    def discard(self, keys: Sequence[PageKey]) -> None:
        for each in self.connectors:
            each.discard(keys)

    def get_kv_connector_stats(self) -> dict[str, Any]:
        return merged(each.get_kv_connector_stats() for each in self.connectors)

    def shutdown(self) -> None:
        """The last one first: it may read what others keep."""
        for each in reversed(self.connectors):
            each.shutdown()


class ChainedLoad:
    """A load of which one connector fetches what it has, and those `behind` it the rest."""

    def __init__(self, load: KVLoad, behind: Sequence[KVConnectorWorker]):
        self._load, self._behind = load, behind

    @property
    def request_id(self) -> str:
        return self._load.request_id

    @property
    def missing(self) -> Sequence[PageContent]:
        return self._load.missing

    def give(self, key: PageKey, page: Buffer | Sequence[Buffer], source: str, *, is_checked: bool = False) -> bool:
        return self._load.give(key, page, source, is_checked=is_checked)

    def finish(self) -> None:
        if self._behind and self.missing:
            self._behind[0].start_load_kv([ChainedLoad(self._load, self._behind[1:])], None)
        else:
            self._load.finish()


def merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
