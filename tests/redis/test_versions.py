"""A rolling upgrade seen through HTTP: an api of tomorrow and a worker of today, and the letter that is left."""

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.sequences import SCHEMA, SamplingParams, SequenceSpec, decode_spec, encode
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.waiting import wait_until


def hello(spec: SequenceSpec) -> Answer:
    return Answer("hello")


async def waiting(redis: Redis) -> str:
    """The key of the one sequence that waits."""
    found: list[bytes] = []

    async def one() -> bool:
        found[:] = await redis.keys(keys.sequence(MODEL, "*"))
        return len(found) == 1

    await wait_until(one)
    return found[0].decode()


@pytest.mark.parametrize("version", [SCHEMA + 1, 0])
async def test_a_worker_of_another_version_refuses_clearly_and_the_request_can_run_later(
    redis: Redis, redis_url: str, version: int
) -> None:
    async with working(redis_url, hello) as worker, api(redis_url) as server:
        worker.paused = True
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "go"}))
        key = await waiting(redis)
        spec = decode_spec(await redis.hget(key, "spec"))
        await redis.hset(key, "spec", msgspec.msgpack.encode({**msgspec.to_builtins(spec), "schema": version}))
        worker.paused = False
        answer = await asking
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "incompatible_version"
        assert f"schema {version} and this process reads 1" in error["message"]
        (letter,) = (await server.http.get("/v1/deadletters")).json()["data"]
        assert (letter["requeueable"], f"schema {version}" in letter["unreadable"]) == (False, True)
        refused = await server.http.post(f"/v1/deadletters/{letter['id']}/requeue")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")


async def test_an_api_of_tomorrow_that_only_adds_fields_is_served(redis: Redis, redis_url: str) -> None:
    async with working(redis_url, hello) as worker, api(redis_url) as server:
        worker.paused = True
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "go"}))
        key = await waiting(redis)
        spec = decode_spec(await redis.hget(key, "spec"))
        await redis.hset(key, "spec", msgspec.msgpack.encode({**msgspec.to_builtins(spec), "added": {"x": 1}}))
        worker.paused = False
        assert (await asking).json()["choices"][0]["text"] == "hello"


async def test_a_letter_is_listed_shown_requeued_and_dropped_over_http(redis: Redis, redis_url: str) -> None:
    spec = SequenceSpec("old", MODEL, (1, 2), SamplingParams(8, 1))
    letter = {"id": "old", "reason": "its workers died 3 times", "worker": "w", "attempt": 3, "job": ""}
    async with working(redis_url, hello), api(redis_url) as server:
        for _ in range(2):
            fields = {**letter, "stream": keys.queue(MODEL, "interactive"), "spec": encode(spec)}
            await redis.xadd(keys.dead_letters(MODEL), fields)
        await redis.expire(keys.dead_letters(MODEL), 60)
        newest, oldest = (await server.http.get("/v1/deadletters", params={"model": MODEL})).json()["data"]
        path = f"/v1/deadletters/{newest['id']}"
        assert (await server.http.get(path)).json()["sequence"]["prompt_ids"] == [1, 2]
        answers = [(await server.http.post(f"{path}/requeue")).json() for _ in range(2)]
        assert [answer["requeued"] for answer in answers] == [True, False]

        async def done() -> bool:
            return (await server.http.get(path)).json()["requeued"]["state"] == "done"

        await wait_until(done)
        assert (await server.http.get(path)).json()["requeued"]["text"] == "hello"
        path = f"/v1/deadletters/{oldest['id']}"
        assert [(await server.http.delete(path)).json()["deleted"] for _ in range(2)] == [True, False]
        assert (await server.http.get(path)).status_code == 404
