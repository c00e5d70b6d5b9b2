"""Serves an engine core to front ends in other processes: one socket, one loop, one thread.

Messages are read between steps and results are sent after them; the socket itself is moved by zmq's own thread, which
needs no interpreter lock. This module knows neither text nor devices, nor who started the process.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_calls import CoreCall, Sleep, WakeUp, call_named
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.heartbeat import CALL, TICK_SECONDS, Heartbeat
from jaxpaged.engine.sleep import LEVELS
from jaxpaged.errors import EngineDeadError, JaxpagedError, ProgramError, RequestError, UsageError
from jaxpaged.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from jaxpaged.sampling_params import RANDOM_SEED

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
MESSAGES_BETWEEN_STEPS = 256
"""At most so many messages are read before the next step: a flood of them must not stop everybody's tokens."""
SAVING_MILLISECONDS = 5
"""That an idle core waits for a message while keys and values wait to be copied off the device."""
STATS_INTERVAL = 1.0
"""Seconds between two statements of how the core is doing, while it works."""

MESSAGES = {
    wire.HELLO: None,
    wire.ADD: list[EngineCoreRequest],
    wire.ITEM: wire.Item,
    wire.ABORT: list[str],
    wire.CALL: wire.Call,
}
"""What may come in, and the type of the value."""


class Client:
    """A front end: where to send, and its requests by the names that it gave them and the core knows them by.
    `pixels`: by key, of requests that have not come yet."""

    def __init__(self, identity: bytes, number: int):
        self.identity = identity
        self.number = number
        self.engine_ids: dict[str, str] = {}
        self.pixels: dict[str, dict[bytes, np.ndarray]] = {}


class LateSleep(NamedTuple):
    """A call of `sleep` that is done when these requests are, by the core's names."""

    client: Client
    call_id: int
    call: Sleep
    request_ids: frozenset[str]


