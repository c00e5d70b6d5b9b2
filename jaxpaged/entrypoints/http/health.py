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
from jaxpaged.serving.errors import ErrorKind, ServingError
from jaxpaged.serving.service import Service

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
        return unavailable(self._service.obstacle())

    async def startup(self, request: Request) -> Response:
        """Start-up: 503 until the engine has been ready for the first time, 200 ever after."""
        service = self._service
        reason = None if service.has_been_ready else service.engine_obstacle()
        service.has_been_ready = reason is None
        return unavailable(reason)

    async def version(self, request: Request) -> Response:
        """The version of jaxpaged."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many requests are under way."""
        return json_response({"server_load": len(self._service.traffic)})


def unavailable(reason: str | None) -> Response:
    """503 with a reason, 200 without one."""
    return Response() if reason is None else error_response(ServingError(reason, kind=ErrorKind.UNAVAILABLE))
