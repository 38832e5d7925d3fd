"""The spans of an api process: the server span is FastAPI's own, and inside it stands one for each piece of work.

The latter follows OpenTelemetry's conventions for generative AI (`gen_ai.*`), with vLLM's names where they have none.
"""

import time
from collections.abc import MutableMapping
from typing import Any

from fastapi.telemetry import TelemetryConfig

from api.generation.sequences import Sequences
from api.http.auth import is_open
from shared.frames import TokenEvent
from shared.sequences import SamplingParams
from shared.telemetry import tracing
from shared.telemetry.spans import OpenSpan

PROVIDER = "mlx_parallm"  # gen_ai.provider.name


def telemetry() -> TelemetryConfig:
    """FastAPI's part: a span a request while traces are on; probes and the dashboard's polls make none.

    Its logs are off for ever: they hold exceptions, and those may quote what users sent.
    """
    return {
        "tracing": tracing.provider() is not None,
        "tracer_provider": tracing.provider(),
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": _unseen,
    }


def _unseen(scope: MutableMapping[str, Any]) -> bool:
    return scope["type"] != "http" or is_open(scope["path"])


class WorkSpan:
    """One piece of work, from its enqueueing to its last token."""

    def __init__(self, span: OpenSpan, prompt_tokens: int) -> None:
        self._span = span
        self._prompt_tokens = prompt_tokens
        self._began = time.perf_counter()
        self._first_s = 0.0
        self._output_tokens = self._cached_tokens = 0
        self._reasons: list[str] = []
        self._error = ""
        self._over = False

    @classmethod
    def begin(cls, sequences: Sequences) -> "WorkSpan | None":
        """None when the request is not traced."""
        if tracing.provider() is None:
            return None
        spec = sequences.template
        generated = "chat" if sequences.chat else "text_completion"
        operation = "embeddings" if spec.kind in ("embed", "head", "network") else generated
        model = spec.adapter or spec.model
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": spec.model,
            "gen_ai.response.id": spec.id,
            "gen_ai.request.id": spec.id,  # vLLM's, as the next two
            "gen_ai.request.n": sequences.n,
            "gen_ai.usage.num_sequences": len(sequences),
        }
        if spec.kind == "generate":
            attributes |= _sampling(spec.sampling)
            attributes["gen_ai.request.choice.count"] = sequences.n
        span = tracing.begin(f"{operation} {model}", attributes)
        return cls(span, sum(map(len, sequences.prompts))) if span is not None else None

    @property
    def traceparent(self) -> str:
        """The W3C traceparent that the sequences carry."""
        return self._span.traceparent

    def heard(self, event: TokenEvent) -> None:
        """The first event of all, and every sequence's last one."""
        if not self._first_s:
            self._first_s = time.perf_counter() - self._began
        if event.finish is None:
            return
        self._output_tokens += event.end
        self._cached_tokens += event.finish.cached_tokens
        self._reasons.append(event.finish.reason)
        if event.finish.reason in ("deadline", "cancelled", "error"):
            self.failed(event.finish.error_code or event.finish.reason)

    def failed(self, kind: str) -> None:
        """Notes the first failure; later ones follow from it."""
        self._error = self._error or kind

    def end(self) -> None:
        """Nothing more will come; only the first call counts."""
        if self._over:
            return
        self._over = True
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.usage.input_tokens": self._prompt_tokens,
            "gen_ai.usage.output_tokens": self._output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
            "gen_ai.response.finish_reasons": self._reasons,
            "gen_ai.latency.e2e": time.perf_counter() - self._began,  # vLLM's, as the next one
        }
        if self._first_s:
            attributes["gen_ai.latency.time_to_first_token"] = self._first_s
        self._span.end(attributes, self._error)


def _sampling(sampling: SamplingParams) -> dict[str, str | int | float]:
    """Numbers only: stop strings and grammars are the user's own text."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": sampling.seed,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    return attributes
