"""Conversations of live traffic as episodes: joined as runners collect them, read by their tenant, deleted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.kept.episode_store import episodes_of
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import SequenceSpec
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api, key_file
from tests.redis.dashboard_pages import Checked
from tests.redis.scripted_worker import CARD, MODEL, Answer, working
from tests.redis.test_feedback import kept, runner
from tests.unit.api_texts import codec, ids
from tests.waiting import wait_until
from worker.jobs.judging import Judging


def script(spec: SequenceSpec) -> Answer:
    return Answer(f"reply {codec().decode(spec.prompt_ids).count('user:')}")


@pytest.fixture
async def keeping(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    async with working(redis_url, script), api(redis_url, feedback_ttl_days=1) as server:
        yield server


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, **more}


async def session(server: Api, id: str, **params: Any) -> dict[str, Any]:
    found = await server.http.get(f"/v1/sessions/{id}", params=params)
    assert found.status_code == 200, found.text
    body: dict[str, Any] = found.json()
    return body


async def test_requests_of_one_conversation_become_an_episode(keeping: Api, redis: Redis, redis_url: str) -> None:
    first = (await keeping.post("/v1/chat/completions", chat("a"))).json()["id"]
    second = (await keeping.post("/v1/chat/completions", chat("a", "reply 1", "b"))).json()["id"]
    await kept(redis, redis_url, 2)
    (listed,) = (await keeping.http.get("/v1/sessions")).json()["data"]
    assert (listed["turns"], listed["title"], listed["policy"]) == (2, "a", "policy")
    one = await session(keeping, listed["id"], tokens=True)
    (a, b), names = one["turns"], [each.removeprefix("chatcmpl-") + "-0" for each in (first, second)]
    assert [each["name"] for each in (a, b)] == names
    assert (a["follows"], b["follows"], b["messages"]) == (None, names[0], [{"role": "user", "content": "b"}])
    assert (b["text"], len(b["logprobs"])) == ("reply 2", len(b["completion_ids"]))
    assert (
        b["prompt_ids"] == ids(codec().decode(b["prompt_ids"]))
        and "completion_ids" not in (await session(keeping, listed["id"]))["turns"][0]
    )
    page = await session(keeping, listed["id"], limit=1)
    assert page["has_more"] and (await session(keeping, listed["id"], after=names[0]))["turns"] == [
        {key: value for key, value in b.items() if key not in ("prompt_ids", "completion_ids", "logprobs", "spans")}
    ]

    deleted = await keeping.http.delete(f"/v1/sessions/{listed['id']}")
    assert deleted.json()["turns"] == 2
    assert (await keeping.http.get("/v1/sessions")).json()["data"] == []
    assert (await keeping.http.get("/v1/feedback")).json()["data"] == [], "its answers are gone, too"
    gone = await keeping.http.get(f"/v1/sessions/{listed['id']}")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "session_id")


async def test_clients_of_all_protocols_name_their_sessions(keeping: Api, redis: Redis, redis_url: str) -> None:
    uuid = "0b0e7a52-33aa-4c1e-9a56-1f5b7a3d9c11"
    await keeping.post("/v1/chat/completions", chat("a"), headers={"X-Session-Id": "s1"})
    message = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": "b"}]}
    await keeping.post("/v1/messages", {**message, "metadata": {"user_id": f"user_1_session_{uuid}"}})
    await keeping.post("/v1/responses", {"model": MODEL, "input": "c", "prompt_cache_key": uuid})
    for prompt in ("raw", "raw" + "reply 0" + " on"):
        await keeping.post("/v1/completions", {"model": MODEL, "prompt": prompt}, headers={"session_id": "s2"})
        await kept(redis, redis_url, 1 if prompt != "raw" else 4)
    await keeping.post("/v1/completions", {"model": MODEL, "prompt": "alone"})
    await kept(redis, redis_url, 1)
    found = {each["id"]: each["turns"] for each in (await keeping.http.get("/v1/sessions")).json()["data"]}
    assert found == {"s1": 1, uuid: 2, "s2": 2}
    raw = (await session(keeping, "s2"))["turns"]
    assert raw[1]["follows"] == raw[0]["name"]


async def test_a_tenant_sees_its_own_sessions_and_a_key_without_consent_leaves_none(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    file, said = key_file(
        tmp_path, alice={"tenant": "acme"}, bob={"tenant": "bobs"}, carl={"tenant": "acme", "feedback": "no"}
    )
    async with working(redis_url, script), api(redis_url, feedback_ttl_days=1, api_key_file=file) as server:
        for who in ("alice", "bob", "carl"):
            await server.post("/v1/chat/completions", chat(who), headers={**said[who], "x-session-id": "same"})
        await kept(redis, redis_url, 2)
        texts = {}
        for who in ("alice", "bob", "carl"):
            (turn,) = (await server.http.get("/v1/sessions/same", headers=said[who])).json()["turns"]
            texts[who] = turn["messages"][0]["content"]
        assert texts == {"alice": "alice", "bob": "bob", "carl": "alice"}, "carl is of alice's tenant"
        foreign = await server.http.delete("/v1/sessions/same", headers=said["bob"])
        assert foreign.status_code == 200
        assert len((await server.http.get("/v1/sessions", headers=said["alice"])).json()["data"]) == 1


async def test_a_session_is_shown_turn_by_turn(keeping: Api, redis: Redis, redis_url: str) -> None:
    hostile = "<script>alert(1)</script>"
    for body in (chat(hostile), chat(hostile, "reply 1", "b"), chat(hostile)):
        await keeping.post("/v1/chat/completions", body, headers={"x-session-id": "s"})
    await kept(redis, redis_url, 3)
    pages = [(await keeping.http.get(f"/dashboard/sessions{path}")).text for path in ("", "/s")]
    assert all(Checked(page).inline == [] and "<script>alert" not in page for page in pages)
    assert "/dashboard/sessions/s?tenant=" in pages[0] and pages[1].count("begins a branch") == 2
    assert "the same request again" in pages[1] and 'follows <a href="#turn-1">' in pages[1]
    (turn, *_) = (await session(keeping, "s"))["turns"]
    shown = await keeping.http.get(f"/dashboard/turns/{turn['name']}")
    assert shown.status_code == 200 and 'class="q' in shown.text
    assert (await keeping.http.get("/dashboard/sessions/unknown")).status_code == 404


async def test_sessions_are_bounded_with_the_answers(keeping: Api, redis: Redis, redis_url: str) -> None:
    for number in range(3):
        await keeping.post("/v1/chat/completions", chat("a"), headers={"x-session-id": f"s{number}"})
        if number == 2:
            await redis.hset(keys.kept_sizes(episodes_of("")), mapping={"all": 256 << 20})  # as if it were so large
        await kept(redis, redis_url, 1)
    assert [each["id"] for each in (await keeping.http.get("/v1/sessions")).json()["data"]] == ["s2", "s1"]
    assert await redis.zcard(keys.kept_order(episodes_of(""), "sessions")) == 2
    refused = await keeping.http.get("/v1/sessions", params={"limit": 0})
    assert refused.status_code == 400


async def collected(redis_url: str, count: int, judge: str = MODEL, after_s: float = 1e6) -> None:
    """Until a runner with a judge has taken so many more answers, and has judged what is due."""
    async with runner(redis_url) as (collecting, verdicts):
        judging = collecting.judging = Judging(collecting.context, judge, after_s)
        taken = 0

        async def all_taken() -> bool:
            nonlocal taken
            taken += await collecting.collect(MODEL)
            return taken >= count

        try:
            await wait_until(all_taken)
            while await judging.judge():
                pass
            while await verdicts.deliver():
                pass
        finally:
            await collecting.context.served.close()


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose context holds the rubric, and a calibration that is read anew for each look."""
    monkeypatch.setattr("shared.redis.kept.episode_store.CALIBRATED_FOR_S", 0.0)
    monkeypatch.setattr(scripted_worker, "CARD", msgspec.structs.replace(CARD, context_length=4096))


