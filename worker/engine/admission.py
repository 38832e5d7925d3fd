"""Which sequences this worker can run at all: pure checks with a reason, before a row exists."""

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
