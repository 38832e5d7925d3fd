"""A worker's settings for speculative decoding; the names are those of other servers."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

SpeculationMode = Literal["none", "ngram", "auto"]


class SpeculationSettings(BaseModel):
    """Part of WorkerSettings."""

    spec_decode: SpeculationMode = Field(
        default="none",
        description="draft tokens and check several in one step: ngram (from the row's own text and the client's "
        "prediction), auto (also from what was written for the same prompt before)",
    )
    num_speculative_tokens: int = Field(default=5, ge=1, le=32, description="tokens of a draft, at most")
    spec_decode_disable_batch_size: int = Field(
        default=8, ge=0, description="rows of a batch from which on nothing is drafted; 0: no bound but what it pays"
    )
    ngram_max: int = Field(default=4, ge=1, le=32, description="tokens of a row's end that are looked for, at most")
    ngram_min: int = Field(default=1, ge=1, le=32, description="and at least")
    ngram_prompt_lookup: bool = Field(default=True, description="look in the prompt, too, not only in the completion")
    spec_decode_dynamic: bool = Field(
        default=True, description="drafts are as long, and as frequent, as a row's are accepted"
    )
    adaptive_k: bool = Field(
        default=True, description="drafts only where steps with them bring more tokens in the time that they take"
    )
    spec_decode_acceptance_threshold: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="a row of whose drafts less is accepted gets one only where --ngram-max tokens match",
    )
    spec_decode_memory_mb: int = Field(
        default=64, ge=1, description="with auto: what sequences have written, kept by prompt and tenant; the oldest go"
    )
    spec_decode_ring_memory_mb: int = Field(
        default=64, ge=0, description="with auto: the same in Redis, for all workers of the ring; 0: each has its own"
    )
    spec_decode_ring_memory_ttl_s: int = Field(
        default=86_400, ge=60, description="for which Redis keeps it after its prompt was used last"
    )

    @field_validator("spec_decode", mode="before")
    @classmethod
    def _without_a_draft_model(cls, mode: Any) -> Any:
        if mode == "draft":
            raise ValueError("there is no draft model here: 'ngram' and 'auto' draft from texts")
        return mode

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError("--ngram-min must not be more than --ngram-max")
        return self
