"""OTLP collectors in this process: they decode what is sent to them, over HTTP and over gRPC."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


@dataclass(frozen=True)
class Span:
    """One span as it arrived. Times are seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    begin: float
    end: float
    attributes: dict
    status: int
    message: str
    resource: dict


@dataclass
class Collector:
    """`answers` cleared: whoever sends waits. `refuses`: it answers with an error."""

    endpoint: str
    spans: list[Span] = field(default_factory=list)
    num_requests: int = 0
    refuses: bool = False
    answers: threading.Event = field(default_factory=threading.Event)

    def take(self, data: bytes) -> bool:
        """Whether it was taken."""
        self.num_requests += 1
        self.answers.wait(30)
        if not self.refuses:
            self.spans += spans_of(ExportTraceServiceRequest.FromString(data))
        return not self.refuses

    def wait_for(self, count: int, name: str = "llm_request") -> list[Span]:
        """The spans of that name once there are so many of them."""
        deadline = time.monotonic() + 30
        while len(found := [span for span in self.spans if span.name == name]) < count:
            assert time.monotonic() < deadline, f"{len(found)} spans of {count} came"
            time.sleep(0.005)
        return found

    def below(self, span: Span) -> dict[str, Span]:
        """The spans whose parent it is, by name."""
        return {each.name: each for each in self.spans if each.parent_id == span.span_id}


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        Span(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            trace_state=span.trace_state,
            kind=span.kind,
            begin=span.start_time_unix_nano / 1e9,
            end=span.end_time_unix_nano / 1e9,
            attributes=values(span.attributes),
            status=span.status.code,
            message=span.status.message,
            resource=values(of_resource.resource.attributes),
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def values(attributes) -> dict:
    return {each.key: value(each.value) for each in attributes}


def value(given):
    kind = given.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in given.array_value.values]
    return getattr(given, kind)


@contextlib.contextmanager
def http_collector():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["Content-Length"]))
            taken = self.path == "/v1/traces" and collector.take(data)
            self.send_response(200 if taken else 400)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    collector.answers.set()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def grpc_collector():
    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            if not collector.take(request.SerializeToString()):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it refuses")
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"http://127.0.0.1:{port}")
    collector.answers.set()
    server.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.stop(0).wait()
