"""What a run is made of. Each part is a seam: the ring's in production, an in-process one in tests."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shared.adapters import GateCheck
from shared.errors import ParallmError
from shared.redis.training.orders import Received
from shared.training import AlertKind, Answer, Order, Refusal, TrainerState, TrainerStatus, TrainingPoint
from trainer.learn.compute import ComputeHost
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Environment
from trainer.rollouts.groups import RolloutSource
from trainer.rollouts.live import LiveQueue
from trainer.state import Arrays


class Board(Protocol):
    """Where a run tells what it does."""

    def begin(self, status: Callable[[TrainerState], TrainerStatus], stop: Callable[[], None]) -> None:
        """From now on `status` may be asked; `stop` ends the run when the policy has gone to another trainer."""

    async def show(self, state: TrainerState, point: TrainingPoint | None = None, problem: str = "") -> None:
        """What the run does now, the train step that it has just done, and what keeps it from learning."""


class BoardStore(Protocol):
    """Where the board is kept: in Redis (`TrainingBoard`), or behind an api (`trainer.ring.over_http.HttpBoard`)."""

    policy: str

    async def hold(self, owner: str, instead_of: str = "") -> str:
        """Own the policy for TRAINER_TTL_S; the owner from now on. `instead_of`: one that is known to be dead."""

    async def let_go(self, owner: str) -> None:
        """Give the policy up, if it is `owner`'s."""

    async def write(self, status: TrainerStatus) -> None: ...

    async def add(self, point: TrainingPoint) -> None:
        """One more train step on the curves."""


@dataclass(frozen=True)
class Letter:
    """An order in the trainer's hands."""

    received: Received
    order: Order


def refusal(error: ParallmError) -> Refusal:
    """The answer when an order could not be carried out."""
    return Refusal(error.code or "", error.message)


class Mailbox(Protocol):
    """Where orders come from."""

    async def next(self) -> Letter:
        """Wait for an order; may be cancelled without loss."""

    def give_back(self, letter: Letter) -> None:
        """It comes first again."""

    async def answer(self, letter: Letter, answer: Answer, *, keep: bool = False) -> None:
        """Tell whoever waits; `keep` until a checkpoint has it."""

    async def saved(self) -> None:
        """A checkpoint is on disk: what was kept is done."""

    def known(self, orders: Collection[str]) -> None:
        """Orders whose effect the weights have already."""


class OrderDesk(Protocol):
    """Where orders lie: in Redis (shared/redis/training/orders.py), or behind an api (trainer/ring/over_http.py)."""

    async def take(self, consumer: str, count: int = 1) -> list[Received]:
        """The next orders: first those that this consumer had and did not finish, then new ones; does not wait."""

    async def wait(self, timeout_s: float) -> None:
        """Until something new may be there."""

    async def tell(self, order_id: str, answer: bytes) -> None:
        """Answer; said again it replaces the answer."""

    async def done(self, received: Received) -> None:
        """It will not come again."""


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
    """Where versions go. The store gives out the numbers; they never repeat."""

    async def stage(self, candidate: Candidate) -> int:
        """Store and verify the candidate as the next version, loadable by number; the latest stays what it was.

        AdapterRejectedError when the files are not what they say.
        """

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        """One atomic flip: following requests get `version` from the next decode step on.

        ConflictError when the latest is not `if_latest`: somebody else has moved it.
        """

    async def latest_version(self) -> int:
        """The version that is the latest now, whoever made it so; 0: none."""

    async def fetch(self, version: int) -> "Stored":
        """A version's weights out of the store, whoever put it there; ParallmError when they cannot be had."""

    async def served_base(self) -> str:
        """The hash of the base model that workers serve now; "": not known."""

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Write down that a staged version failed; it stays readable and is never served."""

    async def roll_back(self, version: int, reason: str) -> None:
        """Make an older version the latest again; logged with the reason."""

    async def set_best(self, version: int, value: float) -> None:
        """Point `best` at a version."""

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Tell whoever watches: an event and a counter."""


@dataclass(frozen=True)
class Parts:
    """The parts of one run."""

    host: ComputeHost
    load_model: Callable[[], Any]  # called in the host's thread; an mlx-lm model
    base_sha256: str
    conversation: ChatEncoder
    source: RolloutSource
    sink: AdapterSink
    environment: Environment
    board: Board
    mailbox: Mailbox
    held_out: Environment | None = None
    live: LiveQueue | None = None  # needed for the sources `live` and `both`
    ring: str = ""  # the name of the ring's data; "": there is none
