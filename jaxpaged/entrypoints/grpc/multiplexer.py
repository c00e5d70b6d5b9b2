"""Many requests on one stream of messages: `GenerateStream`.

Every request is a task; what they have to say goes through one queue of a few messages. A client that reads slowly
fills it, and then the tasks wait: the engine goes on, and joins what is new of each sequence into one result meanwhile.
So a slow client costs memory for its texts alone, and holds up nobody else.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from jaxpaged.entrypoints.grpc.answers import Responses
from jaxpaged.entrypoints.grpc.errors import told
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.generation import GenerationRequest
from jaxpaged.proto import jaxpaged_pb2 as pb

MAX_OPEN = 1024
"""Requests under way on one stream."""
QUEUE_LENGTH = 16


class Generator(Protocol):
    """Who answers one request; see `inference.Inference`."""

    async def prepared(self, request: pb.GenerateRequest, caller: str) -> tuple[GenerationRequest, Responses]: ...

    def generated(self, generation: GenerationRequest, responses: Responses) -> AsyncGenerator[pb.GenerateResponse]: ...

    async def abort(self, generation: GenerationRequest) -> None: ...


class Call:
    """A request under way."""

    def __init__(self) -> None:
        self.task: asyncio.Task | None = None
        self.generation: GenerationRequest | None = None  # None: it is being prepared
        self.aborted = False


class Multiplexer:
    """One stream, of one caller."""

    def __init__(self, generator: Generator, caller: str):
        self._generator = generator
        self._caller = caller
        self._calls: dict[str, Call] = {}
        self._queue: asyncio.Queue[pb.GenerateStreamResponse | Exception | None] = asyncio.Queue(QUEUE_LENGTH)

    async def responses(
        self, given: AsyncIterator[pb.GenerateStreamRequest]
    ) -> AsyncGenerator[pb.GenerateStreamResponse]:
        """What all requests say, until the client has closed its side and all are done. Raises what reading raises."""
        reading = asyncio.ensure_future(self._read(given))
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            tasks = [reading, *(call.task for call in self._calls.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, given: AsyncIterator[pb.GenerateStreamRequest]) -> None:
        last: Exception | None = None
        try:
            async for message in given:
                await self._take(message)
        except Exception as error:
            last = error
        else:
            await asyncio.gather(*(call.task for call in self._calls.values()))
        await self._queue.put(last)

    async def _take(self, message: pb.GenerateStreamRequest) -> None:
        match message.WhichOneof("action"):
            case "generate":
                await self._begin(message.generate)
            case "abort":
                await self._abort(message.abort)
            case _:
                raise HttpError(400, "a message has neither generate nor abort. Give one of them.", "generate")

    async def _begin(self, request: pb.GenerateRequest) -> None:
        request_id = request.request_id
        if not request_id:
            raise HttpError(400, "request_id is missing, so nobody could tell its answer. Give one.", "request_id")
        if request_id in self._calls:
            raise HttpError(400, f"request_id {request_id!r} is in use on this stream. Choose another.", "request_id")
        if len(self._calls) >= MAX_OPEN:
            await self._put_error(request_id, HttpError(
                429, f"{MAX_OPEN} requests are under way on this stream. Wait until one is done.",
                headers={"Retry-After": "1"},
            ))  # fmt: skip
            return
        call = self._calls[request_id] = Call()
        call.task = asyncio.ensure_future(self._run(request, call))

    async def _abort(self, request_id: str) -> None:
        """Unknown ids pass: the request may have ended meanwhile."""
        call = self._calls.get(request_id)
        if call is not None:
            call.aborted = True
            if call.generation is not None:
                await self._generator.abort(call.generation)

    async def _run(self, request: pb.GenerateRequest, call: Call) -> None:
        request_id = request.request_id
        try:
            generation, responses = await self._generator.prepared(request, self._caller)
            if call.aborted:
                sequences = [pb.SequenceDelta(index=i, finish_reason="abort") for i in range(generation.params.n)]
                await self._put(request_id, pb.GenerateResponse(request_id=request_id, sequences=sequences))
            else:
                call.generation = generation
                async for response in self._generator.generated(generation, responses):
                    await self._put(request_id, response)
        except Exception as error:
            del self._calls[request_id]
            await self._put_error(request_id, error)
        else:
            del self._calls[request_id]
            await self._queue.put(pb.GenerateStreamResponse(request_id=request_id, done=pb.Done()))

    async def _put(self, request_id: str, response: pb.GenerateResponse) -> None:
        await self._queue.put(pb.GenerateStreamResponse(request_id=request_id, response=response))

    async def _put_error(self, request_id: str, error: Exception) -> None:
        await self._queue.put(pb.GenerateStreamResponse(request_id=request_id, error=told(error)[1]))