class CoreServer:
    """Answers on `address`. Raises zmq.ZMQError when it cannot be bound.

    A front end that went away is noticed by the next message to it, and its requests are aborted. A slow one costs
    memory for the tokens of its own requests, never time.
    """

    def __init__(self, core: EngineCore, facts: wire.CoreFacts, address: str, heartbeat: Heartbeat):
        self._core = core
        core.keep_pixels()
        self._facts = facts
        self._heartbeat = heartbeat
        self._clients: dict[bytes, Client] = {}
        self._routes: dict[str, tuple[Client, str]] = {}  # the core's request id -> who asked, under which name
        self._num_clients = 0
        self._encoder = FrameEncoder()
        self._decoders = {kind: FrameDecoder(type) for kind, type in MESSAGES.items()}
        self._late_answers: queue.SimpleQueue[tuple[Client, wire.Answer, Any]] = queue.SimpleQueue()
        self._late_sleeps: list[LateSleep] = []
        self._stats_time = 0.0  # when they were last sent
        self._stats_changed = True
        self._stopping, self.has_stopped = False, threading.Event()
        self._context = zmq.Context()
        self._socket = self._bind(address)
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    def _bind(self, address: str) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to those who left is an error
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.bind(address)
        return socket

    def run(self) -> None:
        """Serve until `stop`. Raises EngineDeadError when the core has stopped, or says that it never will compute."""
        while not self._stopping:
            working = self._core.has_work()
            saving = not working and self._core.save_idle()
            if not working:
                self._settle()
            if self._poller.poll(0 if working else SAVING_MILLISECONDS if saving else round(TICK_SECONDS * 1e3)):
                self._receive()
            elif not working and time.monotonic() - self._stats_time > STATS_INTERVAL:
                self._look_at_stats()
            if self._core.has_work():
                self._step()
            if self._late_sleeps:
                self._sleep_when_done()
        self.has_stopped.set()

    def stop(self) -> None:
        """End `run` after the step under way. For any thread."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Give up the socket, after `run`."""
        self._context.destroy(linger=0)
        os.close(self._wake_reader)

    def _wake(self) -> None:
        os.write(self._wake_writer, b"\0")

    # ---- steps

    def _step(self) -> None:
        """Run one step, and tell every front end with requests under way what it gave."""
        self._heartbeat.beat()
        outputs = self._core.step()
        news: dict[Client, list[EngineCoreOutput]] = {c: [] for c in self._clients.values() if c.engine_ids}
        for output in outputs.outputs:
            route = self._routes.get(output.request_id)
            if route is None:  # aborted
                continue
            client, request_id = route
            if output.finish_reason is not None:
                self._end_route(output.request_id)
            if output.error_parameter is not None:
                self._send(client, wire.REFUSED, wire.Refusal(request_id, output.error or "", output.error_parameter))
                continue
            output.request_id = request_id
            news[client].append(output)
        for client, its_outputs in news.items():
            self._send(client, wire.STEP, EngineCoreOutputs(its_outputs, outputs.stats))
        self._stats_changed = True
        if time.monotonic() - self._stats_time > STATS_INTERVAL:
            self._send_stats()

    def _settle(self) -> None:
        """There is nothing to do: say how things are, once, and again while programs are compiled."""
        self._heartbeat.tick()
        if self._stats_changed:
            self._send_stats()

    def _look_at_stats(self) -> None:
        """Programs are compiled, and what is kept or lent changes, while there is nothing to do."""
        stats = wire.CoreStats(self._core.stats(), self._core.executor_stats())
        self._stats_time, self._stats_changed = time.monotonic(), self._stats_changed or stats != self._last_stats

    def _send_stats(self, clients: Sequence[Client] | None = None) -> None:
        stats = wire.CoreStats(self._core.stats(), self._core.executor_stats())
        if clients is None:
            self._last_stats = stats
        for client in list(self._clients.values()) if clients is None else clients:
            self._send(client, wire.STATS, stats)
        if (failure := stats.executor.get("program_failure")) is not None:
            raise ProgramError(failure)
        self._stats_time, self._stats_changed = time.monotonic(), False

    # ---- messages

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        while not self._late_answers.empty():
            client, answer, value = self._late_answers.get()
            self._send(client, wire.ANSWER, answer, value)
        for _ in range(MESSAGES_BETWEEN_STEPS):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(identity, frames)

    def _take(self, identity: bytes, frames: Sequence[bytes]) -> None:
        """Do what one message says. One that says nothing of sense is dropped."""
        kind = frames[0] if frames else b""
        try:
            if kind not in self._decoders:
                raise ValueError("there is no such kind")
            value = self._decoders[kind].decode(frames[1:])
        except (ValueError, TypeError, RecursionError) as error:
            logger.warning("dropped a message of kind %r from a front end: %s", kind[:20], error)
            return
        client = self._clients.get(identity)
        if client is None:
            self._num_clients += 1
            client = self._clients[identity] = Client(identity, self._num_clients)
        if kind == wire.HELLO:
            self._send(client, wire.READY, self._facts)
            self._send_stats([client])
        elif kind == wire.ADD:
            for request in value:
                self._add(client, request)
        elif kind == wire.ITEM:
            self._take_item(client, value)
        elif kind == wire.ABORT:
            self._abort(client, value)
        else:
            self._call(client, value)

    def _add(self, client: Client, request: EngineCoreRequest) -> None:
        """Queue a request, under another name if another front end's has this one."""
        request_id = engine_id = request.request_id
        if engine_id in self._routes and self._routes[engine_id][0] is not client:
            engine_id = request.request_id = f"{request_id}@{client.number}"
        if request.mm_features:
            came = client.pixels.pop(request_id, {})
            for feature in request.mm_features:
                feature.pixels = came.get(feature.key, feature.pixels)
        try:
            check_request(request, self._facts.vocab_size)
            self._core.add_request(request)
        except RequestError as error:
            message = str(error).replace(repr(engine_id), repr(request_id))
            self._send(client, wire.REFUSED, wire.Refusal(request_id, message, error.parameter))
            return
        self._stats_changed = True
        self._routes[engine_id] = (client, request_id)
        client.engine_ids[request_id] = engine_id
        if request.mm_features:
            self._send(client, wire.WANTED, wire.Wanted(request_id, list(self._core.pixels.lacking(engine_id))))

    def _take_item(self, client: Client, item: wire.Item) -> None:
        """Pixels for a request that waits for them, or for one that comes next."""
        if item.pixels.dtype != np.uint8:
            logger.warning("dropped pixels of type %s from a front end", item.pixels.dtype)
        elif item.request_id in client.engine_ids:
            self._core.add_pixels(item.key, item.pixels)
        else:
            client.pixels.setdefault(item.request_id, {})[item.key] = item.pixels

    def _abort(self, client: Client, request_ids: Sequence[str]) -> None:
        engine_ids = [client.engine_ids[each] for each in dict.fromkeys(request_ids) if each in client.engine_ids]
        for engine_id in engine_ids:
            self._end_route(engine_id)
        for request_id in request_ids if client.pixels else ():
            client.pixels.pop(request_id, None)
        self._core.abort_requests(engine_ids)
        self._stats_changed = True

    def _end_route(self, engine_id: str) -> None:
        client, request_id = self._routes.pop(engine_id)
        del client.engine_ids[request_id]

    def _call(self, client: Client, asked: wire.Call) -> None:
        try:
            call = call_named(asked.name, asked.arguments)
        except UsageError as error:
            self._send(client, wire.ANSWER, wire.Answer(asked.call_id, (type(error).__name__, str(error))), None)
            return
        if call.runs_beside_steps:
            threading.Thread(target=self._answer_late, args=(client, asked.call_id, call), daemon=True).start()
        elif isinstance(call, Sleep) and call.mode == "wait" and call.level in LEVELS:
            self._late_sleeps.append(LateSleep(client, asked.call_id, call, self._core.unfinished()))
        else:
            self._answer(client, asked.call_id, call)
            if isinstance(call, WakeUp):
                self._call_off_sleeps()

    def _answer(self, client: Client, call_id: int, call: CoreCall[Any]) -> None:
        """Ask the core, and tell the front end what it says. It may take longer than a step, and to read weights from
        files again longer still: every array that is loaded is a sign of life, so only a read that hangs counts so."""
        self._heartbeat.beat(CALL)
        value, error = self._asked(call)
        self._heartbeat.tick()  # who hears the result may count on it that the patience for calls is over
        if isinstance(call, Sleep | WakeUp):
            if self._core.has_work():
                self._step()  # clients hear what sleep ended before they hear that it sleeps
            self._send_stats()
        self._send(client, wire.ANSWER, wire.Answer(call_id, error), value)

    def _sleep_when_done(self) -> None:
        """Let the core sleep where the requests that a call waits for have ended."""
        unfinished, waiting = self._core.unfinished(), []
        for late in self._late_sleeps:
            if self._core.sleep_level is None and late.request_ids & unfinished:
                waiting.append(late)
            else:  # what came meanwhile goes on after waking
                self._answer(late.client, late.call_id, msgspec.structs.replace(late.call, mode="keep"))
        self._late_sleeps = waiting

    def _call_off_sleeps(self) -> None:
        """Who waits for the core to sleep waits in vain."""
        for late in self._late_sleeps:
            error = ("ConflictError", "the engine was woken before it slept. Let it sleep again.")
            self._send(late.client, wire.ANSWER, wire.Answer(late.call_id, error), None)
        self._late_sleeps = []

    def _answer_late(self, client: Client, call_id: int, call: CoreCall[Any]) -> None:
        value, error = self._asked(call)
        self._late_answers.put((client, wire.Answer(call_id, error), value))
        self._wake()

    def _asked(self, call: CoreCall[Any]) -> tuple[Any, tuple[str, str] | None]:
        """The result of the core, or the error: its class and its message."""
        try:
            return self._core.call(call), None
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, JaxpagedError):
                logger.exception("the call %s failed", call.name())
            return None, (type(error).__name__, str(error))

    def _send(self, client: Client, kind: bytes, *values: Any) -> None:
        """Send a message. When nobody is there any more, nobody's requests are computed."""
        frames = [frame for value in values for frame in self._encoder.encode(value)]
        try:
            self._socket.send_multipart([client.identity, kind, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if self._clients.pop(client.identity, None) is not None:
                self._abort(client, list(client.engine_ids))


def check_request(request: EngineCoreRequest, vocab_size: int) -> None:
    """Raise RequestError for what no input processor lets through, and what would break a step."""
    ids, params = request.prompt_token_ids, request.sampling_params
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(
            f"a token id of the prompt is outside the vocabulary of {vocab_size}. Let an input processor check it.",
            "prompt",
        )
    if params.seed in (None, RANDOM_SEED) or params.n != 1:
        raise RequestError(
            f"the request arrived with seed {params.seed} and n {params.n}. Let an input processor complete it.", "seed"
        )
