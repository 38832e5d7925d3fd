"""Which host loads which model: worker/host/placement.py over facts as hosts read them."""

from shared.catalogue import CatalogueEntry, HeldModel, HostStatus, ModelDemand, PastModel, RingModels
from shared.sequences import SequenceClass
from worker.host.placement import Load, PlacementRules, Unload, decide

NOW = 1_000_000_000
RULES = PlacementRules(batch_turn_s=120, hold=3)
SIZES = {"a": 6, "b": 6, "c": 6, "large": 10}


def entries(**changes: dict[str, object]) -> dict[str, CatalogueEntry]:
    return {
        name: CatalogueEntry(name, name, size_bytes=size, **changes.get(name, {}))  # type: ignore[arg-type]
        for name, size in SIZES.items()
    }


def ready(name: str, *, for_s: float = 1000, idle_s: float = 0) -> HeldModel:
    used = NOW - round(1000 * idle_s)
    return HeldModel(name, "ready", since_ms=NOW - round(1000 * for_s), need_bytes=SIZES[name], used_ms=used)


def host(name: str, *held: HeldModel, memory: int = 10, left: dict[str, float] | None = None) -> HostStatus:
    past = {model: PastModel(10.0, NOW - round(1000 * ago)) for model, ago in (left or {}).items()}
    past = {each.name: PastModel(10.0) for each in held} | past
    free = memory - sum(each.need_bytes for each in held)
    return HostStatus(
        name, name, 1, NOW, memory_bytes=memory, free_bytes=free, offers=SIZES.copy(), held=held, past=past
    )


def asked(
    name: str, kind: SequenceClass = "interactive", *, waits_s: float | None = None, runs: int = 0, left_s: float = 0
) -> ModelDemand:
    """`left_s`: until the earliest deadline of those that wait."""
    waiting: dict[SequenceClass, int] = {} if waits_s is None else {kind: 1}
    deadline = NOW + round(1000 * left_s) if left_s else 0
    return ModelDemand(name, waiting, {kind: runs}, {kind: round(1000 * (waits_s or 0))}, deadline)


def ring(*hosts: HostStatus, loading: dict[str, str] | None = None, **changes: dict[str, object]) -> RingModels:
    return RingModels(NOW, entries(**changes), hosts, (), loading or {}, {})


def decided(models: RingModels, *demand: ModelDemand, rules: PlacementRules = RULES) -> dict[str, list[Load | Unload]]:
    by_name = {each.name: each for each in demand}
    return {each.id: decide(models, by_name, each.id, rules) for each in models.hosts}


def loads(models: RingModels, *demand: ModelDemand) -> list[tuple[str, str, tuple[str, ...]]]:
    found = decided(models, *demand)
    return [(name, each.model, each.evict) for name, all_ in found.items() for each in all_ if isinstance(each, Load)]


def test_one_host_loads_what_is_waited_for_and_the_empty_one_does() -> None:
    full, empty = host("x", ready("a", idle_s=50)), host("y")
    assert loads(ring(full, empty), asked("b", waits_s=1)) == [("y", "b", ())]


def test_interactive_demand_evicts_the_idle_model_and_never_the_busy_one_within_its_hold() -> None:
    busy, idle = host("x", ready("a", for_s=10)), host("y", ready("c", for_s=10, idle_s=9))
    demand = asked("b", waits_s=1), asked("a", runs=2)
    assert loads(ring(busy, idle), *demand) == [("y", "b", ("c",))]
    assert loads(ring(busy), *demand) == []
    assert loads(ring(host("x", ready("a", for_s=31))), *demand) == [("x", "b", ("a",))]


def test_batch_demand_waits_for_its_turn_and_then_evicts_a_busy_model() -> None:
    models = ring(host("x", ready("a")))
    assert loads(models, asked("a", runs=2), asked("b", "batch", waits_s=119)) == []
    assert loads(models, asked("a", runs=2), asked("b", "batch", waits_s=120)) == [("x", "b", ("a",))]
    had_it = ring(host("x", ready("a"), left={"b": 100}))
    assert loads(had_it, asked("a", runs=2), asked("b", "batch", waits_s=5000)) == []


def test_of_two_due_models_the_one_whose_deadline_is_nearer_is_loaded_first() -> None:
    models = ring(host("x", left={"b": 100, "c": 100}))  # a load takes 10 s
    first, second = asked("b", waits_s=5), asked("c", waits_s=1, left_s=20)
    assert loads(models, first, second) == [("x", "c", ())]
    assert loads(models, first, asked("c", waits_s=1, left_s=9)) == [("x", "b", ())], "that one cannot be met"
    priority = ring(host("x", left={"b": 100, "c": 100}), b={"priority": 1})
    assert loads(priority, first, second) == [("x", "b", ())]


def test_batch_with_a_deadline_takes_an_idle_models_memory_in_time_and_no_interactive_ones() -> None:
    models = ring(host("x", ready("a", idle_s=5), left={"b": 100}))
    assert loads(models, asked("b", "batch", waits_s=1, left_s=45)) == []
    assert loads(models, asked("b", "batch", waits_s=1, left_s=39)) == [("x", "b", ("a",))]
    assert loads(models, asked("b", "batch", waits_s=1, left_s=39), asked("a", runs=1)) == []
    assert loads(models, asked("b", "batch", waits_s=1, left_s=39), asked("a", "batch", runs=1)) == [("x", "b", ("a",))]


def test_what_is_loaded_elsewhere_is_loaded_again_only_for_a_long_queue() -> None:
    models = ring(host("x", ready("a")), host("y"))
    assert loads(models, asked("a", waits_s=1, runs=16)) == []
    assert loads(models, asked("a", waits_s=11, runs=16)) == [("y", "a", ())]
    assert loads(ring(host("x"), host("y"), loading={"a": "x"}), asked("a", waits_s=11)) == []


def test_a_model_that_runs_on_a_worker_of_no_host_is_loaded_only_when_sequences_wait_long() -> None:
    assert loads(ring(host("x")), asked("a", waits_s=1, runs=4)) == []
    assert loads(ring(host("x")), asked("a", waits_s=11, runs=4)) == [("x", "a", ())]
    died = host("x", left={"a": 2})  # rows of a worker that has just ended still count as running
    assert loads(ring(died), asked("a", waits_s=1, runs=4)) == [("x", "a", ())]


def test_a_pinned_model_is_loaded_unasked_and_stays() -> None:
    assert loads(ring(host("x"), a={"pinned": True})) == [("x", "a", ())]
    models = ring(host("x", ready("a", idle_s=900)), a={"pinned": True, "idle_s": 60.0})
    assert decided(models, asked("b", waits_s=500)) == {"x": []}


def test_an_idle_model_is_unloaded_after_its_time_and_one_without_an_entry_at_once() -> None:
    models = ring(host("x", ready("a", idle_s=61)), a={"idle_s": 60.0})
    assert decided(models)["x"] == [Unload("a", "idle for 61 s")]
    models.entries.pop("a")
    assert decided(models)["x"] == [Unload("a", "it is no longer in the catalogue")]


def test_a_large_model_that_is_overdue_keeps_small_ones_from_filling_its_host() -> None:
    models = ring(host("x", ready("a", for_s=5), memory=12), host("y", ready("c", for_s=1), memory=6))
    demand = asked("a", runs=1), asked("large", "batch", waits_s=250), asked("b", waits_s=1), asked("c", runs=1)
    assert loads(models, *demand) == []
    assert loads(models, demand[0], demand[2], demand[3]) == [("x", "b", ())]
