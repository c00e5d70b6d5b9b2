"""The memory that LMCache's server shares, and places in it that the server names.

It is read and written through its file, not through a mapping: a server that cuts the file short then costs a chunk,
while touching memory that is gone would end the process. A place is believed if it is one chunk's part, and inside.
"""

import os
import stat
import weakref
from collections.abc import Sequence

import msgspec

from jaxpaged.errors import PageError
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.lmcache.multiprocess.calls import UnfitServerError
from jaxpaged.kv_store.lmcache.multiprocess.settings import HOW_TO_START

FOLDER = "/dev/shm"
PREFIX = "lmcache_l1_pool_"
"""What all names of LMCache's memory begin with: no server has other memory read or written."""
MAX_NAME_BYTES = 255


class Slot(msgspec.Struct, frozen=True):
    """A place for a part of a chunk, as the server says it: bytes, shape, and torch's name of the type."""

    offset: int
    length: int
    shape: Sequence[int]
    dtype: str


class Context(msgspec.Struct, frozen=True):
    """What the server says about a transfer."""

    slots: tuple[Slot, ...]
    chunk_indices: tuple[int, ...] = (0,)


CONTEXTS = msgspec.msgpack.Decoder(Context)  # made before threads share it


def slot_of(encoded: bytes, layout: ChunkLayout, capacity: int) -> Slot | None:
    """The place of one part of one chunk in `capacity` bytes; None where the server names none. Raises PageError."""
    try:
        context = CONTEXTS.decode(encoded)
    except msgspec.MsgspecError as error:
        raise PageError(f"LMCache's server names a place in a way that is not understood: {error!s:.200}") from None
    if not context.slots:
        return None
    (slot, *more) = context.slots
    wanted = (list(layout.part_shape), layout.chunk_dtype.name, layout.part_bytes)
    if more or context.chunk_indices != (0,) or (list(slot.shape), slot.dtype, slot.length) != wanted:
        raise PageError(
            f"LMCache's server has {len(context.slots)} places, the first with shape {list(slot.shape)!s:.100}, type "
            f"{slot.dtype!r:.40} and {slot.length} bytes; this engine needs one with {wanted[0]}, {wanted[1]} and "
            f"{wanted[2]}."
        )
    if not 0 <= slot.offset <= capacity - slot.length:
        raise PageError(f"LMCache's server names a place at {slot.offset}, and its memory has {capacity} bytes.")
    return slot


class Pool:
    """The memory of one server. Raises UnfitServerError for what is none, OSError for what cannot be opened.

    Its file is closed when nobody holds the pool any more, so a thread never writes into another file.
    """

    def __init__(self, name: str, capacity: int, folder: str = FOLDER):
        if not name:
            raise UnfitServerError(f"LMCache's server shares no memory, so it would send pickles. {HOW_TO_START}")
        bare = name.removeprefix("/")
        if not bare.startswith(PREFIX) or "/" in bare or "\0" in bare or len(bare.encode()) > MAX_NAME_BYTES:
            raise UnfitServerError(f"LMCache's server names the memory {name!r:.100}; LMCache's begins with {PREFIX}.")
        self._path = os.path.join(folder, bare)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise UnfitServerError(
                f"LMCache's server shares the memory {bare!r}, and there is no {self._path} here. It must run on the "
                "same machine, and see the same /dev/shm."
            ) from None
        weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file)
        self.capacity = capacity
        self._identity = found.st_dev, found.st_ino
        if not stat.S_ISREG(found.st_mode) or not 0 < capacity <= found.st_size:
            raise UnfitServerError(
                f"LMCache's server says that its memory {bare!r} has {capacity} bytes; it has {found.st_size}."
            )

    def is_at(self, name: str, capacity: int) -> bool:
        """Whether this is what the server says now: one that was started anew has other memory of the same name."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        same = (found.st_dev, found.st_ino) == self._identity and capacity == self.capacity
        return same and os.path.basename(self._path) == name.removeprefix("/")

    def read(self, slot: Slot, target: memoryview) -> None:
        """Fill `target`, bytes as long as the slot. Raises ConnectionError where the memory is gone."""
        done = 0
        while done < len(target):
            count = os.preadv(self._file, [target[done:]], slot.offset + done)
            if count == 0:
                raise ConnectionError("LMCache's server took its memory away")
            done += count

    def write(self, slot: Slot, content: memoryview) -> None:
        """Raises ConnectionError where the memory is gone."""
        if os.fstat(self._file).st_size < self.capacity:
            raise ConnectionError("LMCache's server took its memory away")
        done = 0
        while done < len(content):
            done += os.pwrite(self._file, content[done:], slot.offset + done)
