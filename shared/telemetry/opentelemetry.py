"""OpenTelemetry's SDK for shared/telemetry/tracing.py, which imports this only when traces are on.

Samplers, batches, headers, certificates and resource attributes follow OpenTelemetry's environment variables
(OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.process.settings import version
from shared.telemetry.spans import Attributes, Past, Role

LAST_WORDS_S = 3.0  # at the end, for a collector that may be away
ERROR_TYPE = "error.type"
_w3c = TraceContextTextMapPropagator()


class _OpenSpan:
    """An open span of OpenTelemetry (`shared.telemetry.spans.OpenSpan`)."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = _traceparent_of(span)

    def end(self, attributes: Attributes, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        _mark(self._span, error)
        self._span.end()


class _Discretion(SpanProcessor):
    """Hides the query strings of FastAPI's spans: some clients put keys there."""

    def on_start(self, span: ReadableSpan, parent_context: Context | None = None) -> None:
        if isinstance(span, Span) and "url.query" in (span.attributes or {}):
            span.set_attribute("url.query", "REDACTED")


class Tracing:
    """One process's spans on their way to a collector."""

    def __init__(self, address: str, role: Role) -> None:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # not each try, but what is lost
        self.provider = TracerProvider(resource=_resource(role), shutdown_on_exit=False)
        self.provider.add_span_processor(_Discretion())
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
        self._tracer = self.provider.get_tracer("mlx_parallm", version())

    def close(self) -> None:
        """Send the rest; a collector that does not take it is not waited for."""
        closing = threading.Thread(target=self.provider.shutdown, daemon=True)
        closing.start()
        closing.join(LAST_WORDS_S)

    def traceparent(self) -> str:
        return _traceparent_of(trace.get_current_span())

    def log_fields(self) -> dict[str, str]:
        context = trace.get_current_span().get_span_context()
        return {"trace_id": f"{context.trace_id:032x}"} if context.trace_flags.sampled else {}

    def annotate(self, attributes: Attributes) -> None:
        trace.get_current_span().set_attributes(dict(attributes))

    def begin(self, name: str, attributes: Attributes) -> _OpenSpan | None:
        if not trace.get_current_span().is_recording():
            return None
        return _OpenSpan(self._tracer.start_span(name, attributes=dict(attributes)))

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes, start_ns: int, link: str) -> Iterator[None]:
        """As `tracing.span`. Of an exception only the type is recorded: its message may quote what users sent."""
        causes = [Link(trace.get_current_span(_context_of(link)).get_span_context())] if link else []
        opened = self._tracer.start_span(name, attributes=dict(attributes), links=causes, start_time=start_ns or None)
        with trace.use_span(opened, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except Exception as error:
                _mark(opened, type(error).__name__)
                raise

    def record(self, past: Past, parent: str = "") -> None:
        self._record(past, _context_of(parent) if parent else None)

    def _record(self, past: Past, around: Context | None) -> None:
        span = self._tracer.start_span(
            past.name,
            around,
            SpanKind.CONSUMER if past.consumes else SpanKind.INTERNAL,
            dict(past.attributes),
            start_time=past.start_ns,
        )
        if span.is_recording():
            inside = trace.set_span_in_context(span)
            for child in past.children:
                self._record(child, inside)
        _mark(span, past.error)
        span.end(past.end_ns)


def _mark(span: Span, error: str) -> None:
    if error:
        span.set_attribute(ERROR_TYPE, error)
        span.set_status(Status(StatusCode.ERROR))


def _traceparent_of(span: Span) -> str:
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _w3c.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def _context_of(traceparent: str) -> Context:
    return _w3c.extract({"traceparent": traceparent}, Context())


def _resource(role: Role) -> Resource:
    """Attributes of this process; those of the environment take precedence."""
    ours = {
        SERVICE_NAME: f"parallm-{role}",
        SERVICE_VERSION: version(),
        SERVICE_INSTANCE_ID: f"{socket.gethostname().split('.')[0]}-{os.getpid()}",
    }
    return Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())
