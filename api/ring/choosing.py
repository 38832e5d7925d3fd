"""Which of several rings a request is about: decided once, and everything after that gets this ring.

A request that names a model or an adapter goes to the ring that serves it: the process's own before the others, these
in the order of `--ring`; then to one that knows it without a live worker. Where several rings serve the same weights
under one name, requests for them without an adapter go where there is room (`spreading.py`), unless they begin
something that is looked for by its id and counted by its key, as jobs do. `RING/NAME` names the ring, too, for names
that several rings have. What is named by its id is looked for in each ring.

A ring that is away is not asked. When no other ring has what is asked for, the error names it (503): it cannot be known
whether the thing is there.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from redis.exceptions import RedisError

from api.callers.caller import asker
from api.ring.ring import ANSWER_S, Ring
from api.ring.spreading import choose
from shared.adapters import AdapterRef
from shared.errors import InvalidRequestError, ServiceUnavailableError, UnknownAdapterError
from shared.process.model_aliases import meant_by
from shared.process.other_rings import HOME

HEADER = "x-parallm-ring"
_UNKNOWN, _KNOWN, _SERVED = 0, 1, 2
_SILENT = (RedisError, OSError)  # TimeoutError is an OSError


T = TypeVar("T")
Has = Callable[[Ring], Awaitable[bool]]


class Chosen(NamedTuple):
    """A ring, and what of a request's names is for it."""

    ring: Ring
    model: str | None
    adapter: str


def named_ring(home: Ring, name: str) -> Ring:
    """The ring of this name, which may be away, "" being the process's own; InvalidRequestError for none."""
    for each in home.home.all:
        if each.name == (name or HOME):
            return each
    known = ", ".join(each.name for each in home.home.all)
    raise InvalidRequestError(f"there is no ring '{name[:80]}'; this server has {known}", param=HEADER)


def reached(ring: Ring) -> Ring:
    """The ring; ServiceUnavailableError when it is another one than the process's own and is away."""
    if ring.away and ring.home is not ring:
        raise ring.is_away()
    return ring


async def from_each(ring: Ring, read: Callable[[Ring], Awaitable[T]]) -> list[tuple[Ring, T]]:
    """Result of `read` for each ring that answers in time. A process with one ring waits for it as long as it takes."""
    if not ring.others:
        return [(ring, await read(ring))]
    return [
        (each, said)
        for each, said in zip(ring.all, await results_of_rings(ring, read), strict=True)
        if said is not None
    ]


async def results_of_rings(ring: Ring, read: Callable[[Ring], Awaitable[T]]) -> list[T | None]:
    """The same of all, at once; None for a ring that is away."""

    async def said(each: Ring) -> T | None:
        try:
            return await _answer_of(each, read)
        except _SILENT:
            return None

    return await asyncio.gather(*(said(each) for each in ring.all))


def ring_keeping(ring: Ring, name: str) -> Ring:
    """The ring that something stored has gone to; ServiceUnavailableError when it is away, or none of this process's.

    Another process of the same home may serve it.
    """
    try:
        return reached(named_ring(ring, name))
    except InvalidRequestError:
        raise ServiceUnavailableError(f"it is in ring '{name}', which this api process does not serve") from None


async def ring_for(ring: Ring, model: str | None, adapter: str = "", *, conversation: str | None = None) -> Chosen:
    """The ring of a request's model and adapter; a ring without others is its own choice.

    `conversation`: what the request's turns have in common, "" for nothing; None: it is for the first ring of several.
    """
    if not ring.others:
        return Chosen(ring, model, adapter)
    for each in ring.all:
        prefix = f"{each.name}/"
        if (adapter if model is None else model).startswith(prefix):
            of_model = model if model is None else model.removeprefix(prefix)
            return Chosen(reached(each), of_model, adapter.removeprefix(prefix))
    if model is None and not adapter:
        return Chosen(await _only_serving(ring), model, adapter)
    found = await _best(ring, model, adapter)
    if found is None and model is not None and (alias := meant_by(model, ring.settings.model_alias)) is not None:
        found, model = await _best(ring, alias, adapter), alias
    if found is not None and model is not None and not adapter and conversation is not None:
        found = await _with_room(found, model, conversation)
    return Chosen(found or ring, model, adapter)


