"""Placement: which host loads which model, and what it unloads for it. Pure functions of `RingModels` and the demand.

Every host computes the plan of the whole ring from the same facts and carries out only its own part, after it has taken
the model's lease. So no host commands another, and a wrong or late fact costs time, never a second load: the lease
settles it, and the next plan is made from newer facts. docs/internals/placement.md states the rules.

Invariants of a plan:

- A pinned model is unloaded only where another host holds it ready.
- What a host holds and loads never needs more memory than it has, and never more models than it may hold.
- A model that is ready or under way somewhere is planned a second time only as a copy for a long queue.
- A model that waits `batch_turn_s` comes before all that have waited less, and then waits for the turn of each model
  that was overdue before it, `hold` times a load each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.catalogue import RETRY_S, CatalogueEntry, HeldModel, HostStatus, ModelDemand, RingModels

LOADING = ("downloading", "loading")
BYTES_PER_S = 1e9  # of a load that nobody has measured: a slow disk
LEAST_LOAD_S = 2.0  # of any load: a process starts
PASSING_MS = 1000  # a host looks at least once in this time
IN_USE_S = 5.0  # since its last use, in which one of several copies counts as busy: heartbeats are a second old
STRAY_MS = 10_000  # after a worker has ended, rows of which the queue believes that it runs them are gone
IDLE, BATCH, INTERACTIVE = 1, 2, 3  # how busy a model is
SOON_S = 60.0  # the loss by an eviction is the chance that the model is asked for within this time, times its load


@dataclass(frozen=True)
class PlacementRules:
    """Settings of an operator, the same on all hosts except `idle_s`."""

    batch_turn_s: float = 120.0  # after so long any waiting model is overdue: busy models give way to it
    hold: float = (
        3.0  # a busy model stays for so many times the longer of its load and its successor's, at most batch_turn_s
    )
    idle_s: float = 0.0  # without a request for so long a model is unloaded; 0: when its memory is wanted
    patience_s: float = 5.0  # after each so long the next best host may load a model that the best one has not
    most_copies: int = 0  # hosts that hold one model at once; 0: any number


@dataclass(frozen=True)
class Load:
    """Load `model` once `evict` are drained; nothing of it without the lease.

    Some of `evict` may be on their way out already; the load needs their memory.
    """

    model: str
    evict: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Unload:
    """Drain `model` and end its worker."""

    model: str
    why: str


@dataclass(frozen=True)
class Placing:
    """One way to load a model: on a host, after what it evicts."""

    host: str
    evict: tuple[str, ...]
    level: int  # the busiest of what it evicts: 0 nothing, IDLE, BATCH, INTERACTIVE
    memory: int  # of the host, where memory is short: a small model leaves the large machines to large ones
    cost_s: float  # expected seconds of loading, of this model and again of what it evicts


@dataclass(frozen=True)
class Want:
    """A model that should be loaded, and how much may be done for it."""

    model: str
    why: str
    since_ms: int  # it waits since then
    overdue: bool  # anything but a pinned model gives way, after its hold
    due: bool  # idle models give way at once; otherwise only those that are idle for long
    by_ms: int = 0  # its load should begin by then: its turn, or earlier, so that a deadline can be met
    is_batch: bool = False  # only batch sequences wait: no interactive ones give way before it is overdue
    priority: int = 0
    host: str = ""  # the only one that may load it; "": any
    ordered: bool = False  # by an operator: also where its last load has failed just now

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key: overdue ones by age, then due ones by priority and the time left, then the others."""
        if self.overdue:
            return (0, 0, self.since_ms, self.model)
        return (1 if self.due else 2, -self.priority, self.by_ms, self.model)


@dataclass
class _Host:
    """A host's memory and models if the plan so far is carried out."""

    status: HostStatus
    free: int
    slots: int
    loading_s: float  # until what it loads now is loaded, at most
    gone: set[str] = field(default_factory=set)
    closed: bool = False  # a model that is overdue waits for room here


