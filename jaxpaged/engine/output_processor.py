"""`EngineCoreOutput`s to `RequestOutput`s: text, log probabilities, stop strings, and the `n` sequences of a prompt.

A prompt with n > 1 becomes n engine requests "{i}_{request_id}"; here they become one result again.
This module knows nothing of scheduling: it sees new tokens, and whether a sequence ended.
"""

import time
from collections.abc import Iterable, Sequence

import msgspec

from jaxpaged.engine.detokenizer import make_detokenizer
from jaxpaged.engine.logprobs import SequenceLogprobs, prompt_logprob_dicts
from jaxpaged.engine.metrics import EngineMetrics, FinishedSequence
from jaxpaged.engine.tokenizer import Tokenizer
from jaxpaged.errors import RequestError
from jaxpaged.messages import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    Logprob,
    RequestMetrics,
    RequestOutput,
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
        self.first_token_time = self.last_token_time = request.arrival_time
        self._detokenizer = make_detokenizer(tokenizer, request.prompt_token_ids, params) if params.detokenize else None
        self._logprobs = (
            None if params.logprobs is None else SequenceLogprobs(tokenizer, request.prompt_token_ids, params)
        )
        self._num_taken = 0  # tokens that a DELTA output already had

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: EngineCoreOutput) -> bool:
        """Add new tokens. True when a stop string ended the sequence and the engine does not know it yet."""
        new_ids = output.new_token_ids
        ended_by_token = output.finish_reason == "stop"
        stop = None
        if self._detokenizer is not None:
            count, stop = self._detokenizer.push(new_ids, ended_by_token)
            new_ids = new_ids[:count]
        self.token_ids += new_ids
        if self._logprobs is not None:
            for line in (output.new_logprobs or ())[: len(new_ids)]:
                self._logprobs.push(line)
        if stop is not None:
            self.finish("stop", stop)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return stop is not None and output.finish_reason is None

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is not None:
            self._detokenizer.finish()

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        return self._completion("" if self._detokenizer is None else self._detokenizer.text, 0)

    def take_new(self) -> CompletionOutput:
        """What came since the last call."""
        text = "" if self._detokenizer is None else self._detokenizer.take_new_text()
        start, self._num_taken = self._num_taken, len(self.token_ids)
        return self._completion(text, start)

    def _completion(self, text: str, start: int) -> CompletionOutput:
        logprobs = self._logprobs
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            cumulative_logprob=None if logprobs is None else logprobs.cumulative,
            logprobs=None if logprobs is None else logprobs.positions[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class PromptState:
    """One prompt and its `n` sequences."""

    def __init__(self, request: EngineCoreRequest, text: str | None, sequences: Sequence[SequenceState]):
        self.request = request
        self.text = text
        self.sequences = sequences
        self.metrics = RequestMetrics(request.arrival_time)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.num_unfinished = len(sequences)
        self._preemptions = [0] * len(sequences)

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def note(self, index: int, output: EngineCoreOutput, now: float) -> None:
        """Keep what an output says about the request as a whole."""
        if output.new_token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        if index == 0:  # the others find in the cache what the first one computed
            self.num_cached_tokens = output.num_cached_tokens
        if output.num_preemptions:
            self._preemptions[index] = output.num_preemptions
            self.metrics.num_preemptions = sum(self._preemptions)
        self.error = self.error or output.error

    def output(self, changed: Iterable[int]) -> RequestOutput | None:
        """What the user sees now that the sequences `changed` have changed; None when it is not time yet."""
        kind = self.request.sampling_params.output_kind
        if kind == RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        delta = kind == RequestOutputKind.DELTA
        completions = (
            [self.sequences[index].take_new() for index in sorted(changed)]
            if delta
            else [sequence.whole() for sequence in self.sequences]
        )
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None  # once is enough
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.text,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=self.finished,
            metrics=msgspec.structs.replace(self.metrics),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


class ProcessedOutputs(msgspec.Struct):
    """Results of one step, and the engine requests that a stop string ended."""

    request_outputs: list[RequestOutput]
    ids_to_abort: list[str]


class OutputProcessor:
    """The front end's record of every prompt that is under way."""

    def __init__(self, tokenizer: Tokenizer, metrics: EngineMetrics):
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._prompts: dict[str, PromptState] = {}
        self._sequences: dict[str, tuple[PromptState, SequenceState]] = {}  # by engine request id

    def __len__(self) -> int:
        """Prompts under way."""
        return len(self._prompts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def add_request(self, request: EngineCoreRequest, text: str | None) -> list[EngineCoreRequest]:
        """Expect the results of a request; returns what the engine is to compute for it, a request per sequence.

        Raises RequestError when the id is in use.
        """
        children = fan_out(request)
        for request_id in (request.request_id, *(child.request_id for child in children)):
            if request_id in self._prompts or request_id in self._sequences:
                raise RequestError(f"a request with id {request_id!r} is under way. Use another id.", "request_id")
        sequences = [SequenceState(child, index, self._tokenizer) for index, child in enumerate(children)]
        prompt = self._prompts[request.request_id] = PromptState(request, text, sequences)
        for child, sequence in zip(children, sequences, strict=True):
            self._sequences[child.request_id] = (prompt, sequence)
        self._metrics.record_prompt(len(children))
        return children

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Turn the outputs of one engine step into what users see."""
        now = time.time()
        ids_to_abort: list[str] = []
        changed: dict[str, list[int]] = {}
        for output in outputs:
            if output.request_id not in self._sequences:  # aborted, or ended by a stop string, while under way
                continue
            prompt, sequence = self._sequences[output.request_id]
            changed.setdefault(prompt.request.request_id, []).append(sequence.index)
            if self._advance(prompt, sequence, output, now):
                ids_to_abort.append(output.request_id)
        results = [self._result(request_id, indices) for request_id, indices in changed.items()]
        return ProcessedOutputs([result for result in results if result is not None], ids_to_abort)

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[RequestOutput]]:
        """Forget prompts. Returns the engine requests to abort, and what the prompts had so far. Unknown ids pass."""
        now = time.time()
        engine_ids, results = [], []
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            running = [sequence for sequence in prompt.sequences if not sequence.finished]
            for sequence in running:
                sequence.finish("abort")
                engine_ids.append(sequence.request.request_id)
                self._forget(prompt, sequence, now)
            results.append(self._result(request_id, [sequence.index for sequence in running]))
        return engine_ids, results

    def _advance(self, prompt: PromptState, sequence: SequenceState, output: EngineCoreOutput, now: float) -> bool:
        """Give one output to its sequence. True when the engine has to be told that the sequence ended."""
        num_before = len(sequence.token_ids)
        tell_engine = sequence.push(output)
        self._record_tokens(sequence, output, num_before, now)
        if output.prompt_logprobs is not None:
            request = prompt.request
            prompt.prompt_logprobs = prompt_logprob_dicts(
                output.prompt_logprobs, self._tokenizer, request.prompt_token_ids, request.sampling_params
            )
        prompt.note(sequence.index, output, now)
        if sequence.finished:
            self._forget(prompt, sequence, now)
        return tell_engine

    def _record_tokens(self, sequence: SequenceState, output: EngineCoreOutput, num_before: int, now: float) -> None:
        num_new = len(sequence.token_ids) - num_before
        if not num_new:
            return
        self._metrics.generation_tokens += num_new
        if num_before:
            self._metrics.record_next_tokens(now - sequence.last_token_time)
        else:
            request = sequence.request
            sequence.first_token_time = now
            self._metrics.record_first_token(
                now - request.arrival_time, len(request.prompt_token_ids), output.num_cached_tokens
            )
        sequence.last_token_time = now

    def _forget(self, prompt: PromptState, sequence: SequenceState, now: float) -> None:
        """Stop expecting outputs for a sequence that ended."""
        request = sequence.request
        del self._sequences[request.request_id]
        prompt.num_unfinished -= 1
        if prompt.finished:
            prompt.metrics.finished_time = now
        self._metrics.record_finished(
            FinishedSequence(
                finish_reason=sequence.finish_reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated_tokens=len(sequence.token_ids),
                max_tokens=request.sampling_params.max_tokens,
                latency=now - request.arrival_time,
                decode_time=sequence.last_token_time - sequence.first_token_time,
            )
        )

    def _result(self, request_id: str, changed: list[int]) -> RequestOutput | None:
        prompt = self._prompts[request_id]
        if prompt.finished:
            del self._prompts[request_id]
        return prompt.output(changed)


def fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """A request per sequence. Prompt log probabilities are the same for all, so only the first computes them."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    children = []
    for index in range(params.n):
        child_params = params.child(index)
        if index:
            child_params.prompt_logprobs = None
        child_id = f"{index}_{request.request_id}"
        children.append(msgspec.structs.replace(request, request_id=child_id, sampling_params=child_params))
    return children
