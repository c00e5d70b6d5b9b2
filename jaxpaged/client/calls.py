"""`Client` and `AsyncClient`: the calls of `jaxpaged.proto`.

A call that the server cannot take is tried again, but never one of which anything has been received: nothing that was
streamed comes twice. This module knows how calls are made and tried again; messages are built in `messages.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from jaxpaged.client.errors import ClientError, client_error, wait_before
from jaxpaged.client.messages import Prompt, chat_message, generate_request, inputs_of
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceStub

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]


@dataclass
class Answer:
    """Everything that one sequence of a request became."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    finish_reason: str = ""
    usage: pb.Usage | None = None
    _calls: dict[int, pb.ToolCall] = field(default_factory=dict, repr=False)

    def add(self, response: pb.GenerateResponse, index: int = 0) -> None:
        """Take what a response says of sequence `index`."""
        if response.HasField("usage"):
            self.usage = response.usage
        for each in response.sequences:
            if each.index != index:
                continue
            self.text += each.text
            self.reasoning += each.reasoning
            self.token_ids += each.token_ids
            self.finish_reason = each.finish_reason or self.finish_reason
            for piece in each.tool_calls:
                self._add_call(piece)

    def _add_call(self, piece: pb.ToolCallDelta) -> None:
        call = self._calls.get(piece.index)
        if call is None:
            call = self._calls[piece.index] = pb.ToolCall()
            self.tool_calls.append(call)
        call.id, call.name = call.id or piece.id, call.name or piece.name
        call.arguments += piece.arguments


