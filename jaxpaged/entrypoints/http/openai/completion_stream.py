"""Chunks of a streamed completion."""

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.entrypoints.http.openai.completion_protocol import CompletionStreamChoice
from jaxpaged.entrypoints.http.openai.completion_text import CompletionStyle, SequenceText, Shown
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, Chunk, ChunkWriter, TextEvents
from jaxpaged.entrypoints.http.openai.fields import UsageOptions
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.messages import CompletionOutput, RequestOutput


class CompletionStream:
    """Turns results of prompts, each with `n` sequences, into events."""

    def __init__(
        self,
        request_id: str,
        model: str,
        style: CompletionStyle,
        tokenizer: Tokenizer,
        usage: UsageOptions,
        counter: UsageCounter,
        *,
        n: int,
        with_ids: bool,
    ):
        self._chunks = ChunkWriter(Chunk, "text_completion", request_id, model, usage, counter)
        self._style = style
        self._counter = counter
        self._n = n
        self._with_ids = with_ids
        self._only_text = not (style.logprobs or style.echo or with_ids or usage.in_every_chunk)
        self._text_events: dict[int, TextEvents] = {}  # of sequences that have begun, if text is all there is
        self._sequences: dict[int, SequenceText] = defaultdict(lambda: SequenceText(style, tokenizer))

    def of(self, number: int, output: RequestOutput) -> Iterator[bytes]:
        """Events of a new result of prompt `number`: one for every sequence that has something new."""
        self._counter.add(number, output, self._style.num_dropped(output) if self._style.only_echo else 0)
        for completion in output.outputs:
            index = number * self._n + completion.index
            if self._only_text and completion.finish_reason is None:
                if completion.text or completion.token_ids:
                    yield self._text_event(index, completion.text)
                continue
            first = index not in self._sequences
            shown = self._sequences[index].show(output, completion)
            if shown.text or shown.token_ids or completion.finish_reason is not None:
                yield self._chunks.chunk(self._choice(index, shown, output, completion, first))

    def _text_event(self, index: int, text: str) -> bytes:
        events = self._text_events.get(index)
        if events is None:
            choice = CompletionStreamChoice(index=index, text=PLACEHOLDER, logprobs=None, finish_reason=None)
            events = self._text_events[index] = TextEvents(self._chunks.chunk(choice))
        return events.of(text)

    def last(self) -> bytes:
        """The event with the usage of the whole request."""
        return self._chunks.last()

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
