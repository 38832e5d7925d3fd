"""A ring of hosts in simulated time, which decide with worker/host/placement.py: discrete events, no Redis, no MLX.

What is simulated: heartbeats that are up to a second old when others read them; leases; loads that take as long as a
disk needs; drains, in which batch rows are handed back and interactive ones end; workers that claim interactive
sequences first and compute their rows together; machines whose loaded models share one processor; hosts that die and
whose leases run out. Times are milliseconds, work is counted in tokens, memory in bytes.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from shared.catalogue import CatalogueEntry, HeldModel, HostStatus, ModelDemand, PastModel, RingModels
from shared.sequences import SequenceClass
from worker.host.placement import Load, PlacementRules, Unload

CLASSES: tuple[SequenceClass, ...] = ("interactive", "batch")
GB = 1_000_000_000
ROWS = 16  # of a worker
RESERVED = 2  # of these, for interactive sequences
TICK_MS = 1_000  # between two heartbeats of a host, each with its decisions
START_MS = 1_500  # of a child that has MLX imported, besides reading the weights
END_MS = 300  # of a drained child's process
DRAIN_MS = 30_000  # that interactive rows of a drained worker may take; then others continue them
LEASE_MS = 10_000  # heartbeats, load leases and sequences of a dead host live for so long
WARM = 0.1  # of a session's prompt that is computed where its last turn has left KV
PREFILL = 0.05  # of the time of a token of output, one of a prompt

Decide = Callable[[RingModels, Mapping[str, ModelDemand], str, PlacementRules], list[Load | Unload]]


@dataclass(frozen=True)
class Machine:
    """One machine of the ring."""

    id: str
    memory: int  # bytes for models
    bandwidth: float  # bytes/s of its memory, which bounds decode
    disk: float  # bytes/s


@dataclass(frozen=True)
class Model:
    """One model: its weights and what its rows need."""

    name: str
    size: int  # bytes

    def step_ms(self, machine: Machine, rows: int) -> float:
        """One decode step of a batch: the weights are read once, each row adds a twentieth."""
        return 1000 * max(self.size / machine.bandwidth, 0.004) * (1 + 0.05 * rows)

    def load_ms(self, machine: Machine) -> float:
        return START_MS + 1000 * self.size / machine.disk


@dataclass
class Request:
    """A sequence, with what has become of it."""

    at_ms: float
    model: str
    kind: SequenceClass
    tokens: float
    prompt: float = 0
    deadline_ms: float = math.inf
    session: int = 0  # turns of one conversation; 0: none
    left: float = 0  # tokens that it still needs
    began_ms: float = math.inf  # a worker took it first
    ended_ms: float = math.inf


@dataclass
class Child:
    """A loaded model on a host: rows that advance together, by a clock that counts decode steps."""

    model: Model
    host: "Host"
    held: HeldModel
    victims: set[str] = field(default_factory=set)  # to be gone before the load starts
    rows: dict[int, tuple[float, Request]] = field(default_factory=dict)  # row -> the clock at its end, sequence
    clock: float = 0.0
    loads_from: float = math.inf  # ms at which its load began
    used: bool = False

    def batch_rows(self) -> list[int]:
        return [row for row, (_, request) in self.rows.items() if request.kind == "batch"]


@dataclass
class Host:
    """A machine's host, as it is and as others last read of it."""

    machine: Machine
    children: dict[str, Child] = field(default_factory=dict)
    past: dict[str, PastModel] = field(default_factory=dict)
    published: HostStatus | None = None
    alive: bool = True
    hung: bool = False  # sends heartbeats, but carries out nothing
    beats: bool = True  # False: no host at all, but a worker for one model that was started by hand
    advanced_ms: float = 0.0
    version: int = 0  # of its rows; events of older ones are void
    born: int = 0  # how often it was started

    def free(self) -> int:
        return self.machine.memory - sum(child.held.need_bytes for child in self.children.values())

    def sharing(self) -> int:
        """Models that compute now, and so share the machine."""
        return sum(bool(child.rows) for child in self.children.values())


@dataclass
class Tally:
    """Counts of one run."""

    loads: int = 0
    thrash: int = 0  # loads of a model that the ring had let go less than a minute before
    evicted_busy: int = 0
    twice: int = 0  # loads of a model that another host was loading
    over_memory: int = 0  # heartbeats of hosts that have promised more than they have, with nothing on its way out
    pins_evicted: int = 0
    turn_waits_ms: list[tuple[float, str]] = field(default_factory=list)  # of models whose batch waited for a load
    load_ms: float = 0.0

    @property
    def faults(self) -> int:
        """Counts of what must never happen."""
        return self.twice + self.over_memory + self.pins_evicted


