"""Everything is too old to learn from: told once, with its reason, until a batch has been fresh."""

import asyncio

import pytest

from shared.errors import UnknownAdapterError
from tests.training.nobody import NoOrders
from tests.unit.test_trainer_collect import Player, fresh
from tests.unit.trainer_samples import group, trajectory
from tests.waiting import HANG_S
from trainer.ring.mailbox import RingMailbox
from trainer.rollouts.collector import Collector
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.pacing import UNKNOWN_LAG, Pace, StaleWatch
from trainer.runs.inbox import AllStale, Inbox, Moved
from trainer.state import RunState


def foreign(index: int) -> RolloutGroup:
    return group(*(trajectory(spans=[("policy@2", 0, 2)], sample=i) for i in range(2)), index=index)


class Strange(Player):
    """Whatever is played, another version has sampled it."""

    async def play(self, index: int, adapter: str) -> RolloutGroup:
        await asyncio.sleep(0)
        return foreign(index)


async def never() -> Moved:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_a_run_that_gets_nothing_but_old_samples_says_so_once() -> None:
    watch = StaleWatch("samples", after=8, max_lag=1)
    own = Collector(Strange(), Pace(2, max_lag=1), lambda: "policy@9", watch=watch)
    async with Inbox(own, None, RingMailbox(NoOrders()), never, [watch]) as inbox, asyncio.timeout(HANG_S):
        work = await inbox.next(RunState("run"), lambda g: UNKNOWN_LAG, asyncio.Event())
        assert isinstance(work, AllStale)
        assert "samples in a row were too old to learn from" in work.reason
        assert "policy@2, which is no version of this run (the bound is 1)" in work.reason
        waiting = asyncio.create_task(inbox.next(RunState("run"), lambda g: UNKNOWN_LAG, asyncio.Event()))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done(), "once is enough"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_fresh_batch_ends_the_row() -> None:
    watch = StaleWatch(after=4)
    watch.dropped([foreign(0)], 3)
    watch.used()
    watch.dropped([foreign(1)], 3)
    waiting = asyncio.create_task(watch.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    watch.dropped([foreign(2)], 3)
    assert "4 samples" in await waiting and "3 policy steps old" in await waiting
    watch.reported()
    watch.used()
    watch.dropped([foreign(3), foreign(4)], 3)
    assert "4 samples" in await watch.wait(), "and again, when it comes again"


async def test_a_version_that_is_deleted_under_a_group_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollouts.collector.BACKOFF_S", (0.0, 0.0))
    latest = ["policy@1"]

    class Deleted(Player):
        async def play(self, index: int, adapter: str) -> RolloutGroup:
            self.started.append(index)
            if adapter == "policy@1":
                latest[:] = ["policy@2"] if len(self.started) == 10 else latest
                raise UnknownAdapterError("there is no adapter policy@1")
            return group(trajectory(), index=index)

    player = Deleted()
    async with Collector(player, Pace(1, max_lag=0), lambda: latest[0]) as collector, asyncio.timeout(HANG_S):
        assert [g.index for g in await collector.next_batch(0, fresh)] == [0]
    assert len(player.started) == 11, "more often than a ring that is away is asked again"
