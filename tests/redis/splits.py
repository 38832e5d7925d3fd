"""An adapter of two versions whose requests are split, and rewards for their answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from shared.redis.adapters.splits import count_for_split
from shared.sequences import SequenceSpec
from shared.splits import Arm
from shared.trajectories import LiveTrajectory, Reward, Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer

TWO = "policy@1:0.5,policy@2:0.5"
ASK: dict[str, Any] = {"model": "policy", "prompt": "say", "max_tokens": 8}


def hello(spec: SequenceSpec) -> Answer:
    return Answer("hello", versions={0: spec.adapter} if spec.adapter else {})


@contextlib.asynccontextmanager
async def splitting(redis_url: str) -> AsyncIterator[Api]:
    """An api process that keeps answers for feedback, with two versions; the first is the latest."""
    async with api(redis_url, feedback_ttl_days=1) as serving:
        await publish(serving.ring.adapters)
        await publish(serving.ring.adapters, seed=1, set_latest=False)
        yield serving


async def begun(server: Api, split: str = TWO, **terms: Any) -> dict[str, Any]:
    answer = await server.http.put("/v1/adapters/policy/split", json={"split": split, **terms})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def seen(server: Api) -> dict[str, Any]:
    told: dict[str, Any] = (await server.http.get("/v1/adapters/policy/split")).json()
    return told


def rewarded(state: dict[str, Any], version: int, answer: str, reward: float) -> LiveTrajectory:
    trajectory = Trajectory(0, 0, (1,), (2,), "x", (-0.5,), "stop", reward=Reward("feedback", reward))
    return LiveTrajectory(answer, "policy", MODEL, trajectory, arm=Arm(state["id"], version))


async def earn(redis: Redis, state: dict[str, Any], version: int, rewards: list[float], name: str = "a") -> int:
    lives = [rewarded(state, version, f"{name}{version}-{i}", reward) for i, reward in enumerate(rewards)]
    return sum([await count_for_split(redis, live) for live in lives])


async def answered(server: Api, bodies: list[dict[str, Any]], path: str = "/v1/completions") -> list[dict[str, Any]]:
    """All at once; the answers in order."""
    answers = await asyncio.gather(*(server.post(path, body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return [answer.json() for answer in answers]


def version_of(answer: dict[str, Any]) -> int:
    return int(answer["system_fingerprint"].rpartition("@")[2])
