"""A worker's settings for KV on disk. Off until a folder is named: nobody's disk is filled unasked."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class SsdSettings(BaseModel):
    """Part of WorkerSettings."""

    prefix_cache_gb: float = Field(
        default=1.0, ge=0, description="KV of earlier prompts, kept besides the KV memory; 0: none"
    )
    ssd_cache_dir: Path | None = Field(
        default=None,
        description="folder for KV that the prefix cache has no room for, of all workers of a machine; none: no files",
    )
    ssd: bool = Field(default=True, description="use that folder, if one is named")
    ssd_ttl_days: float = Field(
        default=7, ge=0, description="a file that nobody has used for so long goes; 0: none does"
    )
    ssd_policy: Literal["evict_only", "write_through"] = Field(
        default="evict_only", description="write KV when it is evicted from memory and at the end, or when it is stored"
    )
    ssd_durability: Literal["best_effort", "persistent"] = Field(
        default="best_effort", description="persistent: files are synced, and writes that fail are tried again"
    )
    ssd_async_writes: bool = Field(
        default=True, description="write in a thread; without, running rows wait for the disk"
    )
    ssd_writer_queue_size: int = Field(default=512, ge=1, description="files that wait to be written; more are dropped")
    ssd_persistent_max_retries: int = Field(default=3, ge=0, description="of a write that fails, where persistent")
    ssd_flush_interval_s: float = Field(default=1, ge=0, description="for which files are gathered before a write")
    ssd_max_size_gb: float = Field(default=50, ge=0, description="size of that folder, all files together; 0: no bound")

    @property
    def ssd_folder(self) -> Path | None:
        """Where KV is kept; None: nowhere."""
        return self.ssd_cache_dir if self.ssd else None

    @model_validator(mode="after")
    def _would_do_something(self) -> Self:
        if not self.ssd:
            return self
        if self.ssd_cache_dir is not None and not self.prefix_cache_gb:
            raise ValueError("--ssd-cache-dir takes what leaves the prefix cache: --prefix-cache-gb must not be 0")
        for name, field in SsdSettings.model_fields.items():
            if name.startswith("ssd_") and self.ssd_cache_dir is None and getattr(self, name) != field.default:
                raise ValueError(f"--{name.replace('_', '-')} needs a folder: --ssd-cache-dir DIR, or leave it out")
        return self
