"""The proxy as a web application: completions and chats of OpenAI's API, sent on to engines, and its own metrics.

An engine that cannot be reached, or says that it is too busy or broken, is passed by for another one as long as nothing
of its answer was given to the client. Without a prefill engine that answers, decode engines compute prompts too.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jaxpaged.entrypoints.http.body import read_body
from jaxpaged.entrypoints.http.errors import HttpError, as_http_error, error_body, error_response
from jaxpaged.entrypoints.http.transport.sse import event
from jaxpaged.entrypoints.proxy.backends import Backend, Backends, beginnings_of
from jaxpaged.entrypoints.proxy.handing_over import PROMPTS, Asked, for_decode, for_prefill, params_in, read

MAX_BODY_BYTES = 16 << 20
PASSED_ON = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers that engines get as the client sent them."""
ELSEWHERE = (429, 500, 502, 503, 504)
"""Answers after which another engine is asked."""
PROBE_SECONDS = 5.0
COUNTERS = {
    "requests": "Completions and chats that came.",
    "handed_over": "Requests whose prompt a prefill engine computed.",
    "prefill_failures": "Times that a prefill engine did not compute a prompt.",
    "decode_retries": "Times that another decode engine was asked.",
    "failures": "Requests that no decode engine answered, or whose stream broke off.",
}


class Answer:
    """What an engine says, as it comes: `begun` tells whether it is a good one."""

    def __init__(self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], timeout: float):
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._first: bytes | None = None
        self._backend = backend
        backend.num_under_way += 1
        backend.num_requests += 1
        sink = lambda data, now: self._pieces.put_nowait(data)
        self._asking = asyncio.create_task(backend.client.post(path, body, sink, headers, timeout))
        self._asking.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._backend.num_under_way -= 1  # also where a client left before anybody looked at the answer
        self._pieces.put_nowait(None)

    async def begun(self) -> tuple[int, bytes]:
        """(200, nothing) once a good answer begins, otherwise the status and what a bad one says. Raises OSError."""
        self._first = await self._pieces.get()
        if self._first is not None:
            return 200, b""
        return await self._asking

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer. Raises OSError where it breaks off."""
        piece = self._first
        while piece is not None:
            yield piece
            piece = await self._pieces.get()
        await self._asking

    def close(self) -> None:
        """Nothing more of it is wanted."""
        self._asking.cancel()


class Proxy:
    """`least` tokens of a prompt, about, are worth a prefill engine. An answer may take `timeout` seconds."""

    def __init__(self, prefill: Backends, decode: Backends, *, least: int, timeout: float):
        self.prefill, self.decode, self._least, self._timeout = prefill, decode, least, timeout
        self.counts: Counter[str] = Counter()

    async def generate(self, request: Request) -> Response:
        """A completion or chat."""
        asked = read(request.url.path, bytes(await read_body(request, MAX_BODY_BYTES)))
        headers = {name: value for name in PASSED_ON if (value := request.headers.get(name)) is not None}
        headers.setdefault("x-request-id", uuid.uuid4().hex)
        self.counts["requests"] += 1
        beginnings, params = beginnings_of(asked.prompt), None
        if asked.may_be_split and asked.num_tokens >= self._least:
            params = await self._computed(asked, beginnings, headers)
        answer = await self._decoded(asked, beginnings, for_decode(asked, params), headers)
        if isinstance(answer, Response):
            return answer
        if asked.is_stream:
            return StreamingResponse(self._stream(answer), media_type="text/event-stream")
        try:
            return Response(b"".join([piece async for piece in answer.pieces()]), media_type="application/json")
        except OSError as error:
            self.counts["failures"] += 1
            raise HttpError(502, f"The engine's answer broke off: {error or type(error).__name__}.") from None
        finally:
            answer.close()

    async def _computed(self, asked: Asked, beginnings: list[bytes], headers: Mapping[str, str]) -> dict | None:
        """Have a prefill engine compute the prompt: what it says of that, None where none did."""
        tried: list[Backend] = []
        while (backend := self.prefill.choose(beginnings, tried)) is not None:
            tried.append(backend)
            answer = Answer(backend, asked.path, for_prefill(asked), headers, self._timeout)
            try:
                status, _ = await answer.begun()
                content = b"".join([piece async for piece in answer.pieces()]) if status == 200 else b""
                backend.breaker.succeeded()
            except OSError as error:
                self._failed(backend, error)
                status, content = 0, b""
            finally:
                answer.close()
            if status == 200:
                self.prefill.remember(beginnings, backend)
                params = params_in(content)
                self.counts["handed_over"] += params is not None
                return params
            self.counts["prefill_failures"] += 1
            if status and status not in ELSEWHERE:
                return None  # a decode engine says what is wrong with it
        return None

    async def _decoded(
        self, asked: Asked, beginnings: list[bytes], body: bytes, headers: Mapping[str, str]
    ) -> Answer | Response:
        """The answer of a decode engine, or what the last one says that refuses. Raises HttpError where none is up."""
        tried: list[Backend] = []
        refusal: Response | None = None
        while (backend := self.decode.choose(beginnings, tried)) is not None:
            self.counts["decode_retries"] += bool(tried)
            tried.append(backend)
            answer = Answer(backend, asked.path, body, headers, self._timeout)
            try:
                status, said = await answer.begun()
            except OSError as error:
                answer.close()
                self._failed(backend, error)
                continue
            except BaseException:
                answer.close()
                raise
            backend.breaker.succeeded()
            if status == 200:
                self.decode.remember(beginnings, backend)
                return answer
            answer.close()
            refusal = Response(said, status, media_type="application/json")
            if status not in ELSEWHERE:
                return refusal
        self.counts["failures"] += 1
        if refusal is not None:
            return refusal
        raise HttpError(503, "No decode engine answers. Try again later.", headers={"Retry-After": "2"})

    def _failed(self, backend: Backend, error: OSError) -> None:
        backend.num_failures += 1
        backend.breaker.failed(str(error) or type(error).__name__)

    async def _stream(self, answer: Answer) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.pieces():
                yield piece
        except OSError as error:
            self.counts["failures"] += 1
            said = HttpError(502, f"The engine's answer broke off: {error or type(error).__name__}.")
            yield event(error_body(said)) + event(b"[DONE]")
        finally:
            answer.close()

    async def ask_any(self, request: Request) -> Response:
        """What any decode engine says at this path."""
        for backend in self.decode.all:
            try:
                status, content = await backend.client.get(request.url.path, PROBE_SECONDS)
            except OSError:
                continue
            if status == 200:
                kind = "application/json" if content[:1] in (b"{", b"[") else "text/plain"
                return Response(content, media_type=kind)
        raise HttpError(503, "No decode engine answers. Try again later.")

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


async def answer_with_error(request: Request, error: Exception) -> Response:
    return error_response(as_http_error(error))


def create_app(proxy: Proxy) -> Starlette:
    """The application."""
    routes = [Route(path, proxy.generate, methods=["POST"]) for path in PROMPTS]
    routes += [Route(path, proxy.ask_any) for path in ("/v1/models", "/health", "/ready", "/version")]
    routes.append(Route("/metrics", proxy.metrics))
    kinds = (HttpError, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, answer_with_error))
