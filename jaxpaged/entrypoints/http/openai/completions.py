"""`POST /v1/completions`: continue texts or token ids."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.auth import client_of
from jaxpaged.entrypoints.http.beams import collect_or_search
from jaxpaged.entrypoints.http.big_answer import answer_of
from jaxpaged.entrypoints.http.body import off_loop, read_struct
from jaxpaged.entrypoints.http.errors import HttpError, client_names
from jaxpaged.entrypoints.http.generation import GenerationRequest, stream
from jaxpaged.entrypoints.http.openai.beam_fields import beam_params, check_beams
from jaxpaged.entrypoints.http.openai.completion_protocol import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from jaxpaged.entrypoints.http.openai.completion_stream import CompletionStream
from jaxpaged.entrypoints.http.openai.completion_text import CompletionStyle, SequenceText
from jaxpaged.entrypoints.http.openai.events import DONE, late_error
from jaxpaged.entrypoints.http.openai.fields import (
    check_fields,
    sampling_params,
    shape_name,
    shape_of,
    usage_options,
)
from jaxpaged.entrypoints.http.openai.logprobs import prompt_logprobs
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.entrypoints.http.prepare import CheckShape
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.messages import RequestOutput
from jaxpaged.sampling_params import SamplingParams

MAX_PROMPTS = 1024


class Completions:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def create(self, request: Request) -> Response:
        """Continue one prompt or several, at once or as a stream."""
        service = self._service
        wanted = await read_struct(request, CompletionRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        request_id = service.request_id(request, "cmpl", wanted.request_id)
        generation = await self.generation(wanted, request_id, service.check_shape_for(client_of(request)))
        if wanted.stream:
            return service.streamed(request_id, self._events(wanted, generation, model), late_error)
        return await service.answered(request, request_id, self._complete(wanted, generation, model))

    async def generation(
        self, wanted: CompletionRequest, request_id: str, check_shape: CheckShape
    ) -> GenerationRequest:
        """What the engine is asked for. Raises HttpError and RequestError 400 for what cannot be."""
        generation = await off_loop(self._generation, wanted, request_id)
        with client_names(generation.names):
            await check_shape(generation.params.structured_outputs)
        return generation

    def _generation(self, wanted: CompletionRequest, request_id: str) -> GenerationRequest:
        service = self._service
        check(wanted)
        params, given = self._params(wanted), prompts_of(wanted.prompt)
        beams = beam_params(wanted, params.max_tokens)
        service.traffic.check_num_sequences(len(given), wanted.n or 1)
        special = wanted.add_special_tokens is not False
        prompts = service.prompts.read(given, wanted.truncation, special, wanted.cache_salt)
        repeats = bool(wanted.echo or wanted.return_token_ids)
        return GenerationRequest(
            request_id, prompts, params, wanted.priority or 0, shape_name(wanted), beams, repeats_prompt=repeats
        )

    def _params(self, wanted: CompletionRequest) -> SamplingParams:
        """With an echo, log probabilities are those of the prompt too; the engine computes at least one token."""
        max_tokens = DEFAULT_MAX_TOKENS if wanted.max_tokens is None else wanted.max_tokens
        if wanted.echo and max_tokens == 0:
            max_tokens = 1
        defaults = self._service.engine.input_processor.defaults.sampling
        params = sampling_params(wanted, defaults, max_tokens=max_tokens, logprobs=wanted.logprobs)
        params.structured_outputs = shape_of(wanted)
        if wanted.echo and wanted.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs, params.skip_reading_prefix_cache = wanted.logprobs, True
        return params

    async def _complete(self, wanted: CompletionRequest, generation: GenerationRequest, model: str) -> Response:
        service = self._service
        outputs = await collect_or_search(service.engine, service.traffic, generation)
        return await answer_of(generation.size_of(outputs), lambda: self._answer(wanted, generation, model, outputs))

    def _answer(
        self, wanted: CompletionRequest, generation: GenerationRequest, model: str, outputs: Sequence[RequestOutput]
    ) -> CompletionResponse:
        style = style_of(wanted)
        usage = UsageCounter(self._service.options.enable_prompt_tokens_details)
        choices = []
        for number, output in enumerate(outputs):
            usage.add(number, output, num_dropped=style.num_dropped(output))
            choices += self._choices(wanted, style, number * (wanted.n or 1), output)
        return CompletionResponse(
            id=generation.request_id, created=int(time.time()), model=model, choices=choices, usage=usage.read()
        )

    def _choices(
        self, wanted: CompletionRequest, style: CompletionStyle, first_index: int, output: RequestOutput
    ) -> list[CompletionChoice]:
        choices, of_prompt = [], prompt_logprobs(output.prompt_logprobs)
        for each in output.outputs:
            shown = SequenceText(style, self._service.engine.input_processor.tokenizer).show(output, each)
            choices.append(
                CompletionChoice(
                    index=first_index + each.index,
                    text=shown.text,
                    logprobs=shown.logprobs,
                    finish_reason="length" if style.only_echo else each.finish_reason,
                    stop_reason=None if style.only_echo else each.stop_reason,
                    token_ids=list(each.token_ids) if wanted.return_token_ids else None,
                    prompt_logprobs=of_prompt,
                    prompt_token_ids=output.prompt_token_ids if wanted.return_token_ids else None,
                )
            )
        return choices

    async def _events(
        self, wanted: CompletionRequest, generation: GenerationRequest, model: str
    ) -> AsyncGenerator[bytes]:
        service = self._service
        usage = usage_options(wanted, service.options.enable_force_include_usage)
        counter = UsageCounter(service.options.enable_prompt_tokens_details)
        chunks = CompletionStream(
            generation.request_id, model, style_of(wanted), service.engine.input_processor.tokenizer, usage, counter,
            n=generation.params.n, with_ids=bool(wanted.return_token_ids),
        )  # fmt: skip
        async with aclosing(stream(service.engine, service.traffic, generation)) as results:
            async for number, output in results:
                for chunk in chunks.of(number, output):
                    yield chunk
        if usage.at_end:
            yield chunks.last()
        yield DONE


def check(wanted: CompletionRequest) -> None:
    """Raise HttpError 400 for what this endpoint cannot do."""
    check_fields(wanted)
    check_beams(wanted)
    if wanted.use_beam_search and wanted.echo and wanted.logprobs is not None:
        raise HttpError(
            400, "echo and logprobs are given, but beam search has no log probabilities of the prompt. Leave one out.",
            "echo",
        )  # fmt: skip
    if wanted.suffix:
        raise HttpError(400, "suffix is given, but the model does not fill in the middle. Leave it out.", "suffix")
    if wanted.best_of is not None and wanted.best_of != (wanted.n or 1):
        raise HttpError(
            400, f"best_of is {wanted.best_of} and n is {wanted.n or 1}, but all sequences are returned. Leave it out.",
            "best_of",
        )  # fmt: skip
    if wanted.stream and wanted.echo and wanted.logprobs is not None and (wanted.n or 1) > 1:
        raise HttpError(
            400, f"n is {wanted.n}, but a stream with echo and logprobs has one sequence. Set stream to false.", "n"
        )  # fmt: skip
    if wanted.logprobs is not None and wanted.logprobs < -1:
        raise HttpError(400, f"logprobs is {wanted.logprobs}; it must be at least -1, which means all.", "logprobs")


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each as text or token ids. Raises HttpError 400 for a mixture and for too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise HttpError(400, "prompt is an empty list. Give at least one prompt.", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise HttpError(400, "prompt mixes texts, ids and lists of ids. Give a list of one kind.", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise HttpError(400, f"prompt has {len(prompt)} prompts; one request may have {MAX_PROMPTS}.", "prompt")
    return prompt


def style_of(wanted: CompletionRequest) -> CompletionStyle:
    return CompletionStyle(
        logprobs=wanted.logprobs is not None,
        echo=bool(wanted.echo),
        only_echo=bool(wanted.echo) and wanted.max_tokens == 0,
        as_token_ids=bool(wanted.return_tokens_as_token_ids),
    )
