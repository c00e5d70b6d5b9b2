"""Methods of a Python object as those of a gRPC service: keys are checked, errors become statuses, calls are counted.

Which methods there are, and what they take and give, comes from the descriptor of the service. This module knows no
method by name.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from jaxpaged.engine.observability.metrics import Counter, Metric, Tally
from jaxpaged.entrypoints.grpc.errors import status_of
from jaxpaged.serving.api_keys import KeyRing, digest
from jaxpaged.serving.errors import ErrorKind, ServingError
from jaxpaged.serving.requests import CORE_HEADER, RequestContext, chosen_core, trace_in

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
CLIENT_LEFT = "CANCELLED"
MESSAGE_SECONDS = 60.0
"""Within which the request of a call must have come, where it is one."""
WRITE_SECONDS = 300.0
"""Within which a client must take a response: between so many and twice as many."""


class CallCounts:
    """How many calls ended with which status, and how long they took; named as gRPC's Prometheus libraries do."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str, str], int] = defaultdict(int)
        self._times: dict[tuple[str, str, str], Tally] = defaultdict(lambda: Tally(SECONDS))

    def add(self, method: MethodDescriptor, code: str, seconds: float) -> None:
        kind, service = kind_of(method), method.containing_service.full_name
        self._calls[kind, service, method.name, code] += 1
        self._times[kind, service, method.name].observe(seconds)

    def read(self) -> list[Metric]:
        names = ("grpc_type", "grpc_service", "grpc_method", "grpc_code")
        calls = [Counter("grpc_server_handled", dict(zip(names, key)), n) for key, n in self._calls.items()]
        times = [
            replace(tally.read("grpc_server_handling_seconds"), labels=dict(zip(names, key)))
            for key, tally in self._times.items()
        ]
        return [*calls, *times]


class Access:
    """Who may call a service. `keys` empty: everybody, or, with `closed` a reason, nobody."""

    def __init__(self, keys: Sequence[str], closed: str | None = None):
        self._ring = KeyRing(keys)
        self._closed = closed

    def caller(self, context: grpc.aio.ServicerContext) -> str:
        """Who calls, for shares of what is scarce: the key where keys are needed, else the address.

        Raises ServingError without a key, and 403 where no key would do.
        """
        if not self._ring:
            if self._closed is not None:
                raise ServingError(self._closed, kind=ErrorKind.FORBIDDEN)
            return context.peer().rpartition(":")[0]
        metadata = {name.lower(): value for name, value in context.invocation_metadata() or ()}
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else metadata.get("x-api-key", "")
        if not self._ring.admits(str(key)):
            raise ServingError(
                "The API key is missing or wrong. Send it in the metadata 'authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                kind=ErrorKind.UNAUTHENTICATED,
            )
        return digest(str(key)).hex()


def handlers(
    service: ServiceDescriptor, implementation: object, access: Access, counts: CallCounts, traced: bool = False
) -> grpc.GenericRpcHandler:
    """The methods of `service`, each answered by the method of that name of `implementation`. `traced`: calls may be
    part of a trace."""
    made = {
        each.name: handler(each, getattr(implementation, each.name), access, counts, traced) for each in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, made)


def handler(
    method: MethodDescriptor, function: Callable[..., Any], access: Access, counts: CallCounts, traced: bool
) -> grpc.RpcMethodHandler:
    """`function(request, context)` gives a message or, for a method that streams, an asynchronous generator of messages
    in bytes; a method whose requests are a stream gets their iterator.

    To grpcio the requests of every method are a stream: so who may not call is told before anything is read, and what
    does not come, or is not taken, holds the call only for so long.
    """
    kind, asked = kind_of(method), GetMessageClass(method.input_type)

    def context_of(call: grpc.aio.ServicerContext) -> RequestContext:
        metadata = [(name, str(value)) for name, value in call.invocation_metadata() or ()]
        core = chosen_core([value for name, value in metadata if name == CORE_HEADER.lower()])
        trace = trace_in(metadata) if traced else None
        return RequestContext(access.caller(call), data_parallel_rank=core, trace=trace)

    async def unary(given: AsyncIterator[bytes], call: grpc.aio.ServicerContext) -> Any:
        async with Counted(method, counts, call):
            context = context_of(call)
            return await function(parsed(asked, await first_of(given)), context)

    async def stream(given: AsyncIterator[bytes], call: grpc.aio.ServicerContext) -> None:
        async with Counted(method, counts, call):
            context = context_of(call)
            one = kind == "server_stream"
            request = parsed(asked, await first_of(given)) if one else (parsed(asked, each) async for each in given)
            async with (
                Writing() as writing,
                contextlib.aclosing(function(request, context)) as responses,  # closed with the call
            ):
                async for response in responses:
                    writing.number += 1
                    await call.write(response)
                    writing.number += 1

    if kind == "unary":
        serializer = GetMessageClass(method.output_type).SerializeToString
        return grpc.stream_unary_rpc_method_handler(unary, response_serializer=serializer)
    return grpc.stream_stream_rpc_method_handler(stream)


async def first_of(given: AsyncIterator[bytes]) -> bytes:
    """The message of a call that has one. Raises ServingError when it does not come."""
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            async for data in given:
                return data
    except TimeoutError:
        raise ServingError(
            f"The request did not come within {MESSAGE_SECONDS:g} s. Send it faster.", kind=ErrorKind.TIMEOUT
        ) from None
    raise ServingError("The call has no request. Send one.")


class Writing:
    """Ends a call whose client has long not taken a response; it costs two additions a response.

    `number` is odd while a response is being written. Raises ServingError in the context that it is.
    """

    def __init__(self) -> None:
        self.number = 0
        self._last = 0
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> "Writing":
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(WRITE_SECONDS, self._look)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(*error)
        except TimeoutError:
            raise ServingError(
                f"No response was taken for {WRITE_SECONDS:g} s. Read them faster.", kind=ErrorKind.TIMEOUT
            ) from None

    def _look(self) -> None:
        if self.number % 2 and self.number == self._last:
            self._limit.reschedule(self._loop.time())
        else:
            self._last = self.number
            self._timer = self._loop.call_later(WRITE_SECONDS, self._look)


def parsed(kind: type[Message], data: bytes) -> Message:
    """Raises ServingError for what is no message of this kind, which grpcio would call an unknown failure."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ServingError(f"The request is no {kind.DESCRIPTOR.full_name}: {error}.") from None


class Counted:
    """Around a call: an exception of the method becomes the status of the call, and every call is counted once."""

    def __init__(self, method: MethodDescriptor, counts: CallCounts, context: grpc.aio.ServicerContext):
        self._method, self._counts, self._context = method, counts, context

    async def __aenter__(self) -> None:
        self._start = time.perf_counter()

    async def __aexit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        code = "OK"
        try:
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                code = CLIENT_LEFT
            elif error is not None:
                status, message, trailers = status_of(error)
                code = status.name
                await self._context.abort(status, message, trailers)
        finally:
            self._counts.add(self._method, code, time.perf_counter() - self._start)


def kind_of(method: MethodDescriptor) -> str:
    if method.client_streaming:
        return "bidi_stream"
    return "server_stream" if method.server_streaming else "unary"
