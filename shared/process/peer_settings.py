"""A worker's settings for KV that workers fetch from one another."""

from typing import Self

from pydantic import BaseModel, Field, model_validator

LINGER_S = 15.0  # that a worker stays at its end for others to fetch from, at most


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
