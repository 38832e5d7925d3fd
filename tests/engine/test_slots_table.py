"""The table of slots: references, least recent use, and no waiting for ever."""

import random

from worker.engine.slot_table import SlotTable


def load(table: SlotTable, *versions: str, urgent: bool = True) -> None:
    for version in versions:
        table.want(version, urgent=urgent)
    while (found := table.next_load()) is not None:
        table.finish_load(found[0])


def test_versions_get_empty_slots_first_then_the_least_recently_used() -> None:
    table = SlotTable(2)
    load(table, "a@1", "b@1")
    assert (table.slot_of("a@1"), table.slot_of("b@1")) == (1, 2)
    table.hold("a@1")
    table.release("a@1")
    load(table, "c@1")
    assert table.loaded() == {"a@1": 0, "c@1": 0}


def test_a_held_slot_is_never_given_away() -> None:
    table = SlotTable(2)
    load(table, "a@1", "b@1")
    table.hold("a@1")
    table.hold("b@1")
    load(table, "c@1")
    assert set(table.loaded()) == {"a@1", "b@1"}
    table.release("b@1")
    load(table)
    assert set(table.loaded()) == {"a@1", "c@1"}


def test_an_urgent_wish_closes_a_slot_so_that_newcomers_cannot_keep_it_for_ever() -> None:
    table = SlotTable(2)
    load(table, "a@1", "b@1")
    table.hold("a@1")
    table.hold("a@1")
    table.hold("b@1")
    load(table, "c@1")
    assert table.is_open("a@1") and not table.is_open("b@1")
    table.release("b@1")
    load(table)
    assert table.is_open("c@1")


def test_a_wish_that_is_not_urgent_waits_without_closing() -> None:
    table = SlotTable(1)
    load(table, "a@1")
    table.hold("a@1")
    load(table, "b@1", urgent=False)
    assert table.is_open("a@1")


def test_a_closed_version_opens_again_when_the_other_wish_is_gone() -> None:
    table = SlotTable(1)
    load(table, "a@1")
    table.hold("a@1")
    load(table, "b@1")
    assert not table.is_open("a@1")
    table.want("a@1", urgent=True)
    table.unwant("b@1")
    assert table.next_load() is None
    assert table.is_open("a@1")


def test_a_failed_load_leaves_an_empty_slot() -> None:
    table = SlotTable(1)
    table.want("a@1", urgent=True)
    assert table.next_load() == ("a@1", 1)
    assert table.next_load() is None
    table.fail_load("a@1")
    assert table.loaded() == {}
    load(table, "b@1")
    assert table.slot_of("b@1") == 1


def test_everybody_gets_a_turn_under_pressure() -> None:
    """Rows of 6 versions on 2 slots, newcomers for ever: nobody waits longer than a bounded time."""
    draw, table = random.Random(0), SlotTable(2)
    waiting: list[tuple[str, int]] = []
    running: list[tuple[str, int]] = []
    waits: list[int] = []

    def admit(version: str, now: int) -> None:
        for _, since in [each for each in waiting if each[0] == version]:
            table.hold(version)
            running.append((version, now + draw.randrange(1, 8)))
            waits.append(now - since)
        waiting[:] = [each for each in waiting if each[0] != version]

    for now in range(3000):
        if len(waiting) < 20:
            waiting.append((f"v@{min(draw.randrange(12), 5) + 1}", now))
        for version in [version for version, _ in waiting if table.is_open(version)]:
            admit(version, now)
        for version, _ in waiting:
            table.want(version, urgent=True)
        while (found := table.next_load()) is not None:
            table.finish_load(found[0])
            admit(found[0], now)  # whoever has waited for a load holds it at once
        for version, until in [each for each in running if each[1] <= now]:
            table.release(version)
            running.remove((version, until))
    assert len(waits) > 500
    assert max(waits) < 60, max(waits)
