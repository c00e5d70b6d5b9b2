"""Weights that another process offers, pulled shard by shard through `jax.experimental.transfer`.

A trainer makes a `WeightOffer` of arrays, which are copied to its host's memory. Who pulls hears first, over a socket,
what there is, and asks for bytes only if all of it fits. Then a transfer server, one for each that pulls, sends the
shards as the trainer's devices have them, from host to host, so no device has to hold weights twice.

What `jax.experimental.transfer` (jax 0.12) does not do is done here: it waits for ever for somebody who is silent, and
knows nothing of shapes and types. So arrays are looked at until they are ready, never awaited, and all of them are
bytes. One that is given up holds its memory until the peer answers or ends.
"""

import contextlib
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import msgspec
import numpy as np
from jax.experimental.transfer import start_transfer_server

from jaxpaged.config.offer_address import joined, offer_address, parsed
from jaxpaged.errors import ServerError, UsageError
from jaxpaged.params.framework_trees import flat
from jaxpaged.params.safetensors_reader import ALL_DTYPES, HeldTensor, TensorEntry
from jaxpaged.params.safetensors_writer import NAMES

HEAD = struct.Struct("!4sI")
MAGIC = b"JPW1"
MAX_MANIFEST_BYTES, MAX_PARTS = 1 << 26, 1 << 20
SILENT_SECONDS = 60.0
"""After so long without a shard a trainer is given up."""
SHARDS_IN_FLIGHT = 8
SHORTEST_PAUSE, LONGEST_PAUSE = 1e-4, 5e-3
"""Seconds between two looks at a shard."""


class Offered(msgspec.Struct, frozen=True):
    """A tensor. `parts`: into how many shards each axis is divided; their numbers follow each other, the last axis
    first, and those of the next tensor follow them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return math.prod(self.parts)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(size // count for size, count in zip(self.shape, self.parts))

    @property
    def part_bytes(self) -> int:
        return math.prod(self.part_shape) * ALL_DTYPES[self.dtype].itemsize

    def index(self, place: Sequence[int]) -> tuple[slice, ...]:
        """Where the shard at a place lies in the tensor."""
        return tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, self.part_shape))

    def check(self) -> None:
        """Raise ValueError for what is no tensor."""
        fits = len(self.parts) == len(self.shape) and self.dtype in ALL_DTYPES and min(self.shape, default=1) > 0
        if not fits or any(count < 1 or size % count for size, count in zip(self.shape, self.parts)):
            raise ValueError(f"{self.name} of type {self.dtype}, shape {self.shape} and parts {self.parts} cannot be")


class Manifest(msgspec.Struct, frozen=True):
    """What there is, and at which port of the same host it can be pulled."""

    port: int
    tensors: list[Offered]


# ---- the trainer ---------------------------------------------------------------------------------


class WeightOffer:
    """Weights that engines in other processes may pull, as often as they like, until `close()`.

    `weights`: arrays of numpy or JAX, by the checkpoint's names, or a tree as Tunix, MaxText or flax nnx keeps the
    model, which engines take by the same `mapping`. They are copied, so the trainer may train on. `host` and `port`:
    where to listen, by default for this host alone, at any free port. Whoever can connect gets the weights,
    unencrypted. Raises UsageError for arrays that cannot be offered, CheckpointError for what is no array, and OSError.
    """

    def __init__(self, weights: Any, host: str = "127.0.0.1", port: int = 0):
        shards = {name: shards_of(name, array) for name, array in flat(weights).items()}
        self._tensors = [tensor for tensor, _ in shards.values()]
        self._client = host_device().client
        put = lambda array: jax.device_put(array.reshape(-1).view(np.uint8), host_device())
        self._shards = [put(shard) for _, each in shards.values() for shard in each]
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._connections = set[socket.socket]()
        self._thread = threading.Thread(target=self._accept, name="weight offer", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What `update_weights` takes; with another name of the host where it is "0.0.0.0"."""
        return offer_address(*self._listener.getsockname()[:2])

    def close(self) -> None:
        """Stop to offer; who is pulling hears it."""
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._shards = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weight offer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Until the other side hangs up; what it has not pulled ends with its server."""
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            here = joined(connection.getsockname()[0], 0)
            server = start_transfer_server(self._client, here, [here])
            for number, shard in enumerate(self._shards):
                server.await_pull(number, [shard])
            port = int(server.address().rpartition(":")[2])
            manifest = msgspec.msgpack.encode(Manifest(port, self._tensors))
            connection.sendall(HEAD.pack(MAGIC, len(manifest)) + manifest)
            connection.recv(1)
        self._connections.discard(connection)


def shards_of(name: str, array: Any) -> tuple[Offered, list[np.ndarray]]:
    """Copies of an array's shards, in the order of their places. Raises UsageError."""
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
    elif array.is_deleted():
        raise UsageError(f"{name} was deleted: a program that it was donated to has its memory.")
    elif not array.is_fully_addressable:
        raise UsageError(f"{name} lies in several processes. Gather it in one, and offer it there.")
    if array.dtype not in NAMES or not array.size:
        raise UsageError(f"{name} has type {array.dtype} and shape {array.shape}; give float32, float16 or bfloat16.")
    if isinstance(array, np.ndarray):
        return Offered(name, NAMES[array.dtype], array.shape, (1,) * array.ndim), [np.array(array, order="C")]
    part = array.sharding.shard_shape(array.shape)
    parts = tuple(size // own for size, own in zip(array.shape, part))
    begins = lambda index: tuple(each.start or 0 for each in index)
    found = {begins(shard.index): shard.data for shard in array.addressable_shards}
    tensor = Offered(name, NAMES[array.dtype], array.shape, parts)
    return tensor, [np.array(found[begins(tensor.index(place))], order="C") for place in np.ndindex(*parts)]


# ---- the engine ----------------------------------------------------------------------------------


def pulled(address: str, choose: Callable[[Sequence[TensorEntry]], Sequence[TensorEntry]]) -> list[HeldTensor]:
    """What `choose` takes of the tensors that are offered at an address, of which it knows names, types and shapes.
    Raises what it raises, CheckpointError for an address that is none, and ServerError for a trainer who is silent,
    gone, or says what cannot be."""
    host, port = parsed(address)
    where = f"the trainer at {joined(host, port)}"
    try:
        with socket.create_connection((host, port), timeout=SILENT_SECONDS) as connection:
            manifest = read_manifest(connection)
            entries = {each.name: entry_of(each, where) for each in manifest.tensors}
            chosen = {entry.name for entry in choose(list(entries.values()))}
            own, peer = joined(connection.getsockname()[0], 0), joined(connection.getpeername()[0], manifest.port)
            server = start_transfer_server(host_device().client, own, [own])
            connection.setblocking(False)
            bytes_of = pieces(server.connect(peer), manifest.tensors, chosen, connection)
            return [held(entries[each.name], each, bytes_of) for each in manifest.tensors if each.name in chosen]
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        said = f"it said nothing for {SILENT_SECONDS:g} s" if isinstance(error, TimeoutError) else str(error)
        raise ServerError(f"no weights came from {where}: {said}. The weights that the engine has stay.") from error


def read_manifest(connection: socket.socket) -> Manifest:
    """What there is, heard within `SILENT_SECONDS`. Raises OSError, ValueError."""
    until = time.monotonic() + SILENT_SECONDS
    magic, size = HEAD.unpack(heard(connection, HEAD.size, until))
    if magic != MAGIC or size > MAX_MANIFEST_BYTES:
        raise ValueError(f"it begins with {magic!r}, so it offers no weights")
    manifest = msgspec.msgpack.decode(heard(connection, size, until), type=Manifest)
    for tensor in manifest.tensors:
        tensor.check()
    if sum(tensor.num_parts for tensor in manifest.tensors) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} shards")
    return manifest


