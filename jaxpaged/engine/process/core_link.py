"""What a front end knows of its engine core: whether it serves now, is being replaced, or is dead.

It joins the socket, which says that a core is there, and the supervisor, if this front end has one, which says why it
is not. This module knows neither requests nor results.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxpaged.engine.core_calls import CoreCall, EngineCoreClient
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_supervisor import CoreState, CoreSupervisor
from jaxpaged.engine.process.zmq_client import Handlers, ZmqClient
from jaxpaged.errors import EngineDeadError, EngineError, EngineRestartError, UsageError
from jaxpaged.messages import EngineCoreRequest

CONNECTING = "it has not answered yet"
LOST_CONNECTION = "the connection to the engine core broke"
SHUT_DOWN = "the engine was shut down"
LONG_SILENCE = 10.0
"""Seconds without a sign of life after which new requests had better go to another engine."""


class CoreLink(EngineCoreClient):
    """The way to a core, for one event loop at a time.

    `handlers` get what the core says. `on_loss` is called when requests under way are lost, with the error to raise.
    `restoring`: what a new core is to do before anything else.
    """

    def __init__(
        self,
        client: ZmqClient,
        supervisor: CoreSupervisor | None,
        handlers: Handlers,
        on_loss: Callable[[EngineError], None],
        restoring: Callable[[], Iterable[CoreCall[Any]]] = tuple,
    ):
        self.address = client.address
        self._client = client
        self._supervisor = supervisor
        self._handlers = {**handlers, wire.READY: self._on_ready}
        self._on_loss, self._restoring = on_loss, restoring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()  # set while there is nothing to wait for
        self._trouble: str | None = CONNECTING  # why the core does not serve now
        self._dead = False  # and will not again
        self._num_losses = 0

    def open(self) -> None:
        """Connect in the event loop that runs, once. Raises UsageError when another one uses this engine."""
        loop = asyncio.get_running_loop()
        if self._loop is loop or self._dead:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise UsageError("this AsyncLLM belongs to another event loop that is still open. Use it there.")
            self._trouble = CONNECTING
            self._on_loss(EngineError("the event loop was closed while the request was under way. Send it again."))
        self._loop, self._changed = loop, asyncio.Event()
        self._client.open(loop, self._handlers, self._on_disconnect)
        if self._supervisor is not None:
            self._supervisor.listen(self._on_state_in_thread)
            self._on_state(self._supervisor.state)

    async def until_ready(self) -> None:
        """Wait until a core serves. Raises EngineDeadError when there will be none."""
        self.open()
        while self._trouble is not None:
            if self._dead:
                raise EngineDeadError(f"the engine has stopped: {self._trouble}. Start a new one.")
            await self._changed.wait()

    def trouble(self) -> str | None:
        """Why the core does not serve now; None when it does."""
        if self._trouble != CONNECTING:
            return self._trouble
        if self._supervisor is None or self._supervisor.state.phase == "serving":
            return None
        return self._supervisor.state.reason

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent now."""
        return self._trouble is None

    @property
    def is_dead(self) -> bool:
        """Whether there will be no core any more."""
        return self._dead or (self._supervisor is not None and self._supervisor.state.phase in ("dead", "closed"))

    @property
    def num_restarts(self) -> int:
        """How often the core was replaced, as far as this front end knows."""
        return self._num_losses if self._supervisor is None else self._supervisor.num_restarts

    @property
    def seconds_silent(self) -> float:
        """For about how long the core has given no sign of life, as far as this front end knows."""
        return 0.0 if self._supervisor is None else self._supervisor.silence

    def silence(self) -> str | None:
        """What to say of a core that serves but has long given no sign of life; None when it has."""
        seconds = self.seconds_silent
        return f"its core has given no sign of life for {seconds:.0f} s" if seconds >= LONG_SILENCE else None

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Call it right after `until_ready`."""
        self._client.add_requests(requests)

    def add_items(self, items: Iterable[wire.Item]) -> None:
        """Pixels for requests that come next, or that the core has already; of a core that is gone, for nobody."""
        if self._trouble is None:
            for item in items:
                self._client.add_item(item)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests; a core that is gone has done so already."""
        if self._trouble is None:
            self._client.abort_requests(request_ids)

    async def call[R](self, call: CoreCall[R]) -> R:
        """The core's result. Raises what the core raised, EngineError when it went away, EngineDeadError."""
        await self.until_ready()
        return await self._client.call(call)

    def close(self) -> None:
        """End the core's process, if it is this front end's. Requests under way are lost."""
        self._end(SHUT_DOWN)
        self._client.close()
        if self._supervisor is not None:
            self._supervisor.close()

    # ---- the core comes and goes

    def _on_ready(self, facts: wire.CoreFacts) -> None:
        for call in self._restoring():
            self._client.tell(call)
        self._trouble = None
        self._changed.set()

    def _on_disconnect(self) -> None:
        self._lose(LOST_CONNECTION)

    def _on_state_in_thread(self, state: CoreState) -> None:
        assert self._loop is not None, "who listens was opened"
        with contextlib.suppress(RuntimeError):  # the loop is closed: the next one asks for the state
            self._loop.call_soon_threadsafe(self._on_state, state)

    def _on_state(self, state: CoreState) -> None:
        if self._dead:
            return
        if state.phase in ("dead", "closed"):
            self._end(state.reason)
        elif state.phase == "restarting":
            self._lose(state.reason)

    def _lose(self, reason: str) -> None:
        """The core is gone, and another one will come."""
        self._trouble = reason
        self._num_losses += 1
        self._changed.clear()
        self._on_loss(EngineRestartError(f"{reason}. The engine restarts; send the request again."))
        self._client.reconnect()

    def _end(self, reason: str) -> None:
        """The core is gone for good."""
        self._trouble, self._dead = reason, True
        self._on_loss(EngineDeadError(f"the engine has stopped: {reason}. Start a new one."))
        self._changed.set()
