"""Orders: what an engine does between two turns. Plain data, so that every rank of a group can carry out the same.

An order is carried out before the turn that follows it, on every rank in the same sequence
(worker/group/engine_lead.py). A new order is one struct here, with its handler, and its name in `Order`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from mlx_model.loader import LoadedModel
from shared.adapters import AdapterManifest
from shared.images.refs import Picture
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.engine import Engine
from worker.engine.messages import EndReason, RowRequest
from worker.engine.speculation.memory import Completions
from worker.engine.warm_up import WarmUp


@dataclass(frozen=True)
class EngineParts:
    """A rank's engine with everything that orders act on; used only in the engine's thread."""

    loaded: LoadedModel
    engine: Engine
    slots: AdapterSlots | None  # None: the engine was started without adapters
    warm_up: WarmUp

    @property
    def adapter_slots(self) -> AdapterSlots:
        """The slots, where orders about adapters are expected."""
        assert self.slots is not None, "this engine was started without adapters"
        return self.slots


class EngineOrder(msgspec.Struct, frozen=True, tag=True):
    """Base class of all orders, each of which carries itself out."""

    def carry_out(self, parts: EngineParts) -> None:
        """Do it; in the engine's thread, between two turns."""
        raise NotImplementedError

    def for_followers(self) -> Order:
        """The order as the other ranks of a group receive it."""
        return self  # type: ignore[return-value]  # every subclass stands in `Order`


class Submit(EngineOrder, frozen=True):
    """Decode these sequences; those of one group with equal prompts share their prefill."""

    requests: list[RowRequest]

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.submit(self.requests)

    def for_followers(self) -> Order:
        """Without pixels: the other ranks get what the leading rank's vision tower computes of images."""
        if not any(request.pictures for request in self.requests):
            return self
        return Submit([replace(request, pictures=_emptied(request.pictures)) for request in self.requests])


class Cancel(EngineOrder, frozen=True):
    """End a sequence before its next token."""

    seq: str
    reason: EndReason = "cancelled"

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.cancel(self.seq, self.reason)


class SetAside(EngineOrder, frozen=True):
    """Remove rows and store their KV, so that they can continue later."""

    seqs: list[str]

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.set_aside(self.seqs)


class Freeze(EngineOrder, frozen=True):
    """Stop computing after the decode step under way; rows stay. `clear_cache`: no cached KV survives it."""

    clear_cache: bool

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.freeze(clear_cache=self.clear_cache)


class Thaw(EngineOrder, frozen=True):
    """Continue computing after a `Freeze`."""

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.thaw()


class ClearCache(EngineOrder, frozen=True):
    """Drop the KV of earlier prompts, and with `rows` that of running rows, which then compute theirs again."""

    rows: bool

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.clear_cache(rows=self.rows)


class Provide(EngineOrder, frozen=True):
    """The file of an adapter version is on disk until a `Withdraw`; each rank has its own path to it."""

    path: str
    manifest: AdapterManifest

    def carry_out(self, parts: EngineParts) -> None:
        parts.adapter_slots.provide(Path(self.path), self.manifest)


class Withdraw(EngineOrder, frozen=True):
    """The file of `name@k` goes away; loaded weights stay until their slot is needed."""

    version: str

    def carry_out(self, parts: EngineParts) -> None:
        parts.adapter_slots.withdraw(self.version)


class Point(EngineOrder, frozen=True):
    """The latest version of an adapter, 0 if it has none any more; rows that follow it switch once it is loaded."""

    name: str
    version: int

    def carry_out(self, parts: EngineParts) -> None:
        parts.adapter_slots.point(self.name, self.version)


class Remember(EngineOrder, frozen=True):
    """Completions that other workers have written for prompts of ours, to draft from."""

    completions: list[Completions]

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.drafting.remember(self.completions)


class KeepOnDisk(EngineOrder, frozen=True):
    """Adapter versions whose KV may be written to disk, with digests of their weights; the base's always may."""

    versions: dict[str, str]

    def carry_out(self, parts: EngineParts) -> None:
        parts.engine.prefixes.last(self.versions)


class Rehearse(EngineOrder, frozen=True):
    """Do the next piece of the warm-up."""

    def carry_out(self, parts: EngineParts) -> None:
        parts.warm_up.piece()


Order = (
    Submit
    | Cancel
    | SetAside
    | Freeze
    | Thaw
    | ClearCache
    | Provide
    | Withdraw
    | Point
    | Remember
    | KeepOnDisk
    | Rehearse
)


def _emptied(pictures: tuple[Picture, ...]) -> tuple[Picture, ...]:
    return tuple(replace(picture, tiles=[]) for picture in pictures)