def decide(
    models: RingModels, demand: Mapping[str, ModelDemand], me: str, rules: PlacementRules
) -> list[Load | Unload]:
    """Return what host `me` should do now: unloads first, then loads in the order of their urgency."""
    return _Planner(models, demand, rules).part_of(me)


class _Planner:
    """One plan of the whole ring."""

    def __init__(self, models: RingModels, demand: Mapping[str, ModelDemand], rules: PlacementRules) -> None:
        self._models, self._demand, self._rules = models, demand, rules
        self._now = models.now_ms
        self._measured: dict[str, float] = {}  # model -> s of its slowest known load
        self._left: dict[str, int] = {}  # model -> Unix ms at which the last host let it go
        for host in models.hosts:
            for model, past in host.past.items():
                self._measured[model] = max(past.load_s, self._measured.get(model, 0.0))
                if past.left_ms:
                    left = self._now - _age_ms(host, past.left_ms)
                    self._left[model] = max(left, self._left.get(model, 0))
        self._is_short = sum(each.size_bytes for each in models.entries.values() if each.ranks == 1) > sum(
            host.memory_bytes for host in models.hosts
        )
        self._hosts = {host.id: self._room(host) for host in models.hosts}
        self._ready: dict[str, list[str]] = {}  # model -> hosts
        self._under_way: set[str] = set()
        for host in models.hosts:
            for held in host.held:
                if held.state == "ready" and not host.draining:
                    self._ready.setdefault(held.name, []).append(host.id)
                elif held.state in LOADING:
                    self._under_way.add(held.name)
        for model, holder in models.loading.items():
            if (room := self._hosts.get(holder)) is not None and model not in self._ready:
                self._under_way.add(model)
                if room.status.holds(model) is None:  # the lease is newer than the heartbeat
                    room.free -= self._need(model, room.status)
                    room.slots -= 1

    # -- facts

    def _room(self, host: HostStatus) -> _Host:
        counted = sum(held.state != "failed" for held in host.held)
        loading = [self._load_s(held.name, host) * (1 - held.progress) for held in host.held if held.state in LOADING]
        return _Host(
            host,
            free=host.free_bytes,
            slots=(host.most_models or 1 << 20) - counted,
            loading_s=sum(loading),
        )

    def _need(self, model: str, host: HostStatus) -> int:
        """Bytes that a model takes on a host: all that it has, as long as neither host nor catalogue knows."""
        return host.offers.get(model, 0) or self._models.entries[model].size_bytes or host.memory_bytes

    def _load_s(self, model: str, host: HostStatus) -> float:
        """Seconds that a load takes: as measured here, else as measured elsewhere, else by its size."""
        past = host.past.get(model)
        return past.load_s if past is not None and past.load_s > 0 else self._usual_load_s(model)

    def _usual_load_s(self, model: str) -> float:
        measured = self._measured.get(model, 0.0)
        entry = self._models.entries.get(model)
        return max(LEAST_LOAD_S, measured or (entry.size_bytes / BYTES_PER_S if entry else 0.0))

    def _busy(self, host: HostStatus, held: HeldModel) -> int:
        """How busy a ready model is on a host."""
        asked = self._demand.get(held.name)
        if asked is None or (len(self._ready.get(held.name, ())) > 1 and _idle_s(host, held) > IN_USE_S):
            return IDLE
        if asked.waits("interactive") or asked.running.get("interactive", 0):
            return INTERACTIVE
        return BATCH if asked.waits("batch") or asked.running.get("batch", 0) else IDLE

    # -- what is wanted

    def wants(self) -> list[Want]:
        """Models that should be loaded, the most urgent first."""
        found = [want for entry in self._models.entries.values() if entry.ranks == 1 for want in self._wants_of(entry)]
        return sorted(found, key=lambda want: want.order)

    def _wants_of(self, entry: CatalogueEntry) -> Iterator[Want]:
        asked = self._demand.get(entry.name)
        for order in asked.orders if asked else ():
            host = self._hosts.get(order.host) if order.kind == "load" else None
            held = host.status.holds(entry.name) if host else None
            if host and (held is None or held.state == "failed") and entry.name not in self._under_way:
                yield Want(entry.name, "as ordered", order.at_ms, True, True, host=order.host, ordered=True)
                return
        if entry.name in self._under_way:
            return
        if self._ready.get(entry.name):
            if asked is not None:
                yield from self._copy_of(entry, asked)
            return
        if asked is not None and any(order.kind == "load" for order in asked.orders):
            since_ms = min(order.at_ms for order in asked.orders)
            yield Want(entry.name, "as ordered", since_ms, overdue=True, due=True, ordered=True)
        elif asked is not None and any(asked.waiting.values()):
            want = self._waiting(entry, asked)
            waited_s = (self._now - want.since_ms) / 1000
            if not self._runs_elsewhere(entry, asked) or waited_s >= self._usual_load_s(entry.name):
                yield want
        elif entry.pinned:
            yield Want(entry.name, "pinned", self._left.get(entry.name, 0), overdue=True, due=True)

    def _waiting(self, entry: CatalogueEntry, asked: ModelDemand) -> Want:
        """The want of a model that no host has, by what waits for it."""
        left = self._left.get(entry.name, 0)
        since = {
            kind: max(self._now - asked.oldest_ms.get(kind, 0), left) for kind in asked.waiting if asked.waits(kind)
        }
        turn_ms = round(1000 * self._rules.batch_turn_s)
        oldest = min(since.values())
        overdue = self._now - oldest >= turn_ms
        is_batch = "interactive" not in since
        load_ms = round(1000 * self._usual_load_s(entry.name))
        latest, by_ms = asked.deadline_ms - load_ms, oldest + turn_ms
        if latest >= self._now:  # the deadline can still be met
            by_ms = min(by_ms, latest)
        due = overdue or not is_batch or by_ms - self._now <= min(turn_ms, self._rules.hold * load_ms)
        why = f"{asked.waits('interactive')} interactive and {asked.waits('batch')} batch sequences wait"
        return Want(entry.name, why, oldest, overdue, due, by_ms, is_batch, entry.priority)

    def _runs_elsewhere(self, entry: CatalogueEntry, asked: ModelDemand) -> bool:
        """True if a worker or a group that no host has started runs the model's rows."""
        if not any(asked.running.values()) or self._models.holding(entry.name):
            return False
        return self._now - self._left.get(entry.name, 0) >= STRAY_MS

    def _copy_of(self, entry: CatalogueEntry, asked: ModelDemand) -> Iterator[Want]:
        """A further copy, where the oldest sequence has waited for longer than a load takes."""
        holders = self._ready[entry.name]
        if self._rules.most_copies and len(holders) >= self._rules.most_copies:
            return
        load_s = self._load_s(entry.name, self._hosts[holders[0]].status)
        ready_ms = min(_age_ms(host, held.since_ms) for host, held in self._models.holding(entry.name))
        waited_ms = max((asked.oldest_ms.get(kind, 0) for kind in asked.waiting if asked.waits(kind)), default=0)
        waited_ms = min(waited_ms, ready_ms)  # the newest copy has had as long to shorten the queue
        if waited_ms >= 1000 * load_s:
            why = f"a copy, since sequences wait {waited_ms / 1000:.0f} s"
            since = self._now - waited_ms
            by_ms = since + round(1000 * self._rules.batch_turn_s)
            yield Want(entry.name, why, since, overdue=False, due=False, by_ms=by_ms, priority=entry.priority)

    # -- where

    def part_of(self, me: str) -> list[Load | Unload]:
        """The part of one host: first what it unloads for itself, then its loads in the order of their urgency."""
        mine = self._hosts.get(me)
        if mine is None or mine.status.draining:
            return []
        unloads: list[Load | Unload] = list(self._own_unloads(mine))
        loads: list[Load | Unload] = []
        for want in self.wants():
            ways = self.ways(want)
            if not ways:
                self._keep_room(want)
                continue
            first, *others = ways[: 1 + self._passed_over(want)]
            mine_now = next((way for way in (first, *others) if way.host == me), None)
            if mine_now is not None:
                loads.append(Load(want.model, mine_now.evict, want.why))
            self._take(want, first)
            if mine_now in others:
                self._take(want, mine_now)
        return unloads + loads

    def _passed_over(self, want: Want) -> int:
        """How many hosts may be passed over, since they have not loaded it: in one second of each `patience_s`, since
        what has just become possible is the best host's."""
        patience_ms = round(1000 * min(self._rules.patience_s, 1e9))
        if not want.due or self._now % patience_ms >= PASSING_MS:
            return 0
        return (self._now - want.since_ms) // patience_ms

    def ways(self, want: Want) -> list[Placing]:
        """Every host that could load it now, the best first."""
        found = [way for host in self._hosts.values() if (way := self._way(want, host)) is not None]
        return sorted(found, key=lambda way: (way.level, way.memory, way.cost_s, way.host))

    def _may_load(self, want: Want, host: _Host) -> bool:
        """True if a host could load it, given the memory."""
        status, held = host.status, host.status.holds(want.model)
        if status.draining or host.closed or want.model not in status.offers or want.host not in ("", status.id):
            return False
        if held is None:
            return True
        return held.state == "failed" and (want.ordered or _age_ms(status, held.since_ms) > 1000 * RETRY_S)

    def _way(self, want: Want, host: _Host) -> Placing | None:
        """How a host would load it now; None where it cannot."""
        if not self._may_load(want, host):
            return None
        status = host.status
        need = self._need(want.model, status)
        victims = self._victims(want, host)
        evict: list[tuple[int, float, HeldModel]] = []
        free, slots = host.free, host.slots
        for victim in victims:
            if free >= need and slots >= 1:
                break
            evict.append(victim)
            free, slots = free + victim[2].need_bytes, slots + 1
        if free < need or slots < 1:
            return None
        for victim in sorted(evict, key=lambda each: each[:2], reverse=True):  # those that later ones made needless
            if free - victim[2].need_bytes >= need and slots > 1:
                evict.remove(victim)
                free, slots = free - victim[2].need_bytes, slots - 1
        level = max((victim[0] for victim in evict), default=0)
        cost_s = self._load_s(want.model, status) + host.loading_s + sum(victim[1] for victim in evict)
        memory = status.memory_bytes if self._is_short else 0
        return Placing(status.id, tuple(victim[2].name for victim in evict), level, memory, cost_s)

    def _victims(self, want: Want, host: _Host) -> list[tuple[int, float, HeldModel]]:
        """Models that may be evicted, each with how busy it is and the expected loss in seconds, the least first."""
        found = []
        for held in host.status.held:
            if held.name in host.gone:
                continue
            if held.state == "unloading":  # it waits for the end of a drain
                found.append((0, 0.0, held))
            if held.state != "ready" or self._stays(host.status, held):
                continue
            busy = self._busy(host.status, held)
            if self._may_evict(want, host.status, held, busy):
                found.append((busy, self._loss_s(host.status, held), held))
        return sorted(found, key=lambda victim: (victim[0], victim[1], victim[2].name))

    def _stays(self, host: HostStatus, held: HeldModel) -> bool:
        """True for a pinned model, on the first by id of the hosts that hold it."""
        entry = self._models.entries.get(held.name)
        return entry is not None and entry.pinned and host.id <= min(self._ready.get(held.name, (host.id,)))

    def _may_evict(self, want: Want, host: HostStatus, held: HeldModel, busy: int) -> bool:
        if busy == IDLE:
            return want.due or _idle_s(host, held) > self._rules.hold * self._load_s(held.name, host)
        if not want.due or _age_ms(host, held.since_ms) < self._hold_ms(want, host, held):
            return False
        entry = self._models.entries.get(held.name)
        if want.overdue or busy == BATCH or entry is None:
            return True
        return not want.is_batch and entry.priority <= want.priority

    def _hold_ms(self, want: Want, host: HostStatus, held: HeldModel) -> int:
        """Time that a busy model stays, even where its load took minutes on a machine with much else to do."""
        load_s = max(self._load_s(held.name, host), self._load_s(want.model, host))
        return round(1000 * min(self._rules.hold * load_s, self._rules.batch_turn_s))

    def _loss_s(self, host: HostStatus, held: HeldModel) -> float:
        """Expected cost of an eviction: idle for t, it is asked for within SOON_S with chance SOON_S / (SOON_S + t)."""
        if len(self._ready.get(held.name, ())) > 1:
            return 0.0
        return self._load_s(held.name, host) * SOON_S / (SOON_S + _idle_s(host, held))

    def _take(self, want: Want, way: Placing) -> None:
        """Count a load as done, for what is planned after it."""
        host = self._hosts[way.host]
        by_name = {held.name: held for held in host.status.held}
        for name in way.evict:
            host.free += by_name[name].need_bytes
            host.slots += 1
            host.gone.add(name)
            self._ready[name] = [each for each in self._ready.get(name, ()) if each != way.host]
        host.free -= self._need(want.model, host.status)
        host.slots -= 1
        host.loading_s += self._load_s(want.model, host.status)

    def _keep_room(self, want: Want) -> None:
        """Close the host that can have room for it soonest to all others, which would fill it with small models."""
        if want.overdue and self._now - want.since_ms >= 2000 * self._rules.batch_turn_s:
            soonest = [(at, host.status.id) for host in self._hosts.values() if (at := self._free_at(want, host))]
            if soonest:
                self._hosts[min(soonest)[1]].closed = True

    def _free_at(self, want: Want, host: _Host) -> int:
        """Unix ms at which a host can make room by unloading what has had its turn; 0: it never can."""
        if not self._may_load(want, host):
            return 0
        status, turns = host.status, []
        for each in status.held:
            if each.state == "unloading" and each.name not in host.gone:
                turns.append((self._now, each.need_bytes))
            elif each.state in ("ready", *LOADING) and each.name not in host.gone and not self._stays(status, each):
                began = self._now - (_age_ms(status, each.since_ms) if each.state == "ready" else 0)
                turns.append((began + self._hold_ms(want, status, each), each.need_bytes))
        need, free, slots, at = self._need(want.model, status), host.free, host.slots, self._now
        for end, bytes_ in sorted(turns):
            if free >= need and slots >= 1:
                break
            free, slots, at = free + bytes_, slots + 1, max(at, end)
        return at if free >= need and slots >= 1 else 0

    # -- what a host does for itself

    def _own_unloads(self, mine: _Host) -> Iterator[Unload]:
        for held in mine.status.held:
            if held.state == "ready" and (why := self._needless(mine.status, held)):
                mine.gone.add(held.name)
                mine.free += held.need_bytes
                mine.slots += 1
                yield Unload(held.name, why)

    def _needless(self, host: HostStatus, held: HeldModel) -> str:
        """Why a host should unload a model though no other one wants its memory; empty: it should not."""
        entry = self._models.entries.get(held.name)
        if entry is None:
            return "it is no longer in the catalogue"
        if any(
            each.kind == "unload" and each.model == held.name and each.host in ("", host.id)
            for each in self._models.orders
        ):
            return "as ordered"
        idle_s = entry.idle_s or self._rules.idle_s
        if idle_s and not self._stays(host, held) and self._busy(host, held) == IDLE and _idle_s(host, held) >= idle_s:
            return f"idle for {_idle_s(host, held):.0f} s"
        return ""


def _age_ms(host: HostStatus, at_ms: int) -> int:
    """Time since a stamp of a host, by that host's own clock, since machines' clocks differ: up to its heartbeat."""
    return max(0, host.heartbeat_ms - at_ms)


def _idle_s(host: HostStatus, held: HeldModel) -> float:
    return _age_ms(host, max(held.used_ms, held.since_ms)) / 1000
