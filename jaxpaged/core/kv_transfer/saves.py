"""Pieces that wait to be copied off the device, as long as their blocks hold what is to be copied.

A copy may find no room now and some later (`worker/kv_transfer`), so a piece waits. Once one of its blocks is given out
again, its content lasts until the next thing is dispatched that writes to blocks. It is *urgent* from then on: it is
copied before that, or never.

`Gathers` counts the copies that are under way, which may take so much memory until they are kept.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import batched, count, islice
from typing import NamedTuple

from jaxpaged.core.kv_cache.block_pool import KVCacheBlock
from jaxpaged.core.kv_cache.groups import CacheGroup
from jaxpaged.kv_connector.base import KVCacheLayout, KVConnectorScheduler, KVSave
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece, keys_of


class Save(NamedTuple):
    """A piece whose content is computed by the steps up to `step_id`."""

    step_id: int
    piece: Piece

    @property
    def key(self) -> PageKey:
        """Of its first page, which no other piece has."""
        return self.piece.pages[0].key


Held = tuple[tuple[KVCacheBlock, bytes | None], ...]
"""The blocks of a piece, each with the key of its content."""


class Saves:
    """Those of the blocks of `groups`, in the order of the steps that compute them."""

    def __init__(self, groups: Sequence[CacheGroup]):
        self._groups = groups
        self._pools = list(dict.fromkeys(group.pool for group in groups))
        self._waiting: OrderedDict[PageKey, tuple[Save, Held]] = OrderedDict()
        self._of_block: dict[KVCacheBlock, PageKey] = {}
        self._urgent: list[Save] = []
        for pool in self._pools:
            pool.reused = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._urgent)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._waiting

    def has_any(self, before: int | None) -> bool:
        """Whether any waits that `take` could give."""
        return next((before is None or save.step_id < before for save, _ in self._waiting.values()), False)

    def add(self, save: Save) -> None:
        """A piece whose blocks the prefix cache has now. One that waits already waits for the step named last."""
        self._heed_reused()
        if save.key in self._waiting:
            self._remove(save.key)
        blocks = self._groups[save.key.group].pool.blocks
        held = tuple((blocks[block_id], blocks[block_id].cache_key) for block_id in save.piece.block_ids)
        self._waiting[save.key] = save, held
        self._of_block.update((block, save.key) for block, _ in held)

    def add_first(self, saves: Sequence[Save]) -> None:
        """The same for pieces that go before all others."""
        for save in reversed(saves):
            self.add(save)
            self._waiting.move_to_end(save.key, last=False)

    def take(self, before: int | None, most: int) -> list[Save]:
        """The first `most` of those that steps before number `before` have computed, None: all steps."""
        self._heed_reused()
        taken: list[Save] = []
        for save, held in list(islice(self._waiting.values(), most)):
            if before is not None and save.step_id >= before:
                break
            self._remove(save.key)
            if all(block.cache_key == key for block, key in held):  # else a step failed that wrote there
                taken.append(save)
        return taken

    def take_urgent(self) -> list[Save]:
        """Those that are copied before anything is dispatched that writes to blocks, or never."""
        self._heed_reused()
        urgent, self._urgent = self._urgent, []
        return urgent

    def discard(self, keys: Collection[PageKey]) -> None:
        """The content of these pages is in doubt."""
        for key in keys:
            if key in self._waiting:
                self._remove(key)
        self._urgent = [save for save in self._urgent if not any(key in keys for key in keys_of([save.piece]))]

    def clear(self) -> None:
        self._waiting.clear()
        self._of_block.clear()
        self._urgent.clear()
        for pool in self._pools:
            pool.reused = []

    def _heed_reused(self) -> None:
        """What waits in blocks that were given out since the last call is urgent."""
        for pool in self._pools:
            if pool.reused:
                for block in pool.reused:
                    if (key := self._of_block.get(block)) is not None:
                        self._urgent.append(self._waiting[key][0])
                        self._remove(key)
                pool.reused = []

    def _remove(self, key: PageKey) -> None:
        _, held = self._waiting.pop(key)
        for block, _ in held:
            if self._of_block.get(block) == key:
                del self._of_block[block]


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