async def ring_holding(ring: Ring, has: Has, what: str) -> Ring:
    """The first ring that has something; the given one when none has, ServiceUnavailableError when one is away."""
    found, away = await _first(ring, has)
    if found is None and away is not None:
        raise away.is_away(f"{what} is in no ring that answers, and ")
    return found or ring


async def ring_of_adapter(ring: Ring, name: str, model: str | None = None) -> Chosen:
    """Where an adapter is, else where its base model is, for one that is new; else the given ring."""
    if not ring.others:
        return Chosen(ring, model, name)

    async def has(each: Ring) -> bool:
        owner = await each.adapters.owner(name)
        return owner is not None and asker().sees(owner)

    of_model = await ring_for(ring, model) if model else Chosen(ring, model, "")
    if of_model.ring is not ring:
        return of_model._replace(adapter=name)
    found, _ = await _first(ring, has)
    return Chosen(found or ring, of_model.model, name)


async def _answer_of(ring: Ring, read: Callable[[Ring], Awaitable[T]]) -> T:
    """Result of `read` within ANSWER_S; one of the errors _SILENT, at once from a ring that is away."""
    if ring.away:
        raise TimeoutError
    async with asyncio.timeout(ANSWER_S):
        return await read(ring)


async def _first(ring: Ring, has: Has) -> tuple[Ring | None, Ring | None]:
    """The first ring that has something, and the first one that could not be asked."""
    if not ring.others:
        return (ring if await has(ring) else None), None
    away = None
    for each in ring.all:
        try:
            if await _answer_of(each, has):
                return each, away
        except _SILENT:
            away = away or each
    return None, away


async def _only_serving(ring: Ring) -> Ring:
    """The ring of the only model that is served; the first when there are none, InvalidRequestError when several."""
    serving = [each for each in ring.all if not each.away and await each.live_models()]
    names = sorted(each.full_name(name) for each in serving for name in each.models_seen)
    if len(serving) > 1:
        raise InvalidRequestError(f"'model' is required: {', '.join(names)} are served", param="model")
    return serving[0] if serving else ring


async def _best(ring: Ring, model: str | None, adapter: str) -> Ring | None:
    """The first ring that serves both, or else knows them; None when all answer that they do not."""
    best, known = _UNKNOWN, None
    away: list[Ring] = []

    async def rank_in(each: Ring) -> int:
        return min([await _rank(each, name) for name in (model, adapter) if name])

    for each in ring.all:
        try:
            rank = await _answer_of(each, rank_in)
        except _SILENT:
            away.append(each)
            continue
        if rank == _SERVED:
            return each
        if rank > best:
            best, known = rank, each
    name = model or adapter
    served_away = next((each for each in away if name in each.models_seen), None)
    if served_away is None and known is not None:
        return known
    if ring in away:  # as with one ring: it is waited for
        return ring
    if missing := served_away or next(iter(away), None):
        raise missing.is_away(f"no ring that answers serves '{name[:200]}', and ")
    return None


async def _with_room(first: Ring, model: str, conversation: str) -> Ring:
    """The ring that gets a request, of those that serve the model with the weights of the first one."""
    card = await first.live_card(model)
    equals = [] if card is None else first.equals(card)
    if card is None or len(equals) < 2:
        return first
    chosen = choose([(each, each.crowd(card.name)) for each in equals], conversation)
    chosen.sent.one(card.name)
    return chosen


async def _rank(ring: Ring, name: str) -> int:
    """How a ring knows a model or an adapter."""
    if await ring.live_card(name) is not None:
        return _SERVED
    if await ring.card(name) is not None:
        return _KNOWN
    try:
        choices = AdapterRef.parse(name).choices
    except InvalidRequestError:
        return _UNKNOWN
    return min([await _rank_of_version(ring, choice.name, choice.version) for choice in choices])


async def _rank_of_version(ring: Ring, name: str, version: int) -> int:
    try:
        manifest = await ring.adapters.manifest(name, version)
    except UnknownAdapterError:
        owner = None if version else await ring.adapters.owner(name)
        return _UNKNOWN if owner is None or not asker().sees(owner) else _KNOWN
    live = (await ring.live_models()).values()
    served = any(manifest.network is not None or manifest.base_sha256 in ("", card.base_sha256) for card in live)
    return _SERVED if served else _KNOWN
