"""The front end's side of the socket to an engine core in another process, inside an asyncio event loop.

What arrives is handed to its handler at once, in the loop; steps that came while the loop was busy are handed over
together, since to make one of them costs less than to deal with each. Where to deal with them takes long, what follows
waits as long (see `rest`). Sending never waits; requests that are made in one round of the loop go out together behind
it. This module knows neither text nor prompts, nor what is to be done when the core goes away.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.rate_limit import RateLimit
from jaxpaged.errors import EngineDeadError, EngineError, error_named
from jaxpaged.messages import EngineCoreOutputs, EngineCoreRequest

HELLO_INTERVAL, LONGEST_HELLO_INTERVAL = 0.1, 1.0
"""Seconds between attempts to reach a core that is not there yet: the first, doubled every time, and the last."""
MESSAGES_AT_ONCE = 16
"""So many messages are handled before the event loop's other tasks get their turn."""
MOST_GATHERED, MOST_GATHERED_BYTES = 32, 2**20
"""Requests that one message holds, unless the first alone is longer."""

TYPES = {
    wire.READY: wire.CoreFacts,
    wire.STEP: EngineCoreOutputs,
    wire.STATS: wire.CoreStats,
    wire.REFUSED: wire.Refusal,
    wire.ANSWER: wire.Answer,
    wire.WANTED: wire.Wanted,
}


Handlers = Mapping[bytes, Callable[[Any], None]]
"""Who is told what a core says, by the kind of the message, with its value: of kind STEP a list of them."""


