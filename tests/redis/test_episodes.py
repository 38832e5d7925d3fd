"""Conversations of live traffic as episodes: joined as runners collect them, read by their tenant, deleted."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.kept.episode_store import episodes_of
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api, key_file
from tests.redis.dashboard_pages import Checked
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.redis.test_feedback import kept
from tests.unit.api_texts import codec, ids


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