class Calls:
    """The calls that have one answer; `AsyncClient` has them to be awaited. All raise ClientError."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_certificate: str | Path | None = None,
        certificate: str | Path | None = None,
        private_key: str | Path | None = None,
        timeout: float | None = None,
        retries: int = 3,
    ):
        """`target`: "host:port" or "unix:/path". `tls`: with the certificate authorities that gRPC knows, or those of
        `ca_certificate` (PEM), which switches it on, too; `certificate` and `private_key` are the client's own.
        `timeout`: seconds for a whole call; None: any time. `retries`: how often a call is tried again that the server
        cannot take now.
        """
        self._timeout = timeout
        self._retries = retries
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._credentials = None
        if tls or ca_certificate is not None or certificate is not None:
            read = lambda path: None if path is None else Path(path).read_bytes()
            self._credentials = grpc.ssl_channel_credentials(read(ca_certificate), read(private_key), read(certificate))
        self._channel = self._open(target)
        self._stub = InferenceStub(self._channel)

    def _open(self, target: str) -> Any:
        raise NotImplementedError

    def _unary(self, method: str, request: Any) -> Any:
        raise NotImplementedError

    @property
    def _settings(self) -> dict[str, Any]:
        return {"timeout": self._timeout, "metadata": self._metadata}

    def embed(self, inputs: Sequence[str | Sequence[int]], **values: Any) -> pb.EmbedResponse:
        """A vector for every text, or list of token ids; further fields of EmbedRequest by name."""
        return self._unary("Embed", pb.EmbedRequest(inputs=inputs_of(inputs), **values))

    def score(self, queries: Sequence[str], documents: Sequence[str], **values: Any) -> pb.ScoreResponse:
        """How well documents fit one query, or each its own."""
        return self._unary("Score", pb.ScoreRequest(queries=queries, documents=documents, **values))

    def tokenize(self, prompt: str | Sequence[Any], **values: Any) -> pb.TokenizeResponse:
        """Token ids of a text or of a chat's messages."""
        kind = {"text": prompt} if isinstance(prompt, str) else {"chat": chat_message(prompt, {})}
        return self._unary("Tokenize", pb.TokenizeRequest(**kind, **values))

    def detokenize(self, token_ids: Sequence[int]) -> pb.DetokenizeResponse:
        """The text of token ids."""
        return self._unary("Detokenize", pb.DetokenizeRequest(token_ids=token_ids))

    def model_info(self) -> pb.GetModelInfoResponse:
        """The model that is served."""
        return self._unary("GetModelInfo", pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """The server's version, and what is under way."""
        return self._unary("GetServerInfo", pb.GetServerInfoRequest())

    def abort(self, *request_ids: str) -> pb.AbortResponse:
        """End requests by their ids."""
        return self._unary("Abort", pb.AbortRequest(request_ids=request_ids))


class Client(Calls):
    """A connection to a server, for threads. Close it, or use it in a `with`."""

    def _open(self, target: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, OPTIONS)
        return grpc.secure_channel(target, self._credentials, OPTIONS)

    def generate(self, prompt: Prompt, **values: Any) -> Generator[pb.GenerateResponse]:
        """Responses to a text, token ids or a chat (a list of messages) as they come.

        `values`: fields of GenerateRequest, Chat and SamplingParams by their names, such as `max_tokens=20`. Closing
        the generator ends the request. Raises ClientError, and TypeError for a name or a type that is none of these.
        """
        return self._stream(generate_request(prompt, values))

    def answer(self, prompt: Prompt, **values: Any) -> Answer:
        """The whole answer of `generate`."""
        whole = Answer()
        for response in self.generate(prompt, final_only=True, **values):
            whole.add(response)
        return whole

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _unary(self, method: str, request: Any) -> Any:
        def call() -> Any:
            return getattr(self._stub, method)(request, **self._settings)

        return self._tried(call)

    def _stream(self, request: pb.GenerateRequest) -> Generator[pb.GenerateResponse]:
        calls: list[Any] = []

        def first() -> pb.GenerateResponse | None:
            calls.append(self._stub.Generate(request, **self._settings))
            return next(calls[-1], None)

        try:
            response = self._tried(first)
            while response is not None:
                yield response
                try:
                    response = next(calls[-1], None)
                except grpc.RpcError as error:
                    raise client_error(error) from None
        finally:
            for call in calls:
                call.cancel()

    def _tried[T](self, call: Callable[[], T]) -> T:
        for attempt in range(self._retries + 1):
            try:
                return call()
            except grpc.RpcError as error:
                told = client_error(error)
                if attempt == self._retries or not told.may_pass:
                    raise told from None
                time.sleep(wait_before(attempt, told))
        raise AssertionError("the last try returns or raises")


class AsyncClient(Calls):
    """The same for asyncio: calls are awaited, and `generate` is iterated over with `async for`."""

    def _open(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, OPTIONS)
        return grpc.aio.secure_channel(target, self._credentials, OPTIONS)

    async def generate(self, prompt: Prompt, **values: Any) -> AsyncGenerator[pb.GenerateResponse]:
        """`Client.generate`."""
        request = generate_request(prompt, values)
        calls: list[Any] = []

        async def first() -> Any:
            calls.append(self._stub.Generate(request, **self._settings))
            return await calls[-1].read()

        try:
            response = await self._tried(first)
            while response is not grpc.aio.EOF:
                yield response
                try:
                    response = await calls[-1].read()
                except grpc.RpcError as error:
                    raise client_error(error) from None
        finally:
            for call in calls:
                call.cancel()

    async def answer(self, prompt: Prompt, **values: Any) -> Answer:
        """`Client.answer`."""
        whole = Answer()
        async with contextlib.aclosing(self.generate(prompt, final_only=True, **values)) as responses:
            async for response in responses:
                whole.add(response)
        return whole

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _unary(self, method: str, request: Any) -> Any:
        async def call() -> Any:
            return await getattr(self._stub, method)(request, **self._settings)

        return await self._tried(call)

    async def _tried(self, call: Callable[[], Any]) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return await call()
            except grpc.RpcError as error:
                told: ClientError = client_error(error)
                if attempt == self._retries or not told.may_pass:
                    raise told from None
                await asyncio.sleep(wait_before(attempt, told))
        raise AssertionError("the last try returns or raises")
