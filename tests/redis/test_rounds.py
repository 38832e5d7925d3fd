"""Runs that average their weights: whose changes are in an average, and that nobody waits for ever."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.errors import SetupError
from shared.redis.connection.client import connect
from shared.redis.training.rounds import RoundStore
from tests.redis.shared_trainers import MADE, PROBES, Trainers, made_groups, same, settings, steps, trainers
from trainer.learn.options import Schedule
from trainer.learners.federation import Federation, RoundHandle, RunChange, federation
from trainer.learners.handle import HostHandle
from trainer.learners.kinds import made_with
from trainer.learners.policy import PolicyLearner

OPTIONS = replace(MADE, optimize=replace(MADE.optimize, schedule=Schedule(peak=1e-3)))


async def entered(ring: Trainers, name: str, **given: Any) -> Federation:
    given = {"federation": "f", "sync_every": 2, "run": name} | given
    return await ring.stack.enter_async_context(federation(settings(**given), ring.redis_url, "base", "ring"))


async def joined(ring: Trainers, name: str, **given: Any) -> RoundHandle:
    place = await entered(ring, name, **given)
    host, loaded = await ring.host()
    mine: HostHandle[PolicyLearner] = await HostHandle.open(host, made_with("policy", ring.options), loaded.model)
    return RoundHandle(mine, place, 2)


@pytest.fixture
async def ring(redis_url: str) -> AsyncIterator[Trainers]:
    async with trainers(redis_url, OPTIONS) as entered:
        yield entered


async def test_each_round_ends_in_the_average_weighted_by_samples(ring: Trainers) -> None:
    one, other = await joined(ring, "one"), await joined(ring, "other")
    groups = [await made_groups(one, seed) for seed in range(4)]
    fewer = [each[:1] for each in groups[2:]]
    begun = await one.weights()
    alone = [await ring.alone(), await ring.alone()]
    mine, theirs = [
        (await steps(learner, each))[-1].weights for learner, each in zip(alone, (groups[:2], fewer), strict=True)
    ]
    done = await asyncio.gather(steps(one, groups[:2]), steps(other, fewer))
    expected = {n: begun[n] + (24 * (mine[n] - begun[n]) + 8 * (theirs[n] - begun[n])) / 32 for n in begun}
    for trained in done:
        assert same(trained[-1].weights, done[0][-1].weights)
        assert {check.name: check.passed for check in trained[-1].checks}["probe_kl"]
    assert not same(done[0][0].weights, done[1][0].weights), "in between they are apart"
    for name, value in done[0][-1].weights.items():
        np.testing.assert_allclose(value, expected[name], atol=2e-7)
    assert same(await one.weights(), await other.weights())


async def test_moments_are_averaged_where_all_want_it(ring: Trainers) -> None:
    shared = {"sync_moments": "average"}
    one, other = await joined(ring, "one", **shared), await joined(ring, "other", **shared)
    groups = [await made_groups(one, seed) for seed in range(4)]
    fewer = [each[:1] for each in groups[2:]]
    alone = [await ring.alone(), await ring.alone()]
    for learner, each in zip(alone, (groups[:2], fewer), strict=True):
        await steps(learner, each)
    mine, theirs = [(await learner.snapshot()).optimizer for learner in alone]
    await asyncio.gather(steps(one, groups[:2]), steps(other, fewer))
    for learner in (one, other):
        moments = (await learner.snapshot()).optimizer
        assert moments["step"] == 2
        for name in mine.keys() - {"step", "learning_rate"}:
            expected = (24 * mine[name] + 8 * theirs[name]) / 32
            np.testing.assert_allclose(moments[name], expected, atol=1e-5 * np.abs(expected).max(), err_msg=name)


async def test_one_that_is_away_is_left_out_and_goes_on_from_the_average(ring: Trainers, redis_url: str) -> None:
    one, away = await joined(ring, "one", sync_wait_s=0.5), await joined(ring, "away")
    groups = [await made_groups(one, seed) for seed in range(6)]
    await away.call(PolicyLearner.train, groups[0], 0, 0, PROBES)  # it has joined, and lives, and is slow
    await away.accept()
    done = await steps(one, groups[1:3])
    async with contextlib.aclosing(connect(redis_url)) as redis:
        now = await RoundStore(redis, "f").now()
        assert now is not None and (now.round, now.taken) == (1, {"ring/one"})
        back = await away.call(PolicyLearner.train, groups[3], 1, 1, PROBES)
        assert same(back.weights, done[-1].weights), "what it has learned meanwhile is in no average"
        await one._place.__aexit__(None, None, None)
        later = await joined(ring, "later")
        first, second = await asyncio.gather(steps(away, groups[4:6]), steps(later, groups[4:6]))
        assert same(first[-1].weights, second[-1].weights)
        now = await RoundStore(redis, "f").now()
        assert now is not None and now.round == 2 and now.taken >= {"ring/away", "ring/later"}


async def test_what_is_not_finite_is_in_no_average(ring: Trainers) -> None:
    one, other = await entered(ring, "one"), await entered(ring, "other")
    start = {"a": np.zeros(3, np.float32)}
    for place in (one, other):
        assert same(await place.join({"a": start["a"] + (place is other)}), start), "the first one says where all begin"
    bad = {"a": np.array([1, np.nan, 2], np.float32)}
    found = await asyncio.gather(one.exchange(RunChange({"a": start["a"] + 2}, 5)), other.exchange(RunChange(bad, 500)))
    assert all(each.weights["a"].tolist() == [2, 2, 2] for each in found)
    found = await asyncio.gather(one.exchange(RunChange(bad, 5)), other.exchange(RunChange(bad, 5)))
    assert all(each.weights["a"].tolist() == [2, 2, 2] for each in found), "nobody's change: the average stays"


async def test_a_change_that_is_told_again_counts_once(ring: Trainers) -> None:
    place = await entered(ring, "one")
    await place.join({"a": np.zeros(3, np.float32)})
    await place._publish(1, RunChange({"a": np.full(3, 9.0, np.float32)}, 5))  # of a start that was killed then
    again = await place.exchange(RunChange({"a": np.full(3, 1.0, np.float32)}, 5))
    assert again.weights["a"].tolist() == [1, 1, 1]


async def test_another_base_rank_or_rhythm_is_refused_by_name(ring: Trainers, redis_url: str) -> None:
    place = await entered(ring, "one")
    await place.join({"a": np.zeros(3, np.float32)})
    for given, said in (
        ({"lora_rank": 8}, "--lora-rank 8: the federation 'f' has 16"),
        ({"sync_every": 3}, "--sync-every 3"),
        ({"sync_moments": "average"}, "--sync-moments average: the federation 'f' has own"),
    ):
        with pytest.raises(SetupError, match=said):
            await entered(ring, "other", **given)
    with pytest.raises(SetupError, match="another base"):
        async with federation(settings(federation="f", sync_every=2), redis_url, "another", "ring"):
            pass
