"""Spans as plain data, without OpenTelemetry (shared/telemetry/tracing.py records them)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["api", "worker", "runner", "trainer"]
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class OpenSpan(Protocol):
    """A span that goes on until `end`."""

    traceparent: str  # of what happens inside it

    def end(self, attributes: Attributes, error: str = "") -> None:
        """End the span; `error` is the kind of failure, "" when it went well."""


@dataclass(frozen=True)
class Past:
    """A span that is recorded after its end, with the spans inside it. Times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    children: tuple["Past", ...] = ()
    error: str = ""  # what kind; "": it went well
    consumes: bool = False  # it took its work from a queue
