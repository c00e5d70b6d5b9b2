"""The trace that a request belongs to, as W3C Trace Context says it in HTTP headers and in gRPC metadata.

It is kept where every task that works for the request finds it, and read where the engine is asked. Where nothing is
traced, nothing is kept. This module does not know what the headers mean.
"""

from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.engine.observability.tracing import CONTEXT_HEADERS, ID_HEADER

CONTEXT: ContextVar[dict[str, str] | None] = ContextVar("trace_context", default=None)


def enter_trace(headers: Iterable[tuple[str, str]]) -> None:
    """What follows in this task, and in tasks that it begins, works for a request with these headers.

    The names are in lower case. Two parents are none, and several states are one, as the standard has it.
    """
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in CONTEXT_HEADERS:
            found.setdefault(name, []).append(value)
    parents, states = (found.get(name, []) for name in CONTEXT_HEADERS)
    parent, state = CONTEXT_HEADERS
    CONTEXT.set({parent: parents[0], **({state: ",".join(states)} if states else {})} if len(parents) == 1 else {})


def trace_headers(request_id: str) -> dict[str, str] | None:
    """What the engine is given with a prompt of this request; None where nothing is traced."""
    context = CONTEXT.get()
    return None if context is None else {**context, ID_HEADER: request_id}


class TraceContext:
    """Looks for the trace of every request; for servers whose engine traces."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            enter_trace((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        await self._app(scope, receive, send)
