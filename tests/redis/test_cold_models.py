"""Requests for models of the catalogue that no worker serves yet: they wait, hear why, or are refused with the reason.

A host is played by its heartbeats, written through the real store; the worker that it would start is the scripted one.
"""

import asyncio
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs
from redis.asyncio import Redis
from rich.console import Console

from api.cli.ring_screen import view
from api.ops.ring_view import RingSnapshot
from shared.catalogue import RETRY_S, CatalogueEntry, HeldModel, HeldState, HostStatus
from shared.redis import keys
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.sequences import SequenceSpec
from tests.redis import scripted_worker
from tests.redis.api_servers import Api, api, key_file
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.api_texts import bundle
from tests.waiting import HANG_S, wait_until

ENTRY = CatalogueEntry(MODEL, "models/scripted", aliases=("other-name",), sha256="")
GIB = 1 << 30
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say"}]}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello")


class Host:
    """One host's heartbeats."""

    def __init__(self, redis: Redis) -> None:
        self.store = CatalogueStore(redis)
        self._redis = redis

    async def offers(self, need: int = GIB, memory: int = 8 * GIB, *, card: bool = True) -> None:
        """It has looked at the model's files and holds nothing."""
        self._status = HostStatus("h1", "mini", 1, 1, memory_bytes=memory, offers={MODEL: need})
        await self.store.offer(ENTRY)
        if card:
            await WorkerRegistry(self._redis).register_model(scripted_worker.CARD, bundle())
        await self.store.beat(self._status)

    async def holds(self, state: HeldState, progress: float = 0.0, why: str = "", age_s: float = 0.0) -> None:
        """It has begun to load the model, and is so far."""
        held = HeldModel(MODEL, state, progress, need_bytes=GIB, why=why)
        await self.store.beat(structs.replace(self._status, heartbeat_ms=round(1000 * age_s), held=(held,)))

    async def has_just_started(self) -> None:
        """It does not know the model's files yet."""
        await self.store.beat(structs.replace(self._status, offers={}, unseen=(MODEL,)))

    async def refuses(self, why: str) -> None:
        """It has found its files to be damaged."""
        await self.store.beat(structs.replace(self._status, offers={}, refuses={MODEL: why}))

    async def pins(self, name: str, need: int) -> None:
        """It holds a pinned model of so many bytes."""
        await self.store.beat(structs.replace(self._status, held=(HeldModel(name, "ready", need_bytes=need),)))

    async def wait_for(self, waiting: int) -> None:
        """Return once so many sequences wait for the model."""

        async def so_many() -> bool:
            demand = await self.store.demand(await self.store.read())
            return demand[MODEL].waits("interactive") == waiting

        await wait_until(so_many)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ring.ring.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("api.generation.running.LOOK_S", 0.02)
    monkeypatch.setattr("shared.redis.keys.HOST_TTL_S", 3600)  # a heartbeat outlives a test on a busy machine


@pytest.fixture
def host(redis: Redis) -> Host:
    return Host(redis)


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        yield serving


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def test_a_request_for_a_cold_model_waits_until_it_is_loaded(host: Host, server: Api, redis_url: str) -> None:
    await host.offers()
    asked = asyncio.create_task(server.post("/v1/chat/completions", {**CHAT, "model": "other-name"}))
    await host.wait_for(1)
    await host.holds("loading", 0.5)
    async with working(redis_url, script):
        answer = await asked
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


STREAMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "[DONE]"),
    ("/v1/responses", {"model": MODEL, "input": "say"}, "response.completed"),
    ("/v1/messages", {**CHAT, "max_tokens": 9}, "message_stop"),
    ("/inference/v1/generate", {"model": MODEL, "token_ids": [5, 6], "sampling_params": {}}, "[DONE]"),
    ("/api/chat", CHAT, '"done":true'),
]


