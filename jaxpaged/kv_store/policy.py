"""Which page goes when room is needed, and which page is let in at all. Sizes are in bytes.

Nothing here locks, nor holds pages: a tier asks under its own lock, and keeps the bytes itself.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

from jaxpaged.errors import ConfigError, did_you_mean


class Policy[Key: Hashable](Protocol):
    """The resident pages in the order in which they would go."""

    def insert(self, key: Key, size: int) -> None:
        """A page has come. It was not resident."""
        ...

    def touch(self, key: Key) -> None:
        """A page was used. Unknown keys make no difference."""
        ...

    def remove(self, key: Key) -> None:
        """A page has gone for another reason than room, and leaves no trace. Unknown keys make no difference."""
        ...

    def evict(self) -> Key:
        """Choose the page that goes next, which is resident no more. KeyError when there is none."""
        ...


class LRU[Key: Hashable]:
    """Least recently used goes first."""

    def __init__(self, capacity: int):
        self.sizes: OrderedDict[Key, int] = OrderedDict()

    def insert(self, key: Key, size: int) -> None:
        self.sizes[key] = size

    def touch(self, key: Key) -> None:
        if key in self.sizes:
            self.sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        self.sizes.pop(key, None)

    def evict(self) -> Key:
        return self.sizes.popitem(last=False)[0]


class ARC[Key: Hashable]:
    """Adaptive replacement (Megiddo and Modha, FAST 2003) over bytes: a scan of pages used once evicts no others.

    Pages used once and pages used again are two queues; `target` is how many bytes the first is to have. It grows when
    a page comes back that was evicted from the first, and shrinks when one does that was evicted from the second.
    Of evicted pages only keys are remembered, for as many bytes as the store has at most, per queue.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.target = 0
        self.once: Queue[Key] = Queue()
        self.again: Queue[Key] = Queue()
        self.left_once: Queue[Key] = Queue()
        self.left_again: Queue[Key] = Queue()

    def insert(self, key: Key, size: int) -> None:
        if key in self.left_once.sizes:
            self.left_once.pop(key)
            self.target = min(self.target + self.step(size, self.left_again, self.left_once), self.capacity)
            self.again.push(key, size)
        elif key in self.left_again.sizes:
            self.left_again.pop(key)
            self.target = max(self.target - self.step(size, self.left_once, self.left_again), 0)
            self.again.push(key, size)
        else:
            self.once.push(key, size)

    def step(self, size: int, other: "Queue[Key]", found_in: "Queue[Key]") -> int:
        """By how many bytes the target moves: more where the other queue's evictions outweigh this one's."""
        return int(size * max(1.0, other.num_bytes / max(found_in.num_bytes, size, 1)))

    def touch(self, key: Key) -> None:
        for queue in (self.once, self.again):
            if key in queue.sizes:
                self.again.push(key, queue.pop(key))
                return

    def remove(self, key: Key) -> None:
        for queue in (self.once, self.again, self.left_once, self.left_again):
            if key in queue.sizes:
                queue.pop(key)

    def evict(self) -> Key:
        from_once = self.once.sizes and (self.once.num_bytes > self.target or not self.again.sizes)
        queue, left = (self.once, self.left_once) if from_once else (self.again, self.left_again)
        key, size = queue.pop_oldest()
        left.push(key, size)
        while left.num_bytes > self.capacity:
            left.pop_oldest()
        return key


class Queue[Key: Hashable]:
    """Keys with sizes, oldest first, and the sum of the sizes."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[Key, int] = OrderedDict()
        self.num_bytes = 0

    def push(self, key: Key, size: int) -> None:
        self.sizes[key] = size
        self.num_bytes += size

    def pop(self, key: Key) -> int:
        size = self.sizes.pop(key)
        self.num_bytes -= size
        return size

    def pop_oldest(self) -> tuple[Key, int]:
        key, size = self.sizes.popitem(last=False)
        self.num_bytes -= size
        return key, size


class SecondUse[Key: Hashable]:
    """Lets a page in the second time that it is offered: most prompts never come again.

    Remembers the last `limit` keys that were offered once.
    """

    def __init__(self, limit: int = 1 << 16):
        self.limit = limit
        self.offered: OrderedDict[Key, None] = OrderedDict()

    def admits(self, key: Key) -> bool:
        if key in self.offered:
            del self.offered[key]
            return True
        self.offered[key] = None
        if len(self.offered) > self.limit:
            self.offered.popitem(last=False)
        return False


POLICIES: dict[str, type] = {"lru": LRU, "arc": ARC}


def policy_named(name: str, capacity: int) -> Policy:
    if name not in POLICIES:
        near = did_you_mean(name, POLICIES)
        raise ConfigError(f"The eviction policy is {name!r}; it must be one of {', '.join(POLICIES)}.{near}")
    return POLICIES[name](capacity)
