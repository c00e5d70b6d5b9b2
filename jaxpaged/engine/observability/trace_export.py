"""How spans get to a collector: over OTLP, in a thread of their own, never more than a number of them waiting.

A collector that does not answer costs spans, not requests: it is said once in the log that they are lost, and once that
they arrive again. This module knows OpenTelemetry's libraries (extra `otel`), and not what the spans say.
"""

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxpaged import __version__
from jaxpaged.errors import ConfigError, how_to_install, is_installed, shown_option

logger = logging.getLogger(__name__)

OPTION = "otlp_traces_endpoint"
GRPC, HTTP = "grpc", "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""OpenTelemetry's own; its libraries read others: headers, certificates, sampling, the name of the service, ..."""
MODULES = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
LIBRARY_LOGGERS = (*MODULES.values(), "opentelemetry.exporter.otlp.proto.grpc.exporter")
MAX_WAITING = 8192
"""Spans that wait to be sent; further ones are dropped."""
CLOSING_SECONDS = 5.0
"""What is left gets this long to be sent when the engine stops."""


def check_endpoint(endpoint: str) -> str:
    """The protocol that an endpoint is spoken to in. Raises ConfigError for one that cannot be used, and without the
    libraries.

    It is the one that OpenTelemetry's variables name; else HTTP where the endpoint has a path, and gRPC where it has
    none.
    """
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    variable, protocol = next(
        ((name, os.environ[name]) for name in PROTOCOL_VARIABLES if os.environ.get(name)), ("", "")
    )
    protocol = protocol or (HTTP if parts.path.strip("/") else GRPC)
    if protocol not in MODULES:
        raise ConfigError(
            f"{variable} is {protocol!r}, but traces are sent over {GRPC!r} or {HTTP!r}. Set one of them."
        )
    shown = shown_option(OPTION, endpoint)
    schemes = ("http", "https") if protocol == HTTP else ("http", "https", "grpc", "")
    if parts.scheme not in schemes or not parts.netloc:
        example = "http://localhost:4318/v1/traces" if protocol == HTTP else "http://localhost:4317"
        raise ConfigError(f"{OPTION} is {shown}, no address for {protocol}. Give one like {example}.")
    if not is_installed("opentelemetry.sdk.trace") or not is_installed(MODULES[protocol]):
        raise ConfigError(
            f"{OPTION} is {shown}, but OpenTelemetry's SDK and exporters are not installed. To install "
            f"them, {how_to_install('otel')}."
        )
    return protocol


class TraceExport:
    """Makes a tracer whose spans are sent to an endpoint.

    `room_for` is asked before spans are made, `note_ended` told of those that were.
    """

    def __init__(self, endpoint: str):
        """Raises ConfigError, see `check_endpoint`."""
        protocol = check_endpoint(endpoint)
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._sender = Sender(endpoint, protocol)
        self._num_ended = 0  # the processor has all of them that the sender has not taken yet
        resource = Resource.create({"service.name": "jaxpaged", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        batches = BatchSpanProcessor(self._sender, max_queue_size=MAX_WAITING)  # type: ignore[arg-type]
        self._provider.add_span_processor(batches)
        self.tracer = self._provider.get_tracer("jaxpaged", __version__)
        self._closing, self._closed = threading.Event(), threading.Event()
        # It waits from now on, since an interpreter that ends starts no threads.
        threading.Thread(target=self._close_when_told, name="traces-closing", daemon=True).start()
        atexit.register(self.shutdown)

    def room_for(self, count: int) -> bool:
        """Whether so many spans more may wait. The spans for which there is none are counted as lost."""
        has_room = self._num_ended - self._sender.num_taken + count <= MAX_WAITING
        if not has_room:
            self._sender.lose(count, "more come than it takes")
        return has_room

    def note_ended(self, count: int) -> None:
        self._num_ended += count

    @property
    def num_lost(self) -> int:
        """Spans that no collector got."""
        return self._sender.num_lost

    def shutdown(self) -> None:
        """Send what is left, for a few seconds at most; what comes later is dropped."""
        atexit.unregister(self.shutdown)
        self._closing.set()
        self._closed.wait(CLOSING_SECONDS)

    def _close_when_told(self) -> None:
        self._closing.wait()
        self._provider.shutdown()
        self._closed.set()


class Sender:
    """A span exporter around that of a library, which speaks of every attempt: it makes that a sentence at the first
    failure, and another one when spans arrive again.
    """

    def __init__(self, endpoint: str, protocol: str):
        self._endpoint = endpoint
        self._inner = exporter_for(endpoint, protocol)
        self._is_failing = False
        self._lock = threading.Lock()  # of what is lost, since two threads lose spans
        self._quiet = QuietLogs()
        self.num_taken = 0
        self.num_lost = 0
        for name in LIBRARY_LOGGERS:
            logging.getLogger(name).addFilter(self._quiet)

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._quiet.begin()
        try:
            result = self._inner.export(spans)
            reason = self._quiet.last or "it refused them"
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, repr(error)
        finally:
            self._quiet.end()
            self.num_taken += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._arrive()
        else:
            self.lose(len(spans), reason)
        return result

    def lose(self, count: int, reason: str) -> None:
        with self._lock:
            self.num_lost += count
            is_first, self._is_failing = not self._is_failing, True
        if is_first:
            logger.warning(
                "traces do not get to %s: %s. Spans are lost until they do; this is said once.", self._endpoint, reason
            )

    def _arrive(self) -> None:
        with self._lock:
            was_failing, self._is_failing = self._is_failing, False
        if was_failing:
            logger.info("traces get to %s again; %d spans were lost so far.", self._endpoint, self.num_lost)

    def shutdown(self) -> None:
        for name in LIBRARY_LOGGERS:
            logging.getLogger(name).removeFilter(self._quiet)
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def exporter_for(endpoint: str, protocol: str) -> Any:
    if protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint)


class QuietLogs(logging.Filter):
    """Keeps to itself what is logged in a thread between `begin` and `end`; `last` is the last of it. What others log
    there, such as an application with traces of its own, passes."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    @property
    def last(self) -> str | None:
        return self._here.last

    def begin(self) -> None:
        self._here.is_on, self._here.last = True, None

    def end(self) -> None:
        self._here.is_on = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(self._here, "is_on", False):
            return True
        self._here.last = record.getMessage()
        return False
