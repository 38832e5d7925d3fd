"""With whom a run learns: settings. Other processes may compute its train steps, or average weights with it."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from shared.adapters import check_name
from shared.errors import InvalidRequestError, SetupError

ExchangeDtype = Literal["float32", "bfloat16"]


class LearnerSettings(BaseModel):
    """Part of TrainSettings: how many policies learn in `--mode rl`, and where."""

    agents: Path | None = Field(
        default=None, description="TOML file of several policies that learn at once over one base, one table each"
    )
    learner: Literal["own", "service", "shared"] = Field(
        default="own",
        description="where train steps are computed: own: in this process; service: in a running "
        "mlx_parallm_learners; shared: in this process and all that join it",
    )
    learner_wait_s: float = Field(
        default=300.0,
        gt=0,
        description="time that a run waits for an absent service, or a joined process for its leader, before it ends",
    )
    join_run: str = Field(
        default="",
        description="help compute the train steps of the run of this name, which a process with --learner shared leads",
    )
    trainers: int = Field(
        default=1, ge=1, description="learner shared: number of processes that the first step waits for"
    )
    federation: str = Field(default="", description="average weights with the other runs of this name")
    sync_every: int = Field(default=0, ge=0, description="with federation: train steps between two rounds")
    sync_redis: str = Field(default="", description="with federation: Redis of the rounds; default: the ring's own")
    sync_wait_s: float = Field(
        default=600.0, gt=0, description="with federation: time after a round's first weights at which the round ends"
    )
    sync_moments: Literal["own", "average"] = Field(
        default="own",
        description="with federation: AdamW's moments after a round: this run's own, or the average of all runs",
    )
    outer_rate: float = Field(default=1.0, gt=0, le=10, description="with federation: share of the way to the average")
    outer_momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="with federation: Nesterov momentum of the averages; DiLoCo uses 0.9 and a rate of 0.7",
    )
    exchange: ExchangeDtype = Field(
        default="float32",
        description="learner shared: data type in which gradients are sent; bfloat16 halves the bytes and rounds",
    )

    def check_learner(self, over_http: bool) -> None:
        """SetupError for settings that contradict where the run learns."""
        if self.learner != "own" and over_http:
            raise SetupError(f"--learner {self.learner} goes through the ring's Redis: leave out --over-http")
        if self.join_run:
            if self.learner != "own" or self.agents is not None or over_http:
                raise SetupError(
                    "--join-run computes for another process's run: leave out --learner, --agents, --over-http"
                )
            _check_name("--join-run", self.join_run)
        self._check_federation(over_http)
        for flag, value, usual in (("--trainers", self.trainers, 1), ("--exchange", self.exchange, "float32")):
            if value != usual and self.learner != "shared":
                raise SetupError(f"{flag} {value} goes with --learner shared")

    def _check_federation(self, over_http: bool) -> None:
        usual = LearnerSettings.model_fields
        if not self.federation:
            for name in ("sync_every", "sync_redis", "sync_wait_s", "sync_moments", "outer_rate", "outer_momentum"):
                if getattr(self, name) != usual[name].default:
                    raise SetupError(f"--{name.replace('_', '-')} goes with --federation NAME")
            return
        _check_name("--federation", self.federation)
        if not self.sync_every:
            raise SetupError("--federation needs --sync-every: how many train steps are between two rounds")
        if self.learner != "own" or self.join_run or self.agents is not None:
            raise SetupError("--federation goes with a learner of one's own: leave out --learner, --join-run, --agents")
        if over_http and not self.sync_redis:
            raise SetupError("--federation with --over-http needs --sync-redis: the ring's own Redis is out of sight")


def _check_name(flag: str, name: str) -> None:
    try:
        check_name(name)
    except InvalidRequestError as error:
        raise SetupError(f"{flag}: {error}") from error
