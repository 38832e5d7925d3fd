"""Models of the catalogue: where each stands, and whether a host can load one that no worker serves now.

All of it is computed from the last look at hosts and catalogue (`shared/catalogue.py:RingModels`).
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from shared.catalogue import RETRY_S, CatalogueEntry, HeldState, HostStatus, RingModels
from shared.fit.plan import gb

# Of a model that no host holds: loadable, since a host can load it on request, or unavailable
ModelState = HeldState | Literal["loadable", "unavailable"]

_NEAREST: tuple[HeldState, ...] = ("ready", "loading", "downloading", "unloading")  # to an answer
_COMES = ("ready", "loading", "downloading")
REFUSED_RETRY_S = 30


@dataclass(frozen=True)
class Obstacle:
    """Why no host can load a model."""

    reason: str
    retry_after_s: int = 2
    is_size: bool = False  # it is too large for each machine: waiting changes nothing


def obstacle(models: RingModels, entry: CatalogueEntry) -> Obstacle | None:
    """Why no host can load the model; None if one can, or does."""
    hosts = [host for host in models.hosts if not host.draining]
    held = [each for host in hosts if (each := host.holds(entry.name)) is not None]
    if any(each.state != "failed" for each in held):
        return None
    if not held and any(entry.name in host.unseen for host in hosts):
        return None
    if not hosts:
        return Obstacle("no host is running that could load it (mlx_parallm_worker with several --model)")
    offering = [host for host in hosts if entry.name in host.offers]
    if not offering and entry.ranks > 1:
        return Obstacle(f"a group of {entry.ranks} processes serves it, and none is running")
    refused = [
        f"{host.host} cannot load it: {host.refuses[entry.name]}" for host in hosts if entry.name in host.refuses
    ]
    if not offering and refused:
        return Obstacle("; ".join(refused), REFUSED_RETRY_S)
    if not offering:
        return Obstacle(
            f"none of the {len(hosts)} hosts offers '{entry.source}': a host offers the models of its --model flags, "
            "and with --from-catalogue those of the catalogue that it may fetch or has in its --catalogue-folders "
            "(it looks for a new one within seconds)"
        )
    fitting = [host for host in offering if host.offers[entry.name] <= (host.memory_bytes or float("inf"))]
    if not fitting:
        return Obstacle(_too_large(entry, offering), is_size=True)
    free = [host for host in fitting if not _is_pinned_full(models, host, entry)]
    if not free:
        names = ", ".join(sorted({host.host for host in fitting}))
        return Obstacle(f"pinned models leave no room for it on {names}: unpin one")
    failed = [(host, each) for host in free if (each := host.holds(entry.name)) is not None]
    left_s = min((RETRY_S - (host.heartbeat_ms - each.since_ms) / 1000 for host, each in failed), default=0)
    if len(failed) < len(free) or left_s <= 0:  # some host has not tried it yet, or tries it again
        return None
    reasons = "; ".join(f"on {host.host} loading failed: {each.why or 'no reason given'}" for host, each in failed)
    return Obstacle(reasons, ceil(left_s))


def _is_pinned_full(models: RingModels, host: HostStatus, entry: CatalogueEntry) -> bool:
    """True if what a host never unloads leaves too little for a model; of a pinned one, one copy stays."""
    pinned = [
        held for held in host.held if held.state == "ready" and (own := models.entries.get(held.name)) and own.pinned
    ]
    stays = [held for held in pinned if all(other.id >= host.id for other, _ in models.holding(held.name))]
    taken = sum(held.need_bytes for held in stays)
    lacks = bool(host.memory_bytes) and host.memory_bytes - taken < host.offers[entry.name]
    return bool(stays) and (lacks or len(stays) == host.most_models)


def _too_large(entry: CatalogueEntry, offering: list[HostStatus]) -> str:
    largest = max(offering, key=lambda host: host.memory_bytes - host.offers[entry.name])
    return (
        f"it needs {gb(largest.offers[entry.name])} of memory, and the largest machine that has its files, "
        f"{largest.host}, has {gb(largest.memory_bytes)} for models"
    )


def state_of(models: RingModels, entry: CatalogueEntry) -> ModelState:
    """The state of a model that no worker serves: on the host where it is nearest to an answer."""
    states = {held.state for _, held in models.holding(entry.name)}
    found = next((state for state in _NEAREST if state in states), None)
    if found is not None:
        return "loading" if found == "ready" else found  # its worker is about to be seen
    if obstacle(models, entry) is None:
        return "loadable"
    return "failed" if "failed" in states else "unavailable"


def progress_of(models: RingModels, name: str) -> float:
    """Share of a download or load that is done, on the host that is furthest; 0 without one."""
    held = [each for _, each in models.holding(name)]
    return max((1.0 if each.state == "ready" else each.progress for each in held if each.state in _COMES), default=0.0)


def waiting_for(models: RingModels, entry: CatalogueEntry) -> str:
    """Words that say what a request for the model waits for."""
    state = state_of(models, entry)
    if state in _COMES:
        return f"{state} {progress_of(models, entry.name):.0%}"
    return "waiting for a host to load the model"
