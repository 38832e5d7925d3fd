"""The decision whether a model fits, and how the memory that its weights leave is divided.

Linux cannot move other programs' memory out of the way, so there only what is available counts. macOS compresses and
swaps what idle programs hold: there the GPU's working set counts, which leaves the system its part, and what other
programs hold is a warning. A memory limit that the user sets counts alone: it is the user's word.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.errors import SetupError
from shared.fit.needs import Need, total
from shared.fit.reservations import Reservation
from shared.machine.memory import MachineMemory

LEFT_FREE = 0.12  # of the memory there is: a little more than what counts as pressure (shared/machine/memory.py)
LEAST_TOKENS = 2048  # of one row, or the model's context if that is shorter: less KV serves nobody
KV_SHARE = 0.5  # of what is left; the rest is for prompts' activations, adapters, what MLX has freed and keeps
PREFIX_SHARE = 0.25
USERS_LIMIT = "--memory-limit"


@dataclass(frozen=True)
class Room:
    """Memory that one more process of ours may take, and why it is no more."""

    usable: int
    total: int
    others: int = 0  # held or promised by other processes of ours
    other_processes: int = 0
    limit: str = ""  # where the total comes from, if not from the machine

    def __str__(self) -> str:
        said = f"{gb(self.usable)} of {gb(self.total)}"
        said += f" ({self.limit})" if self.limit else ""
        if self.other_processes:
            count = "one other process" if self.other_processes == 1 else f"{self.other_processes} other processes"
            said += f"; {count} of ours hold or may still take {gb(self.others)}"
        return said


@dataclass(frozen=True)
class Demand:
    """Memory that one process wants of a room."""

    needs: tuple[Need, ...]  # taken in any case
    kv_bytes_per_token: int = 0
    least_tokens: int = LEAST_TOKENS
    kv_bytes: int = 0  # as the user asks for; 0: what the machine has left
    prefix_bytes: int = 0  # at most
    serves: bool = True  # False: no KV at all, as for a trainer

    @property
    def least_kv(self) -> int:
        """KV without which nothing is served."""
        if not self.serves:
            return 0
        return self.kv_bytes or self.kv_bytes_per_token * self.least_tokens

    @property
    def firm(self) -> int:
        """Bytes below which it does not fit."""
        return total(self.needs) + self.least_kv


@dataclass(frozen=True)
class MemoryPlan:
    """How a process's memory is divided."""

    firm_bytes: int  # weights and what else is taken in any case
    kv_bytes: int
    prefix_bytes: int
    room: Room

    def __str__(self) -> str:
        kv = f" and {gb(self.kv_bytes)} for KV" if self.kv_bytes else ""
        return f"it takes {gb(self.firm_bytes)}{kv}, and there is room for {self.room}"

    def rows(self, kv_bytes_per_token: int, tokens: int) -> int:
        """Rows of so many tokens that KV has memory for."""
        return self.kv_bytes // max(1, kv_bytes_per_token * tokens)


@dataclass(frozen=True)
class Alternative:
    """A change that makes a model smaller."""

    advice: str
    demand: Demand


def room_in(
    memory: MachineMemory,
    others: Sequence[Reservation],
    *,
    limit_bytes: int = 0,
    gpu_bytes: int = 0,
    gpu_is_apart: bool = False,
) -> Room:
    """Room for one more process. `gpu_bytes`: what the GPU may hold; `gpu_is_apart`: it has memory of its own."""
    count = len(others)
    if limit_bytes:
        whole = gpu_bytes or memory.total
        usable = min(limit_bytes, whole) if whole else limit_bytes
        return Room(usable, usable, limit=USERS_LIMIT)
    if gpu_is_apart:
        promised = sum(each.bytes for each in others)
        return Room(max(0, gpu_bytes - promised), gpu_bytes, promised, count, "the GPU's memory")
    if gpu_bytes:
        held = sum(max(each.bytes, each.held) for each in others)
        return Room(max(0, gpu_bytes - held), gpu_bytes, held, count, "what the GPU may hold of it")
    here = [each for each in others if memory.shared_with(each.pid)]
    elsewhere = sum(each.outstanding for each in others) - sum(each.outstanding for each in here)
    outstanding = sum(each.outstanding for each in here) + max(0, elsewhere - memory.outside)
    usable = memory.available - outstanding - int(LEFT_FREE * memory.total)
    return Room(
        max(0, usable), memory.total, outstanding, count if elsewhere > memory.outside else len(here), memory.limit
    )


def plan(demand: Demand, room: Room, processes: int = 0) -> MemoryPlan | None:
    """The division of a room; None where the demand does not fit. `processes`: others that divide what is left."""
    left = room.usable - demand.firm
    if left < 0:
        return None
    firm = total(demand.needs)
    left = room.usable - firm
    if not demand.serves:
        return MemoryPlan(firm, 0, 0, room)
    kv = demand.kv_bytes or max(demand.least_kv, int(left * KV_SHARE / (1 + processes)))
    prefix = min(demand.prefix_bytes, int((left if not demand.kv_bytes else left - kv) * PREFIX_SHARE))
    return MemoryPlan(firm, kv, prefix, room)


def refusal(what: str, demand: Demand, room: Room, alternatives: Sequence[Alternative]) -> SetupError:
    """Why a model does not fit: every part with its size, the room, and what would fit."""
    parts = ", ".join(f"{need.name} {gb(need.bytes)}" for need in demand.needs if need.bytes)
    if demand.least_kv:
        parts += f", KV {gb(demand.least_kv)}"
        parts += " as asked for" if demand.kv_bytes else f" for one row of {demand.least_tokens:,} tokens"
    fitting = [each.advice for each in alternatives if plan(each.demand, room) is not None]
    advice = "; ".join(fitting) if fitting else "a smaller model, or a machine with more memory"
    own_word = "" if room.limit == USERS_LIMIT else f". To decide yourself, give {USERS_LIMIT} GB"
    return SetupError(
        f"the {what} does not fit into memory: it needs {gb(demand.firm)} ({parts}), and there is room for {room}. "
        f"What would fit: {advice}{own_word}"
    )


def with_need(demand: Demand, name: str, nbytes: int) -> Demand:
    """The demand with another size of one need; 0 leaves it out."""
    changed = (Need(need.name, nbytes) if need.name == name else need for need in demand.needs)
    return replace(demand, needs=tuple(need for need in changed if need.bytes))


def gb(nbytes: int) -> str:
    """A number of bytes, written for people."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.0f} MB"
