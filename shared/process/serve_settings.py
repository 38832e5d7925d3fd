"""Settings of `mlx_parallm_serve`: those of every process that it starts, and its own."""

from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import Field

from shared.process.api_settings import ApiSettings
from shared.process.process_settings import ProcessSettings, RunnerSettings
from shared.process.worker_settings import WorkerSettings

S = TypeVar("S", bound=ProcessSettings)


class ServeSettings(WorkerSettings, ApiSettings, RunnerSettings):
    """`mlx_parallm_serve`: all of them on one machine."""

    mode: Literal["inference_and_training", "inference_only", "training_only", "inference"] = Field(
        default="inference_only",
        description="inference_only; inference_and_training: with a trainer in the first worker; training_only: a "
        "trainer without HTTP, until it is done",
    )
    enable_rl_training: bool = Field(default=False, description="the same as --mode inference_and_training")
    atropos_url: str = Field(default="", description="Atropos' run-api that the hosted trainer learns from")
    learn_when: str = Field(
        default="",
        description="when training may run, such as idle,plugged,23:00-07:00 (all must hold): of the hosted trainer, "
        "else of night school, which learns from sessions and starts with this",
    )
    suite: Path | None = Field(
        default=None, description="with night school: JSON lines of your own tasks, at which no candidate may be worse"
    )
    lora_rank: int = Field(default=0, ge=0, description="rank of the hosted trainer's adapter; 0: as its settings say")
    learners: int = Field(
        default=0, ge=0, description="most learners of a training service in the first worker; 0: no service"
    )
    data_dir: Path = Field(
        default=Path(".parallm"), description="folder of the embedded Redis, the adapter cache and hosted runs"
    )
    workers: int = Field(
        default=1, ge=0, description="worker processes on this machine; 0: none, workers join from elsewhere"
    )
    api_processes: int = Field(default=1, ge=1, description="api processes that share the port")
    redis_port: int = Field(default=0, ge=0, le=65535, description="port of the embedded Redis; 0: a free one")

    @property
    def trains(self) -> bool:
        """True if the first worker hosts a trainer."""
        return self.enable_rl_training or self.mode in ("inference_and_training", "training_only")

    @property
    def has_nights(self) -> bool:
        """True if a child process learns from sessions while `learn_when` holds."""
        return bool(self.learn_when) and not self.trains

    def of(self, kind: type[S]) -> S:
        """The part of these settings that another process takes."""
        mine = self.model_dump()
        return cast(S, kind.model_construct(**{name: mine[name] for name in kind.model_fields if name in mine}))
