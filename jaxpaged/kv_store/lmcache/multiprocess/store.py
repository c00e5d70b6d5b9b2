"""LMCache's multi-process server as a store of chunks.

A look-up gives the server a text's tokens, which it hashes, and says how many chunks from the beginning it has; these
are locked (`leases.py`) until they are read. To read or write a part, the server is asked for its place in shared
memory, and told when that is done. An engine is known to the server by a number, with the layout of its chunks; it is
told anew from time to time, since servers forget, or are started anew.

Two threads never have a server name a place in memory that is no longer its own: a number goes with the memory that the
server shared when it was told, and whether that is still so is asked after each answer (`_in_use`).
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import Buffer, bytes_of
from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.lmcache.multiprocess.calls import Calls, UnfitServerError
from jaxpaged.kv_store.lmcache.multiprocess.leases import Lease, Leases
from jaxpaged.kv_store.lmcache.multiprocess.pool import Pool, Slot, slot_of
from jaxpaged.kv_store.lmcache.multiprocess.settings import address_of
from jaxpaged.kv_store.lmcache.store import ChunkStore
from jaxpaged.kv_store.remote_store import NotKept

logger = logging.getLogger(__name__)

HOLD_S = 30.0
"""How long chunks that were found are locked; a load that takes longer is over anyway."""
RENEW_S = 10.0
"""How old the server's word may be that it knows this engine."""
COPY_S = 5.0
"""How long a place is used after the server named it. What was held up for longer is not believed, nor written."""
TIDY_S = 1.0
"""How long the server has to answer that it was told of an end."""
MUTE_S = 5.0
"""How long it is not told of any end after it did not answer."""
POLL_S = 0.001
"""How soon a look-up is asked after first."""


class WriteRefusedError(ConnectionError):
    """The server answers, and cannot be written to as it does."""


class Registration:
    """This engine as the server knows it, by a number that is new for each memory."""

    def __init__(self, instance_id: int, pool: Pool):
        self.instance_id, self.pool = instance_id, pool
        self.renewed = time.monotonic()
        self.has_doubts = False
        """Whether a place may be reserved that was not filled. LMCache takes it for filled when the engine leaves."""


