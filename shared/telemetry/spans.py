"""What is told of a traced piece of work (shared/telemetry/tracing.py); plain data, without OpenTelemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["api", "worker", "runner", "trainer"]
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class OpenSpan(Protocol):
    """A span that goes on until `end`."""

    traceparent: str  # of what happens inside it

    def end(self, attributes: Attributes, error: str = "") -> None:
        """It is over; `error` says what kind of failure it was."""


@dataclass(frozen=True)
class Past:
    """A span that is over when it is told, with what happened inside it. Times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    children: tuple["Past", ...] = ()
    error: str = ""  # what kind; "": it went well
    consumes: bool = False  # it took its work from a queue
