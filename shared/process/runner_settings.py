"""Settings of a job runner, which `mlx_parallm_serve` takes, too."""

from pydantic import Field

from shared.process.machine_settings import AwakeSettings
from shared.process.process_settings import ProcessSettings


class RunnerSettings(ProcessSettings, AwakeSettings):
    """The job runner (arq worker)."""

    max_jobs: int = Field(default=16, ge=1, description="jobs that one runner advances at a time")
    window: int = Field(default=512, ge=1, description="sequences of one job in flight")
    reward_processes: int = Field(default=0, ge=0, description="0: one per core, at most 4")
    reward_timeout_s: float = Field(default=5.0, gt=0, description="one reward of one sample may take so long")
    trajectory_buffer_size: int = Field(
        default=10_000, ge=1, description="live trajectories of a policy that wait for its trainer; the oldest go"
    )
    trajectory_buffer_mb: int = Field(default=256, ge=1, description="their size; the oldest go")
