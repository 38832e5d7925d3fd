"""The catalogue of models in Redis: its entries, the hosts' heartbeats, leases of loads, orders, and demand.

Invariants. Each script may be repeated. A name or alias means one entry. A model is loaded by one host at a time, which
holds its lease; a host that dies loses it after LOAD_LEASE_MS. The taker of a lease says how many loads of the model it
knew of when it decided, so that a decision from facts of before another load is not carried out.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, get_args

import msgspec
import structlog
from redis.asyncio import Redis

from shared.catalogue import (
    MOST_ENTRIES,
    CatalogueEntry,
    HostStatus,
    ModelDemand,
    ModelOrder,
    OrderKind,
    RingModels,
)
from shared.errors import ConflictError, UnknownModelError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, is_no_script
from shared.sequences import SequenceClass

T = TypeVar("T")
log = structlog.get_logger()

CLASSES: tuple[SequenceClass, ...] = get_args(SequenceClass)
LEASE_MS = 6_000  # a claim that was not renewed for so long is of a worker that has died: twice a queue's lease
LOOKED_AT = 64  # entries of one stream whose deadlines are read
WORKERS_LOOKED_AT = 64  # of one model
HOSTS_TTL_S = keys.REGISTRY_TTL_S

_PUT, _REMOVE, _READ = Script("catalogue_put"), Script("catalogue_remove"), Script("catalogue_read")
_BEAT, _TAKE, _DEMAND = Script("host_beat"), Script("load_take"), Script("demand")
_DROP = Script("catalogue_drop")

_encode = msgspec.json.Encoder().encode
_entry = msgspec.json.Decoder(CatalogueEntry)
_status = msgspec.json.Decoder(HostStatus)
_order = msgspec.json.Decoder(ModelOrder)


class HostBeat(msgspec.Struct, frozen=True):
    """Answer to a heartbeat of a host."""

    has_catalogue: bool  # False: Redis has lost it, and the host is to `offer` its models again
    lost: tuple[str, ...]  # models that it loads while another host has the lease: it is to stop


class CatalogueStore:
    """The catalogue of one ring."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis

    # -- entries

    async def put(self, entry: CatalogueEntry, *, new: bool = False) -> None:
        """Write an entry as its operator wants it.

        ConflictError when another entry has its name or an alias, when the catalogue is full, or, with `new`, when it
        is there already; InvalidRequestError for one that no ring can serve.
        """
        if not await self._put(entry, "" if new else "*"):
            raise ConflictError(f"model '{entry.name}' is in the catalogue already", param="name")

    async def offer(self, entry: CatalogueEntry, *, adds: bool = True) -> None:
        """Write the figures that a host has found, and add the model unless it is there or is not to be added: somebody
        may have removed it meanwhile. Errors as in `put`."""
        await self._put(entry, "" if adds else "-", _encode(entry))

    async def change(self, name: str, edit: Callable[[CatalogueEntry], CatalogueEntry]) -> CatalogueEntry:
        """Replace an entry, by its name or an alias, with what `edit` makes of it; UnknownModelError for none.

        `edit` may be called several times, when others change the entry as well.
        """
        while True:
            name = (await self._resolved(name)) or name
            raw = await ask(self._redis, "HGET", keys.catalogue(), name)
            if not raw:
                raise UnknownModelError(f"model '{name}' is not in the catalogue", param="model")
            entry = edit(_entry.decode(raw))
            if await self._put(entry, raw):
                return entry

    async def remove(self, name: str) -> bool:
        """Take an entry out; hosts unload its model. False when it was not there."""
        names = [keys.catalogue(), keys.model_aliases(), keys.model_figures(), keys.model_loads(), keys.model_orders()]
        return bool(await _REMOVE(self._redis, names, [name, _field(name, "")]))

    async def _resolved(self, name: str) -> str | None:
        model: bytes | None = await ask(self._redis, "HGET", keys.model_aliases(), name)
        return None if model is None else model.decode()

    async def _put(self, entry: CatalogueEntry, instead_of: str | bytes, figures: bytes = b"") -> bool:
        """False if the entry in its place is another one than `instead_of`."""
        entry = entry.checked()
        args: list[Argument] = [keys.CATALOGUE_TTL_S, MOST_ENTRIES, entry.name, _encode(entry), instead_of, figures]
        names = [keys.catalogue(), keys.model_aliases(), keys.model_figures()]
        said, *more = await _PUT(self._redis, names, [*args, *entry.aliases])
        if said == b"full":
            raise ConflictError(f"the catalogue is full: it has {MOST_ENTRIES} models; remove one first")
        if said == b"taken":
            taken, holder = (each.decode() for each in more)
            raise ConflictError(
                f"'{taken}' is already a name of model '{holder}' in the catalogue",
                param="name" if taken == entry.name else "aliases",
            )
        return bool(said == b"ok")

    # -- everything

    async def read(self) -> RingModels:
        """The catalogue with its hosts, orders and leases, in one round trip; entries with the figures that a host has
        found. What another version has written and this one cannot read is left out, with a line in the log."""
        names = [keys.catalogue(), keys.model_figures(), keys.model_orders(), keys.model_loads(), keys.hosts()]
        now, entries, figures, orders, loads, beats, leases = await _READ(
            self._redis, names, [keys.host(""), keys.loading("")]
        )
        now_ms, known = int(now), dict(_pairs(figures))
        read = [_read(_entry, data) for name, data in _pairs(entries) if name]
        held = {each.name: _with_figures(each, known.get(each.name.encode())) for each in read if each is not None}
        given = (_read(_order, data) for _, data in _pairs(orders))
        oldest = now_ms - 1000 * keys.MODEL_ORDER_TTL_S
        hosts = (_read(_status, data) for data in beats)
        return RingModels(
            now_ms=now_ms,
            entries=dict(sorted(held.items())),
            hosts=tuple(sorted((each for each in hosts if each is not None), key=lambda each: each.id)),
            orders=tuple(each for each in given if each is not None and each.at_ms > oldest),
            loading={model.decode(): host.decode() for model, host in _pairs(leases)},
            loads={model.decode(): int(count) for model, count in _pairs(loads)},
        )

    async def demand(self, models: RingModels) -> dict[str, ModelDemand]:
        """The demand for each model of the catalogue, with its orders, in one round trip."""
        places = ("-", keys.HANDED_BACK, keys.SUSPECTS)
        calls: list[tuple[list[str], list[Argument]]] = [
            (
                [keys.workers(name)],
                [keys.GROUP, keys.sequence(name, ""), LEASE_MS, LOOKED_AT, WORKERS_LOOKED_AT, *CLASSES, "", *places],
            )
            for name in models.entries
        ]
        async with self._redis.pipeline(transaction=False) as pipe:
            for names, args in calls:
                _DEMAND.add(pipe, names, args)
            answers = await pipe.execute(raise_on_error=False) if calls else []
        demand = {}
        for name, call, answer in zip(models.entries, calls, answers, strict=True):
            counted = await _DEMAND(self._redis, *call) if is_no_script(answer) else answer
            if isinstance(counted, Exception):
                raise counted
            deadline_ms, *counts = map(int, counted)
            waiting, running, oldest = (dict(zip(CLASSES, counts[at::3], strict=True)) for at in range(3))
            orders = tuple(order for order in models.orders if order.model == name)
            demand[name] = ModelDemand(name, waiting, running, oldest, deadline_ms, orders)
        return demand

    # -- hosts

    async def beat(self, status: HostStatus) -> HostBeat:
        """Write a host's heartbeat; renews the leases of the models that it fetches or loads."""
        loads = [held.name for held in status.held if held.state in ("downloading", "loading")]
        names = [keys.host(status.id), keys.hosts(), keys.catalogue(), keys.model_aliases(), keys.model_figures()]
        names += [keys.model_loads(), *map(keys.loading, loads)]
        args: list[Argument] = [status.id, _encode(status), keys.HOST_TTL_S, HOSTS_TTL_S, keys.CATALOGUE_TTL_S]
        there, *lost = await _BEAT(self._redis, names, [*args, keys.LOAD_LEASE_MS, *loads])
        return HostBeat(there == b"1", tuple(model.decode() for model in lost))

    async def leave(self, host: str) -> None:
        """Remove a host that ends in an orderly way."""
        async with self._redis.pipeline() as pipe:
            pipe.delete(keys.host(host))
            pipe.zrem(keys.hosts(), host)
            await pipe.execute()

    async def take_load(self, model: str, host: str, loads: int) -> bool:
        """Take the lease to load a model that is in the catalogue; False when another host has it, or has had it since
        there were `loads` of it in all (`RingModels.loads`). A host asks again with another number after `read`."""
        args: list[Argument] = [host, keys.LOAD_LEASE_MS, model, loads, keys.CATALOGUE_TTL_S]
        return bool(await _TAKE(self._redis, [keys.loading(model), keys.model_loads(), keys.catalogue()], args))

    async def end_load(self, model: str, host: str) -> None:
        """Give the lease back. First the heartbeat shows the model as ready or failed: whoever takes the lease next has
        seen it."""
        await _DROP(self._redis, [keys.loading(model)], [host, ""])

    # -- orders

    async def order(self, kind: OrderKind, model: str, host: str = "") -> ModelOrder:
        """Ask a host, or any, to load or unload a model; it replaces an earlier order of the same model and host."""
        order = ModelOrder(uuid.uuid4().hex[:12], kind, model, host, time.time_ns() // 1_000_000)
        async with self._redis.pipeline() as pipe:
            pipe.hset(keys.model_orders(), _field(model, host), _encode(order).decode())
            pipe.expire(keys.model_orders(), keys.MODEL_ORDER_TTL_S)
            await pipe.execute()
        await self._redis.publish(keys.control_channel(keys.HOSTS), "")  # they look now
        return order

    async def fulfil(self, order: ModelOrder) -> None:
        """Take an order off the list, unless a newer one has replaced it."""
        await _DROP(self._redis, [keys.model_orders()], [_encode(order), _field(order.model, order.host)])


def _field(model: str, host: str) -> str:
    """Where an order stands: neither name has a space."""
    return f"{host} {model}"


def _with_figures(entry: CatalogueEntry, figures: bytes | None) -> CatalogueEntry:
    found = _read(_entry, figures) if figures else None
    if found is None or found.source != entry.source:
        return entry
    return msgspec.structs.replace(
        entry,
        size_bytes=found.size_bytes or entry.size_bytes,
        context=found.context or entry.context,
        family=found.family or entry.family,
        sha256=entry.sha256 or found.sha256,
    )


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _read(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T | None:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("catalogue.unreadable", error=str(error))
        return None
