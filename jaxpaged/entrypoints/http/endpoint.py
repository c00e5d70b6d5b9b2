"""An endpoint's declaration, from which come the route and its place in the OpenAPI description; and the headers by
which clients say something of any request.

`X-Request-Id` is looked for in logs and responses. vLLM's `X-Vllm-Priority`, which proxies send, goes before the body's
priority. A bad header is refused on every endpoint.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import UnionType

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.entrypoints.http.body import READ, read_body
from jaxpaged.entrypoints.http.errors import ErrorBody, as_http_error, error_response
from jaxpaged.errors import did_you_mean
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.requests import checked_id, own_or_new

REQUEST_ID_HEADER = "X-Request-Id"
PRIORITY_HEADER = "X-Vllm-Priority"
KEY_OWNER = "jaxpaged.key_owner"
"""What a request with a good key carries in its scope: the key's digest."""
NO_BODY = (b"", b"{}", b"null")
"""The last two are what clients send that always send JSON."""
MOST_OF_NO_BODY = 1024
PRIORITY = re.compile(r"[-+]?[0-9]{1,19}")


def header_id(request: Request) -> str | None:
    """The id in the header, if there is one. Raises ServingError for a bad one, and for two."""
    given = request.headers.getlist(REQUEST_ID_HEADER)
    if len(given) > 1:
        raise ServingError(f"{REQUEST_ID_HEADER} is given {len(given)} times. Send one.", REQUEST_ID_HEADER)
    return checked_id(REQUEST_ID_HEADER, given[0]) if given else None


def request_id_of(request: Request, prefix: str, in_body: str | None = None) -> str:
    """`prefix` with the client's own id, from the header or the body, or with a new one. Raises ServingError."""
    in_header = header_id(request)
    own = own_or_new(in_body)
    name = request.scope["request_id"] = f"{prefix}-{in_header or own}"  # the access log reads it
    return name


def take_priority(request: Request, body: msgspec.Struct) -> None:
    """Put the header's number where the body has its own. Raises ServingError for what is none, and for two."""
    given = request.headers.getlist(PRIORITY_HEADER)
    if not given:
        return
    if len(given) > 1:
        raise ServingError(f"{PRIORITY_HEADER} is given {len(given)} times. Send one.", PRIORITY_HEADER)
    if not PRIORITY.fullmatch(given[0]):
        raise ServingError(f"{PRIORITY_HEADER} is {given[0][:40]!r}; it must be a whole number.", PRIORITY_HEADER)
    body.priority = int(given[0])


def client_of(request: Request) -> str:
    """Who asks, for shares of what is scarce: the key where keys are needed, else the address. What stands in a header
    that nobody checks would make as many clients of one as it likes."""
    owner = request.scope.get(KEY_OWNER)
    return owner or (request.client.host if request.client else "")


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Query:
    """A query parameter, as a JSON schema."""

    name: str
    schema: dict


@dataclass(frozen=True)
class Endpoint:
    """One path and method. `body` and `response` are structs, one of several, or None where there is no JSON.

    The first line of the handler's docstring says what it does. `streams`: the response may be a stream of events.
    """

    method: str
    path: str
    handler: Handler
    body: type | UnionType | None = None
    response: type | UnionType | None = None
    streams: bool = False
    query: tuple[Query, ...] = ()
    not_found: bool = False  # it answers 404 for a name that it does not know
    conflicts: bool = False  # it answers 409 when the engine is in the wrong state
    is_strict: bool = False  # it refuses query parameters that it does not have, and a body where it has none
    error: type = ErrorBody  # what answers that are errors hold

    def route(self) -> Route:
        return Route(self.path, self.respond, methods=[self.method])

    async def respond(self, request: Request) -> Response:
        """Whatever the handler raises becomes a response, and so does a bad X-Request-Id before it is asked."""
        try:
            header_id(request)
            if self.is_strict:
                self._check_query(request)
                await self._check_body(request)
            return await self.handler(request)
        except BaseException as error:
            if (body := request.scope.get(READ)) is not None and body.lent is not None:
                await request.app.state.let_go(body.lent)
            if not isinstance(error, Exception):
                raise
            return error_response(as_http_error(error))

    def _check_query(self, request: Request) -> None:
        known = [each.name for each in self.query]
        for name in request.query_params:
            if name not in known:
                near = did_you_mean(name, known) or " Leave it out."
                raise ServingError(f"{self.path} has no query parameter {name!r}.{near}", name)

    async def _check_body(self, request: Request) -> None:
        """Who says in a body what belongs into the URL would get something else than what was asked for."""
        if self.body is None and (await read_body(request, MOST_OF_NO_BODY)).strip() not in NO_BODY:
            names = ", ".join(each.name for each in self.query)
            what = f"What may be said is in the URL: {names}." if names else "Leave it out."
            raise ServingError(f"{self.path} takes no body. {what}")


def flag(request: Request, name: str) -> bool:
    """A query parameter that is true or false. Raises ServingError for other values."""
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ServingError(f"{name} is {text!r}; it must be true or false.", name)
    return text == "true"


class Below:
    """Leads requests of `path`, and of what is below it, through a `layer` of their own; all others go past it."""

    def __init__(self, app: ASGIApp, path: str, layer: Callable[[ASGIApp], ASGIApp]):
        self._app, self._layered = app, layer(app)
        self._path, self._prefix = path, f"{path}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_below = scope["type"] == "http" and (path == self._path or path.startswith(self._prefix))
        await (self._layered if is_below else self._app)(scope, receive, send)


class KnownPaths:
    """Leads requests to endpoints whose path has no parameters, past the router, which tries one path after the other
    and has a layer of its own around each. All else goes the router's way, and so does a known path with another
    method."""

    def __init__(self, app: ASGIApp, endpoints: Iterable[Endpoint]):
        self._app = app
        self._endpoints = {(each.method, each.path): each for each in endpoints if "{" not in each.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["endpoint"] = endpoint.respond
        response = await endpoint.respond(Request(scope, receive, send))
        await response(scope, receive, send)