@pytest.mark.parametrize(("path", "body", "end"), STREAMS, ids=[path for path, _, _ in STREAMS])
async def test_a_stream_says_how_far_the_load_is(
    path: str, body: dict[str, Any], end: str, host: Host, server: Api, redis_url: str
) -> None:
    await host.offers()
    comments: list[str] = []
    said = ""
    async with asyncio.timeout(HANG_S), server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        await host.wait_for(1)
        await host.holds("downloading", 0.2)
        if path != "/api/chat":  # lines of JSON, which have no comments
            lines = response.aiter_lines()
            while ": downloading 20%" not in comments:
                comments += [line] if (line := await anext(lines)).startswith(":") else []
            await host.holds("loading", 0.43)
            while ": loading 43%" not in comments:
                comments += [line] if (line := await anext(lines)).startswith(":") else []
        async with working(redis_url, script):
            said = "\n".join([line async for line in (response.aiter_lines() if path == "/api/chat" else lines)])
    assert end in said and "error" not in said.replace('"error":null', ""), said


async def test_a_load_that_fails_ends_those_that_wait_with_the_reason(host: Host, server: Api) -> None:
    await host.offers()
    whole = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
    stream = asyncio.create_task(server.post("/v1/chat/completions", {**CHAT, "stream": True}))
    other = asyncio.create_task(server.post("/v1/messages", {**CHAT, "max_tokens": 9}))
    await host.wait_for(3)
    await host.holds("failed", why="no space left on device")
    why = "model 'scripted' is not loaded, and no host can load it: on mini loading failed: no space left on device"
    assert error_of(await whole) == (503, why) and (await whole).headers["retry-after"] == "60"
    assert why in (await stream).text and (await stream).text.rstrip().endswith("data: [DONE]")
    assert error_of(await other) == (529, why)
    assert error_of(await server.post("/v1/chat/completions", CHAT)) == (503, why), "and those that come now"
    await host.wait_for(0)  # nothing is left in the queue that would have the model loaded again
    await host.holds("failed", why="no space left on device", age_s=RETRY_S)
    asked = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
    await host.wait_for(1)  # hosts try it again for those that come later
    await host.holds("failed", why="still none")
    assert error_of(await asked)[1].endswith("still none")


