"""What tells orchestrators how the server is: `/health`, `/ready`, `/startup`, `/ping`, `/version`, `/load`.

The first three are three questions. `/health`: should the process be replaced? An engine that is restarting itself
heals, and is alive. `/ready`: should new requests come here now? `/startup`: has the server ever been ready? Until then
the other two should not be asked.
"""

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged import __version__
from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.entrypoints.http.errors import error_response
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.serving.errors import ErrorKind, ServingError

OPEN_PATHS = frozenset({"/health", "/ready", "/startup", "/ping"})
"""Paths that need no API key."""


class Health:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def health(self, request: Request) -> Response:
        """Liveness: 503 once the engine has stopped for good, and this process should be replaced."""
        return Response(status_code=200 if self._service.engine.is_alive else 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: 503 with the reason while ordinary requests would not be served at full speed."""
        return unavailable(self.obstacle())

    async def startup(self, request: Request) -> Response:
        """Start-up: 503 until the engine has been ready for the first time, 200 ever after."""
        service = self._service
        reason = None if service.has_been_ready else self._engine_obstacle()
        service.has_been_ready = reason is None
        return unavailable(reason)

    async def version(self, request: Request) -> Response:
        """The version of jaxpaged."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many requests are under way."""
        return json_response({"server_load": len(self._service.traffic)})

    def obstacle(self) -> str | None:
        """Why new requests should go elsewhere."""
        return "The server is shutting down." if self._service.traffic.draining else self._engine_obstacle()

    def _engine_obstacle(self) -> str | None:
        """The same without regard to the server."""
        obstacle = self._service.engine.obstacle(self._service.options.ready_when == "compiled")
        if obstacle is None:
            self._service.has_been_ready = True
        return obstacle


def unavailable(reason: str | None) -> Response:
    """503 with a reason, 200 without one."""
    return Response() if reason is None else error_response(ServingError(reason, kind=ErrorKind.UNAVAILABLE))
