"""Verdicts on answers of the last days: kept when they were given, judged once, in the trainer's queue once."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import SetupError
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.due.due_list import DueList
from shared.redis.kept.answer_store import LIST, AnswerStore, Verdict, answers_of
from shared.redis.kept.kept_things import Terms
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.scoring.pool import RewardPool
from shared.sequences import SequenceSpec
from shared.trajectories import LiveTrajectory, Trajectory
from tests.redis.api_servers import Api, api, key_file
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.api_texts import codec, ids
from tests.waiting import wait_until
from trainer.ring.feedback import judged_answers, pairs_of, preferences
from trainer.ring.http_client import HttpApi
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
        await asyncio.gather(*collecting.under_way)


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
    changed = await keeping.post("/v1/feedback", {"id": answer["id"], "rating": 1, "key": "k1"})
    assert (changed.status_code, changed.json()["reward"]) == (200, 0.75), "the same key gives the same answer"
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
    async with runner(redis_url):
        await DueList(redis, LIST).take(10, 30_000)  # a runner, that dies then
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


async def test_each_choice_of_several_prompts_is_an_answer_of_its_own(
    keeping: Api, redis: Redis, redis_url: str
) -> None:
    answer = (await keeping.post("/v1/completions", {**ASK, "prompt": ["a", "b"], "n": 2})).json()
    await kept(redis, redis_url, 4)
    for choice in range(4):
        said = await keeping.post("/v1/feedback", {"id": answer["id"], "choice": choice, "reward": choice})
        assert said.json()["trajectory"] == f"{answer['id']}-{choice}"
    found = {live.id[-1]: live.trajectory for live in await delivered(redis, redis_url)}
    assert {choice: t.reward and t.reward.value for choice, t in found.items()} == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert found["1"].prompt_ids == tuple(ids("a")) and found["2"].prompt_ids == tuple(ids("b"))


async def test_a_name_that_a_client_uses_again_is_that_of_its_latest_answer(
    keeping: Api, redis: Redis, redis_url: str
) -> None:
    for prompt in ("a", "b"):
        await keeping.post("/v1/completions", {**ASK, "prompt": prompt, "request_id": "mine"})
        await kept(redis, redis_url, 1)
    await keeping.post("/v1/feedback", {"id": "cmpl-mine", "rating": "up"})
    (live,) = await delivered(redis, redis_url)
    assert live.trajectory.prompt_ids == tuple(ids("b"))


async def test_a_list_goes_on_behind_a_name_and_forgets_what_is_gone(redis_url: str, redis: Redis) -> None:
    async with api(redis_url, feedback_ttl_days=1) as server:
        store, keeper = server.ring.answers, answers_of("")
        now = time.time_ns() // 1_000_000
        for at in range(12):  # three of each millisecond
            trajectory = Trajectory(0, 0, (1,), (2,), str(at), (-0.5,), "stop")
            await store.keep(
                f"a{at:02}-0", LiveTrajectory(f"a{at:02}-0", "p", MODEL, trajectory, collected_ms=now + at // 3)
            )
        await redis.delete(keys.kept(keeper, "a05-0"))
        seen: list[str] = []
        more, after = True, ""
        while more:
            page = (await server.http.get("/v1/feedback", params={"limit": 4, "after": after})).json()
            seen += [each["text"] for each in page["data"]]
            more, after = page["has_more"], page["data"][-1]["name"]
        assert seen == [str(at) for at in reversed(range(12)) if at != 5]
        unknown = await server.http.get("/v1/feedback", params={"after": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")
        assert await server.ring.answers.judge(keeper, {"a06-0": Verdict(1.0)})
        small = AnswerStore(redis, Terms(86_400, 2_000))
        await small.keep("b-0", LiveTrajectory("b-0", "p", MODEL, trajectory, collected_ms=now + 9))
        assert await redis.zcard(keys.kept_uses(keeper)) < 12, "the bound"
        listed = await redis.zcard(keys.kept_order(keeper, "waiting")) + await redis.zcard(
            keys.kept_order(keeper, "judged")
        )
        assert listed <= await redis.zcard(keys.kept_uses(keeper)) + 1, (
            "and no name of what has gone, but the deleted one"
        )


async def test_a_pair_does_not_make_room_for_itself(redis: Redis) -> None:
    trajectory = Trajectory(0, 0, (1,), (2,), "x" * 400, (-0.5,), "stop")
    store = AnswerStore(redis, Terms(86_400, 3_000))
    for name in ("a", "b"):
        await store.keep(name, LiveTrajectory(name, "p", MODEL, trajectory, collected_ms=1))
    tight = AnswerStore(redis, Terms(86_400, 1_500))  # as after a restart with less room
    await tight.judge(answers_of(""), {"a": Verdict(1.0, over="b"), "b": Verdict(0.0, under="a")})
    there = [await store.find(answers_of(""), name) for name in ("a", "b")]
    assert all(answer is None or answer.packed for answer in there)


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
        ({"id": "x", "reward": 1.1e9}, "reward"),
        ({"id": "x", "reward": 1, "stars": 3}, "stars"),
        ({"id": "x", "reward": 1, "choice": -1}, "choice"),
    ],
)
async def test_bad_feedback_is_refused_by_name(keeping: Api, body: dict[str, Any], param: str) -> None:
    refused = await keeping.post("/v1/feedback", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param, refused.text
    assert param != "rating" or "stars" in refused.text or "one of" in refused.text


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({"id": "chatcmpl-away"}, "'chatcmpl-away'"), ({"id": "resp_away", "choice": 2}, "choice 2 of 'resp_away'")],
)
async def test_an_unknown_answer_is_named_as_it_was_asked_for(
    keeping: Api, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], shown: str
) -> None:
    monkeypatch.setattr("api.rl.feedback.STORED_WITHIN_S", 0.0)
    refused = await keeping.post("/v1/feedback", {**asked, "reward": -1e9})
    assert refused.status_code == 404
    assert f"no answer {shown} waits" in refused.json()["error"]["message"]


async def test_who_does_not_want_it_is_not_kept(redis_url: str, redis: Redis, tmp_path: Path) -> None:
    file, said = key_file(
        tmp_path, alice={"tenant": "acme"}, bob={"tenant": "bobs"}, carl={"tenant": "acme", "feedback": "no"}
    )
    async with (
        working(redis_url, script),
        api(redis_url, feedback_ttl_days=1, api_key_file=file) as server,
    ):
        mine = (await server.post("/v1/completions", ASK, headers=said["alice"])).json()
        await server.post("/v1/completions", {**ASK, "collect_trajectory": False}, headers=said["alice"])
        await server.post("/v1/completions", ASK, headers=said["carl"])
        unstored = {"model": MODEL, "input": "say", "store": False}
        assert (await server.post("/v1/responses", unstored, headers=said["alice"])).status_code == 200
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


async def test_preferences_come_as_pairs_of_token_ids(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.ring.feedback.PAGE", 1)
    day_ms, now_ms = 86_400_000, int(1000 * time.time())
    async with (
        working(redis_url, lambda spec: Answer(f"said {spec.id[-1]}")),
        api(redis_url, feedback_ttl_days=1) as server,
        HttpApi(str(server.http.base_url)) as asking,
    ):
        with pytest.raises(
            SetupError, match=r"no preference between two answers of policy is stored at .*preferred_over"
        ):
            await preferences(asking, "policy", codec(), 1, now_ms)
        told = [(await server.post("/v1/completions", {**ASK, "n": 2})).json()["id"] for _ in range(3)]
        await kept(redis, redis_url, 6)
        for answer in told[:2]:
            pair = {"id": answer, "choice": 1, "preferred_over": answer, "preferred_over_choice": 0}
            assert (await server.post("/v1/feedback", pair)).status_code == 200
        await server.post("/v1/feedback", {"id": told[2], "rating": "up"})
        lines = [json.loads(line) for line in (await preferences(asking, "policy", codec(), 1, now_ms)).splitlines()]
        assert [line["chosen"].endswith("-1") and line["rejected"].endswith("-0") for line in lines] == [True, True]
        for line in lines:
            assert (line["policy"], line["prompt_ids"]) == ("policy", ids("say"))
            said = [codec().decode(line[key]) for key in ("chosen_ids", "rejected_ids")]
            assert said == ["said 1", "said 0"]
        with pytest.raises(SetupError, match=r"can be learned from \(2 too old\)"):
            await preferences(asking, "policy", codec(), 1, now_ms + 2 * day_ms)
        with pytest.raises(SetupError, match="no preference between two answers of other"):
            await preferences(asking, "other", codec(), 1, now_ms)
        answers = await judged_answers(asking, "policy")
    chosen = next(name for name, answer in answers.items() if answer.preferred_over)
    strange = {name: msgspec.structs.replace(answer, text="another text") for name, answer in answers.items()}
    assert pairs_of(strange, codec(), 0)[1:] == (0, 0, 2, 0, 0), "ids of another tokenizer"
    silent = answers | {chosen: msgspec.structs.replace(answers[chosen], completion_ids=(), text="")}
    assert (len(pairs_of(silent, codec(), 0).lines), pairs_of(silent, codec(), 0).empty) == (1, 1)
    halved = {name: answer for name, answer in answers.items() if name != answers[chosen].preferred_over}
    assert (len(pairs_of(halved, codec(), 0).lines), pairs_of(halved, codec(), 0).halved) == (1, 1)
