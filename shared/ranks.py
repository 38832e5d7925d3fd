"""Status of the processes that hold one model together, a worker's or a trainer's."""

from typing import Literal

import msgspec

from shared.machine.status import MachineStatus

RankState = Literal["loading", "ready", "lost"]


class RankStatus(msgspec.Struct, frozen=True):
    """One rank of a group: where it runs and how it is."""

    rank: int
    host: str
    address: str  # where it is reached, or speaks from
    sums_by: str  # how it exchanges sums with the others: ring, nccl or jaccl
    state: RankState
    behind: int = 0  # turns, or units of a learner's work, that it has not confirmed
    silent_s: float = 0.0  # since its last message
    machine: MachineStatus = MachineStatus()  # its memory; of rank 0 it stands where the process reports itself
