"""Chooses an engine core, or an attention rank, for a request: one with little to do, or with a cached prefix.

A core's load is reckoned as in vLLM: a running sequence counts 1, a waiting one 4. A core that is likely to have cached
much of the prompt may have more load. The balancer remembers the prefixes that each core was given lately. It does not
hear what a cache has dropped since, so a guess may be wrong; then the prompt is computed again, and nothing else
happens. This module knows no sockets.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WAITING_COUNTS = 4
"""A waiting sequence counts as many running ones."""
WORTH_OF_WHOLE_PROMPT = 16
"""A core that has cached a whole prompt may have so much more load than another; for half a prompt, half as much."""
EVERY_BLOCK = 32
"""The first blocks of a prompt are remembered one by one; behind them one in two, then one in four, and so on."""
MOST_TOKENS = 8192
"""Tokens of a prompt that are looked at; the rest of a longer prompt is not."""
MOST_BEGINNINGS = 65_536
"""The newest prefixes are remembered: those of 700 prompts of `MOST_TOKENS`, or of thousands of short ones."""


@dataclass(frozen=True)
class Load:
    """The sequences of a core. `is_usable`: the core serves now, and is neither asleep nor silent."""

    num_running: int
    num_waiting: int
    is_usable: bool = True

    @property
    def score(self) -> int:
        return self.num_running + WAITING_COUNTS * self.num_waiting


class Balancer:
    """Chooses among `num_cores` cores whose caches have blocks of `block_size` tokens; 0: they cache nothing."""

    def __init__(self, num_cores: int, block_size: int):
        self._num_cores = num_cores
        self._block_size = block_size
        # The hash of a prefix -> the cores that were given it, a bit for each. An OrderedDict, since a plain dict takes
        # ever longer to forget its oldest entry: it keeps the places of entries that it has lost.
        self._knowers: OrderedDict[int, int] = OrderedDict()
        self._first = 0  # of equal cores, the one that was not chosen for longest

    def choose(self, token_ids: Sequence[int], cache_salt: str | None, loads: Sequence[Load]) -> int:
        """The number of the core that is to compute a prompt. `loads` has one for each core; usable cores go first."""
        beginnings = list(self._beginnings(token_ids, cache_salt))
        known = self._known(beginnings)

        def cost(core: int) -> tuple[bool, float, int]:
            advantage = WORTH_OF_WHOLE_PROMPT * known[core] / max(len(token_ids), 1)
            return not loads[core].is_usable, loads[core].score - advantage, (core - self._first) % self._num_cores

        core = min(range(self._num_cores), key=cost)
        self._first = (core + 1) % self._num_cores
        self._remember(beginnings, core)
        return core

    def give(self, core: int, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Note that a core computes a prompt, since a client has chosen this core."""
        self._remember(list(self._beginnings(token_ids, cache_salt)), core)

    def forget(self, core: int) -> None:
        """The cache of a core is empty."""
        others = ~(1 << core)
        kept = ((beginning, bits & others) for beginning, bits in self._knowers.items() if bits & others)
        self._knowers = OrderedDict(kept)

    def _known(self, beginnings: Sequence[tuple[int, int]]) -> list[int]:
        """For each core, how many tokens of a prompt it was given before."""
        known, candidates = [0] * self._num_cores, -1
        for num_tokens, beginning in beginnings:
            candidates &= self._knowers.get(beginning, 0)
            if not candidates:
                break
            for core in range(self._num_cores):
                if candidates >> core & 1:
                    known[core] = num_tokens
        return known

    def _remember(self, beginnings: Sequence[tuple[int, int]], core: int) -> None:
        for _, beginning in beginnings:
            self._knowers[beginning] = self._knowers.pop(beginning, 0) | 1 << core
        while len(self._knowers) > MOST_BEGINNINGS:
            self._knowers.popitem(last=False)

    def _beginnings(self, token_ids: Sequence[int], cache_salt: str | None) -> Iterator[tuple[int, int]]:
        """Prefixes of a prompt: how many tokens each has, and its hash, which covers all of them."""
        if not self._block_size:
            return
        start, num_blocks, stride = 0, 0, 1
        value, end = hash(cache_salt), min(len(token_ids), MOST_TOKENS)
        while (stop := start + stride * self._block_size) <= end:
            value = hash((value, *token_ids[start:stop]))
            yield stop, value
            start, num_blocks = stop, num_blocks + stride
            if num_blocks >= EVERY_BLOCK * stride:
                stride *= 2
