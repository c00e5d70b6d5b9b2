"""Many requests on one stream of messages: `GenerateStream`.

Every request is a task, which sleeps through most of its results: they are written where they arise. What there is to
say is gathered in one message until the one before is written, so a step of the engine costs one message, however many
requests it serves: writing takes longer than making a dozen events. In the gathered message a request has one response
at most; its task waits before the next. The engine goes on, and joins what is new of each sequence into one result
meanwhile. So a slow client costs memory for its texts alone, and holds up nobody else.

A message that begins no request gets an error without an id, since one with an id in use is about another request.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

from jaxpaged.entrypoints.grpc.errors import told
from jaxpaged.entrypoints.grpc.responses import Responses
from jaxpaged.entrypoints.grpc.wire_format import nested
from jaxpaged.messages import RequestOutput
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import RETRY_SECONDS, ErrorKind, ServingError
from jaxpaged.serving.generate import EngineRequest, Numbered, NumberedTaker
from jaxpaged.serving.requests import RequestContext

MAX_OPEN = 1024
"""Requests under way on one stream."""
MAX_MESSAGE_BYTES = 2**20
"""A longer message has one event only. Clients take four times as much unless told otherwise."""
MAX_SHOWN_ID = 128
"""Characters of an id that a refusal repeats."""
IDLE_SECONDS = 600.0
"""After which a stream without a request is ended: between so many and twice as many."""


class Generator(Protocol):
    """Who answers one request; see `inference.Inference`."""

    async def prepared(
        self, request: pb.GenerateRequest, context: RequestContext
    ) -> tuple[EngineRequest, Responses]: ...

    def results(self, generation: EngineRequest, take: NumberedTaker) -> AsyncGenerator[Numbered]: ...

    async def abort(self, generation: EngineRequest) -> None: ...

    async def let_go(self, request: pb.GenerateRequest) -> None: ...


class Call:
    """A request under way."""

    def __init__(self) -> None:
        self.generation: EngineRequest | None = None  # None: it is being prepared
        self.aborted = False


class Gathered:
    """What was said since the last message: events, as the fields of a message in bytes."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.taken = asyncio.Event()


