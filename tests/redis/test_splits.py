"""Splits of an adapter's requests: who goes where, what is counted, and how the verdict moves the latest version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of, new_key
from api.ring.caller import ApiKey, calling
from shared.adapters import AdapterManifest, GateCheck
from shared.errors import ConflictError
from shared.heads import HeadSpec
from shared.owners import Asker
from shared.redis import keys
from shared.redis.adapters.splits import Splits, SplitState, count_for_split
from shared.redis.adapters.store import AdapterStore
from shared.sequences import SequenceSpec
from shared.splits import Arm
from shared.trajectories import LiveTrajectory, Reward, Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.redis.test_feedback import kept, runner
from tests.waiting import wait_until

TWO = "policy@1:0.5,policy@2:0.5"
ASK: dict[str, Any] = {"model": "policy", "prompt": "say", "max_tokens": 8}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello", versions={0: spec.adapter} if spec.adapter else {})


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ring.split_choices.LOOK_AGAIN_S", 0.0)


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with working(redis_url, script) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
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


async def test_requests_for_the_name_alone_are_split_and_a_user_stays(server: Api, worker: ScriptedWorker) -> None:
    state = await begun(server, floor=0)
    assert (state["state"], [each["share"] for each in state["versions"]]) == ("running", [0.5, 0.5])
    answers = await answered(server, [{**ASK, "user": user} for user in "abcdefgh" * 2])
    taken = [version_of(answer) for answer in answers]
    assert taken[:8] == taken[8:] and set(taken) == {1, 2}
    assert all(spec.adapter_policy == "pin" and spec.collect and spec.collect.arm for spec in worker.specs)
    chat = {"model": MODEL, "adapter": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answers = await answered(server, [{**chat, "user": str(user)} for user in range(40)], "/v1/chat/completions")
    assert 8 <= Counter(map(version_of, answers))[1] <= 32
    worker.specs.clear()
    message = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    await answered(server, [{**message, "metadata": {"user_id": user}} for user in "abcdefgh"], "/v1/messages")
    assert Counter(spec.adapter for spec in worker.specs) == Counter(f"policy@{version}" for version in taken[:8])
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


async def test_feedback_is_counted_once_and_moves_the_shares(
    server: Api, worker: ScriptedWorker, redis: Redis, redis_url: str
) -> None:
    await begun(server)
    answers = await answered(server, [{**ASK, "user": str(user)} for user in range(24)])
    await kept(redis, redis_url, 24)
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
    assert state["rewards"] == 24
    assert [each["mean_reward"] for each in state["versions"]] == [1.0, 0.0]
    assert state["versions"][1]["share"] < 0.02


async def test_scored_live_traffic_is_counted_too(server: Api, redis: Redis, redis_url: str) -> None:
    await begun(server)
    scored = {**ASK, "collect_trajectory": True, "scoring_function": "exact", "metadata": {"reference": "hello"}}
    answers = await answered(server, [*[{**scored, "user": str(user)} for user in range(8)], {**ASK, **scored, "n": 2}])
    await kept(redis, redis_url, 10)
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
    assert await adapters.latest("policy") == better
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
    assert "3" in told["over"] and [each["share"] for each in told["versions"]] == [0, 0]


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


async def test_a_split_ends_when_it_is_deleted(server: Api, worker: ScriptedWorker) -> None:
    await begun(server, "policy@1:0.00001,policy@2:1", auto=False)
    assert (await server.http.delete("/v1/adapters/policy/split")).json()["deleted"]
    await server.post("/v1/completions", ASK)
    assert worker.specs[-1].adapter == "policy@1"
    for call in (server.http.get, server.http.delete):
        assert (await call("/v1/adapters/policy/split")).status_code == 404


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
    secrets = {name: new_key() for name in ("alice", "bob", "root")}
    file = tmp_path / "keys"
    file.write_text(
        f"{line_of(secrets['alice'], name='alice', tenant='acme')}\n"
        f"{line_of(secrets['bob'], name='bob', tenant='bobs')}\n"
        f"{line_of(secrets['root'], name='root', role='admin')}\n"
    )
    said = {name: {"authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
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
