"""What a leader and its members say to each other: plain messages, msgpack. Weights and gradients are parcels.

**step** a train step, by a number that grows · **update** the place of an AdamW update in it, from 0 · **part** what
one process computes of it: the same minibatches with fewer samples, under the whole step's totals · **look** what comes
before a step's first update with a value head: what the values of a part come to. Its number is `LOOK`.
"""

import msgspec

from shared.redis.training.parcels import Parcel
from trainer.learn.advantages import ValueSums
from trainer.learn.steps import Plan, Sums
from trainer.sharing import ExchangeDtype

LOOK = -1  # in the place of an update


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A run that others may join."""

    model: str  # served name of the base
    base_sha256: str
    options: bytes  # PolicyOptions (trainer/learners/kinds.py), msgpack
    settings: dict[str, object]  # those that a member may not have of its own
    exchange: ExchangeDtype = "float32"  # of gradients
    version: str = ""  # of the leader's package


class StepPart(msgspec.Struct, frozen=True):
    """One process's part of a train step."""

    plan: Plan
    policy_step: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A train step begins, with its look or first update: its first weights, a `StepPart` for each member that takes
    part, and the images of their samples.
    """

    epoch: str
    step: int
    weights: Parcel
    parts: dict[str, Parcel]
    origin: Parcel | None = None  # what the run began with, where the loss needs it
    pictures: dict[str, Parcel] = {}  # by their keys in hex: `Picture`, msgpack


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The next update of the step, and its weights."""

    epoch: str
    step: int
    update: int
    weights: Parcel
    known: ValueSums | None = None  # of all parts, with a value head


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The weights that the next step will most likely have."""

    epoch: str
    weights: Parcel


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """This member may not go on: what it computes is wrong."""

    epoch: str
    member: str
    reason: str


Word = Begin | Go | Ready | Leave


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A member's gradient for one update, or its look."""

    epoch: str
    member: str
    step: int
    update: int
    gradient: Parcel | None  # None: its part has no token in the loss
    sums: Sums
    positions: int
    known: ValueSums | None = None


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """A member could not compute its part."""

    epoch: str
    member: str
    step: int
    message: str


Answer = Done | Trouble