@pytest.mark.usefixtures("judged")
async def test_the_next_message_is_judged_through_the_queue(redis_url: str, redis: Redis) -> None:
    async with working(redis_url, script) as worker, api(redis_url, feedback_ttl_days=1) as server:
        named = {"headers": {"x-session-id": "s"}}
        await server.post("/v1/chat/completions", chat("a"), **named)
        await server.post("/v1/chat/completions", chat("a", "reply 1", "no, b"), **named)
        await collected(redis_url, 2)
        asked = [spec for spec in worker.specs if spec.kind == "score"]
        assert {(spec.sequence_class, spec.adapter) for spec in asked} == {("batch", "")} and len(asked) == 4
        shown = codec().decode(asked[0].prompt_ids)
        assert "The assistant replied:\nreply 1" in shown and "Then the user wrote:\nno, b" in shown
        one = await session(server, "s")
        (signal,) = one["turns"][0]["signals"]
        assert signal["labels"] == {"accept": 0.25, "correction": 0.25, "retry": 0.25, "other": 0.25}
        assert (signal["judge"], signal["text"], one["turns"][1]["signals"]) == (MODEL, "no, b", [])
        assert one["calibration"]["accept"] == {"content": 0.9, "verdicts": 0}

        await server.post("/v1/chat/completions", chat("a", "reply 1", "no, b"), **named)  # again
        name = one["turns"][0]["name"]
        said = await server.post("/v1/feedback", {"id": name.removesuffix("-0"), "rating": "up"})
        assert said.json()["status"] == "counted"
        await collected(redis_url, 1, after_s=0.0)
        one = await session(server, "s")
        assert one["calibration"]["accept"]["verdicts"] == 0.25
        assert one["turns"][0]["reward"] == {"value": 1.0, "confidence": 1.0}, "a person's verdict stands"
        (retried,) = one["turns"][1]["signals"]
        assert retried["labels"] == {"retry": 1.0} and one["turns"][2]["signals"][0]["labels"] == {"left": 1.0}
        lives = [each.live for each in await TrajectoryQueue(redis, "policy").peek()]
        rewards = {live.id[-34:]: live.trajectory.reward for live in lives}
        assert {reward.name for reward in rewards.values() if reward} == {"feedback", "session"}
        implied = next(reward for reward in rewards.values() if reward and reward.name == "session")
        assert (implied.value, implied.components) == (0.2, {"confidence": 0.2781}), "calibrated by the verdict"
        late = await server.post("/v1/feedback", {"id": one["turns"][1]["name"].removesuffix("-0"), "rating": "up"})
        assert late.json()["status"] == "late"
        page = (await server.http.get("/dashboard/sessions/s")).text
        assert "next message: retry 1" in page and "reward 1, confidence 1" in page
        await server.post("/v1/chat/completions", chat("a", "reply 1", "no, b", "reply 2", "c"), **named)
        await collected(redis_url, 1)
        (later,) = (await session(server, "s"))["turns"][2]["signals"]
        assert later["text"] == "c", "the user had not left after all"


