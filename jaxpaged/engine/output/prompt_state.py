"""What the front end knows of a prompt under way, and of each of its `n` sequences, until they are results.

This module knows nothing of engine steps, nor of which other prompts there are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.detokenizer import StopDetokenizer, make_detokenizer
from jaxpaged.engine.output.logprobs import SequenceLogprobs
from jaxpaged.messages import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    RequestMetrics,
    RequestOutput,
    SamplingMask,
)
from jaxpaged.sampling_params import RequestOutputKind


class SequenceState:
    """One sequence while it grows: what an engine request has given so far."""

    def __init__(self, request: EngineCoreRequest, index: int, tokenizer: Tokenizer):
        params = request.sampling_params
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0
        self.times: tuple[float, float] | None = None  # when the core queued it and first scheduled it
        self.weight_spans: list[tuple[int, str]] | None = None
        self.old_kv_from: int | None = None
        self.first_token_time: float | None = None  # or of the vector
        self.last_token_time = request.arrival_time
        self.detokenizer = make_detokenizer(tokenizer, request.prompt_token_ids, params) if params.detokenize else None
        self._logprobs = (
            None if params.logprobs is None else SequenceLogprobs(tokenizer, request.prompt_token_ids, params)
        )
        # A sequence may also stop without such a token, when its grammar allows nothing more.
        self._experts: list[np.ndarray] = []
        self._masks: list[list[int]] | None = [] if params.returns_mask else None
        self._stop_ids = {*(params.stop_token_ids or ()), request.eos_token_id}
        self._interval = params.stream_interval or 1
        self._num_new = 0  # tokens that no output had
        self.num_dropped = 0  # tokens that came behind the one that completed a stop string

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: EngineCoreOutput) -> bool:
        """Add new tokens. True when a stop string ended the sequence and the engine does not know it yet."""
        last_id = output.new_token_ids[-1:]
        stop = self.extend(output, output.finish_reason == "stop" and not self._stop_ids.isdisjoint(last_id))
        if stop is not None:
            self.finish("stop", stop)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return stop is not None and output.finish_reason is None

    def extend(self, output: EngineCoreOutput, ended_by_token: bool) -> str | None:
        """Add new tokens, up to the one that completes a stop string, and return that."""
        new_ids, stop = output.new_token_ids, None
        if self.detokenizer is not None:
            count, stop = self.detokenizer.push(new_ids, ended_by_token)
            if stop is not None:
                self.num_dropped, new_ids = len(new_ids) - count, new_ids[:count]
        self.token_ids += new_ids
        self._num_new += len(new_ids)
        if output.routed_experts is not None:
            self._experts += output.routed_experts
        if self._masks is not None:
            self._masks += (output.sampling_mask or ())[: len(new_ids)]
        if self._logprobs is not None:
            for line in (output.new_logprobs or ())[: len(new_ids)]:
                self._logprobs.push(line)
            if output.processed_logprobs is not None:
                self._logprobs.processed += output.processed_logprobs[: len(new_ids)]
        return stop

    @property
    def is_plain(self) -> bool:
        """Whether tokens, but for the first and the last, bring nothing but more ids and more text, each at once."""
        only_ids = self._logprobs is None and self._masks is None and not self._experts
        return only_ids and self._interval == 1 and not isinstance(self.detokenizer, StopDetokenizer)

    @property
    def is_due(self) -> bool:
        """Whether an output shows this sequence now: its first tokens, its end, and `stream_interval` new tokens."""
        return self.finished or self._num_new >= self._interval or self._num_new == len(self.token_ids)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.detokenizer is not None:
            self.detokenizer.finish()
        if self._logprobs is not None and not isinstance(stop_reason, str):
            self._logprobs.finish()

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        self._num_new = 0
        text = "" if self.detokenizer is None else self.detokenizer.text
        return self._completion(text, self.token_ids[:], 0)

    def take_new(self) -> CompletionOutput:
        """What came since the last call."""
        text = "" if self.detokenizer is None else self.detokenizer.take_new_text()
        start = len(self.token_ids) - self._num_new
        self._num_new = 0
        return self._completion(text, self.token_ids[start:], start)

    def _completion(self, text: str, token_ids: list[int], start: int) -> CompletionOutput:
        logprobs = self._logprobs
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            None if logprobs is None else logprobs.cumulative,
            None if logprobs is None else logprobs.positions[start:],
            self.finish_reason,
            self.stop_reason,
            self.weight_spans,
            None if logprobs is None else logprobs.processed[start:] or None,
            None if self._masks is None else SamplingMask(self._masks[start:]),
            self.old_kv_from,
            self._routed_experts() if self.finished and self._experts else None,
        )

    def _routed_experts(self) -> np.ndarray:
        """Of all tokens but the last, and none behind a stop string."""
        first = self.request.sampling_params.routed_experts_prompt_start
        count = len(self.request.prompt_token_ids) + len(self.token_ids) - 1 - first
        return np.concatenate(self._experts)[:count]


class PromptState:
    """One prompt and its `n` sequences."""

    def __init__(self, request: EngineCoreRequest, text: str | None, sequences: Sequence[SequenceState]):
        self.request = request
        self.request_id = request.request_id
        self.text = text
        self._prompt_token_ids = request.prompt_token_ids
        self.sequences = sequences
        self.metrics = RequestMetrics(request.arrival_time)  # results share it: it is replaced, never changed
        self.prompt_logprobs: Any = None  # as results have them, or `LatePromptLogprobs`, from which they are read
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.trace_headers: Mapping[str, str] | None = None
        self.num_unfinished = len(sequences)
        self._by_delta = request.sampling_params.output_kind is RequestOutputKind.DELTA
        self._at_end = request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        self.only_grows = False  # its one sequence has its first token, so others bring no news of the prompt
        self._is_plain = False  # and no log probabilities, nor is a stop string looked for

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def note(self, index: int, output: EngineCoreOutput, now: float) -> None:
        """Keep what an output says about the request as a whole."""
        if output.new_token_ids and self.metrics.first_token_time is None:
            self.update_metrics(first_token_time=now)
        if index == 0:  # the others find in the cache what the first one computed
            self.num_cached_tokens = output.num_cached_tokens
        sequence = self.sequences[index]
        if output.num_preemptions != sequence.num_preemptions:
            sequence.num_preemptions = output.num_preemptions
            self.update_metrics(num_preemptions=sum(each.num_preemptions for each in self.sequences))
        self.error = self.error or output.error
        self.kv_transfer_params = self.kv_transfer_params or output.kv_transfer_params
        self.only_grows = len(self.sequences) == 1 and bool(sequence.token_ids)
        self._is_plain = self.only_grows and sequence.is_plain

    def update_metrics(self, **changes: Any) -> None:
        self.metrics = msgspec.structs.replace(self.metrics, **changes)

    def output(self, changed: Sequence[int]) -> RequestOutput | None:
        """What the user sees now that the sequences `changed` have changed; None when it is not time yet."""
        finished = not self.num_unfinished
        if self._at_end and not finished:
            return None
        due = [index for index in sorted(changed) if self.sequences[index].is_due]
        if not (due or finished):
            return None
        prompt_logprobs = self.prompt_logprobs
        if self._by_delta:
            completions = [self.sequences[index].take_new() for index in due]
            self.prompt_logprobs = None  # once is enough
        else:
            completions = [sequence.whole() for sequence in self.sequences]
        return RequestOutput(
            self.request_id,
            self.text,
            self._prompt_token_ids,
            prompt_logprobs,
            completions,
            finished,
            self.metrics,
            self.num_cached_tokens,
            self.error,
            lora_request=self.request.lora,
            kv_transfer_params=self.kv_transfer_params,
        )

    def grow(self, sequence: SequenceState, output: EngineCoreOutput) -> RequestOutput | None:
        """`push` to the only sequence of a prompt that `only_grows`, and what the user sees of it now.

        None, and the sequence finished, when a stop string ended it. By DELTA everything before was taken. This is the
        way of most tokens: it makes few calls.
        """
        if not self._is_plain:
            return self._grow_with_more(sequence, output)
        new_ids = output.new_token_ids
        sequence.token_ids.extend(new_ids)
        detokenizer, prompt_logprobs = sequence.detokenizer, None
        if self._by_delta:
            text = "" if detokenizer is None else detokenizer.push_and_take(new_ids)  # type: ignore[attr-defined]
            completion = CompletionOutput(0, text, new_ids, None, None)
        else:
            if detokenizer is not None:
                detokenizer.push(new_ids, False)
            if self._at_end:
                return None
            completion, prompt_logprobs = sequence.whole(), self.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.text,
            self._prompt_token_ids,
            prompt_logprobs,
            [completion],
            False,
            self.metrics,
            self.num_cached_tokens,
        )

    def _grow_with_more(self, sequence: SequenceState, output: EngineCoreOutput) -> RequestOutput | None:
        """The same with log probabilities, with stop strings to look for, and where several tokens come together."""
        stop = sequence.extend(output, False)
        if stop is not None:
            sequence.finish("stop", stop)
        if stop is not None or self._at_end or not sequence.is_due:
            return None
        completion = sequence.take_new() if self._by_delta else sequence.whole()
        prompt_logprobs = None if self._by_delta else self.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.text,
            self._prompt_token_ids,
            prompt_logprobs,
            [completion],
            False,
            self.metrics,
            self.num_cached_tokens,
        )


class PromptWithPictures(PromptState):
    """One whose first and last results, and those in between that are not mere growth, name its pictures."""

    def __init__(self, request: EngineCoreRequest, text: str | None, sequences: Sequence[SequenceState]):
        super().__init__(request, text, sequences)
        self._mm_hashes: dict[str, list[str]] = {}
        for feature in request.mm_features:
            self._mm_hashes.setdefault(feature.modality, []).append(feature.key.hex())

    def output(self, changed: Sequence[int]) -> RequestOutput | None:
        result = super().output(changed)
        if result is not None:
            result.mm_hashes = self._mm_hashes
        return result
