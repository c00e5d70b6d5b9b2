"""Tells routers what enters and leaves the prefix cache: over ZeroMQ, as vLLM does.

    PUB      [topic, sequence number, batch]   for every step that changed the cache
    ROUTER   a question is [sequence number]; answers are [sequence number, batch] for every batch from there on that
             is still remembered, then [-1, nothing]

Sequence numbers are 8 bytes, the highest first; a batch is msgpack: [time, events, rank], and each event a map with a
"type", see `core/kv_cache/events.py`. A follower who misses a number asks for it; if it is not there any more, it
forgets all it knows of this engine. The first batch of an engine says that its cache is empty.

Steps never wait: what the sockets' thread has not taken is kept in a queue, and dropped, which leaves a gap in the
numbers, when that is full. This module knows no blocks.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from jaxpaged.core.kv_cache.events import AllBlocksCleared, KVCacheEvent
from jaxpaged.errors import ConfigError, UsageError, did_you_mean

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
POLL_MS = 50
PUBLISHERS = ("zmq", "null")
MAX_QUESTION_BYTES = 4096
"""Of a question, or of a topic that a follower asks for. A follower that sends more is disconnected."""
QUESTIONS_AT_ONCE = 16
"""Between two batches."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The option `kv_events_config`; names and defaults are vLLM's, but for the address, which is this machine's only.

    Sizes are batches: `buffer_steps` that can be asked for again, `hwm` that wait for a slow follower, `max_queue_size`
    that wait for the sockets' thread. `data_parallel_rank` says which of several engine cores, or attention ranks of
    one, publishes: batches hold it, and both addresses follow from it. The engine sets it where it has several.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def endpoint_of_rank(self, endpoint: str) -> str:
        """Where the core of this rank listens: as many ports higher, as vLLM does; a name gets an ending."""
        address, colon, port = endpoint.rpartition(":")
        if not self.data_parallel_rank or (endpoint.startswith("tcp:") and port in ("*", "0")):
            return endpoint
        if endpoint.startswith("tcp:") and port.isdecimal():
            return f"{address}{colon}{int(port) + self.data_parallel_rank}"
        return f"{endpoint}_dp{self.data_parallel_rank}"

    def of_rank(self, rank: int) -> "KVEventsConfig":
        return msgspec.structs.replace(self, data_parallel_rank=rank)

    @classmethod
    def from_option(cls, values: dict[str, Any]) -> "KVEventsConfig | None":
        """None when nothing is to be published. Raises ConfigError for names and values that cannot be."""
        for name in values:
            if name not in cls.__struct_fields__:
                near = did_you_mean(str(name), cls.__struct_fields__)
                raise ConfigError(f"kv_events_config has the unknown key {name!r}.{near or ' Leave it out.'}")
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_events_config is wrong: {error}.") from None
        if config.publisher not in PUBLISHERS:
            raise ConfigError(
                f"kv_events_config has publisher {config.publisher!r}; it must be one of {', '.join(PUBLISHERS)}."
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(config, name) < 1:
                raise ConfigError(f"kv_events_config has {name} {getattr(config, name)}; it must be at least 1.")
        return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


class EventBatch(msgspec.Struct, array_like=True):
    """What one step changed. `ts` is in seconds since the epoch."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int


class KVEventPublisher:
    """Raises UsageError when an address cannot be had. `close` it."""

    def __init__(self, config: KVEventsConfig):
        self._config = config
        self._waiting: queue.Queue[tuple[int, EventBatch]] = queue.Queue(config.max_queue_size)
        self._remembered: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self.num_dropped = 0
        self._context = zmq.Context()
        self._followers = self._bound(zmq.PUB, config.endpoint_of_rank(config.endpoint))
        replay = config.replay_endpoint and config.endpoint_of_rank(config.replay_endpoint)
        self._replays = self._bound(zmq.ROUTER, replay) if replay else None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch, if there are events. It returns at once."""
        if not events:
            return
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._waiting.put_nowait((number, EventBatch(time.time(), list(events), self._config.data_parallel_rank)))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("KV events are dropped: %d batches wait to be sent", self._config.max_queue_size)

    @property
    def endpoints(self) -> list[str]:
        """The addresses that are listened on, with the ports that were given to those of port 0 or `*`."""
        sockets = (each for each in (self._followers, self._replays) if each is not None)
        return [each.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for each in sockets]

    def close(self) -> None:
        """Send what waits, for a second at most, and stop."""
        self._closing.set()
        self._thread.join(2.0)
        self._context.destroy(linger=0)

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, self._config.hwm)
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(f"cannot publish KV events at {endpoint}: {error}. Choose another endpoint.") from None
        return socket

    def _run(self) -> None:
        encoder, topic = msgspec.msgpack.Encoder(), self._config.topic.encode()
        while not (self._closing.is_set() and self._waiting.empty()):
            self._answer_replays()
            try:
                number, batch = self._waiting.get(timeout=POLL_MS / 1e3)
            except queue.Empty:
                continue
            frames = (number.to_bytes(8, "big"), encoder.encode(batch))
            self._remembered.append(frames)
            self._followers.send_multipart([topic, *frames])

    def _answer_replays(self) -> None:
        """Answer questions that have come. Wrong ones are passed over."""
        for _ in range(QUESTIONS_AT_ONCE):
            if self._replays is None or not self._replays.poll(0):
                return
            client, *rest = self._replays.recv_multipart()
            if len(rest) not in (1, 2) or len(rest[-1]) != 8:
                continue
            first = int.from_bytes(rest[-1], "big")
            envelope = [client, *rest[:-1]]  # with the empty frame that a REQ socket puts there
            try:
                for number, batch in self._remembered:
                    if int.from_bytes(number, "big") >= first:
                        self._replays.send_multipart([*envelope, number, batch], zmq.NOBLOCK)
                self._replays.send_multipart([*envelope, END, b""], zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("a follower of KV events does not read what it asked for")
