"""What is said to an engine between two turns: plain data, so that all ranks of a group can obey the same.

An order is obeyed before the turn that follows it, on every rank in the same order (worker/group/).
"""

from dataclasses import replace
from pathlib import Path

import msgspec

from shared.adapters import AdapterManifest
from worker.engine.engine import Engine
from worker.engine.lora.slots import AdapterSlots
from worker.engine.messages import EndReason, Picture, RowRequest
from worker.engine.speculation.memory import Completions
from worker.engine.warm_up import WarmUp


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Decode these sequences."""

    requests: list[RowRequest]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a sequence before its next token."""

    seq: str
    reason: EndReason


class SetAside(msgspec.Struct, frozen=True, tag=True):
    """Let rows go, and keep their KV."""

    seqs: list[str]


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """Stop computing; rows stay."""

    clear_cache: bool


class Thaw(msgspec.Struct, frozen=True, tag=True):
    """Go on."""


class ClearCache(msgspec.Struct, frozen=True, tag=True):
    """Forget KV of earlier prompts, with `rows` that of running rows, too."""

    rows: bool


class Provide(msgspec.Struct, frozen=True, tag=True):
    """The file of an adapter version is here; each rank has its own path to it."""

    path: str
    manifest: AdapterManifest


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """The file of `name@k` goes away."""

    version: str


class Point(msgspec.Struct, frozen=True, tag=True):
    """The latest version of an adapter; 0: none any more."""

    name: str
    version: int


class Remember(msgspec.Struct, frozen=True, tag=True):
    """What others have written behind prompts of ours, to draft from."""

    completions: list[Completions]


class KeepOnDisk(msgspec.Struct, frozen=True, tag=True):
    """Adapter versions whose KV is worth files, and digests of their weights."""

    versions: dict[str, str]


class Rehearse(msgspec.Struct, frozen=True, tag=True):
    """Do the next piece of the warm-up."""


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


def without_pixels(order: Order) -> Order:
    """As ranks that follow are told it: they get what the leading rank's tower makes of images."""
    if not isinstance(order, Submit) or not any(request.pictures for request in order.requests):
        return order
    return Submit([replace(request, pictures=_emptied(request.pictures)) for request in order.requests])


def _emptied(pictures: tuple[Picture, ...]) -> tuple[Picture, ...]:
    return tuple(replace(picture, tiles=[]) for picture in pictures)


def obey(order: Order, engine: Engine, slots: AdapterSlots | None, warm_up: WarmUp | None = None) -> None:
    """Do as it says; in the engine's thread, between two turns."""
    match order:
        case Submit(requests):
            engine.submit(requests)
        case Cancel(seq, reason):
            engine.cancel(seq, reason)
        case SetAside(seqs):
            engine.set_aside(seqs)
        case Freeze(clear_cache):
            engine.freeze(clear_cache=clear_cache)
        case Thaw():
            engine.thaw()
        case ClearCache(rows):
            engine.clear_cache(rows=rows)
        case Remember(completions):
            engine.drafting.remember(completions)
        case KeepOnDisk(versions):
            engine.prefixes.last(versions)
        case Rehearse():
            assert warm_up is not None, "an engine that is built as a worker's"
            warm_up.piece()
        case Provide() | Withdraw() | Point():
            assert slots is not None, "this engine was started without adapters"
            _tell(order, slots)


def _tell(order: Provide | Withdraw | Point, slots: AdapterSlots) -> None:
    match order:
        case Provide(path, manifest):
            slots.provide(Path(path), manifest)
        case Withdraw(version):
            slots.withdraw(version)
        case Point(name, version):
            slots.point(name, version)
