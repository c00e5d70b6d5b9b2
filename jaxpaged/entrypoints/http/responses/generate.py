"""One response while it is made: results of the engine go in, events come out, and at the end it is kept.

A response in the foreground is made for the client that waits for it, and ends when that client leaves. One in the
background is made by a task of its own, and clients read it from the store.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from jaxpaged.entrypoints.http.errors import as_http_error
from jaxpaged.entrypoints.http.openai.logprobs import TokenLogprob, chat_logprobs
from jaxpaged.entrypoints.http.responses.parse import ParsedResponse
from jaxpaged.entrypoints.http.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningItem,
    ResponseUsage,
)
from jaxpaged.entrypoints.http.responses.store import ResponseStore, StoredResponse
from jaxpaged.entrypoints.http.responses.write import EventLog, ResponseWriter, TextLogprobs, by_token
from jaxpaged.entrypoints.http.transport.sending import SMALL_RESPONSE, encoded
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.generate import Numbered
from jaxpaged.serving.service import Service


class ResponseRun:
    """Makes the response that was asked for. `log` gets its events."""

    def __init__(self, service: Service, parsed: ParsedResponse, store: ResponseStore, log: EventLog):
        self._service = service
        self._parsed = parsed
        self._store = store
        self._stored = StoredResponse(parsed.response, parsed.owner, parsed.items, has_events=not log.silent)
        self._log = log
        self._writer = ResponseWriter(parsed.response, log)
        self._reader = parsed.new_reader()
        self._logprobs = TextLogprobs(parsed.reading.is_plain)
        self._begun = False
        self._num_output_tokens = 0
        self.answer_bytes = 0  # of a response that comes whole, about
        self._admission = contextlib.ExitStack()

    async def events(self, results: AsyncGenerator[Numbered]) -> AsyncGenerator[list[bytes]]:
        """Events as they come, those of a result together, for who waits for the whole or reads it from the store.

        Raises what `results` raises before its first one; a later failure is told by an event.
        """
        try:
            async with contextlib.aclosing(results):
                async for _, output in results:
                    await self._take(output)
                    yield self._log.take()
        except Exception as error:
            if not self._begun:
                raise
            self._fail(as_http_error(error))
            yield self._log.take()

    # ---- a stream in the foreground

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result. The last one ends the response, which is kept before anybody hears of that."""
        self._read(output)
        if output.outputs[0].finish_reason is not None:
            self._keep()
        return b"".join(self._log.take())

    def end(self) -> bytes:
        """Nothing: the last result has ended the response."""
        return b""

    def late_error(self, error: ServingError) -> bytes:
        """The response fails, and is kept so."""
        self._fail(error)
        return b"".join(self._log.take())

    # ---- a response in the background

    def start(self, results: AsyncGenerator[Numbered], admission: contextlib.ExitStack) -> StoredResponse:
        """Make the response in a task. `admission` is closed before anybody can see that the response has ended."""
        stored, self._admission = self._stored, admission
        self._writer.queue()
        stored.add_events(self._log.take())
        stored.is_running = True
        stored.task = asyncio.ensure_future(self._run(results))
        stored.task.add_done_callback(self._end)
        self._keep()
        return stored

    async def _run(self, results: AsyncGenerator[Numbered]) -> None:
        async with contextlib.aclosing(self.events(results)) as events:
            async for frames in events:
                self._stored.add_events(frames)

    def _end(self, task: asyncio.Task[None]) -> None:
        """A callback, since a task that is cancelled before it has begun runs none of its own code."""
        self._admission.close()
        if task.cancelled():
            self._writer.cancel()
        elif (error := task.exception()) is not None:
            self._writer.fail(as_http_error(error))
        self._stored.add_events(self._log.take())
        self._stored.end()
        self._keep()

    async def _take(self, output: RequestOutput) -> None:
        """Read a result; the last one ends the response, which is kept before anybody hears of that.

        A whole response that is large is read in a thread, since everybody else waits meanwhile. Pieces are small.
        """
        generation, size = self._parsed.generation, None
        if generation.params.output_kind is RequestOutputKind.FINAL_ONLY:
            self.answer_bytes = generation.size_of([output])
        if self.answer_bytes > SMALL_RESPONSE:
            size = await asyncio.to_thread(self._read_and_measure, output)
        else:
            self._read(output)
        if output.outputs[0].finish_reason is not None:
            self._keep(size)

    def _read_and_measure(self, output: RequestOutput) -> int:
        self._read(output)
        return self._stored.measure(encoded)

    def _read(self, output: RequestOutput) -> None:
        """Write what a result adds; before the first, that the response has begun."""
        if not self._begun:
            self._begun = True
            self._writer.begin()
        completion = output.outputs[0]
        self._num_output_tokens += len(completion.token_ids)
        for piece in [completion] if self._parsed.reading.is_plain else by_token(completion):
            part = self._reader.read(piece)
            self._writer.write(part.deltas, self._logprobs.of(part.deltas, self._entries(piece)))
        if part.finish_reason is not None:
            self._admission.close()
            self._parsed.response.kv_transfer_params = output.kv_transfer_params
            self._writer.finish(part.finish_reason, self._usage(output), self._logprobs.rest())

    def _entries(self, completion: CompletionOutput) -> list[TokenLogprob]:
        if not completion.logprobs:
            return []
        tops, tokenizer = self._parsed.response.top_logprobs, self._service.engine.input_processor.tokenizer
        return chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, tops, as_ids=False).content

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        num_input = len(output.prompt_token_ids)
        num_cached = (output.num_cached_tokens or 0) if self._service.options.enable_prompt_tokens_details else 0
        return ResponseUsage(
            num_input,
            InputTokensDetails(num_cached),
            self._num_output_tokens,
            OutputTokensDetails(self._num_thinking_tokens()),
            num_input + self._num_output_tokens,
        )

    def _num_thinking_tokens(self) -> int:
        """Counted on the text, so that it costs nothing while tokens come; at most the tokens that there were."""
        items = [item for item in self._parsed.response.output if isinstance(item, ReasoningItem)]
        count = sum(self._service.count_tokens(part.text) for item in items for part in item.content)
        return min(count, self._num_output_tokens)

    def _fail(self, error: ServingError) -> None:
        self._admission.close()
        self._writer.fail(error)
        self._keep()

    def _keep(self, size: int | None = None) -> None:
        if self._parsed.response.store:
            self._store.put(self._stored, size)
