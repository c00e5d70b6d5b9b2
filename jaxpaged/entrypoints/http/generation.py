"""Prompts of one HTTP request through the engine: merged while they stream, or collected to the end.

This module knows neither what the prompts are nor what the results become.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxpaged.entrypoints.http.engine_client import Engine
from jaxpaged.entrypoints.http.errors import client_names, failed_request
from jaxpaged.entrypoints.http.prompts import TokenPrompt
from jaxpaged.entrypoints.http.traffic import Load, Traffic
from jaxpaged.messages import RequestOutput
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

Numbered = tuple[int, RequestOutput]
"""The number of a prompt, and a result of it."""


@dataclass(frozen=True)
class GenerationRequest:
    """What one HTTP request asks the engine for: sequences that are drawn, or with `beams` the best that are found.

    `names`: what the engine calls a field -> what the request calls it.
    """

    request_id: str
    prompts: Sequence[TokenPrompt]
    params: SamplingParams
    priority: int = 0
    names: Mapping[str, str] = MappingProxyType({})
    beams: BeamSearchParams | None = None
    unique: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def engine_id(self, number: int) -> str:
        """The engine's id of prompt `number`: no two requests have the same, whatever ids clients choose."""
        return f"{self.request_id}-{number}-{self.unique}"

    def load(self) -> Load:
        """The engine completes every beam by itself."""
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        width = 1 if self.beams is None else self.beams.beam_width
        ids = [self.engine_id(number) for number in range(len(self.prompts) * width)]
        return Load(self.request_id, ids, len(ids) * self.params.n, num_tokens)


async def stream(engine: Engine, traffic: Traffic, request: GenerationRequest) -> AsyncGenerator[Numbered]:
    """Results of all prompts as they come; closing the generator aborts those that are not done.

    Raises HttpError when there is no room or when a prompt fails, and what the engine raises.
    """
    with client_names(request.names), traffic.admitted(request.load()):
        async with contextlib.aclosing(all_results(engine, request)) as results:
            async for numbered in results:
                yield numbered


async def collect(engine: Engine, traffic: Traffic, request: GenerationRequest) -> list[RequestOutput]:
    """The last result of every prompt, in order. Raises what `stream` does."""
    with client_names(request.names), traffic.admitted(request.load()):
        return await last_results(engine, request)


async def last_results(engine: Engine, request: GenerationRequest) -> list[RequestOutput]:
    """`collect` of a request that was admitted."""
    last: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(all_results(engine, request)) as results:
        async for number, output in results:
            last[number] = output
    return [last[number] for number in range(len(request.prompts))]


def all_results(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Numbered]:
    """`stream` of a request that was admitted."""
    return results_of(engine, request, 0) if len(request.prompts) == 1 else merged(engine, request)


async def results_of(engine: Engine, request: GenerationRequest, number: int) -> AsyncGenerator[Numbered]:
    """Results of one prompt. Raises HttpError when it fails while it is computed."""
    prompt = request.prompts[number].for_engine()
    generated = engine.generate(prompt, request.params, request.engine_id(number), priority=request.priority)
    async with contextlib.aclosing(generated) as outputs:
        async for output in outputs:
            if output.error is not None or "error" in [each.finish_reason for each in output.outputs]:
                raise failed_request(output.error)
            yield number, output


async def merged(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Numbered]:
    """Results of several prompts in the order in which they come. The first failure ends them all."""
    arrived: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()

    async def read(number: int) -> None:
        try:
            async with contextlib.aclosing(results_of(engine, request, number)) as results:
                async for numbered in results:
                    arrived.put_nowait(numbered)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    readers = [asyncio.ensure_future(read(number)) for number in range(len(request.prompts))]
    try:
        num_open = len(readers)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
