"""What always holds of placement, for facts of any kind and for small rings in simulated time."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.catalogue import CatalogueEntry, HeldModel, HostStatus, ModelDemand, PastModel, RingModels
from tests.bench.placement import main
from tests.bench.placement_ring import DRAIN_MS, Machine, Model, Request, Ring
from worker.host.placement import Load, PlacementRules, decide

NOW = 1_000_000_000  # in which hosts that have not loaded a model may be passed over
NAMES = ("a", "b", "c", "d", "e")
STATES = ("ready", "ready", "ready", "loading", "downloading", "unloading", "failed")
AGE_MS = st.integers(0, 400_000)


@st.composite
def facts(draw: st.DrawFn) -> tuple[RingModels, dict[str, ModelDemand]]:
    """A ring as a host may read it, and what is asked of it."""
    sizes = {name: draw(st.integers(1, 12)) for name in NAMES}
    entries = {
        name: CatalogueEntry(
            name, name, size_bytes=sizes[name], pinned=draw(st.booleans()), priority=draw(st.integers(0, 1))
        )
        for name in NAMES
    }
    hosts = []
    for number in range(draw(st.integers(1, 4))):
        memory, free, held = draw(st.integers(4, 20)), 0, []
        free = memory
        for name in draw(st.permutations(NAMES)):
            if sizes[name] <= free and draw(st.booleans()):
                state = draw(st.sampled_from(STATES))
                need = 0 if state == "failed" else sizes[name]
                free -= need
                held.append(HeldModel(name, state, 0.5, NOW - draw(AGE_MS), need, used_ms=NOW - draw(AGE_MS)))  # type: ignore[arg-type]
        past = {name: PastModel(draw(st.floats(0, 20)), NOW - draw(AGE_MS)) for name in NAMES if draw(st.booleans())}
        offers = {name: sizes[name] for name in NAMES if draw(st.booleans())}
        name, most = f"h{number}", draw(st.sampled_from((0, 0, 2)))
        hosts.append(HostStatus(name, name, 1, NOW, memory, free, most, offers, tuple(held), past=past))
    demand = {}
    for name in NAMES:
        counts = {kind: draw(st.integers(0, 2)) for kind in ("interactive", "batch")}
        running = {kind: draw(st.integers(0, 2)) for kind in ("interactive", "batch")}
        oldest = {kind: draw(AGE_MS) for kind in counts}
        demand[name] = ModelDemand(name, counts, running, oldest)  # type: ignore[arg-type]
    leases = {
        name: draw(st.sampled_from([host.id for host in hosts])) for name in NAMES if draw(st.integers(0, 5)) == 0
    }
    return RingModels(NOW, entries, tuple(hosts), (), leases, {}), demand


@given(facts(), st.sampled_from((math.inf, 5.0)))
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_pins_and_memory_and_loads_a_model_once(
    ring: tuple[RingModels, dict[str, ModelDemand]], patience_s: float
) -> None:
    models, demand = ring
    rules = PlacementRules(patience_s=patience_s)
    loads = [
        (host, each)
        for host in models.hosts
        for each in decide(models, demand, host.id, rules)
        if isinstance(each, Load)
    ]
    assert patience_s < math.inf or len({load.model for _, load in loads}) == len(loads)
    evicted: dict[str, int] = {}
    for host in models.hosts:
        mine = [load for holder, load in loads if holder is host]
        gone = [name for load in mine for name in load.evict]
        assert len(gone) == len(set(gone))
        by_name = {held.name: held for held in host.held}
        assert all(by_name[name].state in ("ready", "unloading") for name in gone)
        kept = [held for held in host.held if held.name not in gone and held.state != "failed"]
        need = sum(held.need_bytes for held in kept) + sum(host.offers[load.model] for load in mine)
        assert not mine or need <= host.memory_bytes
        assert not mine or not host.most_models or len(kept) + len(mine) <= host.most_models
        for name in gone:
            evicted[name] = evicted.get(name, 0) + (by_name[name].state == "ready")
    for name, entry in models.entries.items():
        ready = sum(held.state == "ready" for _, held in models.holding(name))
        assert not entry.pinned or evicted.get(name, 0) < max(ready, 1)
    busy = {load.model for _, load in loads} & {
        held.name for host in models.hosts for held in host.held if held.state == "loading"
    }
    assert not busy


def small_ring(draw: random.Random, clocks_ms: float) -> Ring:
    """Three machines and five models, each of which fits somewhere, and a pinned one."""
    machines = [Machine(f"m{n}", draw.choice((4, 6, 10)), 40, draw.choice((1, 2))) for n in range(2)]
    models = [Model(name, draw.randint(1, 8)) for name in NAMES]
    entries = {each.name: CatalogueEntry(each.name, each.name, size_bytes=each.size) for each in models}
    entries["e"] = CatalogueEntry("e", "e", size_bytes=2, pinned=True)
    models[-1] = Model("e", 2)
    rules = PlacementRules(batch_turn_s=30)
    machines.append(Machine("m2", 10, 40, 2))
    return Ring(machines, models, decide, rules, seed=draw.randrange(1000), entries=entries, clocks_ms=clocks_ms)


def requests(draw: random.Random, until_ms: float) -> list[Request]:
    """Sequences of all models at random times; one model's chats come without a break."""
    found = [
        Request(draw.uniform(0, until_ms), draw.choice(NAMES), draw.choice(("interactive", "batch", "batch")), 30)
        for _ in range(draw.randint(10, 60))
    ]
    found += [Request(at, "a", "interactive", 40) for at in range(0, round(until_ms), 2_000)]
    return sorted(found, key=lambda each: each.at_ms)


