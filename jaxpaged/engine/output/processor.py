"""`EngineCoreOutput`s to `RequestOutput`s, for all prompts that are under way.

A prompt with n > 1 becomes n engine requests "{i}_{request_id}"; here they become one result again.
This module knows nothing of scheduling: it sees new tokens, and whether a sequence ended.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.observability.metrics import EngineMetrics, FinishedSequence
from jaxpaged.engine.observability.tracing import RequestTracer, checked_headers
from jaxpaged.engine.output.logprobs import LatePromptLogprobs, prompt_logprob_dicts
from jaxpaged.engine.output.prompt_state import PromptState, PromptWithPictures, SequenceState
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.state import PooledPrompt, PooledSequence
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreOutput, EngineCoreRequest, RequestOutput


class ProcessedOutputs(msgspec.Struct):
    """Results of one step, and the engine requests that a stop string ended."""

    request_outputs: list[RequestOutput]
    ids_to_abort: list[str]
    num_tokens: int  # of prompts and outputs


class OutputProcessor:
    """The front end's record of every prompt that is under way."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        pooler: Pooler | None = None,
        tracer: RequestTracer | None = None,
        *,
        late: bool = False,
    ):
        """`pooler` is there when the engine is for pooling, `tracer` when prompts are traced. `late`: who gets a result
        makes its prompt log probabilities by `LatePromptLogprobs.read`, where that holds up nobody."""
        self._prompt_logprobs = LatePromptLogprobs if late else prompt_logprob_dicts
        self._tokenizer = tokenizer
        self._pooler = pooler
        self._metrics = metrics
        self._tracer = tracer
        if tracer is not None:
            metrics.spans_lost = tracer.num_lost
        self._prompts: dict[str, PromptState] = {}
        self._sequences: dict[str, tuple[PromptState, SequenceState]] = {}  # by engine request id
        self._last_time = 0.0  # of the last step

    def __len__(self) -> int:
        """Prompts under way."""
        return len(self._prompts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    @property
    def num_sequences(self) -> int:
        """Sequences under way."""
        return len(self._sequences)

    def add_request(
        self,
        request: EngineCoreRequest,
        text: str | None,
        engine_id: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[EngineCoreRequest]:
        """Expect the results of a request; returns what the engine is to compute for it, a request per sequence.

        `engine_id` is what the engine is to call it, if that is not the request's own id; `trace_headers` put its spans
        into a trace. Raises RequestError for headers that cannot be used, and when the id is in use.
        """
        children = fan_out(request, request.request_id if engine_id is None else engine_id)
        self.register(self.state_of(request, text, children), children, trace_headers)
        return children

    def register(
        self, prompt: PromptState, children: Sequence[EngineCoreRequest], trace_headers: Mapping[str, str] | None = None
    ) -> None:
        """Expect the results of a request whose state is known. Raises RequestError as `add_request` does."""
        if trace_headers is not None:
            prompt.trace_headers = checked_headers(trace_headers, self._tracer)
        for request_id in (prompt.request_id, *(child.request_id for child in children)):
            if request_id in self._prompts or request_id in self._sequences:
                raise id_in_use(request_id)
        self._prompts[prompt.request_id] = prompt
        for child, sequence in zip(children, prompt.sequences, strict=True):
            self._sequences[child.request_id] = (prompt, sequence)

    def state_of(
        self, request: EngineCoreRequest, text: str | None, children: Sequence[EngineCoreRequest]
    ) -> PromptState:
        """What is known of a request before it has results. Any thread may make it."""
        if request.pooling_params is not None:
            assert self._pooler is not None, "input processors without a pooler refuse such requests"
            return PooledPrompt(request, text, [PooledSequence(children[0], 0, self._tokenizer)], self._pooler)
        kind = PromptWithPictures if request.mm_features else PromptState
        return kind(request, text, [SequenceState(each, i, self._tokenizer) for i, each in enumerate(children)])

    def shutdown(self) -> None:
        """Send the spans that are left; prompts under way get none."""
        if self._tracer is not None:
            self._tracer.shutdown()

    def prompt_of(self, engine_id: str) -> str | None:
        """The prompt's request id of an engine request; None when it has ended."""
        found = self._sequences.get(engine_id)
        return None if found is None else found[0].request_id

    def is_unfinished(self, engine_id: str) -> bool:
        """Whether more is expected of an engine request."""
        return engine_id in self._sequences

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Turn the outputs of one engine step, at most one of each engine request, into what users see.

        Most of them bring tokens to a prompt that only grows, and there the time counts: see `PromptState.grow`.
        """
        now, find, num_before = time.time(), self._sequences.get, self._metrics.num_tokens
        results: list[RequestOutput] = []
        ids_to_abort: list[str] = []
        changed: dict[PromptState, list[int]] = {}
        last_time, num_usual, num_tokens = self._last_time, 0, 0
        for output in outputs:
            found = find(output.request_id)
            if found is None:  # aborted, or ended by a stop string
                continue
            prompt, sequence = found
            goes_on = output.finish_reason is None and output.num_preemptions == sequence.num_preemptions
            goes_on = goes_on and output.weight_spans is None
            if goes_on and prompt.only_grows and (not changed or prompt not in changed):
                num_new = len(output.new_token_ids)
                result = prompt.grow(sequence, output)
                if result is None and sequence.finish_reason is not None:  # by a stop string
                    num_new -= sequence.num_dropped
                num_tokens += num_new
                if num_new == 1 and sequence.last_token_time == last_time:  # like most, as in the step before
                    num_usual += 1
                elif num_new:
                    self._metrics.record_next_tokens(now, sequence.last_token_time, 1, num_new)
                sequence.last_token_time = now
                if result is not None:
                    results.append(result)
                elif sequence.finish_reason is not None:
                    changed[prompt] = [sequence.index]
                    ids_to_abort.append(output.request_id)
                    self._forget(prompt, sequence, now)
            else:
                changed.setdefault(prompt, []).append(sequence.index)
                if self._advance(prompt, sequence, output, now):
                    ids_to_abort.append(output.request_id)
        self._metrics.generation_tokens += num_tokens
        if num_usual:
            self._metrics.record_next_tokens(now, last_time, num_usual)
        self._last_time = now
        if changed:
            others = (self._result(prompt, indices) for prompt, indices in changed.items())
            results += [result for result in others if result is not None]
        return ProcessedOutputs(results, ids_to_abort, self._metrics.num_tokens - num_before)

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> tuple[list[str], list[RequestOutput]]:
        """End prompts for a `reason`. Returns the engine requests to abort, and what the prompts had so far.

        Unknown ids pass.
        """
        now = time.time()
        engine_ids, results = [], []
        for request_id in request_ids:
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            running = [sequence for sequence in prompt.sequences if not sequence.finished]
            for sequence in running:
                sequence.finish(reason)
                engine_ids.append(sequence.request.request_id)
                self._forget(prompt, sequence, now)
            result = self._result(prompt, [sequence.index for sequence in running])
            assert result is not None, "the end of a prompt is always shown"
            results.append(result)
        return engine_ids, results

    def discard(self, request_id: str) -> list[str]:
        """Forget a prompt that was refused after all: it is not counted. Returns the engine requests to abort."""
        prompt = self._prompts.pop(request_id)
        engine_ids = [each.request.request_id for each in prompt.sequences if not each.finished]
        for engine_id in engine_ids:
            del self._sequences[engine_id]
        return engine_ids

    def _advance(self, prompt: PromptState, sequence: SequenceState, output: EngineCoreOutput, now: float) -> bool:
        """Give one output to its sequence. True when the engine has to be told that the sequence ended."""
        num_before = len(sequence.token_ids)
        tell_engine = sequence.push(output)
        if output.times is not None:
            sequence.times = output.times
        if output.weight_spans is not None:
            sequence.weight_spans, sequence.old_kv_from = output.weight_spans, output.old_kv_from
        self._record_tokens(sequence, output, num_before, now)
        if output.pooled is not None:
            sequence.first_token_time = sequence.last_token_time = now
            self._metrics.record_pooled(len(prompt.request.prompt_token_ids), output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            request = prompt.request
            prompt.prompt_logprobs = self._prompt_logprobs(
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
            self._metrics.record_next_tokens(now, sequence.last_token_time, 1, num_new)
        else:
            if num_new > 1:
                self._metrics.record_next_tokens(now, now, 1, num_new - 1)
            request = sequence.request
            sequence.first_token_time = now
            self._metrics.record_first_token(
                now - request.arrival_time, len(request.prompt_token_ids), output.num_cached_tokens, output.loaded
            )
        sequence.last_token_time = now

    def _forget(self, prompt: PromptState, sequence: SequenceState, now: float) -> None:
        """Stop expecting outputs for a sequence that ended."""
        request = sequence.request
        del self._sequences[request.request_id]
        prompt.num_unfinished -= 1
        self._metrics.record_finished(finished_sequence(sequence, now))
        if prompt.finished:
            prompt.update_metrics(finished_time=now)
            self._metrics.record_finished_prompt([len(each.token_ids) for each in prompt.sequences])
            if self._tracer is not None:
                self._tracer.record(prompt, now)

    def _result(self, prompt: PromptState, changed: list[int]) -> RequestOutput | None:
        if prompt.finished:
            del self._prompts[prompt.request.request_id]
        return prompt.output(changed)


def id_in_use(request_id: str) -> RequestError:
    return RequestError(f"a request with id {request_id!r} is under way. Use another id.", "request_id")


def finished_sequence(sequence: SequenceState, now: float) -> FinishedSequence:
    """What is counted of a sequence that ends. Times are the core's and ours, of one machine's clock, which may be set
    back meanwhile."""
    request, first, last = sequence.request, sequence.first_token_time, sequence.last_token_time
    queued, scheduled = sequence.times or (None, None)
    assert sequence.finish_reason is not None and request.sampling_params.max_tokens is not None
    return FinishedSequence(
        finish_reason=sequence.finish_reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=len(sequence.token_ids),
        max_tokens=request.sampling_params.max_tokens,
        latency=max(now - request.arrival_time, 0.0),
        queue_time=None if scheduled is None or queued is None else max(scheduled - queued, 0.0),
        prefill_time=None if scheduled is None or first is None else max(first - scheduled, 0.0),
        decode_time=None if first is None or last is None else max(last - first, 0.0),
    )


def fan_out(request: EngineCoreRequest, engine_id: str) -> list[EngineCoreRequest]:
    """A request per sequence, named after `engine_id`.

    Prompt log probabilities are the same for all, so only the first computes them.
    """
    params = request.sampling_params
    if params.n == 1:
        same = engine_id == request.request_id
        return [request if same else msgspec.structs.replace(request, request_id=engine_id)]
    children = []
    for index in range(params.n):
        child_params = params.child(index)
        if index:
            child_params.prompt_logprobs = None
        child_id = f"{index}_{engine_id}"
        children.append(msgspec.structs.replace(request, request_id=child_id, sampling_params=child_params))
    return children
