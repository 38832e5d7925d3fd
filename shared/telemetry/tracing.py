"""OpenTelemetry traces, on request: `--otlp-endpoint`, or OpenTelemetry's own variables.

A trace begins at an api process (FastAPI's server span, which goes on with the caller's `traceparent`), travels
through Redis with the sequence (`SequenceSpec.trace`), and ends in the worker that decoded it. Job runners trace ticks,
trainers train steps. What a span tells is known anyway when its work ends, so no token costs anything.

Invariants. While traces are off, nothing of OpenTelemetry's SDK is imported, and every function here returns at once.
No text and no token of a prompt or a completion gets into a span, and no header, key or setting. A collector that is
away costs spans, never a request.
"""

import contextlib
import os
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import structlog

from shared.errors import SetupError
from shared.telemetry.spans import Attributes, OpenSpan, Past, Role

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = structlog.get_logger()

PATH = "/v1/traces"  # OTLP over HTTP: what follows the base address of a collector
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_INSTALL = "pip install 'mlx-parallm[traces]'"


class Tracer(Protocol):
    """Implementation of the functions below while traces are on: `shared.telemetry.opentelemetry.Tracing`."""

    provider: "TracerProvider"

    def close(self) -> None: ...

    def traceparent(self) -> str: ...

    def log_fields(self) -> dict[str, str]: ...

    def annotate(self, attributes: Attributes) -> None: ...

    def begin(self, name: str, attributes: Attributes) -> OpenSpan | None: ...

    def span(self, name: str, attributes: Attributes, start_ns: int, link: str) -> AbstractContextManager[None]: ...

    def record(self, past: Past, parent: str = "") -> None: ...


_tracing: Tracer | None = None
_nothing = contextlib.nullcontext()


def target(endpoint: str) -> str:
    """Endpoint for spans: the setting, else OpenTelemetry's variables; "" when traces are off.

    SetupError for an address that is none, another protocol than HTTP, or, with the setting, absent packages. With the
    variables alone these only cost the traces: they may be meant for another program.
    """
    named = endpoint or next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not named or off:
        return ""
    if trouble := _trouble(named):
        if endpoint:
            raise SetupError(f"--otlp-endpoint: {trouble}")
        log.warning("traces.off", reason=trouble)
        return ""
    if not endpoint and os.environ.get(_VARIABLES[0]):
        return named  # the whole address, as the specification has it
    return named if urlsplit(named).path.endswith(PATH) else named.rstrip("/") + PATH


def _trouble(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "a collector's address looks like http://127.0.0.1:4318"
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        return f"the protocol {protocol} is not spoken; http/protobuf is, at a collector's port 4318"
    if not all(_is_there(package) for package in _PACKAGES):
        return f"traces need the extra of that name: {_INSTALL}"
    return ""


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # not even what stands around it
        return False


def start(endpoint: str, role: Role) -> None:
    """Trace this process from now on, if it is wanted (see `target`)."""
    global _tracing
    if address := target(endpoint):
        from shared.telemetry.opentelemetry import Tracing

        _tracing = Tracing(address, role)
        log.info("traces.on", collector=urlsplit(address).hostname, role=role)


def stop() -> None:
    """Send what has not been sent, within a few seconds, and trace no more."""
    global _tracing
    if _tracing is not None:
        tracing, _tracing = _tracing, None
        tracing.close()


def provider() -> "TracerProvider | None":
    """The provider for libraries that make spans themselves; None while traces are off."""
    return _tracing.provider if _tracing is not None else None


def traceparent() -> str:
    """The present span as W3C's `traceparent`; "" when none is recorded."""
    return _tracing.traceparent() if _tracing is not None else ""


def log_fields() -> dict[str, str]:
    """Fields that connect log lines with the present trace."""
    return _tracing.log_fields() if _tracing is not None else {}


def annotate(attributes: Attributes) -> None:
    """Add attributes to the present span."""
    if _tracing is not None:
        _tracing.annotate(attributes)


def begin(name: str, attributes: Attributes) -> OpenSpan | None:
    """A span inside the present one, to be ended by hand; None when that is not recorded."""
    return _tracing.begin(name, attributes) if _tracing is not None else None


def span(
    name: str, attributes: Attributes | None = None, *, start_ns: int = 0, link: str = ""
) -> AbstractContextManager[None]:
    """A span around the body of a `with`, inside the one that we are in, or the root of a trace.

    `start_ns`: when it began, if that is over (Unix time); `link`: the traceparent of what has caused it.
    """
    return _tracing.span(name, attributes or {}, start_ns, link) if _tracing is not None else _nothing


def record(past: Past, parent: str = "") -> None:
    """A span that is over, and those in it. `parent`: a traceparent; without one the span that we are in."""
    if _tracing is not None:
        _tracing.record(past, parent)
