"""Which sequences this worker can run at all, and how many at once: pure checks."""

from dataclasses import dataclass

from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
    ParallmError,
    TokenOutOfRangeError,
)
from shared.sequences import ModelCard, SequenceSpec


@dataclass(frozen=True)
class Limits:
    """What the model and this worker's memory allow."""

    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    kv_limit_bytes: int

    @classmethod
    def of(cls, card: ModelCard, kv_limit_bytes: int) -> "Limits":
        """Those of a model on this worker."""
        return cls(card.vocab_size, card.context_length, card.kv_bytes_per_token, kv_limit_bytes)

    def refusal(self, spec: SequenceSpec) -> ParallmError | None:
        """Why this sequence can never run here; None when it can."""
        if not spec.prompt_ids:
            return EmptyPromptError("the prompt has no tokens")
        for token in (*spec.prompt_ids, *spec.score_ids):
            if not 0 <= token < self.vocab_size:
                return TokenOutOfRangeError(f"token {token} is outside the model's vocabulary of {self.vocab_size}")
        if spec.kind == "generate" and spec.sampling.max_tokens < 1:
            return InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        return self._too_long(spec)

    def _too_long(self, spec: SequenceSpec) -> ParallmError | None:
        wanted = spec.kv_tokens
        if wanted > self.context_length:
            return ContextLengthExceededError(
                f"{len(spec.prompt_ids)} prompt tokens and {wanted - len(spec.prompt_ids)} to come exceed "
                f"the model's context of {self.context_length}"
            )
        if wanted * self.kv_bytes_per_token > self.kv_limit_bytes:
            return ContextLengthExceededError(
                f"{wanted} tokens need {wanted * self.kv_bytes_per_token} bytes of KV; "
                f"this worker has {self.kv_limit_bytes}"
            )
        return None


class Reserved:
    """KV of the admitted rows, as the batch holds it: each padded to the longest, at the length it may come to have."""

    def __init__(self, limits: Limits, max_rows: int) -> None:
        self._limits = limits
        self._max_rows = max_rows
        self._tokens: list[int] = []

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self._bytes(self._tokens)

    def fits(self, tokens: int) -> bool:
        """Whether there is a place and KV for one more row; a first one always fits."""
        if not self._tokens:
            return True
        return (
            len(self._tokens) < self._max_rows and self._bytes([*self._tokens, tokens]) <= self._limits.kv_limit_bytes
        )

    def add(self, tokens: int) -> None:
        """Admit a row."""
        self._tokens.append(tokens)

    def remove(self, tokens: int) -> None:
        """A row has left."""
        self._tokens.remove(tokens)

    def _bytes(self, tokens: list[int]) -> int:
        return len(tokens) * max(tokens, default=0) * self._limits.kv_bytes_per_token
