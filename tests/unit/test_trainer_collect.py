import asyncio

import pytest

from shared.errors import InvalidRequestError, ServiceUnavailableError, SetupError
from tests.unit.trainer_samples import group, trajectory
from trainer.rollouts.collector import Collector
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.pacing import Pace


class Player:
    """Finishes a group when it is told to."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.started: list[int] = []
        self.open = False

    async def play(self, index: int, adapter: str) -> RolloutGroup:
        self.started.append(index)
        if not self.open:
            await self.gates.setdefault(index, asyncio.Event()).wait()
        return group(trajectory(1.0), trajectory(0.0), index=index)

    def finish(self, *indices: int) -> None:
        for index in indices:
            self.gates.setdefault(index, asyncio.Event()).set()


def fresh(_: RolloutGroup) -> int:
    return 0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_on_policy_starts_one_batch_and_orders_it_by_index() -> None:
    player = Player()
    async with Collector(player, Pace(3, max_lag=0), lambda: "policy") as collector:
        batch = asyncio.create_task(collector.next_batch(0, fresh))
        await settle()
        assert player.started == [0, 1, 2]
        player.finish(2, 0, 1)
        assert [g.index for g in await batch] == [0, 1, 2]
        await settle()
        assert player.started == [0, 1, 2], "nothing may start before the next version is out"
        collector.pace_on(1)
        await settle()
        assert player.started == [0, 1, 2, 3, 4, 5]


async def test_one_step_off_policy_keeps_the_next_batch_running() -> None:
    player = Player()
    async with Collector(player, Pace(2, max_lag=1), lambda: "policy") as collector:
        batch = asyncio.create_task(collector.next_batch(0, fresh))
        await settle()
        assert player.started == [0, 1, 2, 3]
        player.finish(3, 1)
        assert [g.index for g in await batch] == [1, 3]
        assert collector.pending() == [0, 2]
        assert collector.consumed == 2


async def test_stale_groups_are_dropped_counted_and_replaced() -> None:
    player = Player()
    player.open = True
    async with Collector(player, Pace(2, max_lag=0), lambda: "policy") as collector:
        batch = await collector.next_batch(0, lambda g: 1 if g.index == 0 else 0)
        assert [g.index for g in batch] == [1, 2]
        assert collector.take_dropped() == [0]
        assert collector.pending() == []


async def test_a_straggler_is_dropped_at_its_deadline() -> None:
    player = Player()
    player.finish(1, 2)
    async with Collector(player, Pace(2, max_lag=0, group_deadline_s=0.01), lambda: "policy") as collector:
        batch = await collector.next_batch(0, fresh)
        assert [g.index for g in batch] == [1, 2]
        assert collector.take_dropped() == [0]


async def test_a_resumed_collector_plays_pending_groups_first() -> None:
    player = Player()
    player.open = True
    pace = Pace(2, max_lag=0)
    async with Collector(player, pace, lambda: "policy", cursor=7, pending=[3, 5], consumed=4) as collector:
        assert [g.index for g in await collector.next_batch(2, fresh)] == [3, 5]
        assert collector.cursor == 7


async def test_a_group_is_played_again_when_the_ring_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollouts.collector.BACKOFF_S", (0.0, 0.0))
    tries = 0

    class Away(Player):
        async def play(self, index: int, adapter: str) -> RolloutGroup:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise ServiceUnavailableError("no worker")
            return group(trajectory(), index=index)

    async with Collector(Away(), Pace(1, max_lag=0), lambda: "policy") as collector:
        assert [g.index for g in await collector.next_batch(0, fresh)] == [0]
    assert tries == 3


@pytest.mark.parametrize("error", [InvalidRequestError("bad prompt"), KeyError("environment")])
async def test_what_cannot_be_played_ends_the_wait_and_stays_pending(error: Exception) -> None:
    class Broken(Player):
        async def play(self, index: int, adapter: str) -> RolloutGroup:
            raise error

    async with Collector(Broken(), Pace(1, max_lag=0), lambda: "policy") as collector:
        with pytest.raises(type(error)):
            await collector.next_batch(0, fresh)
        assert collector.pending() == [0]


async def test_a_discarded_batch_is_dropped_and_replaced() -> None:
    player = Player()
    player.open = True
    async with Collector(player, Pace(2, max_lag=0), lambda: "policy") as collector:
        collector.discard(await collector.next_batch(0, fresh))
        assert collector.consumed == 0
        assert [g.index for g in await collector.next_batch(0, fresh)] == [2, 3]
        assert collector.take_dropped() == [0, 1]


async def test_every_started_index_is_in_exactly_one_place() -> None:
    player = Player()
    player.open = True
    consumed: list[int] = []
    dropped: list[int] = []
    async with Collector(player, Pace(4, max_lag=1), lambda: "policy") as collector:
        for step in range(6):
            batch = await collector.next_batch(step, lambda g: 2 if g.index % 5 == 0 else 0)
            consumed += [g.index for g in batch]
            dropped += collector.take_dropped()
            collector.pace_on(step + 1)
            places = consumed + dropped + collector.pending()
            assert sorted(places) == list(range(collector.cursor))


async def test_bad_settings_end_the_wait_at_once() -> None:
    class Wrong(Player):
        async def play(self, index: int, adapter: str) -> RolloutGroup:
            self.started.append(index)
            raise SetupError("no such tool")

    player = Wrong()
    async with Collector(player, Pace(1, max_lag=0), lambda: "policy") as collector:
        with pytest.raises(SetupError, match="no such tool"):
            await collector.next_batch(0, fresh)
    assert player.started == [0], "asked once: asking again changes nothing"
