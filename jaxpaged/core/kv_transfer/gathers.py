"""Copies off the device that are under way: which go next, and how much memory they may take until they are kept.

Nothing here knows a request. What a piece is, and how long its content lasts, is in `saves.py`.
"""

from collections.abc import Sequence
from itertools import batched, count

from jaxpaged.core.kv_transfer.saves import Save
from jaxpaged.kv_connector.base import KVCacheLayout, KVConnectorScheduler, KVSave
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import keys_of

ROOM = 256 << 20
"""Bytes that are gathered and not kept yet, after which no other gather begins."""
ROOM_TO_LEND = 2 << 30
"""The same where others wait for what is gathered: what is not saved they must compute."""


class Gathers:
    """Those of an engine whose pages look like `layout`."""

    def __init__(self, connector: KVConnectorScheduler, layout: KVCacheLayout):
        self._connector, self._pools = connector, layout.pools
        self._pool_of = {g: p for p, pool in enumerate(layout.pools) for g in pool.group_idxs}
        self.room = ROOM_TO_LEND if connector.others_wait else ROOM
        self.num_bytes = 0
        self._ids = count()
        self._under_way: dict[int, tuple[int, list[PageKey]]] = {}  # bytes and pages, by the number of a save
        self._keys: set[PageKey] = set()  # that are under way

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def has_room(self) -> bool:
        """Whether another one may begin."""
        return self.num_bytes < self.room

    def begin(self, saves: Sequence[Save]) -> tuple[list[KVSave], list[Save]]:
        """Copies of the pages of pieces that the connector lacks, and the pieces for which there is no room."""
        lacking = iter(self.lacks(saves))
        by_pool: dict[int, list[tuple[Save, list[PageContent | None]]]] = {}
        for save in saves:
            wanted = [page if next(lacking) else None for page in save.piece.pages]
            if any(wanted):
                by_pool.setdefault(self._pool_of[save.key.group], []).append((save, wanted))
        begun, left = list[KVSave](), set[PageKey]()
        for pool, missing in by_pool.items():
            for some in batched(missing, self._pools[pool].copy_sizes[-1]):
                if self.has_room:
                    begun.append(self._begin(pool, some))
                else:
                    left.update(save.key for save, _ in some)
        return begun, [save for save in saves if save.key in left]

    def lacks(self, saves: Sequence[Save]) -> Sequence[bool]:
        """Whether each page of these is to be saved."""
        return self._connector.lacks(keys_of([save.piece for save in saves]), self._keys)

    def _begin(self, pool: int, some: Sequence[tuple[Save, list[PageContent | None]]]) -> KVSave:
        layout = self._pools[pool]
        size = next(i for i, most in enumerate(layout.copy_sizes) if most >= len(some))
        pages = [page for _, wanted in some for page in wanted]
        keys = [page.key for page in pages if page is not None]
        save_id = next(self._ids)
        self._under_way[save_id] = layout.copy_bytes[size], keys
        self._keys.update(keys)
        self.num_bytes += layout.copy_bytes[size]
        block_ids = [block_id for save, _ in some for block_id in save.piece.block_ids]
        return KVSave(save_id, max(save.step_id for save, _ in some), pool, pages, block_ids)

    def end(self, save_id: int) -> None:
        """Its pages are kept, or lost."""
        num_bytes, keys = self._under_way.pop(save_id)
        self.num_bytes -= num_bytes
        self._keys.difference_update(keys)
