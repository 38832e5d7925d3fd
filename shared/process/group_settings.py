"""Settings of a worker, or a trainer, for being several processes, its ranks, which hold one model together."""

from typing import Literal

from pydantic import BaseModel, Field

LOST_EXIT_CODE = 3  # of a rank of a strict group that has lost another one: nobody starts it again

Mode = Literal["", "off", "ring", "jaccl", "nccl"]
Sharding = Literal["tensor", "pipeline", "data"]


class GroupSettings(BaseModel):
    """Part of WorkerSettings and TrainSettings; the names are those of other servers."""

    num_local_ranks: int = Field(
        default=1, ge=1, le=64, description="processes on this machine that hold the model together, each a part of it"
    )
    distributed_mode: Mode = Field(
        default="",
        description="how ranks exchange sums: ring (TCP), nccl (NVIDIA), jaccl (RDMA over Thunderbolt); default: nccl "
        "between GPUs, else ring; off: this process is in no group, even under mlx.launch",
    )
    distributed_sharding: Sharding = Field(
        default="tensor",
        description="what a rank holds: a part of every layer (tensor), whole layers (pipeline), or, for a trainer, the"
        " whole model, with each rank learning from a part of every step's samples (data)",
    )
    distributed_strict: bool = Field(
        default=False, description="end with exit code 3 when a rank is lost; otherwise the group is built anew"
    )
    distributed_hostfile: str = Field(
        default="",
        description="JSON file of the ranks' machines, in the format of mlx.launch or MLX_HOSTFILE; the same on each "
        "machine",
    )
    distributed_rank: int = Field(
        default=-1, ge=-1, description="rank of this machine in that file; -1: found by its addresses and its name"
    )
    distributed_ibv_devices: str = Field(default="", description="with jaccl: file of RDMA devices, as MLX_IBV_DEVICES")
    distributed_jaccl_coordinator: str = Field(
        default="", description="with jaccl: HOST:PORT of rank 0, as MLX_JACCL_COORDINATOR"
    )
    distributed_group: str = Field(
        default="",
        description="name by which ranks find one another in Redis; default: derived from the file of machines",
    )
    distributed_silence_s: float = Field(
        default=3, gt=0, description="silence after which a rank is lost, and the group with it"
    )
    distributed_turn_s: float = Field(
        default=30, gt=0, description="time after which a rank that is one turn late is lost, too"
    )


class TrainerGroupSettings(GroupSettings):
    """Part of TrainSettings: a microbatch of a model that is too large for one machine takes its time."""

    distributed_turn_s: float = Field(
        default=600, gt=0, description="time after which a rank that is one microbatch late is lost, too"
    )
