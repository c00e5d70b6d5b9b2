"""The server's life: listen, serve, and when told to stop, let requests under way finish first.

    SIGTERM or SIGINT   /ready turns 503 and new requests are refused; those under way get `shutdown_timeout` seconds
    a second one        what is left is aborted at once

This module knows processes and signals; what is served is the business of `app.py`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.http.app import counts_of, create_admin_app, create_app
from jaxpaged.entrypoints.http.transport.connections import allowed_connections
from jaxpaged.entrypoints.http.transport.listener import Listener, bind, bind_unix, url_of
from jaxpaged.entrypoints.http.transport.tls import tls_settings
from jaxpaged.errors import EngineError, UsageError
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import Service

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ABORT_SECONDS = 5.0
"""How long clients of aborted requests get to receive their last bytes."""
LOOPBACK = "127.0.0.1"


class Sockets:
    """Where the server will listen, reserved before anything is loaded.

    Raises UsageError for a taken address, for TLS files that do not serve, and when there would be none at all.
    """

    def __init__(self, options: ServerOptions):
        self._path = options.uds
        self.tls = tls_settings(options)
        if not options.http and options.grpc_port is None and options.grpc_uds is None:
            raise UsageError("--no-http leaves nothing to serve. Add --grpc-port or --grpc-uds.")
        self.public = self.admin = None
        self.grpc_addresses: list[str] = []
        """Where the gRPC server listens, as gRPC's clients write it."""
        self._grpc: list[socket.socket] = []
        try:
            if options.http:
                self.public = bind_unix(options.uds) if options.uds else bind(options.host, options.port)
            if options.admin_port is not None:
                self.admin = bind(LOOPBACK, options.admin_port, "--admin-port")
            if options.grpc_port is not None:
                self._grpc.append(bind(options.host, options.grpc_port, "--grpc-port"))
            if options.grpc_uds is not None:
                self._grpc.append(bind_unix(options.grpc_uds, "--grpc-uds"))
        except UsageError:
            self.close()
            raise
        self.grpc_addresses += [url_of(each).removeprefix("http://") for each in self._grpc]

    def close(self) -> None:
        """Clients that connect are refused; a server that runs closes its sockets itself."""
        for each in filter(None, (self.public, self.admin)):
            each.close()
        if self.public is not None and self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self.release_grpc()

    @property
    def urls(self) -> list[str]:
        """Of the HTTP listeners: the public one, if there is one, and that of the admin endpoints."""
        public = [] if self.public is None else [url_of(self.public, "https" if self.tls else "http")]
        return public + ([] if self.admin is None else [url_of(self.admin)])

    def release_grpc(self) -> None:
        """Leave `grpc_addresses` for gRPC's library to take: it opens its sockets itself."""
        for each in self._grpc:
            path = each.getsockname()
            each.close()
            if isinstance(path, str):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._grpc.clear()


class StopRequests:
    """Counts signals: the first asks to drain, the second to hurry."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def on_signal(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()


def api_keys(options: ServerOptions) -> list[str]:
    """All keys, those of the file included. Raises UsageError when the file cannot be read or holds none."""
    keys = [*options.api_key, *keys_in(options.api_key_file, "--api-key-file")]
    if "" in keys:
        raise UsageError("an API key is empty. Give it at least one character.")
    return keys


def keys_in(file: str | None, option: str) -> list[str]:
    """The keys of a file that `option` names; none without one."""
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}. Check {option}.") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"{file} holds no key. Write one a line, or leave out {option}.")
    return keys


async def serve(
    service: Service,
    sockets: Sockets,
    keys: Sequence[str] = (),
    grpc_admin_keys: Sequence[str] = (),
    *,
    on_listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal says otherwise; `on_listening` is called once nobody who connects is refused any more.

    Raises UsageError for an address that somebody took meanwhile.
    """
    stop = StopRequests()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.on_signal)
    listeners = make_listeners(service, sockets, keys, grpc_admin_keys)
    running: list[asyncio.Future[None]] = []
    loading = None if service.adapters is None else asyncio.ensure_future(service.adapters.load_at_start())
    waiting = asyncio.ensure_future(stop.drain.wait())
    try:
        for listener in listeners:
            await listener.listen()
        on_listening()
        running += [asyncio.ensure_future(listener.run_until_stopped()) for listener in listeners]
        watched = [waiting, *running]
        await asyncio.wait([*watched, *filter(None, [loading])], return_when=asyncio.FIRST_COMPLETED)
        if loading is not None and loading.done():
            loading.result()  # a server without the adapters that it should have is none
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        await come_to_rest(service, stop)
    finally:
        waiting.cancel()
        if loading is not None:
            loading.cancel()
        for listener in listeners:
            listener.should_exit = True
        await asyncio.gather(*running)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def make_listeners(
    service: Service, sockets: Sockets, keys: Sequence[str], grpc_admin_keys: Sequence[str]
) -> list[Any]:
    """What serves: each has `listen()`, then `run_until_stopped()`, which ends when its `should_exit` is set."""
    most = allowed_connections(service.options.max_connections)
    settings = {"max_header_bytes": service.options.max_header_bytes, "max_connections": most}
    listeners: list[Any] = []
    counts = counts_of(service)
    if sockets.public is not None:
        listeners.append(Listener(create_app(service, keys, counts), sockets.public, tls=sockets.tls, **settings))
    if sockets.admin is not None:
        listeners.append(Listener(create_admin_app(service, keys, counts), sockets.admin, **settings))
    sockets.release_grpc()
    if addresses := sockets.grpc_addresses:
        from jaxpaged.entrypoints.grpc.server import GrpcListener, grpc_credentials  # an extra

        credentials = grpc_credentials(sockets.tls)
        listeners.append(
            GrpcListener(
                service, addresses, keys=keys, admin_keys=grpc_admin_keys, credentials=credentials, max_connections=most
            )
        )
    return listeners


async def come_to_rest(service: Service, stop: StopRequests) -> None:
    """Take no more requests, and wait for those under way, for `shutdown_timeout` seconds or until the second signal;
    then abort what is left."""
    traffic = service.traffic
    traffic.draining = True
    logger.info("stopping: %d requests are under way, and get %g s", len(traffic), service.options.shutdown_timeout)
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
