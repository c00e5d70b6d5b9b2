"""Traces: a span `llm_request` for every prompt that ended, under vLLM's names, and below it what its time went to.

    llm_request   from the prompt's arrival to its end
      queue       from when the engine core had it until its first step
      prefill     from there to the first token, or to the vector
      decode      from the first token to the last one

The times are those that are kept for the metrics; of several sequences the first begins and the last ends. A prompt
may bring the W3C trace context of its client. Then its spans are part of that trace, if that trace is recorded. No text
gets into a span. This module knows neither HTTP nor how spans are sent.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability.trace_export import OPTION, TraceExport, check_endpoint
from jaxpaged.engine.output.prompt_state import PromptState
from jaxpaged.errors import RequestError

logger = logging.getLogger(__name__)

CONTEXT_HEADERS = ("traceparent", "tracestate")
ID_HEADER = "x-request-id"
"""The header, among those of a request, that says by which name a trace shows it; the engine's own by default."""
MOST_SPANS = 4


class RequestTracer:
    """Makes spans of prompts that have ended."""

    def __init__(self, endpoint: str, model: str):
        """Raises ConfigError for an endpoint that cannot be used, and without the extra `otel`."""
        self._export = TraceExport(endpoint)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = self._export.tracer
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._has_failed = False
        self.shutdown = self._export.shutdown

    def num_lost(self) -> int:
        """Spans that no collector got."""
        return self._export.num_lost

    def record(self, prompt: PromptState, now: float) -> None:
        """Make the spans of a prompt that has ended `now`. It never raises: a request does not fail for its trace."""
        try:
            if self._export.room_for(MOST_SPANS):
                self._export.note_ended(self._record(prompt, now))
        except Exception:
            if not self._has_failed:
                logger.exception("no spans could be made of a request; this is said once")
            self._has_failed = True

    def _record(self, prompt: PromptState, now: float) -> int:
        """How many spans will be sent."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        times, headers = times_of(prompt, now), prompt.trace_headers or {}
        parent = self._propagator.extract(headers, Context())
        attributes = {
            **attributes_of(prompt, times),
            "gen_ai.request.id": headers.get(ID_HEADER, prompt.request_id),
            "gen_ai.response.model": self._model,
        }
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, attributes, start_time=nanoseconds(times.arrival)
        )
        if not span.get_span_context().trace_flags.sampled:
            return 0
        if "error" in attributes["gen_ai.response.finish_reasons"]:
            span.set_status(Status(StatusCode.ERROR, prompt.error or "the engine failed"))
        below, count = set_span_in_context(span, parent), 1
        for name, begin, end in times.stages():
            self._tracer.start_span(name, below, start_time=nanoseconds(begin)).end(nanoseconds(end))
            count += 1
        span.end(nanoseconds(times.end))
        return count


@dataclass(frozen=True)
class PromptTimes:
    """When what began, in seconds since the epoch; None for what was never reached. None is before the one above it."""

    arrival: float
    queued: float | None
    scheduled: float | None
    first_token: float | None  # or the vector
    last_token: float | None
    end: float

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """Names, beginnings and ends of the spans below the prompt's own."""
        if self.queued is not None and self.scheduled is not None:
            yield "queue", self.queued, self.scheduled
            if self.first_token is not None:
                yield "prefill", self.scheduled, self.first_token
        if self.first_token is not None and self.last_token is not None:
            yield "decode", self.first_token, self.last_token

    def latencies(self) -> Iterator[tuple[str, float]]:
        """vLLM's names of durations, in seconds."""
        yield "e2e", self.end - self.arrival
        if self.first_token is not None and self.last_token is not None:
            yield "time_to_first_token", self.first_token - self.arrival
        names = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}
        for name, begin, end in self.stages():
            yield names[name], end - begin
        if self.scheduled is not None and self.first_token is not None:
            yield "time_in_model_inference", (self.last_token or self.first_token) - self.scheduled


def times_of(prompt: PromptState, now: float) -> PromptTimes:
    """The core's times and ours are of one machine's clock, which may be set back meanwhile: none is put before what
    came first."""
    sequences, latest = prompt.sequences, prompt.request.arrival_time

    def in_order(time: float | None) -> float | None:
        nonlocal latest
        latest = latest if time is None else max(latest, time)
        return None if time is None else latest

    times: list[Any] = [each.times for each in sequences if each.times is not None]
    first = min(times, default=(None, None))
    first_times = [each.first_token_time for each in sequences if each.first_token_time is not None]
    last_times = [each.last_token_time for each in sequences if each.last_token_time is not None]
    is_pooled = prompt.request.pooling_params is not None
    return PromptTimes(
        arrival=latest,
        queued=in_order(first[0]),
        scheduled=in_order(first[1]),
        first_token=in_order(min(first_times, default=None)),
        last_token=None if is_pooled else in_order(max(last_times, default=None)),
        end=max(latest, now),
    )


def attributes_of(prompt: PromptState, times: PromptTimes) -> dict[str, Any]:
    """Of the span of a prompt: vLLM's, and after them two of OpenTelemetry's conventions and ours."""
    request, sequences = prompt.request, prompt.sequences
    params = request.sampling_params
    attributes: dict[str, Any] = {f"gen_ai.latency.{name}": seconds for name, seconds in times.latencies()}
    attributes["gen_ai.usage.prompt_tokens"] = len(request.prompt_token_ids)
    attributes["gen_ai.usage.completion_tokens"] = sum(len(each.token_ids) for each in sequences)
    if request.pooling_params is None:
        attributes["gen_ai.usage.num_sequences"] = attributes["gen_ai.request.n"] = len(sequences)
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
    attributes["gen_ai.usage.cache_read.input_tokens"] = prompt.num_cached_tokens or 0
    attributes["gen_ai.response.finish_reasons"] = list(dict.fromkeys(each.finish_reason for each in sequences))
    if any(each.weight_spans for each in sequences):
        versions = (version for each in sequences for _, version in each.weight_spans or [(0, "")])
        attributes["jaxpaged.weight_versions"] = list(dict.fromkeys(versions))
    attributes["jaxpaged.num_preemptions"] = prompt.metrics.num_preemptions
    return attributes


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def check_tracing(config: EngineConfig) -> None:
    """Raise ConfigError when what the options ask for cannot be: that must come out before any weight is read."""
    if config.observability.otlp_traces_endpoint is not None:
        check_endpoint(config.observability.otlp_traces_endpoint)


def request_tracer(config: EngineConfig) -> RequestTracer | None:
    """What the options ask for. Raises ConfigError when that cannot be."""
    endpoint = config.observability.otlp_traces_endpoint
    return None if endpoint is None else RequestTracer(endpoint, config.model.model)


def checked_headers(headers: Mapping[str, str], tracer: RequestTracer | None) -> dict[str, str]:
    """Trace headers by their names in lower case. Raises RequestError for what is none, and where nothing is traced."""
    if tracer is None:
        raise RequestError(
            f"trace_headers are given, but nothing is traced. Set {OPTION}, or leave them out.", "trace_headers"
        )
    if not isinstance(headers, Mapping) or not all(isinstance(each, str) for pair in headers.items() for each in pair):
        raise RequestError(f"trace_headers is {headers!r}; it must map names of headers to texts.", "trace_headers")
    return {name.lower(): value for name, value in headers.items()}