async def test_an_agent_reports_tests_and_a_user_an_edit(keeping: Api, redis: Redis, redis_url: str) -> None:
    named = {"headers": {"x-session-id": "s"}}
    await keeping.post("/v1/chat/completions", chat("a"), **named)
    await keeping.post("/v1/chat/completions", chat("a", "reply 1", "b"), **named)
    await kept(redis, redis_url, 2)
    for told in ({"tests": {"passed": 3, "failed": 1}}, {"exit_code": 1}, {"edited": "reply 2"}):
        said = await keeping.post("/v1/feedback", {"session": "s", **told})
        assert (said.status_code, said.json()["status"]) == (200, "signal"), said.text
    first, last = (await session(keeping, "s"))["turns"]
    assert {each["kind"]: each["value"] for each in last["signals"]} == {"edit": 1.0, "exit_code": 0.0, "tests": 0.75}
    assert first["reward"]["confidence"] < last["reward"]["confidence"] and first["signals"] == []
    up = await keeping.post("/v1/feedback", {"session": "s", "rating": "up"})
    assert (up.json()["status"], up.json()["name"]) == ("counted", last["name"])
    for wrong, param in (
        ({"session": "s", "tests": {"passed": 0, "failed": 0}}, "tests.passed"),
        ({"session": "s", "exit_code": 0, "rating": "up"}, "exit_code"),
        ({"rating": "up"}, "id"),
    ):
        refused = await keeping.post("/v1/feedback", wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert (await keeping.post("/v1/feedback", {"session": "t", "exit_code": 0})).status_code == 404


@pytest.mark.usefixtures("judged")
async def test_nobody_judges_what_follows_answers_to_a_key_that_does_not_say_so(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    carols = {"tenant": "carols", "learn": "user"}  # of whose users one agrees
    file, said = key_file(tmp_path, alice={"tenant": "acme"}, bob={"tenant": "bobs", "learn": "yes"}, carol=carols)
    async with working(redis_url, script), api(redis_url, feedback_ttl_days=1, api_key_file=file) as server:
        for who in said:
            for body in (chat("a"), chat("a", "reply 1", "b")):
                headers = {**said[who], "x-session-id": "s"}
                await server.post("/v1/chat/completions", body, headers={**headers, "x-parallm-learn": "no"})
                if who == "carol":
                    await server.post("/v1/chat/completions", body, headers=headers)
                    headers["x-parallm-learn"] = "yes"
                await server.post("/v1/chat/completions", body, headers=headers)
        refused = await server.post("/v1/chat/completions", chat("a"), headers={**said["bob"], "x-parallm-learn": "ja"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-parallm-learn")
        await collected(redis_url, 6)
        for who, signals in (("alice", 0), ("bob", 1), ("carol", 1)):
            turns = (await server.http.get("/v1/sessions/s", headers=said[who])).json()["turns"]
            assert (len(turns), len(turns[0]["signals"])) == (2, signals)