class Multiplexer:
    """One stream, of one caller."""

    def __init__(self, generator: Generator, context: RequestContext):
        self._generator = generator
        self._context = context
        self._calls: dict[str, Call] = {}  # whose ids are in use
        self._tasks: set[asyncio.Task] = set()  # of these, and of those whose last words are not taken yet
        self._num_taken = 0
        self._idle = False  # when it was last looked at
        self._gathered = Gathered()
        self._news = asyncio.Event()
        self._ended = False  # nothing more will be said
        self._error: Exception | None = None  # for which the whole stream ends

    async def responses(self, given: AsyncIterator[pb.GenerateStreamRequest]) -> AsyncGenerator[bytes]:
        """What all requests say, until the client has closed its side and all are done: messages of the type
        `GenerateStreamResponse`, in bytes. Raises what reading raises."""
        reading = asyncio.ensure_future(self._read(given))
        self._look(0)
        try:
            while not self._ended:
                await self._news.wait()
                self._news.clear()
                gathered, self._gathered = self._gathered, Gathered()
                gathered.taken.set()
                for message in in_parts(gathered.events):
                    yield message
            if self._error is not None:
                raise self._error
        finally:
            self._timer.cancel()
            tasks = [reading, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self, last_taken: int) -> None:
        """End the stream if nothing was asked for since the look before, and nothing is under way."""
        if self._num_taken == last_taken and self._idle and not self._tasks:
            self._error = ServingError(
                f"The stream had no request for {IDLE_SECONDS:g} s. Open another.", kind=ErrorKind.TIMEOUT
            )
            self._ended = True
            self._news.set()
        self._idle = not self._tasks
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look, self._num_taken)

    async def _read(self, given: AsyncIterator[pb.GenerateStreamRequest]) -> None:
        try:
            async for message in given:
                await self._take(message)
        except Exception as error:
            self._error = error
        else:
            await asyncio.gather(*self._tasks)
        self._ended = True
        self._news.set()

    async def _take(self, message: pb.GenerateStreamRequest) -> None:
        self._num_taken += 1
        match message.WhichOneof("action"):
            case "generate":
                await self._begin(message.generate)
            case "abort":
                await self._abort(message.abort)
            case _:
                await self._refuse("a message has neither generate nor abort. Give one of them.", "generate")

    async def _begin(self, request: pb.GenerateRequest) -> None:
        request_id = request.request_id
        if not request_id:
            await self._refuse("request_id is missing, so nobody could tell its answer. Give one.", "request_id")
            await self._let_go(request)
            return
        if request_id in self._calls:
            shown = repr(request_id[:MAX_SHOWN_ID])
            await self._refuse(f"request_id {shown} is in use on this stream. Choose another.", "request_id")
            await self._let_go(request)
            return
        if len(self._tasks) >= MAX_OPEN:
            await self._say_last(
                request_id,
                error=told(
                    ServingError(
                        f"{MAX_OPEN} requests are under way on this stream. Wait until one is done.",
                        kind=ErrorKind.TOO_MANY,
                        retry_after=RETRY_SECONDS,
                    )
                )[1],
            )
            await self._let_go(request)
            return
        call = self._calls[request_id] = Call()
        task = asyncio.ensure_future(self._run(request, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_go(self, request: pb.GenerateRequest) -> None:
        """Give back what another engine lends for a request that does not begin."""
        if request.HasField("kv_transfer_params"):
            await self._generator.let_go(request)

    async def _refuse(self, why: str, field: str) -> None:
        """Say that a message has begun nothing."""
        await self._say_last("", error=told(ServingError(why, field))[1])

    async def _abort(self, request_id: str) -> None:
        """Unknown ids pass: the request may have ended meanwhile."""
        call = self._calls.get(request_id)
        if call is not None:
            call.aborted = True
            if call.generation is not None:
                await self._generator.abort(call.generation)

    async def _run(self, request: pb.GenerateRequest, call: Call) -> None:
        last: dict[str, pb.Done | pb.Error] = {"done": pb.Done()}
        try:
            generation, responses = await self._generator.prepared(request, self._context)
            if call.aborted:
                self._say_aborted(request.request_id, generation.params.n)
                await self._let_go(request)
            else:
                call.generation = generation
                await self._say_results(request.request_id, generation, responses)
        except Exception as error:
            last = {"error": told(error)[1]}
        del self._calls[request.request_id]
        await self._say_last(request.request_id, **last)

    async def _say_results(self, request_id: str, generation: EngineRequest, responses: Responses) -> None:
        said = None  # where the last response was written
        head = nested(1, request_id.encode())

        def take(number: int, output: RequestOutput) -> bool:
            nonlocal said
            if said is self._gathered:
                return False
            said = self._say(head, responses.of(output)) or said
            return True

        async with aclosing(self._generator.results(generation, take)) as results:
            async for number, output in results:
                while not take(number, output):
                    await self._gathered.taken.wait()

    def _say(self, head: bytes, response: bytes) -> Gathered | None:
        """Where a response was written, as an event that begins with `head`; None when it is empty."""
        if not response:
            return None
        self._gathered.events.append(nested(1, head + nested(2, response)))
        self._news.set()
        return self._gathered

    def _say_aborted(self, request_id: str, n: int) -> None:
        """That a request was aborted before it began."""
        ends = [pb.SequenceDelta(index=i, finish_reason="abort") for i in range(n)]
        response = pb.GenerateResponse(request_id=request_id, sequences=ends)
        self._say(nested(1, request_id.encode()), response.SerializeToString())

    async def _say_last(self, request_id: str, **event: pb.Done | pb.Error) -> None:
        """How a request ended. Returns when that was taken."""
        gathered = self._gathered
        last = pb.GenerateStreamEvent(request_id=request_id, **event)
        gathered.events.append(nested(1, last.SerializeToString()))
        self._news.set()
        await gathered.taken.wait()


def in_parts(events: Sequence[bytes]) -> Iterator[bytes]:
    """The events in as many messages as it takes for none to be very long; no message without events."""
    part: list[bytes] = []
    size = 0
    for event in events:
        if part and size + len(event) > MAX_MESSAGE_BYTES:
            yield b"".join(part)
            part, size = [], 0
        part.append(event)
        size += len(event)
    if part:
        yield b"".join(part)