class MPStore(ChunkStore):
    """Chunks in the server at `url` (`grpc://HOST:PORT`), on this machine. Raises ConfigError for other ones."""

    refusals = (WriteRefusedError,)

    def __init__(
        self,
        url: str,
        layout: ChunkLayout,
        model: str,
        *,
        timeout_s: float = 2.0,
        retry_after_s: float = 30.0,
        hold_s: float = HOLD_S,
        renew_s: float = RENEW_S,
    ):
        self.calls = Calls(address_of(url), timeout_s)
        self.found_for_s, self._renew_s = hold_s, renew_s
        self._registering = threading.Lock()
        self._registration: Registration | None = None
        self._failed_at = self._mute_until = 0.0  # monotonic
        self.leases = Leases(self._end, hold_s)
        super().__init__(url, layout, model, timeout_s=timeout_s, retry_after_s=retry_after_s)

    def connect(self) -> None:
        """See whether the server can be used. Raises UnfitServerError, or ConnectionError where it is not there."""
        self._in_use()

    # ---- the store ----------------------------------------------------------------------------------------

    def exist(self, chunks: Sequence[Chunk]) -> list[bool]:
        self._in_use()
        before = {each.before for each in chunks}
        found: set[Chunk] = set()
        for lease in self._look_up([chunk for chunk in dict.fromkeys(chunks) if chunk not in before]):
            found.update(lease.left)
            if lease.left:
                self.leases.add(lease)
            else:
                self._end(lease)
        return [chunk in found for chunk in chunks]

    def fetch(self, chunk: Chunk) -> np.ndarray | None:
        registration = self._in_use()
        lease = self.leases.take(chunk) or self._take_alone(chunk)
        if lease is None:
            return None
        parts: list[np.ndarray] = []
        try:
            for worker in range(self.layout.num_parts):
                part = self._read(registration, lease, chunk, worker)
                if part is None:
                    return None
                parts.append(part)
            return self.whole(parts)
        finally:
            for worker in range(len(parts) + 1, self.layout.num_parts):  # the one that failed is settled
                self._tidy("FreeLookupLocks", key=self._key(lease, chunk.number, worker=worker), tp_size=1)
            self.leases.done(lease)

    def store(self, chunk: Chunk, buffers: Sequence[Buffer]) -> None:
        registration = self._in_use()
        session = Lease(new_name(), chunk.beginning(), ())
        try:
            written = [
                self._write(registration, session, chunk, worker, part)
                for worker, part in enumerate(self.parts_of(buffers))
            ]
        except PageError as error:
            raise WriteRefusedError(str(error)) from None
        finally:
            self._end(session)
        if not all(written) and self.exist([chunk]) == [False]:
            raise NotKept("LMCache's server has no room for a chunk now, or another engine writes it")

    def disconnect(self) -> None:
        self.leases.close()
        registration, self._registration = self._registration, None
        if registration is not None and not registration.has_doubts:
            self._tidy("UnregisterKvCacheEngineDrivenContext", instance_id=registration.instance_id)
        self.calls.close()

    # ---- who this is ------------------------------------------------------------------------------------------

    def _in_use(self) -> Registration:
        """How the server knows this engine. It is asked now unless it said so a short while ago."""
        began = time.monotonic()
        with self._registering:
            if self._failed_at > began:
                raise ConnectionError("LMCache's server did not answer somebody else")
            try:
                return self._told()
            except OSError:
                self._failed_at = time.monotonic()
                raise

    def _told(self) -> Registration:
        known = self._registration
        if known is not None and time.monotonic() - known.renewed < self._renew_s:
            return known
        self._registration = None  # a server that does not answer may know the number all the same
        if known is not None:
            said = self._register(known.instance_id)
            if known.pool.is_at(said.shm_name, said.pool_size):
                known.renewed, self._registration = time.monotonic(), known
                return known
        size = self.calls.ask("GetChunkSize").chunk_size
        if size != self.layout.chunk_tokens:
            raise UnfitServerError(
                f"LMCache's server has chunks of {size} tokens, and this engine of {self.layout.chunk_tokens}. Start "
                "one of them anew: the engine takes the server's size if that is there first, and the setting "
                "chunk_size otherwise."
            )
        instance_id = secrets.randbits(62)
        said = self._register(instance_id)
        self._registration = Registration(instance_id, Pool(said.shm_name, said.pool_size))
        return self._registration

    def _register(self, instance_id: int) -> Any:
        layers, _, hidden = self.layout.part_shape[1:]
        said = self.calls.ask(
            "RegisterKvCacheEngineDrivenContext",
            instance_id=instance_id,
            model_name=self.model,
            world_size=self.layout.num_parts,
            block_size=self.layout.page_tokens,
            num_layers=layers,
            hidden_dim_size=hidden,
            dtype_str=self.layout.chunk_dtype.name,
            use_mla=False,
        )
        self._mute_until = 0.0  # it answers again, and what it locks from now on it can be told of
        return said

    def _check_in_use(self, registration: Registration) -> None:
        """After a server named a place: raise unless it is in the memory that is held. A server that was started anew
        knows the number only by `_in_use`, which has the lock while it tells."""
        with self._registering:
            if self._registration is not registration:
                raise ConnectionError("LMCache's server was started anew")

    # ---- looking --------------------------------------------------------------------------------------------

    def _look_up(self, ends: Sequence[Chunk]) -> list[Lease]:
        """What there is, and locked now, of the texts up to the ends of these chunks."""
        texts = [(chunk, Lease(new_name(), chunk.beginning(), ())) for chunk in ends]
        begun: list[Lease] = []
        try:
            for chunk, lease in texts:
                begun.append(lease)
                key = self._key(lease, 0, chunk.number + 1)
                self.calls.ask("Lookup", key=key, tp_size=self.layout.num_parts)
            deadline = time.monotonic() + self.timeout_s
            for chunk, lease in texts:
                lease.left = dict.fromkeys(chain_of(chunk)[: self._count(chunk, lease, deadline)])
        except BaseException:
            for lease in begun:
                lease.left.clear()
                self._end(lease, len(lease.token_ids) // self.layout.chunk_tokens)
            raise
        return [lease for _, lease in texts]

    def _count(self, chunk: Chunk, lease: Lease, deadline: float) -> int:
        """Chunks that a look-up found. It is asked again and again: waiting would take one of the server's threads."""
        pause = POLL_S
        while True:
            said = self.calls.ask("QueryPrefetchStatus", request_id=lease.request_id)
            if said.HasField("chunk_count"):
                if not 0 <= said.chunk_count <= chunk.number + 1:
                    raise ConnectionError(
                        f"LMCache's server says that it has {said.chunk_count} of {chunk.number + 1} chunks"
                    )
                return said.chunk_count
            if time.monotonic() + pause > deadline:
                raise TimeoutError("LMCache's server took too long to look for chunks")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _take_alone(self, chunk: Chunk) -> Lease | None:
        """Look for one chunk, and lock no other one."""
        (lease,) = self._look_up([chunk])
        if chunk in lease.left:
            del lease.left[chunk]
            self._free(lease)
            lease.left.clear()
            lease.num_readers = 1
            return lease
        self._end(lease)
        return None

    # ---- parts of chunks ------------------------------------------------------------------------------------

    def _read(self, registration: Registration, lease: Lease, chunk: Chunk, worker: int) -> np.ndarray | None:
        target = {"key": self._key(lease, chunk.number, worker=worker), "instance_id": registration.instance_id}
        try:
            said = self.calls.ask("PrepareRetrieve", **target)
            if not said.success:
                return None
            began = time.monotonic()
            if said.data:
                raise PageError("LMCache's server sends a pickle. It is not read.")
            slot = slot_of(said.encoded_context, self.layout, registration.pool.capacity)
            if slot is None:
                raise PageError("LMCache's server has a chunk, and names no place for it.")
            self._check_in_use(registration)
            part = self.layout.empty_part()
            registration.pool.read(slot, bytes_of(part.reshape(-1).view(np.uint8)))
            check_soon(began)
            return part
        finally:
            self._tidy("CommitRetrieve", **target)

    def _write(self, registration: Registration, session: Lease, chunk: Chunk, worker: int, part: np.ndarray) -> bool:
        """Whether the server had a place. A place that was not filled is left: LMCache would show what is in it."""
        target = {"key": self._key(session, chunk.number, worker=worker), "instance_id": registration.instance_id}
        try:
            said = self.calls.ask("PrepareStore", **target)
            began = time.monotonic()
            slot = slot_of(said.encoded_context, self.layout, registration.pool.capacity)
            if slot is None:
                return False
            self._check_in_use(registration)
            self._fill(registration.pool, slot, part, began)
            if not self.calls.ask("CommitStore", **target, data=b"").success:
                raise WriteRefusedError("LMCache's server does not keep what it had a place for")
            return True
        except BaseException:
            registration.has_doubts = True
            raise

    def _fill(self, pool: Pool, slot: Slot, part: np.ndarray, began: float) -> None:
        check_soon(began)
        pool.write(slot, bytes_of(part))
        check_soon(began)

    def _key(self, lease: Lease, start: int, end: int | None = None, *, worker: int | None = None) -> Any:
        """Of chunks from number `start` up to without `end`, one unless it is given; `worker` None: all parts."""
        size = self.layout.chunk_tokens
        return self.calls.messages.IpcCacheServerKey(
            model_name=self.model,
            world_size=self.layout.num_parts,
            worker_id=worker,
            token_ids=lease.token_ids.tolist(),
            start=start * size,
            end=(start + 1 if end is None else end) * size,
            request_id=lease.request_id,
            num_kv_readers=1,
        )

    # ---- ends -----------------------------------------------------------------------------------------------

    def _end(self, lease: Lease, num_sought: int = 0) -> None:
        """Unlock what is left of a look-up, or any of `num_sought` chunks, and have it forgotten."""
        if num_sought:
            self._tidy("FreeLookupLocks", key=self._key(lease, 0, num_sought), tp_size=self.layout.num_parts)
        self._free(lease)
        self._tidy("EndSession", request_id=lease.request_id)

    def _free(self, lease: Lease) -> None:
        for start, end in lease.runs():
            self._tidy("FreeLookupLocks", key=self._key(lease, start, end), tp_size=self.layout.num_parts)

    def _tidy(self, name: str, **fields: Any) -> None:
        """Tell the server of an end. Where it is not told, its locks end by themselves, after minutes."""
        if time.monotonic() < self._mute_until:
            return
        try:
            self.calls.ask(name, min(TIDY_S, self.timeout_s), **fields)
        except OSError:  # whatever is asked of it next says so in the log
            self._mute_until = time.monotonic() + MUTE_S
            with self._changed:
                self.counters.errors += 1


def new_name() -> str:
    return f"jaxpaged-{secrets.token_hex(12)}"


def chain_of(chunk: Chunk) -> list[Chunk]:
    """A chunk and all before it, the first one first."""
    chain = [chunk]
    while (before := chain[-1].before) is not None:
        chain.append(before)
    return chain[::-1]


def check_soon(began: float) -> None:
    """Raise TimeoutError where a place was named too long ago."""
    if (seconds := time.monotonic() - began) > COPY_S:
        raise TimeoutError(f"a chunk was copied for {seconds:.0f} s, after which its place may be another's")
