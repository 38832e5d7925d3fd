"""One api in front of two rings: each request goes to the ring of its model, and one that dies takes nothing along."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of
from api.ring.choosing import HEADER
from api.serve.embedded_redis import EmbeddedRedis, free_port
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import SequenceSpec
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker, working
from tests.redis.test_feedback import runner
from tests.waiting import HANG_S, wait_until

EAST = "eastern"
EAST_CARD = msgspec.structs.replace(CARD, name=EAST, base_sha256="east-base")
KEYS = {name: f"the-key-of-{name}-is-long" for name in ("alice", "bob", "root")}
LINES = [
    line_of(KEYS["alice"], name="alice", tenant="acme"),
    line_of(KEYS["bob"], name="bob", tenant="bobs"),
    line_of(KEYS["root"], name="root", role="admin"),
]


def script(spec: SequenceSpec) -> Answer:
    return Answer(f"this is {spec.model}", hold_at=3 if spec.sampling.max_tokens == 99 else None)


SILENCE_S = 6.0  # for which a ring may be silent: thrice what users' may, since all share this test's event loop


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ring", "choosing"):
        monkeypatch.setattr(f"api.ring.{module}.ANSWER_S", SILENCE_S)
    monkeypatch.setattr("api.ring.ring.GIVEN_UP_S", HANG_S)  # of streams, while a ring is restarted


@pytest.fixture(scope="module")
def east_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("east"), port=free_port()) as server:
        yield server


@pytest.fixture
async def east(east_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """The other ring's Redis, without keys."""
    client = connect(east_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def easterner(east: Redis, east_server: EmbeddedRedis) -> AsyncIterator[ScriptedWorker]:
    async with working(east_server.url, script, EAST_CARD) as playing:
        yield playing


@pytest.fixture
async def front(
    redis_url: str, worker: ScriptedWorker, easterner: ScriptedWorker, east_server: EmbeddedRedis
) -> AsyncIterator[Api]:
    async with api(redis_url, ring=[f"east={east_server.url}"]) as serving:
        yield serving


async def text_of(front: Api, model: str | None, **more: Any) -> str:
    answer = await front.post("/v1/completions", {"model": model, "prompt": "a", **more})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def ids(front: Api, path: str, **arguments: Any) -> list[str]:
    return [each["id"] for each in (await front.http.get(path, **arguments)).json()["data"]]


async def test_a_request_goes_to_the_ring_of_its_model(
    front: Api, worker: ScriptedWorker, easterner: ScriptedWorker
) -> None:
    assert sorted(await ids(front, "/v1/models")) == [EAST, MODEL]
    for model in (MODEL, EAST):
        assert await text_of(front, model) == f"this is {model}"
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
            "/v1/responses": {"input": "hi"},
            "/inference/v1/generate": {"token_ids": [5]},
            "/generate": {"prompt": "a"},
            "/tokenize": {"prompt": "a"},
        }.items():
            answer = await front.post(path, {"model": model, **body})
            assert answer.status_code == 200, (path, answer.text)
        async with front.stream("/v1/completions", {"model": model, "prompt": "a"}) as events:
            chunks = await events.all()
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"this is {model}" and events.done
        named = {"model": model, "prompt": "a", "stream_options": {"include_event_ids": True}}
        async with front.stream("/v1/completions", named) as events:
            first = await events.next()
            assert first is not None
        async with front.resume(first["id"], events.last_event_id) as rest:
            chunks = [first, *await rest.all()]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"this is {model}"
    assert {spec.model for spec in worker.specs} == {MODEL}
    assert {spec.model for spec in easterner.specs} == {EAST}
    assert len(worker.specs) == len(easterner.specs)
    nobody = await front.post("/v1/completions", {"model": "nobodys", "prompt": "a"})
    assert (nobody.status_code, f"east/{EAST}, {MODEL}" in nobody.text) == (404, True)
    unnamed = await front.post("/v1/completions", {"prompt": "a"})
    assert unnamed.status_code == 400 and f"east/{EAST}, {MODEL}" in unnamed.text