class ZmqClient:
    """Talks to whatever core answers on `address`. All methods are for the event loop's thread, after `open`.

    `watch_connection`: tell when the connection breaks, for those whom nobody else tells. `clock`: seconds.
    """

    def __init__(self, address: str, *, watch_connection: bool, clock: Callable[[], float] = time.perf_counter):
        self.address = address
        self._watch_connection = watch_connection
        self._context = zmq.Context()
        self._loop: asyncio.AbstractEventLoop  # from `open` on
        self._rate_limit = RateLimit(clock)
        self._handlers: Handlers = {}
        self._on_disconnect: Callable[[], None] = lambda: None
        self._socket: zmq.Socket | None = None
        self._monitor: zmq.Socket | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._encoder = FrameEncoder()
        self._gathered: list[msgspec.Raw] = []  # requests that are not sent yet, encoded
        self._num_gathered_bytes = 0
        self._decoders = {kind: FrameDecoder(type) for kind, type in TYPES.items()}
        self._call_ids = itertools.count()
        self._calls: dict[int, tuple[Any, asyncio.Future[Any]]] = {}  # by id: the type of the result, and who waits

    def open(self, loop: asyncio.AbstractEventLoop, handlers: Handlers, on_disconnect: Callable[[], None]) -> None:
        """Connect, now or as soon as there is a core: a message of kind READY says so."""
        self._disconnect()
        self._loop, self._handlers, self._on_disconnect = loop, handlers, on_disconnect
        self._connect()

    def reconnect(self) -> None:
        """Forget what was said so far, and look for a new core. Calls that wait fail with EngineError."""
        self._disconnect()
        self._connect()

    def close(self) -> None:
        self._disconnect()
        self._context.destroy(linger=0)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """They go out before whatever is said next. To send a message takes as long as to make five requests."""
        for request in requests:
            (encoded,) = self._encoder.encode(request)  # what cannot be encoded fails alone; it holds no arrays
            if not self._gathered:
                self._loop.call_soon(self._send_gathered)
            elif len(self._gathered) == MOST_GATHERED or self._num_gathered_bytes + len(encoded) > MOST_GATHERED_BYTES:
                self._send_gathered()
            self._gathered.append(msgspec.Raw(encoded))
            self._num_gathered_bytes += len(encoded)

    def add_item(self, item: wire.Item) -> None:
        """Pixels go out at once: before the request that they belong to, if that is made later."""
        self._send(wire.ITEM, item)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._send(wire.ABORT, request_ids)

    def tell(self, call: CoreCall[Any]) -> int:
        """Call it at once, and do not wait for its end. Returns its number."""
        call_id = next(self._call_ids)
        self._send(wire.CALL, wire.Call(call_id, call.name(), msgspec.structs.asdict(call)))
        return call_id

    async def call[R](self, call: CoreCall[R]) -> R:
        """The core's result. Raises what the core raised, or EngineError when it went away."""
        future: asyncio.Future[R] = self._loop.create_future()
        call_id = self.tell(call)
        self._calls[call_id] = (call.result_type(), future)
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    # ---- the socket

    def _connect(self) -> None:
        self._socket = dealer(self._context, self.address)
        if self._watch_connection:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(descriptor(self._monitor), self._look_at_monitor)
            self._loop.call_soon(self._look_at_monitor)  # the descriptor says nothing before the first look
        self._loop.add_reader(descriptor(self._socket), self._receive)
        self._say_hello(HELLO_INTERVAL)

    def _disconnect(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None
        if self._monitor is not None and self._socket is not None:
            self._forget_reader(self._monitor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._rate_limit.cancel()
        if self._socket is not None:
            self._forget_reader(self._socket)
            self._socket.close(linger=0)
            self._socket = None
        self._gathered, self._num_gathered_bytes = [], 0
        for _, future in self._calls.values():
            if not future.done() and not self._loop.is_closed():
                future.set_exception(EngineError("the engine core went away before it answered. Ask again."))
        self._calls.clear()

    def _forget_reader(self, socket: zmq.Socket) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor(socket))

    def _say_hello(self, interval: float) -> None:
        """Repeated, since what is said to a core that is about to end is lost."""
        next_interval = min(2 * interval, LONGEST_HELLO_INTERVAL)
        self._hello_timer = self._loop.call_later(interval, self._say_hello, next_interval)
        self._send(wire.HELLO, None)

    def _send_gathered(self) -> None:
        if self._gathered:
            requests, self._gathered, self._num_gathered_bytes = self._gathered, [], 0
            self._send(wire.ADD, requests)

    def _send(self, kind: bytes, value: Any) -> None:
        assert self._socket is not None, "nothing is sent before `open` and after `close`"
        self._send_gathered()
        self._socket.send_multipart([kind, *self._encoder.encode(value)], zmq.NOBLOCK)
        # The descriptor is readable when something changes, not while something is there; sending uses up changes.
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._socket is None:
            return
        if self._rate_limit.lasts(self._receive):
            self._socket.get(zmq.EVENTS)  # or the descriptor would wake the loop again and again for the same
        else:
            self._take_all()

    def _take_all(self) -> None:
        """Hand over what is there, up to `MESSAGES_AT_ONCE`."""
        came = list(itertools.islice(self._messages(), MESSAGES_AT_ONCE))
        if len(came) == MESSAGES_AT_ONCE:  # a backlog must not grow
            self._loop.call_soon(self._take_all)
        elif any(kind == wire.STEP for kind, *_ in came):
            self._rate_limit.begin_work()
        socket, steps = self._socket, []
        for kind, *frames in [*came, [b""]]:
            if kind == wire.STEP:
                steps.append(self._decoders[kind].decode(frames))
                continue
            if steps:
                self._handlers[wire.STEP](steps)
                steps = []
            if kind:
                self._take(kind, frames)
            if self._socket is not socket:  # closed by what the message led to
                return

    def _messages(self) -> Iterator[list[bytes]]:
        """Those that are there. To be told that there is none, by an error, takes as long as to receive one."""
        while self._socket is not None and self._socket.poll(0):
            yield self._socket.recv_multipart(zmq.NOBLOCK)

    def _take(self, kind: bytes, frames: Sequence[bytes]) -> None:
        if kind == wire.ANSWER:
            self._take_answer(frames)
            return
        value = self._decoders[kind].decode(frames)
        if kind == wire.READY:
            if self._hello_timer is None:  # the answer to another greeting
                return
            self._hello_timer.cancel()
            self._hello_timer = None
        self._handlers[kind](value)

    def _take_answer(self, frames: Sequence[bytes]) -> None:
        answer: wire.Answer = self._decoders[wire.ANSWER].decode(frames[:1])
        result_type, future = self._calls.get(answer.call_id, (None, None))
        if future is None or future.done():  # nobody waits any more
            return
        if answer.error is not None:
            future.set_exception(error_named(*answer.error))
        else:
            future.set_result(FrameDecoder(result_type).decode(frames[1:]))

    def _look_at_monitor(self) -> None:
        """All that it reports is that the connection broke."""
        if self._monitor is not None and self._monitor.poll(0):
            self._on_disconnect()


def descriptor(socket: zmq.Socket) -> int:
    """The file descriptor that tells of something new."""
    number = socket.get(zmq.FD)
    assert isinstance(number, int), number
    return number


def dealer(context: zmq.Context, address: str) -> zmq.Socket:
    """A socket connected to the core at `address`, or to one that will be there."""
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.RECONNECT_IVL_MAX, 200)
    socket.connect(address)
    return socket


def ask_facts(address: str, timeout: float) -> wire.CoreFacts:
    """What a front end must know of the core at `address`. Raises EngineDeadError when none answers in `timeout` s."""
    hello = [wire.HELLO, *FrameEncoder().encode(None)]
    with zmq.Context() as context, dealer(context, address) as socket:
        for _ in range(max(1, round(timeout / HELLO_INTERVAL))):
            socket.send_multipart(hello)
            if socket.poll(round(HELLO_INTERVAL * 1000)):
                return FrameDecoder(wire.CoreFacts).decode(socket.recv_multipart()[1:])
    raise EngineDeadError(f"no engine core answers at {address} within {timeout:g} s. Check the address.")
