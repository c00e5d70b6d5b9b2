"""What was used last of more than there is room for, counted in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable


class ByteLRU[Key: Hashable, Value]:
    """Values by their keys, up to `capacity` bytes, each as large as `size_of` says; the one that was used last goes
    last. Nothing is copied. Not for several threads at a time."""

    def __init__(self, capacity: int, size_of: Callable[[Value], int]):
        self.capacity = capacity
        self.num_bytes = self.queries = self.hits = 0
        self._size_of = size_of
        self._items: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def values(self) -> Iterable[Value]:
        return self._items.values()

    def get(self, key: Key) -> Value | None:
        """A use of the value, if it is there."""
        self.queries += 1
        value = self._items.get(key)
        if value is not None:
            self.hits += 1
            self._items.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, unless it alone is more than there is room for. One that is there stays as it is."""
        num_bytes = self._size_of(value)
        if key in self._items or num_bytes > self.capacity:
            return
        self._items[key] = value
        self.num_bytes += num_bytes
        self.shrink_to(self.capacity)

    def remove(self, key: Key) -> None:
        """Let go of a value, if it is there."""
        value = self._items.pop(key, None)
        if value is not None:
            self.num_bytes -= self._size_of(value)

    def shrink_to(self, num_bytes: int) -> None:
        """Let go of values until the others have no more bytes."""
        while self._items and self.num_bytes > num_bytes:
            _, value = self._items.popitem(last=False)
            self.num_bytes -= self._size_of(value)

    def clear(self) -> None:
        self.shrink_to(-1)