async def test_names_that_several_rings_have_are_home_s_unless_the_ring_is_named(
    redis_url: str, worker: ScriptedWorker, east: Redis, east_server: EmbeddedRedis
) -> None:
    def eastern(spec: SequenceSpec) -> Answer:
        return Answer(f"east, {spec.adapter}")

    async with (
        working(east_server.url, eastern, msgspec.structs.replace(CARD, base_sha256="other")) as easterner,
        api(redis_url, ring=[f"east={east_server.url}"], model_alias=["gpt-*=theirs"]) as front,
    ):
        store = AdapterStore(east)
        for name in ("policy", "theirs"):
            await publish(store, name, base="other")
        await publish(store, "policy", seed=1, base="other")
        await publish(front.ring.adapters, "policy")
        models = await ids(front, "/v1/models")
        assert models == [MODEL, "policy", f"east/{MODEL}", "east/policy", "theirs"]
        for model in models:
            shown = (await front.http.get(f"/v1/models/{model}")).json()
            assert shown["root"] == {MODEL: MODEL, "policy": "policy@1", "theirs": "theirs@1"}.get(
                model, MODEL if model.endswith(MODEL) else "policy@2"
            )
        assert await text_of(front, MODEL) == f"this is {MODEL}"
        assert await text_of(front, f"east/{MODEL}") == "east, "
        assert await text_of(front, "policy") == f"this is {MODEL}"
        assert await text_of(front, "policy@2") == "east, policy@2", "only one ring has this version"
        assert await text_of(front, "east/policy@1") == "east, policy@1"
        assert await text_of(front, "gpt-9") == "east, theirs@1", "an alias stands for it"
        said = await front.post("/v1/completions", {"prompt": "a"}, headers={HEADER: "east"})
        assert said.json()["choices"][0]["text"] == "east, ", "the header names the ring of the whole request"
        wrong = await front.http.get("/v1/jobs", headers={HEADER: "west"})
        assert wrong.status_code == 400 and "home, east" in wrong.text
        assert len(easterner.specs) == 5