class Ring:
    """The simulation; `run` gives the requests with what has become of them."""

    def __init__(
        self,
        machines: list[Machine],
        models: list[Model],
        decide: Decide,
        rules: PlacementRules,
        *,
        seed: int = 0,
        entries: Mapping[str, CatalogueEntry] | None = None,
        clocks_ms: float = 0.0,  # by which machines' clocks are off, at most
        outside: Mapping[str, Machine] = {},
    ) -> None:
        """`outside`: models that have a worker of no host, each on a machine of its own."""
        self.models = {model.name: model for model in models}
        self.entries = dict(entries or {m.name: CatalogueEntry(m.name, m.name, size_bytes=m.size) for m in models})
        self.hosts = {machine.id: Host(machine) for machine in machines}
        for name, machine in outside.items():
            self.hosts[machine.id] = worker = Host(machine, beats=False)
            held = HeldModel(name, "ready", need_bytes=self.models[name].size)
            worker.children[name] = Child(self.models[name], worker, held, loads_from=0.0)
        self.tally = Tally()
        self.now = 0.0
        self._decide, self.rules = decide, rules
        self._random = random.Random(seed)
        self._clocks = {each: round(self._random.uniform(-clocks_ms, clocks_ms)) for each in self.hosts}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count(1)
        self._queues: dict[tuple[str, SequenceClass], deque[Request]] = {}
        self._leases: dict[str, str] = {}
        self._loads: dict[str, int] = {}
        self._sessions: dict[int, str] = {}  # the host of its last turn
        self._left: dict[str, float] = {}  # ms at which the ring let a model go
        self._running: dict[str, dict[SequenceClass, int]] = {}

    def at(self, ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (ms, next(self._count), act))

    def hold_everything(self) -> None:
        """Let every machine hold every model that alone fits it, as if memory had no bound: no ring can do better."""
        for host in self.hosts.values():
            for model in self.models.values():
                if model.size <= host.machine.memory:
                    held = HeldModel(model.name, "ready", need_bytes=0)
                    host.children[model.name] = Child(model, host, held, loads_from=0.0)

    def run(self, requests: list[Request], until_ms: float) -> list[Request]:
        for host in self.hosts.values() if self.now == 0 else ():
            if host.beats:
                self._beat(host, self._random.uniform(0, TICK_MS), host.born)
        for request in requests:
            self.at(request.at_ms, lambda request=request: self._arrive(request))  # type: ignore[misc]
        while self._events and self._events[0][0] <= until_ms:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return requests

    # -- what happens to hosts

    def kill(self, name: str) -> None:
        """The machine is gone; what it had comes back when its leases have run out."""
        host = self.hosts[name]
        self._advance(host)
        host.alive, host.version, host.born = False, host.version + 1, host.born + 1
        rows = [row for child in host.children.values() for row in self._taken_off(child, list(child.rows))]
        loading = [child.model.name for child in host.children.values() if child.held.state == "loading"]
        for model in host.children:
            self._left[model] = self.now
        host.children.clear()
        host.past.clear()
        self.at(self.now + LEASE_MS, lambda: self._after_death(host, host.born, rows, loading))

    def _after_death(self, host: Host, born: int, rows: list[Request], loading: list[str]) -> None:
        for model in loading:
            if self._leases.get(model) == host.machine.id:
                del self._leases[model]
        if host.born == born and not host.alive:
            host.published = None
        for request in rows:
            self._requeue(request)

    def start(self, name: str) -> None:
        host = self.hosts[name]
        host.alive = True
        self._beat(host, self.now, host.born)

    def _beat(self, host: Host, at_ms: float, born: int) -> None:
        def beat() -> None:
            if host.born == born and host.alive:
                self._tick(host)
                self._beat(host, self.now + TICK_MS, born)

        self.at(at_ms, beat)

    def _tick(self, host: Host) -> None:
        host.published = self._status(host)
        if host.hung:
            return
        leaving = sum(each.held.need_bytes for each in host.children.values() if each.held.state == "unloading")
        self.tally.over_memory += host.free() + leaving < 0
        facts, demand = self.facts(), self.demand()
        for decision in self._decide(facts, demand, host.machine.id, self.rules):
            if isinstance(decision, Load):
                self._take_lease(host, decision)
            elif (child := host.children.get(decision.model)) is not None:
                self._drain(child)
        host.published = self._status(host)

    def _status(self, host: Host) -> HostStatus:
        machine, clock = host.machine, self._clocks[host.machine.id]
        return HostStatus(
            id=machine.id,
            host=machine.id,
            pid=1,
            heartbeat_ms=round(self.now) + clock,
            memory_bytes=machine.memory,
            free_bytes=host.free(),
            offers={model.name: model.size for model in self.models.values()},
            held=tuple(self._held(child, clock) for child in host.children.values()),
            past={
                name: PastModel(past.load_s, past.left_ms and past.left_ms + clock) for name, past in host.past.items()
            },
        )

    def _held(self, child: Child, clock: int) -> HeldModel:
        held = child.held
        if child.rows:
            child.held = held = msgspec.structs.replace(held, used_ms=round(self.now))
        return msgspec.structs.replace(held, since_ms=held.since_ms + clock, used_ms=held.used_ms + clock)

    def facts(self) -> RingModels:
        """The facts, as a host reads them from Redis."""
        hosts = tuple(host.published for host in self.hosts.values() if host.published is not None)
        return RingModels(round(self.now), self.entries, hosts, (), dict(self._leases), dict(self._loads))

    def demand(self) -> dict[str, ModelDemand]:
        found = {}
        for name in self.models:
            waiting = {kind: queue for kind in CLASSES if (queue := self._queues.get((name, kind)))}
            found[name] = ModelDemand(
                name,
                {kind: len(queue) for kind, queue in waiting.items()},
                {kind: count for kind, count in self._running.get(name, {}).items() if count},
                {kind: round(self.now - queue[0].at_ms) for kind, queue in waiting.items()},
                deadline_ms=_earliest(waiting.values(), self.now),
            )
        return found

    # -- loads and unloads

    def _take_lease(self, host: Host, load: Load) -> None:
        holder = self._leases.get(load.model)
        if holder is not None or load.model in host.children:
            return
        self._leases[load.model] = host.machine.id
        self._loads[load.model] = self._loads.get(load.model, 0) + 1
        model = self.models[load.model]
        held = HeldModel(model.name, "loading", since_ms=round(self.now), need_bytes=model.size)
        victims = {name for name in load.evict if name in host.children}
        self.tally.loads += 1
        if self.now - self._left.get(model.name, -math.inf) < 60_000:
            self.tally.thrash += 1
        self.tally.twice += any(
            other.children[model.name].held.state == "loading"
            for other in self.hosts.values()
            if model.name in other.children
        )
        host.children[model.name] = Child(model, host, held, victims)
        for name in sorted(victims):
            self._drain(host.children[name])
        self._begin_loads(host)

    def _begin_loads(self, host: Host) -> None:
        """Start loads in the order of their leases, each when the memory is there."""
        waiting = [child for child in host.children.values() if child.loads_from == math.inf]
        taken = sum(child.held.need_bytes for child in host.children.values() if child.loads_from < math.inf)
        for child in waiting:
            taken += child.held.need_bytes
            if taken > host.machine.memory or child.victims & set(host.children):
                break
            child.loads_from, took_ms = self.now, child.model.load_ms(host.machine)
            self.tally.load_ms += took_ms
            self.at(self.now + took_ms, lambda child=child: self._loaded(child))  # type: ignore[misc]

    def _loaded(self, child: Child) -> None:
        host, name = child.host, child.model.name
        if host.children.get(name) is not child:
            return
        took = (self.now - child.held.since_ms) / 1000
        child.held = msgspec.structs.replace(
            child.held, state="ready", since_ms=round(self.now), load_s=took, progress=1.0
        )
        host.past[name] = PastModel(child.model.load_ms(host.machine) / 1000)
        if self._leases.get(name) == host.machine.id:
            del self._leases[name]
        if queue := self._queues.get((name, "batch")):
            oldest = max(queue[0].at_ms, self._left.get(name, 0))
            if not any(other is not host and name in other.children for other in self.hosts.values()):
                self.tally.turn_waits_ms.append((self.now - oldest, name))
        self._claim(child)

    def _drain(self, child: Child) -> None:
        if child.held.state != "ready":
            return
        name = child.model.name
        self.tally.evicted_busy += bool(child.rows)
        self.tally.pins_evicted += self.entries[name].pinned and not self._elsewhere(child)
        self._advance(child.host)
        child.held = msgspec.structs.replace(child.held, state="unloading", since_ms=round(self.now))
        for request in self._taken_off(child, child.batch_rows()):
            self._requeue(request)
        self._reschedule(child.host)
        self.at(self.now + DRAIN_MS, lambda: self._end_drain(child))
        if not child.rows:
            self.at(self.now + END_MS, lambda: self._gone(child))

    def _elsewhere(self, child: Child) -> bool:
        holders = [host.children.get(child.model.name) for host in self.hosts.values() if host is not child.host]
        return any(other is not None and other.held.state == "ready" for other in holders)

    def _end_drain(self, child: Child) -> None:
        if child.host.children.get(child.model.name) is child and child.rows:
            self._advance(child.host)
            for request in self._taken_off(child, list(child.rows)):
                self._requeue(request)
            self._reschedule(child.host)
            self._gone(child)

    def _gone(self, child: Child) -> None:
        host, name = child.host, child.model.name
        if host.children.get(name) is child:
            del host.children[name]
            self._left[name] = self.now
            host.past[name] = PastModel(host.past[name].load_s, round(self.now))
            self._begin_loads(host)

    # -- sequences

    def _arrive(self, request: Request) -> None:
        request.left = request.tokens
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        queue = self._queues.setdefault((request.model, request.kind), deque())
        (queue.appendleft if request.began_ms < math.inf else queue.append)(request)
        ready = [child for host in self.hosts.values() if (child := host.children.get(request.model)) is not None]
        ready = [child for child in ready if child.held.state == "ready" and child.host.alive]
        self._random.shuffle(ready)
        for child in sorted(ready, key=lambda child: self._pace(child)):
            self._claim(child)

    def _pace(self, child: Child) -> float:
        """Workers with free rows and short steps are the first to ask for more."""
        return (
            child.model.step_ms(child.host.machine, len(child.rows))
            * max(1, child.host.sharing())
            * (1000 if len(child.rows) >= ROWS else 1)
        )

    def _claim(self, child: Child) -> None:
        """Fill the rows of a worker, interactive sequences first; these take the place of batch rows."""
        if child.held.state != "ready":
            return
        name, changed = child.model.name, False
        interactive = self._queues.get((name, "interactive"))
        batch = self._queues.get((name, "batch"))
        while interactive or batch:
            rows = len(child.rows)
            if interactive and rows >= ROWS and (others := child.batch_rows()):
                self._advance(child.host)
                (back,) = self._taken_off(child, others[-1:])
                self._queues.setdefault((name, "batch"), deque()).appendleft(back)
                batch = self._queues[(name, "batch")]
            elif interactive and rows < ROWS:
                self._take_row(child, interactive.popleft())
            elif batch and len(child.batch_rows()) < ROWS - RESERVED and rows < ROWS:
                self._take_row(child, batch.popleft())
            else:
                break
            changed = True
        if changed:
            self._reschedule(child.host)

    def _take_row(self, child: Child, request: Request) -> None:
        self._advance(child.host)
        request.began_ms = min(request.began_ms, self.now)
        here = child.host.machine.id
        warm = bool(request.session) and self._sessions.get(request.session) == here
        if request.session:
            self._sessions[request.session] = here
        work = request.left + PREFILL * request.prompt * (WARM if warm else 1)
        child.rows[next(self._count)] = (child.clock + work, request)
        counts = self._running.setdefault(request.model, {})
        counts[request.kind] = counts.get(request.kind, 0) + 1

    def _taken_off(self, child: Child, rows: list[int]) -> list[Request]:
        """Sequences of rows that end here, with what they still need."""
        found = []
        for row in rows:
            end, request = child.rows.pop(row)
            request.left = min(request.left, max(1.0, end - child.clock))
            self._running[request.model][request.kind] -= 1
            found.append(request)
        child.held = msgspec.structs.replace(child.held, used_ms=round(self.now))
        return found

    def _advance(self, host: Host) -> None:
        """Move the clocks of a host's workers to now."""
        passed, sharing = self.now - host.advanced_ms, host.sharing()
        host.advanced_ms = self.now
        if passed > 0:
            for child in host.children.values():
                if child.rows:
                    child.clock += passed / (child.model.step_ms(host.machine, len(child.rows)) * sharing)

    def _reschedule(self, host: Host) -> None:
        """Set the event of the next row of a host to end."""
        host.version += 1
        version, sharing, soonest = host.version, host.sharing(), math.inf
        for child in host.children.values():
            if child.rows:
                end = min(end for end, _ in child.rows.values())
                step = child.model.step_ms(host.machine, len(child.rows)) * sharing
                soonest = min(soonest, self.now + max(0.0, end - child.clock) * step)
        if soonest < math.inf:
            self.at(soonest + 0.01, lambda: self._row_ends(host, version))

    def _row_ends(self, host: Host, version: int) -> None:
        if host.version != version or not host.alive:
            return
        self._advance(host)
        children = list(host.children.values())
        for child in children:
            for row in [row for row, (end, _) in child.rows.items() if end <= child.clock + 1e-6]:
                (request,) = self._taken_off(child, [row])
                request.left, request.ended_ms = 0, self.now
        self._reschedule(host)
        for child in children:
            self._claim(child)
            if child.held.state == "unloading" and not child.rows:
                self.at(self.now + END_MS, lambda child=child: self._gone(child))  # type: ignore[misc]


def _earliest(queues: Iterable[deque[Request]], now_ms: float) -> int:
    """The earliest deadline to come among the first sequences of some queues, Unix ms; 0: none."""
    waiting = (each.deadline_ms for queue in queues for each in itertools.islice(queue, 100))
    found = min((each for each in waiting if each > now_ms), default=math.inf)
    return 0 if found == math.inf else round(found)
