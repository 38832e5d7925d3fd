"""A ring as a trainer sees it: samples come from it, versions go to it, users ask through it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shared.adapters import GateCheck
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.text.codec import TextCodec
from shared.training import AlertKind
from trainer.learners.federation import Federation
from trainer.learners.service import ServiceLearners
from trainer.learners.shared_exchange import RunLead
from trainer.ring.board import RingBoard
from trainer.ring.mailbox import RingMailbox
from trainer.rollouts.groups import RolloutSource, Scorer
from trainer.state import Arrays


@dataclass(frozen=True)
class Candidate:
    """An adapter directory in mlx-lm's format (`adapter_config.json`, `adapters.safetensors`), and what is known."""

    directory: Path
    train_step: int
    parent: int  # the version that it was trained from; 0: none
    base_sha256: str
    metrics: dict[str, float] = field(default_factory=dict)
    gate: tuple[GateCheck, ...] = ()  # checks that it has passed so far


@dataclass(frozen=True)
class Stored:
    """A version as the store has it."""

    weights: Arrays
    config: bytes  # adapter_config.json
    base_sha256: str


class AdapterSink(Protocol):
    """Store of versions: `over_redis.py` or `over_http.py`. The store gives out the numbers; they never repeat."""

    async def stage(self, candidate: Candidate) -> int:
        """Store and verify the candidate as the next version, loadable by number; the latest stays what it was.

        AdapterRejectedError when the files are not what they say.
        """

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        """One atomic flip: following requests get `version` from the next decode step on.

        ConflictError when the latest is not `if_latest`: somebody else has moved it.
        """

    async def latest_version(self) -> int:
        """The latest version at present, of any origin; 0: none."""

    async def fetch(self, version: int, name: str = "") -> Stored:
        """A version's weights out of the store, whoever put it there; ParallmError when they cannot be had.

        `name`: of another adapter than the run's.
        """

    async def served_base(self) -> str:
        """The hash of the base model that workers serve now; "": not known."""

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Write down that a staged version failed; it stays readable and is never served."""

    async def roll_back(self, version: int, reason: str) -> None:
        """Make an older version the latest again; logged with the reason."""

    async def set_best(self, version: int, value: float) -> None:
        """Point `best` at a version."""

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Publish an alert: an event and a counter."""


async def nobody_asks() -> bool:
    """For rings that cannot say."""
    return False


@dataclass(frozen=True)
class TrainerRing:
    """The parts of a ring that a run uses."""

    base_sha256: str
    codec: TextCodec
    source: RolloutSource
    sink: AdapterSink
    board: RingBoard
    mailbox: RingMailbox
    live: TrajectoryQueue | None = None  # needed for the sources `live` and `both`
    id: str = ""  # the name of its data; "": not known
    learners: ServiceLearners | None = None  # where the training service has the run's learner
    lead: RunLead | None = None  # where others may compute with the run
    federation: Federation | None = None  # with which the run averages its weights
    model: str = ""  # served name of the base
    asked: Callable[[], Awaitable[bool]] = nobody_asks  # whether an interactive request waits or runs
    scorer: Scorer | None = None  # of a run with a teacher
