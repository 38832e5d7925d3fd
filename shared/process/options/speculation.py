"""A worker's settings for speculative decoding; the names are those of other servers."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

SpeculationMode = Literal["none", "ngram", "draft", "auto"]


class SpeculationSettings(BaseModel):
    """Part of WorkerSettings."""

    spec_decode: SpeculationMode = Field(
        default="none",
        description="draft tokens and check several in one step: ngram (from the row's own text and the client's "
        "prediction), draft (by --draft-model-path), auto (all of it, and from what was written for the same prompt "
        "before)",
    )
    draft_model_path: str | None = Field(
        default=None,
        description="a smaller model of the same tokenizer, folder or hub name, that drafts where no text does",
    )
    draft_context_len: int = Field(
        default=0, ge=0, description="tokens of a prompt that the draft model reads, the last ones; 0: all"
    )
    num_speculative_tokens: int = Field(default=7, ge=1, le=32, description="tokens of a draft, at most")
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

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError("--ngram-min must not be more than --ngram-max")
        if self.spec_decode == "draft" and self.draft_model_path is None:
            raise ValueError(
                "--spec-decode draft needs a draft model: --draft-model-path; without one ngram and auto do"
            )
        if self.draft_model_path is not None and self.spec_decode not in ("draft", "auto"):
            raise ValueError("--draft-model-path is used with --spec-decode draft or auto")
        if self.draft_context_len and self.draft_model_path is None:
            raise ValueError("--draft-context-len is of a draft model: --draft-model-path")
        return self
