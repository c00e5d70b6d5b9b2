"""The proxy as a web application: what clients ask of an engine is sent on to engines, and it has metrics of its own.

Prompts of completions and chats are computed by prefill engines; all else is a decode engine's alone. An engine that
cannot be reached, or says that it is too busy or broken, is passed by for another one as long as nothing of its
response was given to the client. Without a prefill engine that answers, decode engines compute prompts too; without a
decode engine nobody computes anything.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxpaged.entrypoints.http.anthropic.errors import PREFIX as MESSAGES
from jaxpaged.entrypoints.http.anthropic.errors import MessagesErrors
from jaxpaged.entrypoints.http.body import LONG_BODY, REST_SECONDS_A_BYTE, read_body
from jaxpaged.entrypoints.http.endpoint import Below
from jaxpaged.entrypoints.http.errors import HttpError, as_http_error, error_body, error_response
from jaxpaged.entrypoints.http.health import OPEN_PATHS
from jaxpaged.entrypoints.http.transport.auth import ApiKeys
from jaxpaged.entrypoints.http.transport.sending import event
from jaxpaged.entrypoints.proxy.backends import Backend, Backends, beginnings_of
from jaxpaged.entrypoints.proxy.engine_response import ELSEWHERE, MOST_WHOLE, EngineResponse
from jaxpaged.entrypoints.proxy.handing_over import PROMPTS, WHOLE, Asked, for_decode, read
from jaxpaged.entrypoints.proxy.prompts import Prompt, Prompts
from jaxpaged.serving.errors import ErrorKind, ServingError

PASSED_ON = ("traceparent", "tracestate", "x-request-id", "anthropic-version", "anthropic-beta")
KEYS = ("authorization", "x-api-key")
"""Headers that engines get as the client sent them, keys unless the proxy has one of its own for them."""
CLIENT_LEFT = 499
"""What is answered to nobody."""
MAX_BODY_BYTES = 64 << 20
"""Engines have limits of their own, and pictures in base64 are long."""
PROBE_SECONDS = 5.0
ANY = ("/v1/models", "/v1/models/{id:path}", "/health", "/ready", "/startup", "/ping", "/version")
"""Paths at which every decode engine says the same."""
COUNTERS = {
    "requests": "Requests that came for engines, completions, chats and others.",
    "handed_over": "Requests whose prompt a prefill engine computed.",
    "prefill_failures": "Times that a prefill engine did not compute a prompt.",
    "decode_retries": "Times that another decode engine was asked.",
    "left": "Requests whose client left before the answer began.",
    "failures": "Requests that no decode engine answered, or whose stream broke off.",
}


class Streamed(StreamingResponse):
    """A response that is passed on as it comes. Its engine is left when the client is gone, even before it begins."""

    def __init__(self, response: EngineResponse, pieces: AsyncIterator[bytes], media_type: str):
        super().__init__(pieces, media_type=media_type)
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except OSError:
            return  # in the middle of a response: the server cuts the client's connection, and logs a line
        finally:
            self._response.close()


class Proxy:
    """`least` tokens of a prompt, about, are worth a prefill engine. A response may take `timeout` seconds. `has_key`:
    engines get a key of the proxy's, and none of the client's. `waits`: a decode engine is asked once a prompt is
    computed, and not while it is."""

    def __init__(
        self,
        prefill: Backends,
        decode: Backends,
        *,
        least: int,
        timeout: float,
        has_key: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        waits: bool = False,
    ):
        self.prefill, self.decode, self._least, self._timeout = prefill, decode, least, timeout
        self._passed_on = PASSED_ON if has_key else (*KEYS, *PASSED_ON)
        self._max_body_bytes, self._long_bodies = max_body_bytes, asyncio.Lock()
        self.counts: Counter[str] = Counter()
        self._prompts = Prompts(prefill, self.counts, timeout, waits=waits)

    async def generate(self, request: Request) -> Response:
        """A completion, a chat, or whatever else has a body that an engine answers."""
        asked = await self._read(request)
        self.counts["requests"] += 1
        answering = asyncio.ensure_future(self._response(asked, self._headers(request)))
        leaving = asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            self.counts["left"] += 1
            return Response(status_code=CLIENT_LEFT)
        finally:
            for each in (answering, leaving):
                each.cancel()

    async def _response(self, asked: Asked, headers: Mapping[str, str]) -> Response:
        beginnings, prompt = beginnings_of(asked.beginning), Prompt()
        if asked.may_be_split and asked.num_tokens >= self._least and await self._is_reachable(beginnings):
            prompt = await self._prompts.computed(asked, beginnings, headers)
        response: EngineResponse | Response | None = None
        try:
            response = await self._decoded(asked, beginnings, for_decode(asked, prompt.params), headers)
        finally:
            if not isinstance(response, EngineResponse):
                prompt.leave()
        if isinstance(response, Response):
            return response
        if asked.is_stream:
            pieces = self._stream(response) if asked.path in PROMPTS else self._passed(response)
            return Streamed(response, pieces, media_type="text/event-stream")
        return await self._whole(response)

    async def _is_reachable(self, beginnings: list[bytes]) -> bool:
        """Whether there is a decode engine to go on from a prompt: else none is computed."""
        if not self.prefill.all:
            return False
        tried: list[Backend] = []
        while (backend := self.decode.choose(beginnings, tried)) is not None:
            self.counts["decode_retries"] += bool(tried)
            if await backend.reach():
                return True
            tried.append(backend)
        return False

    async def _read(self, request: Request) -> Asked:
        """What is asked. Long bodies are looked at one at a time: each holds everybody up for some milliseconds."""
        body = bytes(await read_body(request, self._max_body_bytes))
        if len(body) <= LONG_BODY:
            return read(request.url.path, body)
        async with self._long_bodies:
            await asyncio.sleep(REST_SECONDS_A_BYTE * len(body))
            return read(request.url.path, body)

    def _headers(self, request: Request) -> dict[str, str]:
        headers = {name: value for name in self._passed_on if (value := request.headers.get(name)) is not None}
        return {"x-request-id": uuid.uuid4().hex, **headers}

    async def _whole(self, response: EngineResponse) -> Response:
        """A response that is no stream."""
        rest = None
        try:
            content, rest = await response.some(MOST_WHOLE)
        except OSError as error:
            self.counts["failures"] += 1
            raise HttpError(502, f"The engine's answer broke off: {error or type(error).__name__}.") from None
        finally:
            if rest is None:
                response.close()
        if rest is None:
            return Response(content, media_type="application/json")
        return Streamed(response, self._long(content, rest), media_type="application/json")

    async def _long(self, begun: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Raises OSError where the response breaks off, upon which the client's connection is cut."""
        try:
            yield begun
            async for piece in rest:
                yield piece
        except OSError:
            self.counts["failures"] += 1
            raise

    def _passed(self, response: EngineResponse) -> AsyncIterator[bytes]:
        """The pieces of a stream whose form has no event for one that breaks off."""
        return self._long(b"", response.pieces())

    async def _decoded(
        self, asked: Asked, beginnings: list[bytes], body: bytes, headers: Mapping[str, str]
    ) -> EngineResponse | Response:
        """The response of a decode engine, or what the last one says that refuses.

        Raises ServingError where none is up.
        """
        tried: list[Backend] = []
        refusal: Response | None = None
        while (backend := self.decode.choose(beginnings, tried)) is not None:
            self.counts["decode_retries"] += bool(tried)
            tried.append(backend)
            response = EngineResponse(backend, asked.path, body, headers, self._timeout)
            try:
                status, said = await response.begun()
            except OSError as error:
                response.close()
                backend.failed(error)
                continue
            except BaseException:
                response.close()
                raise
            backend.breaker.succeeded()
            if status == 200:
                self.decode.remember(beginnings, backend)
                return response
            response.close()
            refusal = Response(said, status, media_type="application/json")
            if status not in ELSEWHERE and not (status == 404 and asked.goes_on):
                return refusal
        self.counts["failures"] += 1
        if refusal is not None:
            return refusal
        raise ServingError("No decode engine answers. Try again later.", kind=ErrorKind.UNAVAILABLE, retry_after=2)

    async def _stream(self, response: EngineResponse) -> AsyncIterator[bytes]:
        try:
            async for piece in response.pieces():
                yield piece
        except OSError as error:
            self.counts["failures"] += 1
            said = HttpError(502, f"The engine's answer broke off: {error or type(error).__name__}.")
            yield event(error_body(said)) + event(b"[DONE]")

    async def ask_any(self, request: Request) -> Response:
        """What any decode engine says at this path."""
        for backend in self.decode.all:
            try:
                status, content = await backend.client.get(request.url.path, PROBE_SECONDS, self._headers(request))
            except OSError:
                continue
            if status not in ELSEWHERE:
                kind = "application/json" if content[:1] in (b"{", b"[") else "text/plain"
                return Response(content, status, media_type=kind)
        raise ServingError("No decode engine answers. Try again later.", kind=ErrorKind.UNAVAILABLE, retry_after=2)

    async def ask_owner(self, request: Request) -> Response:
        """What the decode engine says that knows what this path names."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        kind = "text/event-stream" if request.query_params.get("stream") == "true" else "application/json"
        refusal: Response | None = None
        for backend in self.decode.all:
            response = EngineResponse(backend, path, b"", self._headers(request), self._timeout, request.method)
            try:
                status, said = await response.begun()
            except OSError:
                response.close()
                continue
            except BaseException:
                response.close()
                raise
            if status == 200:
                return Streamed(response, self._passed(response), media_type=kind)
            response.close()
            refusal = Response(said, status, media_type="application/json")
            if status != 404 and status not in ELSEWHERE:
                return refusal
        if refusal is not None:
            return refusal
        raise ServingError("No decode engine answers. Try again later.", kind=ErrorKind.UNAVAILABLE, retry_after=2)

    async def metrics(self, request: Request) -> Response:
        """In Prometheus's format."""
        lines = []
        for name, help in COUNTERS.items():
            full = f"jaxpaged:proxy_{name}_total"
            lines += [f"# HELP {full} {help}", f"# TYPE {full} counter", f"{full} {self.counts[name]}"]
        for field, kind, help in (
            ("num_under_way", "gauge", "Requests that an engine answers now."),
            ("num_requests", "counter", "Requests that an engine got."),
            ("num_failures", "counter", "Times that an engine could not be reached."),
        ):
            full = f"jaxpaged:proxy_engine_{field.removeprefix('num_')}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
            for role, backends in (("prefill", self.prefill), ("decode", self.decode)):
                for each in backends.all:
                    lines.append(f'{full}{{role="{role}",url="{each.url}"}} {getattr(each, field)}')
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def gone(request: Request) -> None:
    """Returns when the client has left. Its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def respond_with_error(request: Request, error: Exception) -> Response:
    return error_response(as_http_error(error))


def create_app(proxy: Proxy, keys: Sequence[str] = ()) -> Starlette:
    """The application. Clients must show one of `keys`, if there are any."""
    routes = [Route(path, proxy.generate, methods=["POST"]) for path in PROMPTS | WHOLE]
    routes += [Route(path, proxy.ask_any) for path in ANY]
    routes += [
        Route("/v1/responses/{id}", proxy.ask_owner, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", proxy.ask_owner, methods=["POST"]),
        Route("/metrics", proxy.metrics),
    ]
    kinds = (ServingError, HTTPException, Exception)
    layers = [
        Middleware(Below, path=MESSAGES, layer=MessagesErrors),
        Middleware(ApiKeys, keys=keys, open_paths=OPEN_PATHS),
    ]
    return Starlette(routes=routes, middleware=layers, exception_handlers=dict.fromkeys(kinds, respond_with_error))
