"""`mlx_parallm_learners`: its settings. Flags > environment (`PARALLM_*`) > YAML > defaults; unknown keys fail."""

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field

from shared.process.machine_settings import MachineSettings
from shared.process.process_settings import JoinSettings

USUAL_RANK = 16  # of one learner, by which memory is planned before any has come


class LearnersSettings(JoinSettings, MachineSettings):
    """`mlx_parallm_learners`: one or more processes for each model."""

    is_trainer: ClassVar[bool] = True

    model: str = Field(
        default="models/tiny",
        validation_alias=AliasChoices("model", "model_path", "PARALLM_MODEL"),
        description="model folder, hub name or GGUF file; the same as the workers'",
    )
    dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="data type of the base; default: the model's, float32 on a Linux CPU"
    )
    max_learners: int = Field(default=16, ge=1, description="learners in memory at once; others wait for a place")
    max_rank: int = Field(
        default=64, ge=1, le=256, description="largest rank; the workers' --adapter-rank bounds it, too"
    )
    microbatch_tokens: int = Field(default=8192, ge=64, description="padded positions of one forward and backward pass")
    max_saves: int = Field(
        default=64, ge=1, description="saved states and published versions with a name that one learner may have"
    )
    adapter_keep_n: int = Field(
        default=16,
        ge=1,
        description="published versions of a learner that stay, besides the latest, saves and used ones",
    )
    idle_s: float = Field(default=300, gt=0, description="time without requests after which a learner leaves memory")
    state_every: int = Field(default=16, ge=1, description="most requests after which a learner's state is stored")
    state_after_s: float = Field(
        default=2, gt=0, description="time after a learner's last request at which its state is stored"
    )
