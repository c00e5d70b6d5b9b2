"""Results of the engine as what `/v1/completions` answers: the whole, or the chunks of a stream.

A sequence shows text, tokens and log probabilities, and the prompt before them where it is echoed.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.token_texts import texts_of
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, Chunk, OpenAIStream, TextEvents
from jaxpaged.entrypoints.http.openai.logprobs import (
    Candidates,
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from jaxpaged.entrypoints.http.openai.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    CompletionStreamChoice,
)
from jaxpaged.entrypoints.http.openai.usage import usage_of
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.output_reader import UsageCounter
from jaxpaged.serving.service import Service

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
            if self._only_text and completion.finish_reason is None:
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
        )


def choices(
    body: CompletionRequest, style: CompletionStyle, first_index: int, output: RequestOutput, tokenizer: Tokenizer
) -> list[CompletionChoice]:
    """The sequences of one prompt."""
    shown, of_prompt = [], prompt_logprobs(output.prompt_logprobs)
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
