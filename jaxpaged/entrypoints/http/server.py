"""The server's life: listen, serve, and when told to stop, let requests under way finish first.

    SIGTERM or SIGINT   /ready turns 503 and new requests are refused; those under way get `shutdown_timeout` seconds
    a second one        what is left is aborted at once

This module knows processes and signals; what is served is the business of `app.py`.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.http.app import create_admin_app, create_app
from jaxpaged.entrypoints.http.listener import BACKLOG, Listener, bind, url_of
from jaxpaged.entrypoints.http.options import ServerOptions
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.errors import EngineError, UsageError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ABORT_SECONDS = 5.0
"""How long clients of aborted requests get to receive their last bytes."""
LOOPBACK = "127.0.0.1"


class Sockets:
    """Where the server will listen, reserved before anything is loaded. Raises UsageError for a taken address."""

    def __init__(self, options: ServerOptions):
        self.public = bind(options.host, options.port)
        self.admin: socket.socket | None = None
        if options.admin_port is not None:
            try:
                self.admin = bind(LOOPBACK, options.admin_port, "--admin-port")
            except UsageError:
                self.close()
                raise

    def listen(self) -> None:
        """From now on clients that connect are not refused; they wait until `serve` runs."""
        for each in filter(None, (self.public, self.admin)):
            each.listen(BACKLOG)

    def close(self) -> None:
        """Clients that connect are refused; a server that runs closes its sockets itself."""
        for each in filter(None, (self.public, self.admin)):
            each.close()

    @property
    def urls(self) -> list[str]:
        return [url_of(each) for each in (self.public, self.admin) if each is not None]


class StopRequests:
    """Counts signals: the first asks to drain, the second to hurry."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def on_signal(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()


def api_keys(options: ServerOptions) -> list[str]:
    """All keys, those of the file included. Raises UsageError when the file cannot be read or holds none."""
    keys = list(options.api_key)
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read {options.api_key_file}: {error.strerror}. Check --api-key-file.") from None
        keys += [line.strip() for line in lines if line.strip()]
        if not keys:
            raise UsageError(f"{options.api_key_file} holds no key. Write one a line, or leave out --api-key-file.")
    if "" in keys:
        raise UsageError("an API key is empty. Give it at least one character.")
    return keys


async def serve(service: Service, sockets: Sockets, keys: Sequence[str] = ()) -> None:
    """Serve until a signal says otherwise."""
    stop = StopRequests()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.on_signal)
    listeners = make_listeners(service, sockets, keys)
    running = [asyncio.ensure_future(listener.run_until_stopped()) for listener in listeners]
    waiting = asyncio.ensure_future(stop.drain.wait())
    try:
        await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
        await come_to_rest(service, stop)
    finally:
        waiting.cancel()
        for listener in listeners:
            listener.should_exit = True
        await asyncio.gather(*running)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def make_listeners(service: Service, sockets: Sockets, keys: Sequence[str]) -> list[Listener]:
    settings = {"max_header_bytes": service.options.max_header_bytes, "access_log": service.options.access_log}
    listeners = [Listener(create_app(service, keys), sockets.public, **settings)]
    if sockets.admin is not None:
        listeners.append(Listener(create_admin_app(service, keys), sockets.admin, **settings))
    return listeners


async def come_to_rest(service: Service, stop: StopRequests) -> None:
    """Take no more requests, and wait for those under way, for `shutdown_timeout` seconds or until the second signal;
    then abort what is left."""
    traffic = service.traffic
    traffic.draining = True
    if not await idle_in_time(traffic.wait_until_idle(service.options.shutdown_timeout), stop.hurry.wait()):
        logger.warning("%d requests are aborted", len(traffic))
        with contextlib.suppress(EngineError):
            await service.engine.abort(traffic.engine_ids())
        await traffic.wait_until_idle(ABORT_SECONDS)


async def idle_in_time(idle: Coroutine[Any, Any, bool], hurry: Coroutine[Any, Any, bool]) -> bool:
    """Whether `idle` came out true before `hurry` ended."""
    tasks = [asyncio.ensure_future(idle), asyncio.ensure_future(hurry)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return tasks[0] in done and tasks[0].result()
