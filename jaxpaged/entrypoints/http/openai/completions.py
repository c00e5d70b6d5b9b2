"""`/v1/completions`: its body as what the engine is to do, and results as the whole or the chunks of a stream.

What this API cannot do is refused by its field. A sequence shows text, tokens and log probabilities, and the prompt
before them where it is echoed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.token_texts import texts_of
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, Chunk, OpenAIStream, TextEvents
from jaxpaged.entrypoints.http.openai.fields import (
    beam_params,
    check_fields,
    check_given,
    sampling_params,
    shape_name,
    shape_of,
)
from jaxpaged.entrypoints.http.openai.logprobs import (
    Candidates,
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from jaxpaged.entrypoints.http.openai.protocol import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    CompletionStreamChoice,
    told_to_trainers,
    usage_of,
)
from jaxpaged.entrypoints.http.respond import Parsed, Stages, respond
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.generate import GenerateRequest, TextPrompts, check_logprobs, prepare
from jaxpaged.serving.output_reader import UsageCounter
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

MAX_PROMPTS = 1024


def parse(service: Service, body: CompletionRequest, context: RequestContext) -> Parsed[CompletionRequest]:
    """Raises ServingError and RequestError for what cannot be."""
    check(body)
    params, given = params_of(service, body), prompts_of(body.prompt)
    if body.kv_transfer_params and len(given) > 1:
        raise ServingError(
            f"kv_transfer_params is given with {len(given)} prompts; it is about one.", "kv_transfer_params"
        )
    beams = beam_params(body, params.max_tokens)
    texts = TextPrompts(given, body.truncation, body.add_special_tokens is not False, body.cache_salt, shape_of(body))
    request = GenerateRequest(
        prompt=texts,
        params=params,
        beams=beams,
        priority=body.priority or 0,
        names=shape_name(body),
        repeats_prompt=bool(body.echo or body.return_token_ids),
    )
    return Parsed(body, context.model, prepare(service, request, context).generation)


def params_of(service: Service, body: CompletionRequest) -> SamplingParams:
    """With an echo, log probabilities are those of the prompt too; the engine computes at least one token."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1
    defaults = service.engine.input_processor.defaults.sampling
    params = sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs, params.skip_reading_prefix_cache = body.logprobs, True
    return params


