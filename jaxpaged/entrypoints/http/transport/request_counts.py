"""How many requests came, how long they took, and how large they and their responses were; each is a line in the log.

Names, labels and buckets are those of the Prometheus instrumentation that vLLM's dashboards read: statuses by class,
paths as they are declared. Nothing that a client makes up becomes a label, nothing of bodies and queries gets into the
log, and what a client made up is quoted there. This module knows no endpoint.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.engine.observability.metrics import Counter, Metric, Tally
from jaxpaged.entrypoints.http.transport.sending import PIPE

logger = logging.getLogger("jaxpaged.entrypoints.http.transport.access_log")


def log_request(scope: Scope, status: int, seconds: float, level: int = logging.INFO) -> None:
    """A request that was answered, or left, `seconds` after its headers came."""
    if not logger.isEnabledFor(level):
        return
    client = scope.get("client")
    address = client[0] if client else "-"
    method, path, request_id = quote(scope["method"]), quote(scope["path"]), scope.get("request_id")
    logger.log(
        level,
        "%s %s %d in %.3f s%s from %s",
        method,
        path,
        status,
        seconds,
        f", {request_id}," if request_id else "",
        address,
        extra={
            "method": method,
            "path": path,
            "status": status,
            "duration": round(seconds, 6),
            "client": address,
            **({"request_id": request_id} if request_id else {}),
        },
    )


FINE_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
COARSE_BUCKETS = (0.1, 0.5, 1)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
UNCOUNTED = frozenset({"/metrics", "/health", "/ready", "/startup", "/load", "/ping", "/version", "/engine/state"})
"""Paths that machines ask all the time."""
NOWHERE = "none"
"""What paths are called that lead nowhere, and those of requests that were refused before they got anywhere."""
NO_RESPONSE = 499
"""The status of a request whose client left before there was a response."""


@dataclass(frozen=True)
class Summary(Metric):
    """How many observations there were, and their sum."""

    count: int
    sum: float


@dataclass
class Size:
    """Bytes that went one way."""

    count: int = 0
    sum: int = 0

    def add(self, num_bytes: int) -> None:
        self.count += 1
        self.sum += num_bytes


@dataclass(frozen=True)
class Exchange:
    """A request and its response. `handler` is the path as it is declared."""

    method: str
    handler: str
    status: int
    num_bytes_in: int
    num_bytes_out: int


class RequestCounts:
    """What was counted since the server started."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = defaultdict(int)
        self._times: dict[tuple[str, str], Tally] = defaultdict(lambda: Tally(COARSE_BUCKETS))
        self._all_times = Tally(FINE_BUCKETS)
        self._sizes_in: dict[str, Size] = defaultdict(Size)
        self._sizes_out: dict[str, Size] = defaultdict(Size)

    def add(self, exchange: Exchange, seconds: float) -> None:
        """An exchange that took `seconds` from its headers to the last byte of the response."""
        handler, method = exchange.handler, exchange.method if exchange.method in METHODS else "other"
        self._requests[method, f"{exchange.status // 100}xx", handler] += 1
        self._times[handler, method].observe(seconds)
        self._all_times.observe(seconds)
        self._sizes_in[handler].add(exchange.num_bytes_in)
        self._sizes_out[handler].add(exchange.num_bytes_out)

    def read(self) -> list[Metric]:
        """All of it as metrics."""
        return [
            *(
                Counter("http_requests", {"method": method, "status": status, "handler": handler}, count)
                for (method, status, handler), count in self._requests.items()
            ),
            self._all_times.read("http_request_duration_highr_seconds"),
            *(
                replace(tally.read("http_request_duration_seconds"), labels={"handler": handler, "method": method})
                for (handler, method), tally in self._times.items()
            ),
            *summaries("http_request_size_bytes", self._sizes_in),
            *summaries("http_response_size_bytes", self._sizes_out),
        ]


def summaries(name: str, sizes: Mapping[str, Size]) -> list[Metric]:
    return [Summary(name, {"handler": handler}, size.count, size.sum) for handler, size in sizes.items()]


class CountRequests:
    """Counts what goes through, and with `logged` writes it to the access log, except for the paths `unlogged`.

    `handlers`: the function that answers -> its path as it is declared.
    """

    def __init__(
        self,
        app: ASGIApp,
        counts: RequestCounts,
        handlers: Mapping[Callable[..., Any], str],
        logged: bool = False,
        unlogged: Collection[str] = (),
    ):
        self._app = app
        self._logged = logged
        self._unlogged = frozenset(unlogged)
        self._counts = counts
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, num_bytes_in, num_bytes_out = time.perf_counter(), NO_RESPONSE, 0, 0

        async def received() -> Message:
            nonlocal num_bytes_in
            message = await receive()
            num_bytes_in += len(message.get("body", b""))
            return message

        def sent(message: Message) -> Awaitable[None]:
            nonlocal status, num_bytes_out
            num_bytes_out += len(message.get("body", b""))
            if "status" in message:
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            handler, seconds = self._handlers.get(scope.get("endpoint"), NOWHERE), time.perf_counter() - start
            num_bytes_out += scope[PIPE].num_bytes if PIPE in scope else 0
            if handler not in UNCOUNTED:
                exchange = Exchange(scope["method"], handler, status, num_bytes_in, num_bytes_out)
                self._counts.add(exchange, seconds)
            if self._logged and scope["path"] not in self._unlogged:
                log_request(scope, status, seconds, logging.DEBUG if handler in UNCOUNTED else logging.INFO)
