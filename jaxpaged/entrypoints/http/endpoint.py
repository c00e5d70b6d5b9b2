"""An endpoint's declaration: from it come the route and its place in the OpenAPI description."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpaged.entrypoints.http.errors import ErrorBody, as_http_error, error_response
from jaxpaged.entrypoints.http.request_ids import header_id

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Query:
    """A query parameter, as a JSON schema."""

    name: str
    schema: dict


@dataclass(frozen=True)
class Endpoint:
    """One path and method. `body` and `answer` are structs, or None where there is no JSON.

    The first line of the handler's docstring says what it does. `streams`: the answer may be a stream of events.
    """

    method: str
    path: str
    handler: Handler
    body: type | None = None
    answer: type | None = None
    streams: bool = False
    query: tuple[Query, ...] = ()
    not_found: bool = False  # it answers 404 for a name that it does not know
    conflicts: bool = False  # it answers 409 when the engine is in the wrong state
    error: type = ErrorBody  # what answers that are errors hold

    def route(self) -> Route:
        return Route(self.path, self._answer, methods=[self.method])

    async def _answer(self, request: Request) -> Response:
        """Whatever the handler raises becomes an answer, and so does a bad X-Request-Id before it is asked."""
        try:
            header_id(request)
            return await self.handler(request)
        except Exception as error:
            return error_response(as_http_error(error))