def bound_s(ring: Ring) -> float:
    """Twice its turn, and a drain and `hold + 1` loads for each model: after this one whose batch waits is ready."""
    load_s = max(model.load_ms(host.machine) for model in ring.models.values() for host in ring.hosts.values()) / 1000
    return 2 * ring.rules.batch_turn_s + len(ring.models) * ((ring.rules.hold + 1) * load_s + DRAIN_MS / 1000)


@given(st.integers(0, 1_000_000), st.sampled_from((0.0, 3_600_000.0)), st.sampled_from(("", "m0", "m2")))
@settings(max_examples=8, deadline=None)
def test_a_small_ring_serves_all_and_comes_to_rest(seed: int, clocks_ms: float, killed: str) -> None:
    draw = random.Random(seed)
    ring = small_ring(draw, clocks_ms)
    asked = requests(draw, 90_000)
    if killed:
        ring.at(draw.uniform(5_000, 60_000), lambda: ring.kill(killed))
        ring.at(120_000, lambda: ring.start(killed))
    ring.run(asked, 300_000)
    assert all(request.ended_ms < math.inf for request in asked)
    assert ring.tally.faults == 0
    assert killed or all(waited / 1000 <= bound_s(ring) for waited, _ in ring.tally.turn_waits_ms)
    assert any(host.children.get("e") for host in ring.hosts.values())
    loads = ring.tally.loads
    ring.run([], 400_000)
    assert ring.tally.loads == loads, "nothing is asked for, and hosts still load"


def test_what_a_dead_machine_held_is_loaded_elsewhere() -> None:
    machines = [Machine("m0", 10, 40, 2), Machine("m1", 10, 40, 2)]
    ring = Ring(machines, [Model("a", 6)], decide, PlacementRules())
    asked = [Request(at, "a", "interactive", 5) for at in range(0, 60_000, 1_000)]
    ring.at(20_000, lambda: ring.kill(next(name for name, host in ring.hosts.items() if "a" in host.children)))
    ring.run(asked, 90_000)
    assert all(request.ended_ms < math.inf for request in asked) and ring.tally.loads == 2


def test_hosts_leave_a_model_to_its_own_worker_while_that_one_keeps_up() -> None:
    own = Machine("own", 10, 40, 2)
    for count, loads in ((30, 0), (300, 1)):
        ring = Ring([Machine("m0", 10, 40, 2)], [Model("a", 6)], decide, PlacementRules(), outside={"a": own})
        asked = ring.run([Request(20_000, "a", "interactive", 4) for _ in range(count)], 90_000)
        assert all(request.ended_ms < math.inf for request in asked) and ring.tally.loads == loads


def test_the_next_best_host_loads_what_the_best_one_does_not() -> None:
    machines = [Machine("m0", 10, 40, 20), Machine("m1", 10, 40, 2)]
    ring = Ring(machines, [Model("a", 6)], decide, PlacementRules())
    ring.hosts["m0"].hung = True
    (request,) = ring.run([Request(1_000, "a", "interactive", 5)], 60_000)
    assert request.ended_ms < math.inf


def test_batch_of_a_large_model_has_its_turn_while_small_ones_change_places() -> None:
    models = [Model("a", 5), Model("b", 5), Model("c", 5), Model("large", 10)]
    ring = Ring([Machine("m0", 10, 40, 2)], models, decide, PlacementRules(batch_turn_s=30))
    chats = [Request(at, name, "interactive", 40) for at in range(0, 250_000, 4_000) for name in "abc"]
    batch = Request(1_000, "large", "batch", 20)
    ring.run([batch, *chats], 250_000)
    assert ring.tally.loads > 8
    assert batch.began_ms < 1000 * bound_s(ring)


def test_the_bench_in_its_smallest_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bursts", "--minutes", "1", "--seeds", "1"]) == 0
    assert "bursts" in capsys.readouterr().out
