"""A trainer's status, orders to it, and its answers: plain messages, read by api and dashboard.

**policy** the adapter name that a trainer publishes under; there is one trainer a policy · **train step** one batch
consumed · **policy step** a train step whose result is part of the present policy.
"""

import re
from typing import Literal, get_args

import msgspec

from shared.adapters import NAME
from shared.errors import InvalidRequestError, ParallmError
from shared.machine.status import MachineStatus
from shared.ranks import RankStatus
from shared.trajectories import LiveTrajectory

AlertKind = Literal[
    "gate_failed",
    "reward_collapse",
    "no_signal",
    "foreign_version",
    "all_stale",
    "gave_up",
    "disk_full",
    "own_code_blocked",
]
ALERT_KINDS: tuple[AlertKind, ...] = get_args(AlertKind)
TrainerState = Literal["starting", "waiting", "training", "paused", "ended", "failed"]
ForeignAction = Literal["adopt", "override"]  # reaction to a version that another process has made the latest


class BoardSample(msgspec.Struct, frozen=True):
    """A sample of the last train step with its reward, shortened for people."""

    reward: float | None  # None: it failed
    prompt: str  # its end
    completion: str  # its beginning
    tokens: int = 0  # of the completion
    finish_reason: str = ""
    version: str = ""  # that wrote its end; "": the base
    components: dict[str, float] = {}  # of the reward
    error: str = ""  # why it failed


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's totals and present state; None: not known yet, or not finite."""

    policy: str
    run: str
    owner: str  # host:pid:random
    model: str = ""
    source: str = "prompts"
    state: TrainerState = "starting"
    problem: str = ""  # why it failed, is paused, or cannot learn
    started_ms: int = 0  # Unix milliseconds
    heartbeat_ms: int = 0
    last_update_ms: int = 0  # when a policy step last succeeded; 0: never
    train_step: int = 0
    policy_step: int = 0
    version: int = 0  # that the trainer serves; 0: none yet
    best_version: int = 0
    best_reward: float | None = None
    held_out: float | None = None
    held_out_true: float | None = None  # the second reward of the same answers
    reward: float | None = None  # of the last train step, as are the next three
    loss: float | None = None
    kl: float | None = None
    lag: int = 0
    trajectories: int = 0  # learned from, since the run began; the totals below, too
    tokens: int = 0
    updates: int = 0
    swaps: int = 0  # versions served
    rejected: int = 0
    rollbacks: int = 0
    checkpoint_saves: int = 0
    updates_per_s: float = 0.0  # over the time that the run has trained
    tokens_per_s: float = 0.0
    checkpoints: tuple[str, ...] = ()  # that can be resumed from, oldest first
    latest_checkpoint: str = ""
    best_checkpoint: str = ""
    value_loss: float | None = None  # of a value head, in the last train step
    explained: float | None = None  # how well its values were known before: 1 is all
    ranks: tuple[RankStatus, ...] = ()  # that divide the model among them; (): it is one process
    machine: MachineStatus = MachineStatus()  # the trainer's memory
    mode: str = ""  # of learning, as `--mode` has it; "": rl, of a trainer that does not state it
    steps: int = 0  # train steps that the run is to make; 0: it has no end
    eta_s: float | None = None  # until they are made, at the pace of the last ones
    groups: int = 0  # of the last train step, as are the next four
    taught: int = 0  # groups in the loss
    zero_variance: int = 0  # groups whose samples all earned the same
    overlong: int = 0  # samples that reached the length limit
    failed: int = 0  # samples without a completion or a reward
    samples: tuple[BoardSample, ...] = ()  # of the last train step, the highest reward first
    held_out_right: float | None = None  # of a run on a data set: the share of held-out items that it has right
    next_version_at: int = 0  # train step after which it offers its next version; 0: not known


class TrainingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One train step on the curves."""

    train_step: int
    policy_step: int
    version: int
    at_ms: int
    source: str = "prompts"  # where its trajectories came from: prompts, live, posted
    reward: float | None = None
    reward_std: float | None = None
    held_out: float | None = None
    held_out_true: float | None = None  # the second reward of the same answers
    held_out_right: float | None = None  # of a run on a data set: the share of held-out items that is right
    loss: float | None = None
    value_loss: float | None = None  # of a value head; None: there is none
    explained: float | None = None  # share of the variance of the returns that the values had predicted
    kl: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    grad_norm: float | None = None
    update_rms: float | None = None
    learning_rate: float | None = None
    lag_mean: float | None = None
    lag_max: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    gate: str = ""  # "" when the version passed, else the failed checks
    held_out_loss: float | None = None  # of a run on a data set


class Beat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Heartbeat of a trainer without Redis: that it owns the policy, and its status."""

    owner: str
    instead_of: str = ""  # an owner that is known to be dead
    base_sha256: str = ""  # of the model that it trains, when it asks for its name
    status: TrainerStatus | None = None
    point: TrainingPoint | None = None