async def test_a_model_that_is_removed_ends_those_that_wait_for_it(
    host: Host, server: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ring.ring.REMOVED_S", 0.0)
    await host.offers()
    asked = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
    await host.wait_for(1)
    await host.store.remove(MODEL)
    assert error_of(await asked) == (404, f"model '{MODEL}' was removed from the catalogue meanwhile")


async def test_a_request_waits_for_a_host_that_has_not_looked_at_the_files_yet(
    host: Host, server: Api, redis_url: str
) -> None:
    await host.offers()
    asked = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
    await host.wait_for(1)
    await host.has_just_started()
    later = asyncio.create_task(server.post("/v1/chat/completions", CHAT))
    await host.wait_for(2)
    async with working(redis_url, script):
        assert [(await each).status_code for each in (asked, later)] == [200, 200]


async def test_a_model_that_no_machine_can_hold_is_refused_with_the_numbers(host: Host, server: Api) -> None:
    await host.offers(need=40 * GIB, memory=16 * GIB)
    why = "it needs 42.9 GB of memory, and the largest machine that has its files, mini, has 17.2 GB for models"
    status, message = error_of(await server.post("/v1/chat/completions", CHAT))
    assert status == 503 and message.endswith(why)
    job = await server.post("/v1/jobs", {"kind": "generate", "model": MODEL, "prompts": ["a"], "max_tokens": 2})
    assert error_of(job) == (status, message)
    (model,) = [each for each in (await server.http.get("/v1/models")).json()["data"] if each["id"] == MODEL]
    assert model["state"] == "unavailable" and model["catalogue"]["why"] == why
    health = await server.http.get("/health")
    assert health.status_code == 503 and health.json()["models"][MODEL]["why"] == why


async def test_what_a_group_has_taken_waits_for_it_to_come_back(
    host: Host, redis: Redis, server: Api, redis_url: str
) -> None:
    await host.offers(need=40 * GIB, memory=16 * GIB)
    await scripted_worker.ScriptedWorker(redis, script).join()  # and takes nothing
    request = server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
    async with asyncio.timeout(HANG_S), request as response:
        await host.wait_for(1)
        await redis.delete(keys.worker(MODEL, "w1"))
        lines = response.aiter_lines()
        while await anext(lines) != ": waiting for a group that serves the model":
            pass
        assert (await server.post("/v1/chat/completions", CHAT)).status_code == 503, "and nobody else waits"
        async with working(redis_url, script):
            assert "data: [DONE]" in [line async for line in lines]


async def test_who_asks_hears_that_no_host_has_a_model(host: Host, redis: Redis, server: Api) -> None:
    await host.store.put(ENTRY)
    assert "no host is running" in error_of(await server.post("/v1/chat/completions", CHAT))[1]
    await host.store.beat(HostStatus("h1", "mini", 1, 1))
    status, message = error_of(await server.post("/v1/chat/completions", CHAT))
    assert status == 503 and "none of the 1 hosts offers 'models/scripted'" in message
    await host.store.change(MODEL, lambda entry: CatalogueEntry(MODEL, entry.source, ranks=2))
    assert "a group of 2 processes serves it" in error_of(await server.post("/v1/chat/completions", CHAT))[1]
    status, message = error_of(await server.post("/v1/chat/completions", {**CHAT, "model": "nothing"}))
    assert status == 404 and "served: scripted" in message


async def test_a_model_for_which_pinned_ones_leave_no_room_is_refused(host: Host, redis: Redis, server: Api) -> None:
    await host.offers()
    await host.store.put(CatalogueEntry("pinned", "models/pinned", pinned=True))
    await host.pins("pinned", 7 * GIB)
    answering = asyncio.create_task(server.http.post("/v1/chat/completions", json=CHAT))
    await host.wait_for(1)
    await host.pins("pinned", 7 * GIB + 1)
    assert error_of(await answering)[1].endswith("pinned models leave no room for it on mini: unpin one")
    assert (await server.http.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_who_asks_hears_what_is_wrong_with_the_files(host: Host, server: Api) -> None:
    await host.offers()
    await host.refuses("no whole safetensors file")
    answer = await server.http.post("/v1/chat/completions", json=CHAT)
    assert error_of(answer) == (
        503,
        f"model '{MODEL}' is not loaded, and no host can load it: mini cannot load it: no whole safetensors file",
    )
    listed, *_ = (await server.http.get("/v1/models")).json()["data"]
    assert listed["state"] == "unavailable" and "no whole" in listed["catalogue"]["why"]


async def test_a_new_model_is_ordered_before_its_tokenizer_is_known(host: Host, server: Api) -> None:
    await host.offers(card=False)
    status, message = error_of(await server.post("/v1/chat/completions", CHAT))
    assert status == 503 and "no host has read its tokenizer yet" in message
    (order,) = (await host.store.read()).orders
    assert (order.kind, order.model, order.host) == ("load", MODEL, "")


async def test_a_deadline_ends_the_wait_for_a_cold_model(
    host: Host, server: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.generation.running.DEADLINE_GRACE_S", 0.0)
    await host.offers()
    await host.holds("loading")
    answer = await server.post("/v1/chat/completions", {**CHAT, "deadline_s": 0.2})
    assert answer.status_code == 504
    await host.wait_for(0)


async def test_a_job_for_a_cold_model_waits_for_a_host(host: Host, server: Api) -> None:
    await host.offers()
    job = await server.post("/v1/jobs", {"kind": "generate", "model": "other-name", "prompts": ["a"], "max_tokens": 2})
    assert job.status_code in (200, 201, 202) and job.json()["model"] == MODEL, job.text


async def test_models_say_where_they_are_and_what_can_be_loaded(host: Host, server: Api, redis_url: str) -> None:
    await host.offers()

    async def shown() -> dict[str, Any]:
        model: dict[str, Any] = (await server.http.get("/v1/models/other-name")).json()
        return model

    assert ((await shown())["state"], (await shown())["catalogue"]["offered_by"]) == ("loadable", ["mini"])
    assert {each["id"] for each in (await server.http.get("/v1/models")).json()["data"]} == {MODEL, "other-name"}
    assert (await server.http.get("/readyz")).status_code == 200, "a request would be answered"
    await host.holds("loading", 0.5)
    model = await shown()
    assert (model["state"], model["progress"]) == ("loading", 0.5)
    assert [place["host"] for place in model["catalogue"]["hosts"]] == ["mini"]
    assert (await server.http.get("/api/ps")).json()["models"] == []
    assert (await server.http.get("/health")).json()["models"][MODEL]["state"] == "loading"
    async with working(redis_url, script):
        assert (await shown())["state"] == "ready"
        ready = {name: each["state"] for name, each in (await server.http.get("/health")).json()["models"].items()}
        assert ready == {MODEL: "ready"}


async def test_the_catalogue_is_managed_over_http(server: Api, host: Host) -> None:
    added = await server.post("/v1/models", {"source": "org/Big-4bit", "pinned": True, "options": {"kv-bits": "8"}})
    assert added.status_code == 201 and added.json()["id"] == "Big-4bit", added.text
    assert (await server.post("/v1/models", {"source": "org/Big-4bit"})).status_code == 409
    changed = await server.http.patch("/v1/models/Big-4bit", json={"pinned": False, "aliases": ["big"], "priority": 3})
    facts = changed.json()["catalogue"]
    assert (facts["pinned"], facts["aliases"], facts["priority"]) == (False, ["big"], 3)
    assert facts["options"] == {"kv-bits": "8"}
    for wrong in ({"options": {"ssd-cache-dir": "/etc"}}, {"idle_s": -1}, {"aliases": ["a b"]}, {"pined": True}):
        refused = await server.http.patch("/v1/models/big", json=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(wrong))
    assert (await server.http.delete("/v1/models/big")).json() == {"id": "Big-4bit", "object": "model", "deleted": True}
    assert (await server.http.delete("/v1/models/big")).status_code == 404
    assert (await server.http.patch("/v1/models/big", json={})).status_code == 404


async def test_a_model_is_loaded_and_unloaded_on_request(host: Host, server: Api) -> None:
    path, body = "/v1/models/load", {"model": "other-name"}
    assert (await server.post(path, body)).status_code == 404
    await host.offers()
    for wrong in ({"model": MODEL, "host": "nowhere"}, {"mdel": MODEL}):
        assert (await server.post(path, wrong)).status_code == 400
    assert (await server.post("/v1/models/unload", body)).status_code == 200, "no host holds it"
    answer = await server.post(path, {**body, "host": "mini"})
    assert answer.status_code == 202 and answer.json()["state"] == "loadable"
    assert [(each.kind, each.host) for each in (await host.store.read()).orders] == [("load", "h1")]
    await host.holds("failed", why="broken")
    assert (await server.post(path, body)).status_code == 202, "it is tried again"
    await host.holds("ready")
    assert (await server.post(path, body)).status_code == 200
    assert (await server.post("/v1/models/unload", body)).status_code == 202
    assert ("unload", "h1") in [(each.kind, each.host) for each in (await host.store.read()).orders]
    await server.http.patch(f"/v1/models/{MODEL}", json={"pinned": True})
    assert (await server.post("/v1/models/unload", body)).status_code == 409


async def test_the_dashboard_has_a_table_of_models_whose_buttons_load_and_unload(host: Host, server: Api) -> None:
    await host.offers()
    page = (await server.http.get("/dashboard")).text
    assert "loadable" in page and 'aria-label="Load scripted"' in page
    same = {"origin": server.url, "HX-Request": "true"}
    said = await server.http.post("/dashboard/models/load", data={"model": MODEL}, headers=same)
    assert (said.status_code, "scripted is to be loaded" in said.text) == (200, True), said.text
    assert [each.kind for each in (await host.store.read()).orders] == ["load"]
    wrong = await server.http.post("/dashboard/models/load", data={"model": "<b>"}, headers=same)
    assert wrong.status_code == 404 and "<b>" not in wrong.text
    snapshot = msgspec.json.decode((await server.http.get("/v1/ring/snapshot")).content, type=RingSnapshot)
    console = Console(file=StringIO(), width=120)
    console.print(view(snapshot))
    assert isinstance(console.file, StringIO) and "loadable" in console.file.getvalue()


async def test_a_tenant_sees_models_and_no_folders(host: Host, redis_url: str, tmp_path: Any) -> None:
    file, headers = key_file(tmp_path, admin={"role": "admin"}, acme={"tenant": "acme"})
    await host.offers()
    async with api(redis_url, api_key_file=file) as server:
        (model, _) = (await server.http.get("/v1/models", headers=headers["acme"])).json()["data"]
        assert model["state"] == "loadable" and model["catalogue"] is None
        for path in ("/v1/models/load", "/v1/models/unload"):
            assert (await server.post(path, {"model": MODEL}, headers=headers["acme"])).status_code == 403
        (model, _) = (await server.http.get("/v1/models", headers=headers["admin"])).json()["data"]
        assert model["catalogue"]["source"] == "models/scripted"
