"""What tells orchestrators how the server is: `/health`, `/ready`, `/ping`, `/version`, `/load`.

`/health` is about the process: 503 means that it should be replaced. `/ready` is about traffic: 503 means that new
requests should go elsewhere.
"""

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged import __version__
from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.entrypoints.http.errors import HttpError, error_response
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.errors import EngineError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths that need no API key."""


class Health:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def health(self, request: Request) -> Response:
        """Liveness: 200 while the engine can serve, also when the server is about to stop."""
        return Response(status_code=200 if await self._alive() else 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: 503 with the reason once the server was told to stop, and while the engine is down or asleep."""
        reason = await self._obstacle()
        return Response() if reason is None else error_response(HttpError(503, reason))

    async def version(self, request: Request) -> Response:
        """The version of jaxpaged."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many requests are under way."""
        return json_response({"server_load": len(self._service.traffic)})

    async def _obstacle(self) -> str | None:
        """Why new requests should go elsewhere."""
        engine = self._service.engine
        if self._service.traffic.draining:
            return "The server is shutting down."
        if not engine.is_running or not await self._alive():
            return "The engine is down."
        if engine.sleep_level is not None:
            return f"The engine sleeps at level {engine.sleep_level}. Requests wait until it is woken."
        return None

    async def _alive(self) -> bool:
        try:
            await self._service.engine.check_health()
        except EngineError:
            return False
        return True
