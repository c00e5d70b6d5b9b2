"""Several tiers as one, fastest first: looked up in order, written to all, and moved between them in the background.

`put` writes a page into the first tier at once, and into each of the others through a queue (`tier_writer.py`), so that
pages are on the disk soon, for after a crash. When a queue is full the page waits in the first tier, and is offered
again when that evicts it (spilling). A page that is found further down is copied to the first tier (promotion).
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence, Set

import numpy as np

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import Buffer, joined, read_only
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.lmcache.tier import LMCacheTier
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.remote_store import RemoteTier
from jaxpaged.kv_store.tier import Lookup, Tier, TierUsage
from jaxpaged.kv_store.tier_events import TierEventLog
from jaxpaged.kv_store.tier_writer import TierWriter

DEFAULT_QUEUE_BYTES = 256 << 20
MOST_CLOSE_SECONDS = 30.0
"""That closing takes, where pages go on to be written."""


class Tiers:
    """All tiers behind the interface of one. It owns them: `close` closes them too.

    `queue_bytes` limits the pages on their way to each tier but the first, besides what the first holds. Closing ends
    once no page was written for `close_patience_s`.
    """

    name = "tiers"

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        num_threads: int = 2,
        close_patience_s: float = 10.0,
    ):
        if not tiers:
            raise ConfigError("There is no tier to keep pages in. Give one at least.")
        self.tiers = list(tiers)
        self.close_patience_s = close_patience_s
        self._writers = [TierWriter(tier, queue_bytes, num_threads, self._held) for tier in self.tiers]
        self.are_far = [isinstance(tier, RemoteTier | LMCacheTier) for tier in self.tiers]
        """Of each tier whether its pages come from another process."""
        self._chunked = [tier for tier in self.tiers if isinstance(tier, LMCacheTier)]
        if len(sizes := {tier.chunk_tokens for tier in self._chunked}) > 1:
            raise ConfigError(f"There are tiers with chunks of {sorted(sizes)} tokens. Give all the same chunk_size.")
        self.chunk_tokens = next(iter(sizes), None)
        """Tokens of a chunk where a tier has such (`introduce`, `collect`)."""
        for tier in self.tiers[:-1]:
            if isinstance(tier, HostTier):
                tier.on_evict = self._spill

    @property
    def is_lasting(self) -> bool:
        """Whether a tier outlives this process."""
        return not all(isinstance(tier, HostTier) for tier in self.tiers)

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        states = dict.fromkeys(keys, Lookup.MISS)
        for tier in self.tiers:
            asked = [key for key, state in states.items() if state is not Lookup.HIT]
            for key, state in zip(asked, tier.lookup(asked)) if asked else ():
                if state is not Lookup.MISS:
                    states[key] = state
        for key, state in states.items():
            if state is not Lookup.HIT and self._on_its_way(key) is not None:
                states[key] = Lookup.HIT
        return [states[key] for key in keys]

    def lacks(self, keys: Sequence[PageKey], under_way: Set[PageKey] = frozenset()) -> list[bool]:
        """Whether each page is to be brought: no tier has it, nor is it `under_way`, or it is part of a chunk that one
        lacks."""
        lacking = [False] * len(keys)
        if len(self._chunked) < len(self.tiers):
            states = zip(keys, self.lookup(keys))
            lacking = [state is not Lookup.HIT and key not in under_way for key, state in states]
        for tier in self._chunked:
            lacking = [before or wanted for before, wanted in zip(lacking, tier.lacks(keys))]
        return lacking

    def introduce(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> None:
        """Full chunks of a text's first `end` tokens may be asked for; `hashes` are those of its pages."""
        for tier in self._chunked:
            tier.introduce(token_ids, hashes, end)

    def collect(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> bool:
        """The chunk that ends there is computed. Whether a tier wants all of its pages."""
        wanted = [tier.collect(token_ids, hashes, end) for tier in self._chunked]  # all of them collect
        return any(wanted)

    def where(self, keys: Sequence[PageKey]) -> list[str]:
        """The name of the first tier that has each page, as far as that is known at once: where `get` would find it."""
        names: dict[PageKey, str] = {}
        for tier in self.tiers:
            asked = [key for key in keys if key not in names]
            states = zip(asked, tier.lookup(asked)) if asked else ()
            names.update((key, tier.name) for key, state in states if state is Lookup.HIT)
        return [names.get(key, HostTier.name) for key in keys]

    def farthest(self, keys: Sequence[PageKey]) -> int | None:
        """The number of the last tier that pages would come from, as far as that is known at once. None: some are in no
        tier."""
        farthest, asked = 0, list(keys)
        for number, tier in enumerate(self.tiers):
            left = [key for key, state in zip(asked, tier.lookup(asked)) if state is not Lookup.HIT] if asked else []
            farthest, asked = (number if len(left) < len(asked) else farthest), left
        return farthest if all(self._on_its_way(key) is not None for key in asked) else None

    def _on_its_way(self, key: PageKey) -> np.ndarray | None:
        return next((page for writer in self._writers if (page := writer.find(key)) is not None), None)

    def get(self, key: PageKey) -> Buffer | None:
        return self.get_from(key)[0]

    def get_from(self, key: PageKey) -> tuple[Buffer | None, str]:
        """`get`, and the name of the tier that had it. What is still on its way to one is in memory."""
        for number, tier in enumerate(self.tiers):
            if tier.lookup([key]) == [Lookup.HIT] and (page := tier.get(key)) is not None:
                if number > 0:
                    self._writers[0].offer(key, np.frombuffer(page, np.uint8))
                return page, tier.name
        return self._on_its_way(key), HostTier.name

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> bool:
        if len(self.tiers) == 1:
            return self.tiers[0].put(key, buffers)
        page = read_only(joined(buffers))
        is_kept = self.tiers[0].put(key, [page])
        return self._send_down(key, page, is_kept) or is_kept

    def _held(self, key: PageKey) -> np.ndarray | None:
        """A page that the first tier has."""
        page = self.tiers[0].get(key)
        return None if page is None else np.frombuffer(page, np.uint8)

    def _send_down(self, key: PageKey, page: np.ndarray, is_held: bool) -> bool:
        """Have a page written to the tiers below the first, which holds it or not, that lack it. Whether it is, or soon
        will be, in one."""
        is_kept = False
        for writer in self._writers[1:]:
            if isinstance(writer.tier, LMCacheTier):
                is_kept = (writer.tier.lacks([key]) == [True] and writer.submit(key, page, is_held)) or is_kept
                continue
            here = writer.tier.lookup([key]) == [Lookup.HIT]  # a store elsewhere that is still asked does not have it
            is_kept = here or writer.submit(key, page, is_held) or is_kept
        return is_kept

    def _spill(self, key: PageKey, page: Buffer) -> None:
        self._send_down(key, np.frombuffer(page, np.uint8), is_held=False)

    def touch(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        for tier in self.tiers:
            tier.touch(keys)

    def delete(self, keys: Iterable[PageKey]) -> None:
        keys = list(keys)
        for writer in self._writers:
            writer.delete(keys)
            writer.tier.delete(keys)

    def watch(self, log: TierEventLog) -> None:
        for tier in self.tiers:
            tier.watch(log)

    def usage(self) -> list[TierUsage]:
        lines = []
        for writer in self._writers:
            for line in writer.tier.usage():
                counters = dataclasses.replace(line.counters, dropped=line.counters.dropped + writer.dropped)
                lines.append(dataclasses.replace(line, counters=counters, num_waiting=writer.num_waiting))
        return lines

    def flush(self, timeout_s: float) -> bool:
        """Wait until every page is where it is to go. False when that took too long."""
        deadline = time.monotonic() + timeout_s
        return all(writer.flush(max(deadline - time.monotonic(), 0.0)) for writer in self._writers)

    def close(self) -> None:
        deadline = time.monotonic() + MOST_CLOSE_SECONDS
        for writer in self._writers:
            writer.close(deadline, self.close_patience_s)
        for tier in self.tiers:
            tier.close()
