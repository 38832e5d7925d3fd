"""Completions that are kept by prompt, to draft from: plain ids, no model."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from shared.sequences import SamplingParams, SequenceSpec
from worker.engine.speculation.lookup import (
    BREAK,
    Guess,
    Ids,
)
from worker.engine.speculation.memory import (
    AT_ONCE as JOINED_AT_ONCE,
)
from worker.engine.speculation.memory import (
    FARTHEST,
    IDLE,
    JOINED_SHARE,
    KEPT,
    Completions,
    Joined,
    Key,
    Memory,
    bytes_of,
    key_of,
    mark_of,
    owner_of,
)


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def of(tenant: str, prompt: tuple[int, ...], model: str = "m") -> Key:
    return key_of(SequenceSpec("s", model, prompt, SamplingParams(1, 0), tenant=tenant))


def written(key: Key, *texts: Ids, begin: int = 0) -> Completions:
    """By sequences that are numbered, behind one prompt of twenty ids."""
    return Completions(key, range(20), [(mark_of(str(at)), text) for at, text in enumerate(texts, begin)])


def test_prompts_of_other_tenants_and_models_are_other_prompts() -> None:
    keys = {of("a", (1, 2)), of("", (1, 2)), of("a", (1,)), of("", (1, 2), "am"), of("m", (1, 2), "")}
    assert len(keys) == 5 and of("a", (1, 2)) in keys


def asked(memory: Memory, key: Key) -> Joined | None:
    """By a row, in a step of its own."""
    memory.begin()
    return memory.joined(key)


def test_memory_keeps_to_its_bytes_and_to_tenants() -> None:
    prompt, size = tuple(range(20)), bytes_of(ids(*[0] * 100_000))
    memory = Memory(3 * size, (1,))
    for tenant in ("a", "b"):
        memory.add(written(of(tenant, prompt), ids(*[ord(tenant)] * 7)))
    theirs = asked(memory, of("a", prompt))
    assert theirs is not None and ord("a") in theirs.text.ids and ord("b") not in theirs.text.ids
    assert asked(memory, of("", prompt)) is None and asked(memory, of("a", prompt[:-1])) is None
    assert memory.bytes == 2 * bytes_of(ids(*[0] * 7)) + theirs.bytes
    for at in range(2):
        memory.add(written(of("c", prompt), ids(*[5] * 100_000), begin=at))
    assert asked(memory, of("b", prompt)) is not None and asked(memory, of("a", prompt)) is not None
    memory.add(written(of("d", prompt), ids(*[5] * 90_000)))
    assert asked(memory, of("c", prompt)) is not None, "one of two was written last"
    assert memory.bytes <= 3 * size
    memory.add(written(of("f", prompt), ids(*[5] * 300_000)))
    assert asked(memory, of("f", prompt)) is None, "larger than all that is kept"
    for at in range(9):
        memory.add(written(of("e", prompt), ids(*[5] * 100_000), begin=at))
    assert len(memory._shelves[owner_of(of("e", prompt))].known[of("e", prompt)]) == 2, "who writes most loses its own"
    assert memory.bytes <= 3 * size and all(asked(memory, of(each, prompt)) is not None for each in "ab")


def test_memory_keeps_the_latest_completions_of_a_prompt() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    for each in range(KEPT + 3):
        memory.add(written(key, ids(100 + each), begin=each))
    known = asked(memory, key)
    assert known is not None and known.text.ids[20::22].tolist() == [19] * KEPT, "each behind the prompt's end"
    assert known.text.ids[known.text.ids >= 100].tolist() == list(range(103, 100 + KEPT + 3))
    assert known.beginnings.draft([], 1) == Guess([100 + KEPT + 2], 0, [(1, KEPT)])


def test_no_more_is_held_than_is_counted() -> None:
    memory = Memory(1 << 20, (1,))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(300):
        memory.add(written(at.to_bytes(16), np.arange(at, at + 64, dtype=np.int32), begin=at))
    held = tracemalloc.get_traced_memory()[0] - before
    assert 300 * 64 * 4 < held < memory.bytes <= 1 << 20
    for at in range(300):
        asked(memory, at.to_bytes(16))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert memory._joined_bytes and held < memory.bytes <= 1 << 20, "what is joined, too"


@pytest.mark.parametrize("prompts", [JOINED_AT_ONCE, 130])
def test_what_rows_ask_for_in_every_step_is_joined_once_and_a_little_of_it_in_a_step(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, made = Memory(64 << 20, (1, 4)), 0
    keys = [of("", (at,)) for at in range(prompts)]
    for key in keys:
        memory.add(written(key, ids(1, 2, 3)))

    def count(self: Joined, *given: Any) -> None:
        nonlocal made
        made += 1
        init(self, *given)

    init = Joined.__init__
    monkeypatch.setattr(Joined, "__init__", count)
    steps = -(-prompts // JOINED_AT_ONCE)
    for step in range(1, steps + 4):
        memory.begin()
        ready = sum(memory.joined(key) is not None for key in keys)
        assert made == min(prompts, step * JOINED_AT_ONCE) and ready <= made
    assert ready == prompts
    (known,) = (shelf.known for shelf in memory._shelves.values())
    for _ in range(3):  # sequences of all prompts end all the time: each has its turn
        for key in keys:
            memory.add(Completions(key, (1,), [(mark_of(f"{len(known[key])}"), ids(1, 2, 4))]))
        for _ in range(steps):
            memory.begin()
            assert all(memory.joined(key) is not None for key in keys), "an older one until then"
    assert made == 4 * prompts and all(each.is_joined for each in known.values())


def test_what_rows_look_through_is_not_joined_again_and_again_where_there_is_no_room_for_all() -> None:
    memory = Memory(1 << 20, (1,))
    keys = [of("", (at,)) for at in range(60)]
    for key in keys:
        memory.add(written(key, ids(1, 2, 3)))
    for _ in range(20):
        memory.begin()
        ready = [memory.joined(key) for key in keys]
    memory.begin()
    assert [memory.joined(key) for key in keys] == ready and 3 < len([each for each in ready if each]) < 60
    assert memory._joined_bytes <= (1 << 20) // JOINED_SHARE
    for _ in range(3):
        memory.begin()
        others = [memory.joined(key) for key in keys[-3:]]
    assert all(others), "nobody has asked for those of the others since"


def test_a_tenant_that_writes_and_asks_for_much_leaves_others_theirs() -> None:
    """What is kept of what both have written, and what their rows look through."""
    memory = Memory(1 << 20, (1,))
    prompts = {"few": range(2), "many": range(300)}
    memory.add(written(of("few", (9,)), ids(5, 6)))
    for at in range(300):
        memory.add(written(of("many", (at,)), ids(7, 8), begin=at))
    assert asked(memory, of("few", (9,))) is not None
    for tenant, each in prompts.items():
        for at in each:
            memory.add(written(of(tenant, (at,)), np.arange(900, dtype=np.int32), begin=at))
    ready = dict.fromkeys(prompts, 0)
    for _ in range(60):
        memory.begin()
        for tenant in ("many", "few"):
            asks = [of(tenant, (at,)) for at in prompts[tenant]]
            ready[tenant] = sum(memory.joined(key) is not None for key in asks)
    assert ready["few"] == len(prompts["few"]) and 2 < ready["many"] < len(prompts["many"]) / 5
    keys = [of(tenant, (at,)) for tenant in ("many", "few") for at in prompts[tenant]]
    before = [memory.joined(key) for key in keys]
    for _ in range(3):
        memory.begin()
        assert [memory.joined(key) for key in keys] == before, "nobody takes it back"


def test_tenants_wait_in_turn_for_what_they_look_through() -> None:
    memory = Memory(64 << 20, (1,))
    keys = [of("many", (at,)) for at in range(5 * JOINED_AT_ONCE)]
    for key in (*keys, of("few", (1,))):
        memory.add(written(key, ids(1, 2, 3)))
    memory.begin()
    assert sum(memory.joined(key) is not None for key in keys) > 0
    memory.joined(of("few", (1,)))
    assert asked(memory, keys[0]) is not None and memory.joined(of("few", (1,))) is not None


def test_what_a_tenant_has_not_asked_for_for_long_goes_before_what_others_ask_for() -> None:
    memory = Memory(1 << 20, (1,))
    for at in range(10):
        memory.add(written(of("gone", (at,)), np.arange(9_000, dtype=np.int32), begin=at))
    memory._step += IDLE + 1
    for at in range(30):
        memory.add(written(of("here", (at,)), np.arange(9_000, dtype=np.int32), begin=at))
    assert [len(shelf.known) for shelf in memory._shelves.values()] == [(1 << 20) // bytes_of(ids(*range(9_000)))]


def test_no_more_is_joined_than_is_looked_through() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    memory.add(written(key, *(np.full(FARTHEST // 2, at, np.int32) for at in range(30, 35))))
    known = asked(memory, key)
    assert known is not None and len(known.text.ids) == FARTHEST
    assert sorted(set(known.text.ids[20:].tolist()) - {BREAK, *range(20)}) == [33, 34]


def test_what_comes_again_from_elsewhere_is_kept_once() -> None:
    memory, key = Memory(1 << 20, (1,)), of("", (1,))
    memory.add(written(key, ids(5), ids(6)))
    known = asked(memory, key)
    assert known is not None
    memory.add(written(key, ids(5), ids(6)))
    assert asked(memory, key) is known and memory.bytes == 2 * bytes_of(ids(5)) + known.bytes
    memory.add(Completions(of("", (2,)), (2,), []))
    assert asked(memory, of("", (2,))) is None
