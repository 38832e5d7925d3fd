"""Settings of processes that hold a model, about the machine that they run on."""

from typing import Literal

from pydantic import BaseModel, Field

OnBattery = Literal["pause", "slow", "go"]


class AwakeSettings(BaseModel):
    """Part of the settings of every process that works unattended."""

    keep_awake: bool = Field(
        default=True, description="on macOS: prevent idle sleep while this process runs (caffeinate -i -w PID)"
    )


class MachineSettings(AwakeSettings):
    """Part of the settings of workers, trainers and the learners' service."""

    memory_limit: float = Field(
        default=0,
        ge=0,
        description="GB of memory that this process may take in total; 0: what the machine has free at start",
    )
    wired_limit: float = Field(
        default=0,
        ge=0,
        description="on Metal: GB that stay resident for the GPU (mx.set_wired_limit); 0: none, since it has caused "
        "macOS panics under continuous batching",
    )
    on_battery: OnBattery = Field(
        default="go",
        description="on battery power: go: continue; slow: a quarter of the rows, train steps half of the time; pause: "
        "begin nothing new",
    )

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes that this process may take; 0: what the machine has left."""
        return int(self.memory_limit * 1e9)
