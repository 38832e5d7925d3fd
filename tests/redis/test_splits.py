"""Splits of an adapter's requests: who goes where, who may set them, and what is refused."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.adapters import AdapterManifest, GateCheck
from shared.heads import HeadSpec
from shared.redis import keys
from shared.redis.adapters.splits import SplitState
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api, key_file
from tests.redis.scripted_worker import MODEL, ScriptedWorker, working
from tests.redis.splits import ASK, TWO, answered, begun, earn, hello, splitting, version_of
from tests.waiting import wait_until

script = hello


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 0.0)


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with splitting(redis_url) as serving:
        yield serving


async def test_requests_for_the_name_alone_are_split_and_a_user_stays(server: Api, worker: ScriptedWorker) -> None:
    state = await begun(server, floor=0)
    assert (state["state"], [each["share"] for each in state["versions"]]) == ("running", [0.5, 0.5])
    answers = await answered(server, [{**ASK, "user": user} for user in ascii_lowercase * 2])
    taken = [version_of(answer) for answer in answers]
    assert taken[:26] == taken[26:] and set(taken) == {1, 2}
    assert all(spec.adapter_policy == "pin" and spec.collect and spec.collect.arm for spec in worker.specs)
    chat = {"model": MODEL, "adapter": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answers = await answered(server, [{**chat, "user": str(user)} for user in range(40)], "/v1/chat/completions")
    assert 8 <= Counter(map(version_of, answers))[1] <= 32
    worker.specs.clear()
    message = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    await answered(server, [{**message, "metadata": {"user_id": user}} for user in ascii_lowercase], "/v1/messages")
    assert Counter(spec.adapter for spec in worker.specs) == Counter(f"policy@{version}" for version in taken[:26])
    page = (await server.http.get("/dashboard/adapters/policy")).text
    assert "0 of 400 rewards" in page
    metrics = (await server.http.get("/metrics")).text
    assert 'mlx_parallm_split_share{adapter="policy",version="2"} 0.5' in metrics


async def test_requests_are_counted_when_they_are_sent(server: Api) -> None:
    await begun(server, floor=0)
    answers = await answered(server, [{**ASK, "user": user} for user in "abcdefgh"])
    refused = await asyncio.gather(*(server.post("/v1/completions", {**ASK, "n": -1, "user": user}) for user in "abcd"))
    refused += [await server.post("/v1/completions", {**ASK, "prompt": [10**9]})]
    assert {answer.status_code for answer in refused} == {400}
    later = [{"model": "policy", "input": "say", "background": True, "user": user} for user in "abcd"]
    assert {(await server.post("/v1/responses", body)).status_code for body in later} == {200}
    name = "mlx_parallm_split_requests_total"
    counted = {field: count for field, count in server.ring.tally.fields().items() if field.startswith(name)}
    taken = Counter(map(version_of, answers)) + Counter(map(version_of, answers[:4]))
    assert counted == {f"{name}|latest": taken[1], f"{name}|candidate": taken[2]}


async def test_what_names_a_version_or_compares_vectors_is_not_split(server: Api, worker: ScriptedWorker) -> None:
    await begun(server, "policy@1:0.00001,policy@2:1", auto=False)
    for fields in ({"model": "policy@1"}, {"adapter_policy": "follow"}):
        await server.post("/v1/completions", {**ASK, **fields})
    await server.post("/generate", {"adapter": "policy", "prompt": "say"})
    await server.post("/v1/embeddings", {"model": "policy", "input": "say"})
    assert [spec.adapter for spec in worker.specs] == ["policy@1", "policy", "policy@1", "policy@1"]
    assert all(spec.collect is None or spec.collect.arm is None for spec in worker.specs)
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@2"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def test_no_request_goes_by_an_old_look_and_those_at_once_share_a_new_one(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, choices, looks = Clock(), server.ring.splits, 0
    find = choices.stored.find

    async def counted(name: str) -> SplitState | None:
        nonlocal looks
        looks += 1
        return await find(name)

    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 1.0)
    monkeypatch.setattr("api.ring.split_choices.time", clock)
    await begun(server)
    monkeypatch.setattr(choices.stored, "find", counted)
    assert all(await asyncio.gather(*(choices.choose("policy", str(user)) for user in range(10)))) and looks == 1
    await redis.unlink(keys.split("policy"))  # by another api process
    clock.now += 100
    assert set(await asyncio.gather(*(choices.choose("policy", str(user)) for user in range(10)))) == {None}
    assert looks == 2
    clock.now += 1.5
    await begun(server)
    choices.forget("policy")
    assert await choices.choose("policy", "a") is not None
    await redis.unlink(keys.split("policy"))
    clock.now += 1.5
    assert await choices.choose("policy", "a") is not None, "a little old, and looked at anew meanwhile"

    async def seen_anew() -> bool:
        return await choices.choose("policy", "a") is None

    await wait_until(seen_anew)


async def test_the_floor_is_drawn_for_each_request_of_few_users(
    server: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 60.0)
    state = await begun(server, floor=0.1)
    await earn(redis, state, 1, [1.0, 0.9] * 10)
    await earn(redis, state, 2, [0.1, 0.0] * 10)
    server.ring.splits.forget("policy")
    chosen = [await server.ring.splits.choose("policy", "the only user") for _ in range(1000)]
    taken = Counter(choice.arm.version for choice in chosen if choice is not None)
    assert 40 < taken[2] < 180 and taken[1] + taken[2] == 1000


@pytest.mark.parametrize("change", ["delete", "reject", "elsewhere"])
async def test_nobody_is_sent_to_a_version_that_has_just_gone(
    server: Api, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 60.0)
    await begun(server, "policy@1:0.00001,policy@2:1", auto=False)
    chosen = await server.ring.splits.choose("policy", "x")
    assert chosen is not None and chosen.arm.version == 2
    if change == "delete":
        assert (await server.http.delete("/v1/adapters/policy/versions/2")).status_code == 200
    elif change == "reject":
        gate = {"version": 2, "gate": [{"name": "by_hand", "passed": False}]}
        assert (await server.http.post("/v1/adapters/policy/reject", json=gate)).status_code == 200
    else:
        await server.ring.adapters.delete("policy", 2)
    if change != "elsewhere":
        assert await server.ring.splits.choose("policy", "x") is None
    answer = await server.post("/v1/completions", ASK)
    assert answer.status_code == 200 and worker.specs[-1].adapter == "policy@1"


async def test_a_rollback_holds_from_the_next_request_on(
    server: Api, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 60.0)
    await server.ring.adapters.promote("policy", 2)
    await begun(server, "policy@1:0.00001,policy@2:1", auto=False)
    assert await server.ring.splits.choose("policy", "x") is not None
    assert (await server.http.post("/v1/adapters/policy/rollback", json={})).status_code == 200
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@1"
    assert (await server.http.post("/v1/adapters/policy/promote", json={"version": 2})).status_code == 200
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@2"


async def test_a_split_that_cannot_be_read_does_not_end_the_scrape(server: Api, redis: Redis) -> None:
    await begun(server)
    await publish(server.ring.adapters, "other")
    await redis.hset(keys.split("other"), mapping={"terms": "{}", "id": "x", "started_ms": "0"})
    await redis.expire(keys.split("other"), 60)
    metrics = await server.http.get("/metrics")
    assert metrics.status_code == 200
    assert 'mlx_parallm_split_share{adapter="policy",version="2"} 0.5' in metrics.text


async def test_what_is_remembered_of_a_split_does_not_grow_with_its_versions_manifests(
    server: Api, redis: Redis
) -> None:
    await begun(server)
    key = keys.adapter_manifest("policy", 2)
    manifest = msgspec.json.decode(await redis.get(key), type=AdapterManifest)
    heads = {f"h{at}": HeadSpec("labels", tuple(map(str, range(1024))), inputs=8) for at in range(16)}
    await redis.set(key, msgspec.json.encode(msgspec.structs.replace(manifest, heads=heads)), keepttl=True)
    state = await server.ring.splits.read("policy")
    assert state is not None and not state.over
    assert len(msgspec.json.encode(state)) < 2_000


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "split"),
        ({"split": "policy@1"}, 400, "split"),
        ({"split": "policy@1,policy@2"}, 400, "split"),
        ({"split": "policy@1:auto,policy@2:auto"}, 400, "split"),
        ({"split": "policy@1:1,other@2:1"}, 400, "split"),
        ({"split": "policy:1,policy@2:1"}, 400, "split"),
        ({"split": "policy@2:1,policy@3:1"}, 400, "split"),
        ({"split": "policy@1:1,policy@9:1"}, 404, None),
        ({"split": "policy@1:5e-324,policy@2:1000000"}, 400, "split"),
        ({"split": "policy@1:1,policy@2:1000001"}, 400, "split"),
        ({"split": "policy@1:0.000001,policy@2:2"}, 400, "split"),
        ({"split": TWO, "floor": 0.5}, 400, "floor"),
        ({"split": TWO, "floor": -1}, 400, "floor"),
        ({"split": TWO, "verdict_after": 3}, 400, "verdict_after"),
        ({"split": TWO, "verdict_after": 19}, 400, "verdict_after"),
        ({"split": TWO, "confidence": 1}, 400, "confidence"),
        ({"split": TWO, "shares": "auto"}, 400, "shares"),
        ({"split": ",".join(f"policy@{k}:1" for k in range(1, 10))}, 400, "split"),
    ],
)
async def test_a_wrong_split_is_refused_by_name(
    server: Api, body: dict[str, Any], status: int, param: str | None
) -> None:
    refused = await server.http.put("/v1/adapters/policy/split", json=body)
    assert refused.status_code == status, refused.text
    assert param is None or refused.json()["error"]["param"] == param
    assert (await server.http.get("/v1/adapters/policy/split")).status_code == 404


@pytest.mark.parametrize("model", ["policy@1:auto,policy@2:auto", "policy:auto"])
async def test_a_request_that_asks_for_moving_shares_is_told_where_they_are_set(server: Api, model: str) -> None:
    refused = await server.post("/v1/completions", {**ASK, "model": model})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "/split" in refused.json()["error"]["message"]


async def test_a_rejected_version_is_not_split_over(server: Api) -> None:
    await server.ring.adapters.reject("policy", 2, [GateCheck("held_out", False)])
    refused = await server.http.put("/v1/adapters/policy/split", json={"split": TWO})
    assert refused.status_code == 409


async def test_a_split_is_about_its_owners_requests_alone(redis_url: str, redis: Redis, tmp_path: Path) -> None:
    file, said = key_file(tmp_path, alice={"tenant": "acme"}, bob={"tenant": "bobs"}, root={"role": "admin"})
    async with working(redis_url, script) as worker, api(redis_url, feedback_ttl_days=1, api_key_file=file) as server:
        await publish(server.ring.adapters)  # for all
        await publish(server.ring.adapters, seed=1, set_latest=False)
        one_sided = {"split": "policy@1:0.00001,policy@2:1", "auto": False}

        async def asked(who: str, method: str, **request: Any) -> int:
            path = "/v1/adapters/policy/split"
            return (await server.http.request(method, path, headers=said[who], **request)).status_code

        assert await asked("bob", "PUT", json=one_sided) == 403
        assert await asked("root", "PUT", json=one_sided) == 200
        assert [await asked(who, "GET") for who in ("alice", "bob", "root")] == [403, 403, 200]
        assert await asked("alice", "DELETE") == 403
        for who in ("alice", "bob", "root"):
            await server.post("/v1/completions", ASK, headers=said[who])
        assert [spec.adapter for spec in worker.specs] == ["policy@1", "policy@1", "policy@2"]
        assert [bool(spec.collect and spec.collect.arm) for spec in worker.specs] == [False, False, True]
