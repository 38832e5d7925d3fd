"""Verdicts on answers of the last days: kept when they were given, judged once, in the trainer's queue once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of, new_key
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.kept.answer_store import LIST, answers_of
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.scoring.pool import RewardPool
from shared.sequences import SequenceSpec
from shared.trajectories import LiveTrajectory
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.api_texts import ids
from tests.waiting import wait_until
from worker.jobs.collecting import Collecting
from worker.jobs.context import TickContext
from worker.jobs.verdicts import Verdicts

ASK: dict[str, Any] = {"model": MODEL, "prompt": "say", "max_tokens": 16}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "say"}], "max_tokens": 16}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello")


@contextlib.asynccontextmanager
async def runner(redis_url: str) -> AsyncIterator[tuple[Collecting, Verdicts]]:
    redis, blocking, pool = connect(redis_url), connect(redis_url, blocking=True), RewardPool(1)
    try:
        yield Collecting(TickContext("r1", redis, blocking, pool), 100, 1 << 20), Verdicts(redis, 100, 1 << 20)
    finally:
        pool.close()
        await redis.aclose()
        await blocking.aclose()


@pytest.fixture
async def keeping(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    async with working(redis_url, script), api(redis_url, feedback_ttl_days=1) as server:
        yield server


async def kept(redis: Redis, redis_url: str, answers: int) -> None:
    """Until a runner has kept so many more answers."""
    async with runner(redis_url) as (collecting, _):
        taken = 0

        async def all_taken() -> bool:
            nonlocal taken
            taken += await collecting.collect(MODEL)
            return taken >= answers

        await wait_until(all_taken)


async def delivered(redis: Redis, redis_url: str) -> list[LiveTrajectory]:
    async with runner(redis_url) as (_, verdicts):
        while await verdicts.deliver():
            pass
    return [each.live for each in await TrajectoryQueue(redis, "policy").peek()]


async def test_a_verdict_makes_an_answer_a_trajectory_once(keeping: Api, redis: Redis, redis_url: str) -> None:
    answer = (await keeping.post("/v1/completions", {**ASK, "temperature": 0.5})).json()
    await kept(redis, redis_url, 1)
    assert await delivered(redis, redis_url) == [], "nobody has judged it"
    (waiting,) = (await keeping.http.get("/v1/feedback")).json()["data"]
    assert (waiting["text"], waiting["prompt_ids"], waiting["reward"]) == ("hello", ids("say"), None)
    remark = await keeping.post("/v1/feedback", {"id": answer["id"], "text": "so so"})
    assert remark.json()["status"] == "noted"
    said = await keeping.post("/v1/feedback", {"id": answer["id"], "rating": 4, "key": "k1"})
    assert (said.status_code, said.json()["status"], said.json()["reward"]) == (200, "counted", 0.75)
    (live,) = await delivered(redis, redis_url)
    t = live.trajectory
    assert t.reward is not None and (t.reward.name, t.reward.value) == ("feedback", 0.75)
    assert (t.metadata, t.logprobs_mode, live.group_size) == ({"feedback": "so so"}, "processed_logprobs", 1)
    assert live.id == f"{answer['id']}-0" == said.json()["trajectory"]

    again = await keeping.post("/v1/feedback", {"id": answer["id"], "rating": 4})
    assert again.json() == said.json()
    assert (await keeping.post("/v1/feedback", {"id": answer["id"], "rating": 1, "key": "k1"})).status_code == 200
    other = await keeping.post("/v1/feedback", {"id": answer["id"], "rating": 1, "key": "k2"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    await redis.delete(keys.trajectories_seen("policy"))  # as after an hour: the answer itself remembers
    assert len(await delivered(redis, redis_url)) == 1
    assert (await keeping.http.get("/v1/feedback")).json()["data"] == []
    (judged,) = (await keeping.http.get("/v1/feedback", params={"state": "judged"})).json()["data"]
    assert judged["reward"] == 0.75


async def test_a_runner_that_dies_on_the_way_leaves_a_verdict_to_the_next_one(
    keeping: Api, redis: Redis, redis_url: str
) -> None:
    answer = (await keeping.post("/v1/chat/completions", CHAT)).json()
    await kept(redis, redis_url, 1)
    await keeping.post("/v1/feedback", {"id": answer["id"], "reward": -2.5})
    async with runner(redis_url) as (_, dying):
        await dying._due.take(10, 30_000)  # and then nothing more
        assert await delivered(redis, redis_url) == []
    await redis.zadd(keys.due(LIST), dict.fromkeys(await redis.zrange(keys.due(LIST), 0, -1), 1))  # its lease is over
    (live,) = await delivered(redis, redis_url)
    assert live.trajectory.reward is not None and live.trajectory.reward.value == -2.5


async def test_of_two_answers_one_is_preferred(keeping: Api, redis: Redis, redis_url: str) -> None:
    answer = (await keeping.post("/v1/chat/completions", {**CHAT, "n": 2})).json()
    alone = (
        await keeping.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "b"}]})
    ).json()
    await kept(redis, redis_url, 3)
    pair = {"id": answer["id"], "choice": 1, "preferred_over": answer["id"], "preferred_over_choice": 0}
    itself = await keeping.post("/v1/feedback", {**pair, "choice": 0})
    unlike = await keeping.post("/v1/feedback", {**pair, "preferred_over": alone["id"]})
    assert [each.status_code for each in (itself, unlike)] == [400, 400]
    assert (await keeping.post("/v1/feedback", pair)).json()["reward"] == 1
    turned = {**pair, "choice": 0, "preferred_over_choice": 1}
    assert (await keeping.post("/v1/feedback", turned)).status_code == 409
    better, worse = await delivered(redis, redis_url)
    assert (better.id, worse.id) == (f"{answer['id']}-1", f"{answer['id']}-0")
    assert better.group == worse.group and better.group_size == worse.group_size == 2
    assert [each.trajectory.reward.value for each in (better, worse) if each.trajectory.reward] == [1.0, 0.0]
    judged = (await keeping.http.get("/v1/feedback", params={"state": "judged"})).json()["data"]
    assert sorted(each["preferred_over"] or "" for each in judged)[0] == "" and len(judged) == 2


async def test_feedback_may_come_before_the_answer_is_kept(keeping: Api, redis: Redis, redis_url: str) -> None:
    answer = (await keeping.post("/v1/responses", {"model": MODEL, "input": "say"})).json()
    said = asyncio.create_task(keeping.post("/v1/feedback", {"id": answer["id"], "rating": "up"}))
    await kept(redis, redis_url, 1)
    assert (await said).json()["status"] == "counted"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "x"}, "reward"),
        ({"rating": "up"}, "id"),
        ({"id": "x", "rating": "up", "reward": 1}, "rating"),
        ({"id": "x", "rating": 6}, "rating"),
        ({"id": "x", "rating": True}, "rating"),
        ({"id": "x", "reward": 1e9}, "reward"),
        ({"id": "x", "reward": 1, "stars": 3}, "stars"),
        ({"id": "x", "reward": 1, "choice": -1}, "choice"),
    ],
)
async def test_bad_feedback_is_refused_by_name(keeping: Api, body: dict[str, Any], param: str) -> None:
    refused = await keeping.post("/v1/feedback", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param), refused.text


async def test_who_does_not_want_it_is_not_kept(redis_url: str, redis: Redis, tmp_path: Path) -> None:
    secrets = {name: new_key() for name in ("alice", "bob", "carl")}
    file = tmp_path / "keys"
    file.write_text(
        f"{line_of(secrets['alice'], name='alice', tenant='acme')}\n"
        f"{line_of(secrets['bob'], name='bob', tenant='bobs')}\n"
        f"{line_of(secrets['carl'], name='carl', tenant='acme', feedback='no')}\n"
    )
    said = {name: {"authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
    async with (
        working(redis_url, script),
        api(redis_url, feedback_ttl_days=1, api_key_file=file) as server,
    ):
        mine = (await server.post("/v1/completions", ASK, headers=said["alice"])).json()
        await server.post("/v1/completions", {**ASK, "collect_trajectory": False}, headers=said["alice"])
        await server.post("/v1/completions", ASK, headers=said["carl"])
        await kept(redis, redis_url, 1)
        assert await redis.xlen(keys.collected(MODEL)) == 0
        strange = await server.post("/v1/feedback", {"id": mine["id"], "rating": "up"}, headers=said["bob"])
        assert (strange.status_code, strange.json()["error"]["param"]) == (404, "id")
        assert (await server.http.get("/v1/feedback", headers=said["bob"])).json()["data"] == []
        shared = await server.http.get("/v1/feedback", headers=said["carl"])
        assert [each["name"] for each in shared.json()["data"]] == [f"{mine['id'].removeprefix('cmpl-')}-0"]
    assert await redis.zcard(keys.kept_uses(answers_of("acme"))) == 1


async def test_a_server_that_keeps_nothing_says_so(server: Api) -> None:
    refused = await server.post("/v1/feedback", {"id": "cmpl-1", "rating": "up"})
    assert (refused.status_code, "--feedback-ttl-days" in refused.text) == (400, True)


async def test_the_oldest_answers_make_room(redis_url: str, redis: Redis) -> None:
    async with (
        working(redis_url, script),
        api(redis_url, feedback_ttl_days=1, feedback_store_mb=1) as server,
    ):
        first = (await server.post("/v1/completions", ASK)).json()
        await kept(redis, redis_url, 1)
        await redis.hset(keys.kept_sizes(answers_of("")), mapping={"all": 1 << 20})  # as if it were so large
        await server.post("/v1/completions", ASK)
        await kept(redis, redis_url, 1)
        left = [each["trajectory"] for each in (await server.http.get("/v1/feedback")).json()["data"]]
    assert f"{first['id']}-0" not in left
