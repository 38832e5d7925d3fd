"""Splits of an adapter's requests: what is counted, how the verdict moves the latest version, what ends one sooner."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from api.callers.caller import ApiKey, calling
from shared.adapters import GateCheck
from shared.errors import ConflictError
from shared.owners import Asker
from shared.redis import keys
from shared.redis.adapters.splits import Splits
from shared.redis.adapters.store import AdapterStore
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api
from tests.redis.scripted_worker import ScriptedWorker
from tests.redis.splits import ASK, answered, begun, earn, hello, seen, splitting, version_of
from tests.redis.test_feedback import kept, runner

script = hello


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 0.0)


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with splitting(redis_url) as serving:
        yield serving


async def test_feedback_is_counted_once_and_moves_the_shares(
    server: Api, worker: ScriptedWorker, redis: Redis, redis_url: str
) -> None:
    await begun(server)
    answers = await answered(server, [{**ASK, "user": str(user)} for user in range(60)])
    await kept(redis, redis_url, 60)
    for answer in answers:
        good = version_of(answer) == 1
        said = await server.post("/v1/feedback", {"id": answer["id"], "rating": "up" if good else "down"})
        assert said.status_code == 200
        if answer is answers[0]:
            await server.post("/v1/feedback", {"id": answer["id"], "rating": "up" if good else "down"})
    async with runner(redis_url) as (_, verdicts):
        while await verdicts.deliver():
            pass
    state = await seen(server)
    assert state["rewards"] == 60
    assert [each["mean_reward"] for each in state["versions"]] == [1.0, 0.0]
    assert state["versions"][1]["share"] < 0.02


async def test_scored_live_traffic_is_counted_too(server: Api, redis: Redis, redis_url: str) -> None:
    await begun(server)
    scored = {**ASK, "collect_trajectory": True, "scoring_function": "exact", "metadata": {"reference": "hello"}}
    answers = await answered(
        server, [*[{**scored, "user": str(user)} for user in range(26)], {**ASK, **scored, "n": 2}]
    )
    await kept(redis, redis_url, 28)
    state = await seen(server)
    (one, two), expected = state["versions"], Counter(map(version_of, [*answers, answers[-1]]))
    assert (one["rewards"], two["rewards"], one["mean_reward"]) == (expected[1], expected[2], 1.0)


async def test_an_answer_counts_once_for_the_split_that_chose_its_version(server: Api, redis: Redis) -> None:
    state = await begun(server)
    assert await earn(redis, state, 1, [1.0, 0.5]) == 2
    assert await earn(redis, state, 1, [1.0, 0.5]) == 0, "told again"
    assert await earn(redis, {"id": "another"}, 1, [1.0], "b") == 0
    for odd in (float("nan"), float("inf"), 1e300):
        assert await earn(redis, state, 1, [odd], "c") == 0
    again = await begun(server, floor=0.05)
    assert (again["id"], again["rewards"], again["floor"]) == (state["id"], 2, 0.05), "new terms, same rewards"
    await publish(server.ring.adapters, seed=2, set_latest=False)
    other = await begun(server, "policy@1:1,policy@3:1")
    assert other["id"] != state["id"] and other["rewards"] == 0
    assert await earn(redis, state, 1, [1.0], "d") == 0, "of a split that has made room"
    for key in (keys.split("policy"), keys.split_answers("policy")):
        assert await redis.ttl(key) > 0 or not await redis.exists(key)


@pytest.mark.parametrize(("latest", "better", "outcome"), [(1, 2, "promoted"), (2, 1, "rolled_back"), (1, 1, "kept")])
async def test_the_verdict_moves_the_latest_version(
    server: Api, worker: ScriptedWorker, redis: Redis, latest: int, better: int, outcome: str
) -> None:
    adapters = server.ring.adapters
    if latest == 2:
        await adapters.promote("policy", 2, gate=[GateCheck("held_out", True, "0.5")])
    state = await begun(server, verdict_after=20)
    worse = 3 - better
    await earn(redis, state, better, [1.0] * 10)
    await earn(redis, state, worse, [0.0] * 9)
    assert (await seen(server))["verdict"] is None
    await earn(redis, state, worse, [0.0] * 5, "late")
    await answered(server, [ASK] * 4)
    assert "20 rewards" in (await server.http.get("/dashboard/adapters/policy")).text
    told = await seen(server)
    assert (told["state"], told["rewards"]) == ("decided", 20)
    assert (told["verdict"]["winner"], told["verdict"]["outcome"]) == (f"policy@{better}", outcome)
    assert await adapters.latest("policy") == told["latest"] == better and told["latest_at_start"] == latest
    assert {each["id"]: each["share"] for each in told["versions"]} == {f"policy@{better}": 1, f"policy@{worse}": 0}
    moves = [flip.version for flip in await adapters.history("policy")]
    assert len(moves) == {"promoted": 2, "rolled_back": 3, "kept": 1}[outcome], "it moves once"
    if outcome == "promoted":
        (check,) = (await adapters.manifest("policy", 2)).gate
        assert (check.name, check.passed) == ("split", True) and "20 rewards" in check.detail
    await server.post("/v1/completions", ASK)
    spec = worker.specs[-1]
    assert spec.adapter == f"policy@{better}" and spec.collect is not None and spec.collect.arm is None
    assert await earn(redis, state, 1, [1.0], "after") == 0
    fresh = await begun(server, verdict_after=20)
    assert fresh["id"] != state["id"] and fresh["rewards"] == 0, "after a verdict it begins anew"


async def test_the_promotion_and_the_end_of_the_split_are_one_step(server: Api, redis: Redis) -> None:
    state = await begun(server, verdict_after=20)
    await earn(redis, state, 1, [0.0] * 10)
    await earn(redis, state, 2, [1.0] * 10)
    splits, adapters = Splits(redis, server.ring.adapters), server.ring.adapters
    found = await splits.find("policy")
    assert found is not None
    await asyncio.gather(*(splits.settle("policy", found) for _ in range(4)))
    told = (await seen(server))["verdict"]
    assert told["outcome"] == "promoted" and len(await adapters.history("policy")) == 2, "it moves once"
    await adapters.rollback("policy", 1)
    await splits.settle("policy", found)  # of one that has looked before
    assert (await seen(server))["verdict"] == told
    assert await adapters.latest("policy") == 1, "what an operator has undone stays undone"


@pytest.mark.parametrize("back", ["rollback", "promote"])
async def test_a_split_stays_over_when_the_latest_version_comes_back(server: Api, redis: Redis, back: str) -> None:
    adapters = server.ring.adapters
    await adapters.promote("policy", 2)
    await publish(adapters, seed=2, set_latest=False)
    state = await begun(server, "policy@2:0.5,policy@3:0.5", verdict_after=20)
    await earn(redis, state, 2, [0.0] * 10)
    await adapters.rollback("policy", 1)
    assert await earn(redis, state, 3, [1.0] * 10) == 0, "nothing is counted for it any more"
    assert not await redis.exists(keys.split_answers("policy"))
    await (adapters.rollback("policy", 2) if back == "rollback" else adapters.promote("policy", 2))
    told = await seen(server)
    assert (told["state"], told["verdict"], told["rewards"]) == ("over", None, 10) and "1" in told["over"]
    assert await adapters.latest("policy") == 2
    again = await begun(server, "policy@2:0.5,policy@3:0.5", verdict_after=20)
    assert again["id"] != state["id"] and again["rewards"] == 0


async def test_a_version_that_is_published_ends_a_split_for_good(server: Api, redis: Redis) -> None:
    state = await begun(server)
    await publish(server.ring.adapters, seed=2)
    await server.ring.adapters.rollback("policy", 1)
    assert await earn(redis, state, 1, [1.0]) == 0
    assert "moved to 3" in (await seen(server))["over"]


async def test_a_promotion_that_is_refused_leaves_no_check_on_the_manifest(server: Api, redis: Redis) -> None:
    state = await begun(server, verdict_after=20)
    await earn(redis, state, 1, [0.0] * 10)
    await earn(redis, state, 2, [1.0] * 10)
    splits, adapters = Splits(redis, server.ring.adapters), server.ring.adapters
    found = await splits.find("policy")
    assert found is not None
    await publish(adapters, seed=2)
    await splits.settle("policy", found)  # of one that has looked before
    assert (await adapters.manifest("policy", 2)).gate == () and await adapters.latest("policy") == 3
    with pytest.raises(ConflictError):
        await adapters.promote("policy", 2, gate=[GateCheck("by_hand", True)])
    assert (await adapters.manifest("policy", 2)).gate == ()


async def test_a_person_who_moves_the_latest_version_ends_the_split(
    server: Api, worker: ScriptedWorker, redis: Redis
) -> None:
    state = await begun(server, verdict_after=20)
    await publish(server.ring.adapters, seed=2)
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@3"
    await earn(redis, state, 1, [0.0] * 5)
    await earn(redis, state, 2, [1.0] * 5)
    told = await seen(server)
    assert (told["state"], told["verdict"], await server.ring.adapters.latest("policy")) == ("over", None, 3)
    assert "3" in told["over"] and (told["latest"], told["latest_at_start"]) == (3, 1)
    assert [each["share"] for each in told["versions"]] == [0, 0]


async def test_a_version_that_goes_ends_the_split_and_pruning_leaves_it(server: Api, worker: ScriptedWorker) -> None:
    await begun(server)
    for seed in range(3):
        await publish(server.ring.adapters, seed=2 + seed, set_latest=False)
    deleted = await server.ring.adapters.prune("policy", 1)
    assert 2 not in deleted and deleted
    await server.ring.adapters.reject("policy", 2, [GateCheck("by_hand", False)])
    await answered(server, [{**ASK, "user": str(user)} for user in range(12)])
    assert {spec.adapter for spec in worker.specs} == {"policy@1"}
    assert "version 2" in (await seen(server))["over"]


async def test_a_verdict_is_given_whoever_asks_first(server: Api, redis: Redis) -> None:
    state = await begun(server, verdict_after=20)
    await earn(redis, state, 1, [0.0] * 10)
    await earn(redis, state, 2, [1.0] * 10)
    token = calling.set(ApiKey("bob", b"", tenant="bobs"))
    try:
        assert await server.ring.splits.choose("policy", "x") is None
    finally:
        calling.reset(token)
    assert await server.ring.adapters.latest("policy") == 2


async def test_a_deleted_adapters_split_goes_with_it_and_is_never_shown_to_the_names_next_owner(
    server: Api, redis: Redis
) -> None:
    state = await begun(server)
    await earn(redis, state, 1, [1.0])
    split = await redis.dump(keys.split("policy"))
    await server.ring.adapters.delete("policy")
    assert not await redis.exists(keys.split("policy"), keys.split_answers("policy"))
    await redis.restore(keys.split("policy"), 60_000, split)  # as if the adapter had gone by its time to live
    bobs = AdapterStore(redis, who_asks=lambda: Asker("bobs", limited=True))
    await publish(bobs)
    assert await Splits(redis, bobs).find("policy") is None


async def test_a_split_ends_when_it_is_deleted(server: Api, worker: ScriptedWorker) -> None:
    await begun(server, "policy@1:0.00001,policy@2:1", auto=False)
    assert (await server.http.delete("/v1/adapters/policy/split")).json()["deleted"]
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@1"
    for call in (server.http.get, server.http.delete):
        assert (await call("/v1/adapters/policy/split")).status_code == 404