def heard(connection: socket.socket, size: int, until: float) -> bytes:
    """So many bytes, before a time. Raises TimeoutError, ConnectionError."""
    received = bytearray()
    while len(received) < size:
        connection.settimeout(max(until - time.monotonic(), SHORTEST_PAUSE))
        received += some(connection.recv(min(size - len(received), 1 << 20)))
    return bytes(received)


def some(received: bytes) -> bytes:
    if not received:
        raise ConnectionError("it closed the connection")
    return received


def entry_of(tensor: Offered, where: str) -> TensorEntry:
    return TensorEntry(Path(where), tensor.name, tensor.dtype, tensor.shape, 0, tensor.num_parts * tensor.part_bytes)


def held(entry: TensorEntry, tensor: Offered, bytes_of: Iterator[np.ndarray]) -> HeldTensor:
    """A tensor, put together."""
    shard = lambda: next(bytes_of).view(ALL_DTYPES[tensor.dtype]).reshape(tensor.part_shape)
    if tensor.num_parts == 1:
        array = shard()
    else:
        array = np.empty(tensor.shape, ALL_DTYPES[tensor.dtype])
        for place in np.ndindex(*tensor.parts):
            array[tensor.index(place)] = shard()
    return HeldTensor(entry.path, entry.name, entry.dtype, entry.shape, 0, entry.num_bytes, array)


def pieces(peer: Any, tensors: Sequence[Offered], chosen: set[str], connection: socket.socket) -> Iterator[np.ndarray]:
    """The bytes of all shards of those that are chosen, of which some are on their way ahead of time, while the trainer
    is there."""
    sharding, number, pending = jax.sharding.SingleDeviceSharding(host_device()), 0, deque[jax.Array]()
    for tensor in tensors:
        if tensor.name in chosen:
            shape = jax.ShapeDtypeStruct((tensor.part_bytes,), np.uint8, sharding=sharding)
            for each in range(number, number + tensor.num_parts):
                if len(pending) == SHARDS_IN_FLIGHT:
                    yield arrived(pending.popleft(), connection)
                pending.extend(peer.pull(each, [shape]))
        number += tensor.num_parts
    while pending:
        yield arrived(pending.popleft(), connection)


def arrived(shard: jax.Array, connection: socket.socket) -> np.ndarray:
    """A shard that was asked for. Raises TimeoutError for one that does not come, and ConnectionError once the trainer
    has hung up, of which shards that are asked for later hear nothing."""
    until, pause = time.monotonic() + SILENT_SECONDS, SHORTEST_PAUSE
    while not shard.is_ready():
        with contextlib.suppress(BlockingIOError):
            some(connection.recv(1))
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return np.asarray(shard)


# ---- both ----------------------------------------------------------------------------------------


def host_device() -> jax.Device:
    """The host's memory, whatever computes. Raises UsageError where JAX_PLATFORMS leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UsageError(f"weights are sent from the host's memory, which JAX has not here: {error}") from None