async def test_a_model_that_two_rings_serve_is_shared_by_load_and_a_conversation_stays(
    redis: Redis, redis_url: str, worker: ScriptedWorker, east: Redis, east_server: EmbeddedRedis
) -> None:
    def here(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": "say where"}, {"role": "user", "content": text}]

    async def ask(messages: list[dict[str, str]], path: str = "/v1/chat/completions", **more: Any) -> None:
        answer = await front.post(path, {"model": MODEL, "messages": messages, "max_tokens": 50, **more})
        assert answer.status_code == 200, answer.text

    async def served_by(messages: list[dict[str, str]]) -> str:
        before = len(easterner.specs)
        await ask(messages)
        return "east" if len(easterner.specs) > before else "home"

    async def tell(ring: Redis, claimed: int) -> None:
        """What the ring's worker says it has claimed, and until the front has heard it."""
        status = WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 8, claimed, 0, 1, 0.0, 0, 1, 2**40)
        await WorkerRegistry(ring).heartbeat(status)
        seen = front.ring.others[0] if ring is east else front.ring

        async def heard() -> bool:
            await seen.live_models()
            return [each.waiting for each in seen.serving(MODEL)] == [claimed]

        await wait_until(heard)

    async with (
        working(east_server.url, script, CARD) as easterner,
        api(redis_url, ring=[f"east={east_server.url}"]) as front,
    ):
        await wait_until(lambda: len(front.ring.equals(CARD)) == 2)
        conversations = [here(f"hello {i}") for i in range(24)]
        places = [await served_by(each) for each in conversations]
        assert set(places) == {"home", "east"}
        later = [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and?"}]
        assert [await served_by([*each, *later]) for each in conversations] == places
        away = conversations[places.index("east")]
        asked = len(easterner.specs)
        await ask([away[1]], "/v1/messages", system="another")
        first = (await front.post("/v1/responses", {"model": MODEL, "input": away[1]["content"]})).json()["id"]
        follow = {"model": MODEL, "input": "and?", "previous_response_id": first}
        assert (await front.post("/v1/responses", follow)).status_code == 200
        assert len(easterner.specs) == asked + 3, "in any protocol, and where only the last turn is sent"
        job = (await front.post("/v1/jobs", {"kind": "generate", "model": MODEL, "prompts": ["a"]})).json()["id"]
        assert await ids(front, "/v1/jobs", headers={HEADER: "home"}) == [job], "jobs are for the first ring"
        await tell(redis, 400)
        assert {await served_by(each) for each in conversations[:8]} == {"east"}, "it would wait at home"
        assert await text_of(front, f"home/{MODEL}") == f"this is {MODEL}" and len(worker.specs) > 0
        await tell(redis, 0)
        east_server.stop()
        try:
            await wait_until(lambda: bool(front.ring.others[0].away))
            for each in conversations[:8]:
                assert await served_by(each) == "home", "a ring that is away is left out"
        finally:
            east_server.start()


async def test_jobs_are_found_by_their_ids(front: Api) -> None:
    jobs = []
    for model in (MODEL, EAST, MODEL):
        answer = await front.post("/v1/jobs", {"kind": "generate", "model": model, "prompts": ["a"]})
        assert answer.status_code == 202, answer.text
        jobs.append(answer.json()["id"])
    assert await ids(front, "/v1/jobs") == jobs[::-1]
    assert await ids(front, "/v1/jobs", params={"limit": 1, "before": jobs[2]}) == [jobs[1]]
    assert await ids(front, "/v1/jobs", params={"before": jobs[1]}) == [jobs[0]]
    assert await ids(front, "/v1/jobs", headers={HEADER: "east"}) == [jobs[1]]
    assert (await front.http.get("/v1/jobs", params={"before": "job-1"})).status_code == 404
    for job in jobs:
        assert (await front.http.get(f"/v1/jobs/{job}")).json()["status"] == "queued"
        assert (await front.post(f"/v1/jobs/{job}/cancel", {})).json()["status"] == "cancelled"
        assert (await front.http.delete(f"/v1/jobs/{job}")).status_code == 200
    assert await ids(front, "/v1/jobs") == []


async def test_adapters_of_another_ring_are_found_by_their_names(front: Api, east: Redis) -> None:
    await publish(AdapterStore(east), "theirs", base=EAST_CARD.base_sha256)
    assert await text_of(front, "theirs") == f"this is {EAST}"
    shown = (await front.http.get("/v1/adapters")).json()["data"]
    assert [(each["name"], each.get("ring")) for each in shown] == [("theirs", "east")]
    assert (await front.http.get("/v1/adapters/theirs")).json()["latest"] == 1
    assert (await front.http.get("/v1/training/status", params={"policy": "theirs"})).json()[
        "current_lora"
    ] == "theirs@1"
    assert (await front.http.delete("/v1/adapters/theirs")).status_code == 200
    assert await AdapterStore(east).names() == []


async def test_responses_and_batches_are_kept_at_home_and_computed_elsewhere(
    redis_url: str, worker: ScriptedWorker, front: Api, redis: Redis
) -> None:
    async with api(redis_url) as beside:  # another process at home, which does not know the other ring
        assert await ids(beside, "/v1/models") == [MODEL]
        await _respond_and_batch(front, beside, redis)


async def _respond_and_batch(front: Api, beside: Api, redis: Redis) -> None:
    begun = await front.post("/v1/responses", {"model": EAST, "input": "hi", "background": True})
    response = begun.json()["id"]

    async def ended() -> bool:
        return bool((await front.http.get(f"/v1/responses/{response}")).json()["status"] == "completed")

    await wait_until(ended)
    follows = {"model": MODEL, "input": "and", "previous_response_id": response}
    assert (await front.post("/v1/responses", follows)).status_code == 200, "said in one ring, followed in the other"
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": {"model": EAST, "prompt": "hi"}}
        for at in range(2)
    ]
    upload = {"file": ("a.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    file = (await front.http.post("/v1/files", data={"purpose": "batch"}, files=upload)).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await front.post("/v1/batches", asked)).json()["id"]

    async def in_progress() -> bool:
        return bool((await front.http.get(f"/v1/batches/{batch}")).json()["status"] == "in_progress")

    await wait_until(in_progress)
    (job,) = await ids(front, "/v1/jobs", headers={HEADER: "east"})
    assert (await front.http.get(f"/v1/jobs/{job}")).json()["metadata"]["batch"] == batch
    assert await redis.zcard("parallm:jobs") == 0
    cancelled = (await beside.post(f"/v1/batches/{batch}/cancel", {})).json()
    assert cancelled["status"] == "cancelling"

    async def over() -> bool:
        return bool((await front.http.get(f"/v1/batches/{batch}")).json()["status"] == "cancelled")

    await wait_until(over)


async def test_an_answer_is_judged_in_the_ring_that_keeps_it(
    redis_url: str, worker: ScriptedWorker, easterner: ScriptedWorker, east: Redis, east_server: EmbeddedRedis
) -> None:
    async with api(redis_url, ring=[f"east={east_server.url}"], feedback_ttl_days=1) as front:
        said = (await front.post("/v1/completions", {"model": EAST, "prompt": "a"})).json()["id"]
        async with runner(east_server.url) as (collecting, verdicts):

            async def kept() -> bool:
                return bool(await collecting.collect(EAST))

            await wait_until(kept)
            await asyncio.gather(*collecting.under_way)
            judged = await front.post("/v1/feedback", {"id": said, "reward": 1})
            assert judged.json()["status"] == "counted", judged.text
            await verdicts.deliver()
        (delivered,) = await TrajectoryQueue(east, "policy").peek("", 10)
        reward = delivered.live.trajectory.reward
        assert reward is not None and reward.value == 1.0
        assert await TrajectoryQueue(front.ring.redis, "policy").peek("", 10) == []


async def test_a_ring_that_is_killed_amid_streams_takes_neither_the_front_nor_the_others(
    front: Api, worker: ScriptedWorker, easterner: ScriptedWorker, east_server: EmbeddedRedis, redis: Redis
) -> None:
    held = {"prompt": "a", "max_tokens": 99}
    job = (await front.post("/v1/jobs", {"kind": "generate", "model": EAST, "prompts": ["a"]})).json()["id"]
    async with (
        front.stream("/v1/completions", {"model": MODEL, **held}) as here,
        front.stream("/v1/completions", {"model": EAST, **held}) as there,
    ):
        assert await here.next() is not None and await there.next() is not None
        east_server.stop()
        await wait_until(lambda: bool(front.ring.others[0].away))
        assert await text_of(front, MODEL) == f"this is {MODEL}"
        for request in (
            front.post("/v1/completions", {"model": EAST, "prompt": "a"}),
            front.post("/v1/completions", {"model": f"east/{EAST}", "prompt": "a"}),
            front.post("/v1/jobs", {"kind": "generate", "model": EAST, "prompts": ["a"]}),
            front.http.get(f"/v1/jobs/{job}"),
            front.http.get("/health", headers={HEADER: "east"}),
        ):
            away = await request
            assert away.status_code == 503 and "ring 'east' is away" in away.text, away.text
            assert "retry-after" in away.headers
        assert await ids(front, "/v1/models") == [MODEL]
        board = (await front.http.get("/dashboard")).text
        assert f"<td>home</td><td>available</td><td>{MODEL}</td>" in board
        assert "<td>east</td><td>unavailable: its Redis does not answer" in board and f"<td>{EAST}</td>" in board
        assert (await front.http.get("/readyz")).status_code == 200
        health = await front.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["rings"]["east"]["status"] == "overloaded"
        assert "ring 'east'" in health.json()["reasons"][0]
        figures = (await front.http.get("/metrics")).text
        assert 'mlx_parallm_ring_up{ring="east"} 0.0' in figures and 'mlx_parallm_ring_up{ring="home"} 1.0' in figures
        worker.go.set()
        easterner.go.set()
        assert "".join(chunk["choices"][0]["text"] for chunk in await here.all()) == f"this is {MODEL}" and here.done
        east_server.start()
        assert "".join(chunk["choices"][0]["text"] for chunk in await there.all()) == f"this is {EAST}" and there.done
    await easterner.join()
    await wait_until(lambda: not front.ring.others[0].away)

    async def serves_again() -> bool:
        return (await front.post("/v1/completions", {"model": EAST, "prompt": "a"})).status_code == 200

    await wait_until(serves_again)
    figures = (await front.http.get("/metrics")).text
    assert f'vllm:num_requests_waiting{{model_name="{EAST}",ring="east"}} 0.0' in figures
    assert f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0' in figures
    assert (await front.http.get("/health")).json()["rings"]["east"]["models"].keys() == {EAST}


async def test_a_ring_that_freezes_is_not_waited_for(
    front: Api, east_server: EmbeddedRedis, easterner: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await text_of(front, EAST) == f"this is {EAST}"
    os.kill(east_server.pid, signal.SIGSTOP)
    monkeypatch.setattr("api.ring.ring.GIVEN_UP_S", 0.2)  # not before: a busy ring may need longer than that
    try:
        frozen = await front.post("/v1/completions", {"model": EAST, "prompt": "a"})
        assert frozen.status_code == 503 and "ring 'east' is away" in frozen.text
        assert await text_of(front, MODEL) == f"this is {MODEL}"
        await wait_until(lambda: bool(front.ring.others[0].away))
        assert (await front.http.get("/health")).json()["rings"]["east"]["status"] == "overloaded"
    finally:
        monkeypatch.setattr("api.ring.ring.GIVEN_UP_S", HANG_S)
        os.kill(east_server.pid, signal.SIGCONT)

    async def serves_again() -> bool:
        return (await front.post("/v1/completions", {"model": EAST, "prompt": "a"})).status_code == 200

    await wait_until(serves_again)


async def test_streams_of_a_ring_that_stays_away_end_with_its_name(
    front: Api, east_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front.stream("/v1/completions", {"model": EAST, "prompt": "a", "max_tokens": 99}) as there:
        assert await there.next() is not None
        east_server.stop()
        monkeypatch.setattr("api.ring.ring.GIVEN_UP_S", 0.1)
        try:
            await there.all()
            assert "ring 'east' is away" in json.dumps(there.chunks[-1]["error"])
        finally:
            east_server.start()


async def test_a_front_starts_and_serves_while_a_ring_has_never_been_there(
    redis_url: str, worker: ScriptedWorker
) -> None:
    async with api(redis_url, ring=[f"lost=redis://127.0.0.1:{free_port()}"]) as front:
        assert await text_of(front, MODEL) == f"this is {MODEL}"
        unsure = await front.post("/v1/completions", {"model": "nobodys", "prompt": "a"})
        assert unsure.status_code == 503 and "ring 'lost' is away" in unsure.text
        assert (await front.http.get("/v1/jobs/job-1")).status_code == 503
        assert (await front.http.get("/v1/adapters/nobodys")).status_code == 503
        assert await ids(front, "/v1/jobs") == []


async def test_keys_tenants_and_bounds_are_counted_in_one_place(
    redis_url: str,
    worker: ScriptedWorker,
    easterner: ScriptedWorker,
    east_server: EmbeddedRedis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.admission.RATE_ANSWER_S", HANG_S)  # else what a busy Redis counts late passes
    keys = tmp_path / "keys"
    keys.write_text("\n".join(LINES))
    async with api(redis_url, ring=[f"east={east_server.url}"], api_key_file=keys, rate_limit="4/hour") as front:

        async def ask(who: str, method: str, path: str, **request: Any) -> httpx.Response:
            bearer = {"authorization": f"Bearer {KEYS[who]}", **request.pop("headers", {})}
            return await front.http.request(method, path, headers=bearer, **request)

        job = {"kind": "generate", "model": EAST, "prompts": ["a"]}
        made = (await ask("alice", "POST", "/v1/jobs", json=job)).json()["id"]
        assert (await ask("alice", "GET", f"/v1/jobs/{made}")).status_code == 200
        foreign = await ask("bob", "GET", f"/v1/jobs/{made}")
        never = await ask("bob", "GET", "/v1/jobs/job-000000000000000000")
        assert (foreign.status_code, never.status_code) == (404, 404)
        assert foreign.text.replace(made, "X") == never.text.replace("job-000000000000000000", "X")
        assert (await ask("bob", "GET", f"/v1/jobs/{made}", headers={HEADER: "east"})).status_code == 404
        assert (await ask("bob", "POST", "/pause", headers={HEADER: "east"})).status_code == 403
        listed = {who: (await ask(who, "GET", "/v1/jobs")).json()["data"] for who in ("alice", "bob", "root")}
        assert {who: len(data) for who, data in listed.items()} == {"alice": 1, "bob": 0, "root": 1}
        codes = [
            (await ask("alice", "POST", "/v1/completions", json={"model": model, "prompt": "a"})).status_code
            for model in (MODEL, EAST, MODEL, EAST, MODEL, EAST)
        ]
        assert codes == [200, 200, 200, 200, 429, 429], "one rate for all rings"
        assert {spec.tenant for spec in easterner.specs} == {"acme"}