def check(body: CompletionRequest) -> None:
    """Raise ServingError for what this API cannot do."""
    check_fields(body)
    check_given(body, "prompt")
    if body.use_beam_search and body.echo and body.logprobs is not None:
        raise ServingError(
            "echo and logprobs are given, but beam search has no log probabilities of the prompt. Leave one out.",
            "echo",
        )
    if body.suffix:
        raise ServingError("suffix is given, but the model does not fill in the middle. Leave it out.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ServingError(
            f"best_of is {body.best_of} and n is {body.n or 1}, but all sequences are returned. Leave it out.",
            "best_of",
        )
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ServingError(
            f"n is {body.n}, but a stream with echo and logprobs has one sequence. Set stream to false.", "n"
        )
    check_logprobs("logprobs", body.logprobs)


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each as text or token ids. Raises ServingError for a mixture and for too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ServingError("prompt is an empty list. Give at least one prompt.", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise ServingError("prompt mixes texts, ids and lists of ids. Give a list of one kind.", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise ServingError(f"prompt has {len(prompt)} prompts; one request may have {MAX_PROMPTS}.", "prompt")
    return prompt


COLUMNS = CompletionLogprobs.__struct_fields__


def answer(service: Service, parsed: Parsed[CompletionRequest], outputs: Sequence[RequestOutput]) -> CompletionResponse:
    """The whole of it: `outputs` are the last results of all prompts."""
    body, tokenizer = parsed.body, service.engine.input_processor.tokenizer
    style, usage = style_of(parsed), UsageCounter(service.options.enable_prompt_tokens_details)
    all_choices = []
    for number, output in enumerate(outputs):
        usage.add(number, output, num_dropped=style.num_dropped(output))
        all_choices += choices(body, style, number * (body.n or 1), output, tokenizer)
    return CompletionResponse(
        id=parsed.generation.request_id,
        created=int(time.time()),
        model=parsed.model,
        choices=all_choices,
        usage=usage_of(usage),
        kv_transfer_params=outputs[0].kv_transfer_params if len(outputs) == 1 else None,
    )


@dataclass(frozen=True)
class CompletionStyle:
    """What the request wants to see. `only_echo`: the prompt and nothing of what the engine had to compute."""

    params: SamplingParams
    logprobs: bool
    echo: bool
    only_echo: bool
    as_token_ids: bool

    def num_dropped(self, output: RequestOutput) -> int:
        """Tokens of a result that the client does not get."""
        return sum(len(each.token_ids) for each in output.outputs) if self.only_echo else 0


@dataclass(frozen=True)
class Shown:
    """A piece of one sequence as the client sees it."""

    text: str
    token_ids: Sequence[int]
    logprobs: CompletionLogprobs | None


class SequenceText:
    """One sequence of a completion; pieces come in order, and the first one has the echo."""

    def __init__(self, style: CompletionStyle, tokenizer: Tokenizer):
        self._style = style
        self._tokenizer = tokenizer
        self._offset = 0  # characters shown so far
        self._begun = False

    def show(self, output: RequestOutput, completion: CompletionOutput) -> Shown:
        """The next piece, or the whole of a final result."""
        style, parts = self._style, []
        if style.echo and not self._begun:
            parts.append(self._prompt(output))
        if not style.only_echo:
            parts.append(self._generated(completion))
        self._begun = True
        return parts[0] if len(parts) == 1 else joined(parts)

    def _prompt(self, output: RequestOutput) -> Shown:
        """The text is that which was given; ids are turned into text. Special tokens may or may not stand in it."""
        ids, style, logprobs = output.prompt_token_ids, self._style, None
        skips = style.params.skip_special_tokens or output.prompt is not None
        texts = texts_of(self._tokenizer, ids, skips) if style.logprobs or output.prompt is None else []
        text = output.prompt
        if text is None:
            left_out = self._tokenizer.special_ids if skips else ()
            text = "".join(text for token_id, text in zip(ids, texts) if token_id not in left_out)
        if style.logprobs:
            positions = output.prompt_logprobs or [None] * len(ids)
            logprobs = self._logprobs(ids, positions, texts, lambda name: text.startswith(name, self._offset))
        self._offset = len(text)
        return Shown(text, ids, logprobs)

    def _generated(self, completion: CompletionOutput) -> Shown:
        ids, positions = completion.token_ids, completion.logprobs or ()
        logprobs = None
        if self._style.logprobs:
            texts = [candidates[i].decoded_token or "" for i, candidates in zip(ids, positions)]
            logprobs = self._logprobs(ids, positions, texts, lambda name: not self._style.params.skip_special_tokens)
        return Shown(completion.text, ids, logprobs)

    def _logprobs(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Candidates | None],
        texts: Sequence[str],
        is_written: Callable[[str], bool],
    ) -> CompletionLogprobs:
        """`is_written` says whether a special token of some name, which is the next, stands in the text."""
        offsets = []
        for token_id, text in zip(token_ids, texts):
            offsets.append(self._offset)
            if token_id not in self._tokenizer.special_ids or is_written(text):
                self._offset += len(text)
        as_ids = self._style.as_token_ids
        return completion_logprobs(self._tokenizer, token_ids, positions, texts, offsets, as_ids)


def joined(parts: Sequence[Shown]) -> Shown:
    """Several pieces as one."""
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    columns = [[value for each in logprobs for value in getattr(each, name)] for name in COLUMNS]
    return Shown(
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        CompletionLogprobs(*columns) if logprobs else None,
    )


class CompletionStream(OpenAIStream):
    """Writes the chunks of a stream: results of prompts, each with `n` sequences."""

    def __init__(self, service: Service, parsed: Parsed[CompletionRequest]):
        super().__init__(service, parsed, Chunk, "text_completion")
        self._style = style = style_of(parsed)
        self._n = parsed.generation.params.n
        self._with_ids = bool(parsed.body.return_token_ids)
        self._only_text = not (style.logprobs or style.echo or self._with_ids or self._usage.in_every_chunk)
        self._text_events: dict[int, TextEvents] = {}  # of sequences that have begun, if text is all there is
        tokenizer = service.engine.input_processor.tokenizer
        self._sequences: dict[int, SequenceText] = defaultdict(lambda: SequenceText(style, tokenizer))

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result of prompt `number`: one for every sequence that has something new."""
        self._counter.add(number, output, self._style.num_dropped(output) if self._style.only_echo else 0)
        events = self.lent(output)
        for completion in output.outputs:
            index = number * self._n + completion.index
            if self._only_text and completion.finish_reason is None and completion.sampling_mask is None:
                if completion.text or completion.token_ids:
                    events += self._text_event(index, completion.text)
                continue
            first = index not in self._sequences
            shown = self._sequences[index].show(output, completion)
            if shown.text or shown.token_ids or completion.finish_reason is not None:
                events += self._chunks.chunk(self._choice(index, shown, output, completion, first))
        return events

    def _text_event(self, index: int, text: str) -> bytes:
        events = self._text_events.get(index)
        if events is None:
            choice = CompletionStreamChoice(index=index, text=PLACEHOLDER, logprobs=None, finish_reason=None)
            events = self._text_events[index] = TextEvents(self._chunks.chunk(choice))
        return events.of(text)

    def _choice(
        self, index: int, shown: Shown, output: RequestOutput, completion: CompletionOutput, first: bool
    ) -> CompletionStreamChoice:
        finish_reason = completion.finish_reason
        ended = finish_reason is not None
        only_echo = self._style.only_echo
        return CompletionStreamChoice(
            index=index,
            text=shown.text,
            logprobs=shown.logprobs,
            finish_reason="length" if ended and only_echo else finish_reason,
            stop_reason=completion.stop_reason if ended and not only_echo else msgspec.UNSET,
            token_ids=list(completion.token_ids) if self._with_ids else None,
            prompt_token_ids=output.prompt_token_ids if self._with_ids and first else None,
            **told_to_trainers(completion),
        )


def choices(
    body: CompletionRequest, style: CompletionStyle, first_index: int, output: RequestOutput, tokenizer: Tokenizer
) -> list[CompletionChoice]:
    """The sequences of one prompt."""
    shown = []
    of_prompt = None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)
    for each in output.outputs:
        piece = SequenceText(style, tokenizer).show(output, each)
        shown.append(
            CompletionChoice(
                index=first_index + each.index,
                text=piece.text,
                logprobs=piece.logprobs,
                finish_reason="length" if style.only_echo else each.finish_reason,
                stop_reason=None if style.only_echo else each.stop_reason,
                token_ids=list(each.token_ids) if body.return_token_ids else None,
                prompt_logprobs=of_prompt,
                prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
                **told_to_trainers(each),
            )
        )
    return shown


def style_of(parsed: Parsed[CompletionRequest]) -> CompletionStyle:
    body = parsed.body
    return CompletionStyle(
        params=parsed.generation.params,
        logprobs=body.logprobs is not None,
        echo=bool(body.echo),
        only_echo=bool(body.echo) and body.max_tokens == 0,
        as_token_ids=bool(body.return_tokens_as_token_ids),
    )


COMPLETIONS = Stages("cmpl", CompletionRequest, parse, answer, CompletionStream)


class Completions:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def respond(self, request: Request) -> Response:
        """Continue one prompt or several, at once or as a stream."""
        return await respond(self._service, COMPLETIONS, request)
