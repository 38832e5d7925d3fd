"""An OTLP receiver for tests: takes what a collector takes, and keeps it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.waiting import HANG_S


@dataclass(frozen=True)
class Span:
    """One span as it came."""

    name: str
    service: str
    trace: str
    id: str
    parent: str  # "" for a root
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[str]  # ids of traces
    failed: bool


@dataclass
class Collector:
    """What has come in so far."""

    url: str
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.bodies.append(body)
        for resource in request.resource_spans:
            service = {a.key: _value(a.value) for a in resource.resource.attributes}["service.name"]
            self.spans += [_span(span, service) for scope in resource.scope_spans for span in scope.spans]

    def wait_for(self, found: Callable[[list[Span]], bool]) -> list[Span]:
        """All spans, once they hold what is looked for."""
        deadline = time.monotonic() + HANG_S
        while not found(list(self.spans)):
            assert time.monotonic() < deadline, [(span.service, span.name) for span in self.spans]
            threading.Event().wait(0.02)
        return list(self.spans)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """One that listens on a free port."""
    kept: Collector

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            kept.headers.append(dict(self.headers))
            kept.take(self.rfile.read(int(self.headers["content-length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept = Collector(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield kept
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        service=service,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={a.key: _value(a.value) for a in span.attributes},
        links=[link.trace_id.hex() for link in span.links],
        failed=span.status.code == 2,
    )


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    found = getattr(value, which) if which else None
    return [_value(each) for each in found.values] if which == "array_value" else found
