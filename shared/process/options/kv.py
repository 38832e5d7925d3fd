"""A worker's settings for the KV of its rows, and for KV that workers fetch from one another."""

from typing import Self

from pydantic import BaseModel, Field, field_validator, model_validator

LINGER_S = 15.0  # that a worker stays at its end for others to fetch from, at most


class KvSettings(BaseModel):
    """Part of WorkerSettings."""

    kv_memory_gb: float = Field(default=0, ge=0, description="KV memory limit; 0: half of what the model left free")
    block_size: int = Field(default=64, ge=16, description="tokens by which the prefix cache compares prompts")
    kv_bits: int = Field(default=0, description="quantise KV to 8 or 4 bits; 0: do not")
    kv_group_size: int = Field(default=64, ge=32, le=128, description="numbers of KV with one scale: 32, 64 or 128")
    max_kv_size: int = Field(
        default=0,
        ge=0,
        description="positions that a layer of full attention keeps of a sequence, the last ones; 0: all. What is "
        "forgotten changes answers",
    )

    @field_validator("kv_bits")
    @classmethod
    def _known_bits(cls, bits: int) -> int:
        if bits not in (0, 4, 8):
            raise ValueError(f"{bits} is none of 8 and 4, the bits that KV can have, or 0: as it is")
        return bits


class PeerSettings(BaseModel):
    """Part of WorkerSettings."""

    kv_transfer: bool = Field(
        default=False,
        description="get KV of sequences that move here from the worker that has it, where that is quicker than to "
        "compute it; workers listen for one another",
    )
    kv_transfer_host: str = Field(
        default="",
        description="address of this machine to listen on for that; default: the one that it reaches Redis from",
    )

    @model_validator(mode="after")
    def _has_a_cache(self) -> Self:
        if self.kv_transfer and not getattr(self, "prefix_cache_gb", 1):
            raise ValueError("kv_transfer moves KV between prefix caches: --prefix-cache-gb must be more than 0")
        return self