class Holder(msgspec.Struct, frozen=True):
    """The owner of a policy from now on, and the names of model and ring here ("": not asked for)."""

    owner: str
    model: str = ""
    ring: str = ""


class Alert(msgspec.Struct, frozen=True):
    """Something that a person should look at."""

    policy: str
    kind: AlertKind
    message: str
    at_ms: int


class UpdateOrder(msgspec.Struct, frozen=True, tag="update"):
    """Learn from these trajectories in one train step."""

    trajectories: tuple[LiveTrajectory, ...]
    update_inference: bool = True  # serve the result
    checkpoint_name: str = ""  # save a checkpoint of the result; "": none


class CheckpointOrder(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Save a checkpoint now, between two train steps."""

    name: str = ""


class ResumeOrder(msgspec.Struct, frozen=True, tag="resume"):
    """Continue a run that is paused because another process has moved `latest` of its policy."""

    action: ForeignAction


Order = UpdateOrder | CheckpointOrder | ResumeOrder
UpdateOutcome = Literal["updated", "rejected", "no_signal"]


class UpdateAnswer(msgspec.Struct, frozen=True, tag="updated"):
    """Result of an update. `rejected`: the gate refused it and all is as before; `no_signal`: nothing to learn."""

    status: UpdateOutcome
    train_step: int
    policy_step: int
    version: int  # that is served afterwards
    served: bool  # whether the update is in it
    trajectories: int  # that were in the loss
    dropped: dict[str, int]  # groups or trajectories that taught nothing, by reason
    reward: float | None
    loss: float | None
    kl: float | None
    gate: str  # the failed checks
    checkpoint: str  # "": none
    unchecked: int = 0  # trajectories whose log-probabilities could not be compared: their version is gone


class CheckpointAnswer(msgspec.Struct, frozen=True, tag="saved"):
    """The name of the checkpoint that was saved."""

    checkpoint: str
    train_step: int


class ResumeAnswer(msgspec.Struct, frozen=True, tag="resumed"):
    """The run was resumed, with the version that it now serves."""

    action: ForeignAction
    version: int  # that is served and trained from now on


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """The order could not be carried out; `code` is that of an error of ours."""

    code: str
    message: str

    @classmethod
    def of(cls, error: ParallmError) -> "Refusal":
        """The answer when an error of ours is why."""
        return cls(error.code or "", error.message)


Answer = UpdateAnswer | CheckpointAnswer | ResumeAnswer | Refusal


class TakeOrders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer without Redis asks for an order."""

    owner: str
    after: str = ""  # an order taken in an earlier life and not finished, after this entry; "": a new one


class TakenOrder(msgspec.Struct, frozen=True):
    """An order on its way to such a trainer."""

    entry: str
    id: str
    order: msgspec.Raw  # of an `Order`; what is wrong with it the trainer answers
    deadline_ms: int
    again: bool
    too_late: bool  # by the ring's clock


class AnswerLetter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of such a trainer to an order."""

    owner: str
    entry: str
    id: str
    answer: Answer | None = None
    done: bool = False


class TrajectoryStats(msgspec.Struct, frozen=True):
    """Counts of a policy's live trajectories, and what waits."""

    collected: int = 0
    dropped: int = 0  # the oldest, when the bound was passed
    consumed: int = 0  # learned from, or found too old or without a score by the trainer
    waiting: int = 0
    bytes: int = 0  # number of waiting ones


def is_checkpoint_name(name: str) -> bool:
    """True if the name is allowed for a checkpoint; `latest` and `best` are pointers to others."""
    return re.fullmatch(NAME, name) is not None and name not in ("latest", "best")


def check_checkpoint_name(name: str) -> str:
    """The name, if a checkpoint can have it; "" is the default name."""
    if name and not is_checkpoint_name(name):
        raise InvalidRequestError(
            f"{name[:80]!r} is no checkpoint name: letters, digits, '.', '_', '-', at most 64, not 'latest' or 'best'",
            param="checkpoint_name",
        )
    return name
