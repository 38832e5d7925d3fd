"""Tenants: what one's key has made is not there for another's, on every route that there is.

A thing of another tenant has to be answered as one that never was: same status, same words. Every route has a rule
(api/tenants.py), every rule has a request here; a new route without one of them fails.
"""

import functools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from redis.asyncio import Redis

from api.app import create_app
from api.http.api_keys import line_of
from api.tenants import ADMIN, LIST, NOTHING, PAGE, RULES, Rule, rule_of
from shared.owners import ADMINS
from shared.process.settings import ApiSettings
from shared.redis import keys
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import SamplingParams, SequenceSpec, encode
from shared.trajectories import LiveTrajectory, Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, Events, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.redis.test_api_adapters import files
from tests.redis.test_api_training import ONE
from tests.unit.adapter_files import lora, mlx_config, write
from tests.waiting import wait_until

KEYS = {name: f"the-key-of-{name}-is-long" for name in ("alice", "anna", "bob", "root")}
OPEN = {"GET /openapi.json", "GET /docs", "GET /docs/oauth2-redirect", "GET /redoc"}  # the same for everybody
UNKNOWN = {
    "job": "job-000000000000000000",
    "file": "file-" + "0" * 48,
    "batch": "batch_" + "0" * 48,
    "stream": "cmpl-" + "0" * 32,
    "dead letter": f"{MODEL}:1-1",
    "policy": "nobodys",
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {  # of routes that name a thing in their path
    "POST /v1/adapters/{name}/promote": {"json": {"version": 1}},
    "POST /v1/adapters/{name}/reject": {"json": {"version": 1}},
    "POST /v1/adapters/{name}/best": {"json": {"version": 1, "value": 1.0}},
    "POST /v1/adapters/{name}/versions": {"files": files(mlx_config())},
    "PUT /v1/trainers/{policy}": {"json": {"owner": "b"}},
    "DELETE /v1/trainers/{policy}": {"params": {"owner": "b"}},
    "POST /v1/trainers/{policy}/alerts": {"json": {"policy": "p", "kind": "no_signal", "message": "m", "at_ms": 1}},
    "POST /v1/trainers/{policy}/orders": {"json": {"owner": "b"}},
    "POST /v1/trainers/{policy}/orders/answers": {"json": {"owner": "b", "entry": "1-1", "id": "order-1"}},
}


def named(adapter: str, file: str) -> dict[str, dict[str, Any]]:
    """A request of every route that names an adapter, a policy or a file elsewhere than in its path."""
    upload = {"data": {"name": adapter}, "files": files(mlx_config())}
    return {
        "POST /v1/completions": {"json": {"model": adapter, "prompt": "hi"}},
        "POST /v1/chat/completions": {"json": {"model": MODEL, "adapter": f"{adapter}@1", **CHAT}},
        "POST /v1/embeddings": {"json": {"model": adapter, "input": "hi"}},
        "POST /v1/responses": {"json": {"model": adapter, "input": "hi"}},
        "POST /v1/classifications": {"json": {"model": adapter, "input": "hi", "labels": ["a", "b"]}},
        "POST /v1/chat/completions/render": {"json": {"model": adapter, **CHAT}},
        "POST /classify": {"json": {"model": adapter, "input": "hi", "labels": ["a", "b"]}},
        "POST /pooling": {"json": {"model": adapter, "input": "hi"}},
        "POST /score": {"json": {"model": adapter, "text_1": "hi", "text_2": "ho"}},
        "POST /v1/score": {"json": {"model": adapter, "text_1": "hi", "text_2": "ho"}},
        "POST /rerank": {"json": {"model": adapter, "query": "hi", "documents": ["ho"]}},
        "POST /v1/rerank": {"json": {"model": adapter, "query": "hi", "documents": ["ho"]}},
        "POST /v2/rerank": {"json": {"model": adapter, "query": "hi", "documents": ["ho"]}},
        "GET /tokenizer_info": {"params": {"model": adapter}},
        "GET /v1/models/{name:path}": {"path": f"/v1/models/{adapter}@1"},
        "GET /models/{name:path}": {"path": f"/models/{adapter}"},
        "POST /v1/batches": {
            "json": {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        },
        "POST /v1/jobs": {"json": {"kind": "generate", "model": MODEL, "adapter": adapter, "prompts": ["hi"]}},
        "POST /v1/rl/act": {"json": {"model": adapter, "observations": ["hi"]}},
        "POST /v1/predict": {"json": {"model": adapter, "inputs": {"text": ["hi"]}}},
        "POST /inference/v1/generate": {"json": {"model": adapter, "token_ids": [1]}},
        "POST /generate": {"json": {"adapter": adapter, "prompt": "hi"}},
        "POST /tokenize": {"json": {"model": adapter, "prompt": "hi"}},
        "POST /detokenize": {"json": {"model": adapter, "tokens": [1]}},
        "POST /v1/rewards/score": {"json": {"completions": "a", "prompts": "b", "reward": "judge", "model": adapter}},
        "POST /v1/adapters": upload,
        "POST /upload_adapter": upload,
        "POST /update_adapter_weights": {"data": {"name": adapter}, "files": files()},
        "POST /load_adapter": {"json": {"adapter_path": "good", "name": adapter}},
        "POST /v1/load_lora_adapter": {"json": {"lora_path": "good", "lora_name": adapter, "load_inplace": True}},
        "POST /v1/unload_lora_adapter": {"json": {"lora_name": adapter}},
        "POST /model/switch-lora": {"json": {"name": adapter, "version": 1}},
        "POST /v1/training/update": {"json": {"policy": adapter, "trajectories": [ONE]}},
        "POST /training/checkpoint": {"json": {"policy": adapter}},
        "GET /v1/training/status": {"params": {"policy": adapter}},
        "GET /debug/training": {"params": {"policy": adapter}},
        "GET /v1/training/trajectories": {"params": {"policy": adapter}},
    }


MAKES = {"POST /v1/adapters", "POST /upload_adapter", "POST /load_adapter", "POST /v1/load_lora_adapter"}
NAMES_NOTHING = {"POST /v1/files", "POST /abort_requests", "POST /v1/training/resume"}


class Ring:
    """A server with tenants, and what alice has made on it."""

    def __init__(self, server: Api, worker: ScriptedWorker, things: dict[str, str]) -> None:
        self.server, self.worker, self.things = server, worker, things

    async def ask(self, who: str, route: str, **request: Any) -> httpx.Response:
        """`route` as "METHOD path"; `path` in place of the route's."""
        method, path = route.split(" ", 1)
        bearer = {"authorization": f"Bearer {KEYS[who]}", **request.pop("headers", {})}
        return await self.server.http.request(method, request.pop("path", path), headers=bearer, **request)


@functools.cache
def routes() -> list[tuple[str, Rule | None]]:
    found = []
    for route in iter_route_contexts(create_app(ApiSettings()).routes):
        for method in sorted((route.methods or set()) - {"HEAD"}):
            assert route.path is not None
            if f"{method} {route.path}" not in OPEN:
                found.append((f"{method} {route.path}", rule_of(method, route.path)))
    return found


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    lines = [
        line_of(KEYS["alice"], name="alice", tenant="acme"),
        line_of(KEYS["anna"], name="anna", tenant="acme"),
        line_of(KEYS["bob"], name="bob", tenant="bobs", **{"class": "batch"}),
        line_of(KEYS["root"], name="root", role="admin"),
    ]
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
async def ring(
    redis_url: str, redis: Redis, tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ring]:
    monkeypatch.setattr("api.batches.work.LOOK_S", 0.05)
    folder = tmp_path / "adapters"
    write(folder / "good", mlx_config(), lora())
    async with (
        working(redis_url, lambda spec: Answer()) as worker,
        api(redis_url, api_key_file=key_file, adapter_dirs=[folder]) as server,
    ):
        made = Ring(server, worker, {})
        await publish(server.ring.adapters, "shared")
        await make(made, redis)
        yield made


async def make(ring: Ring, redis: Redis) -> None:
    """One of everything, by alice."""
    adapter = await ring.ask("alice", "POST /v1/adapters", data={"name": "hers"}, files=files(mlx_config()))
    assert adapter.status_code == 201, adapter.text
    assert (await ring.ask("alice", "PUT /v1/trainers/learns", json={"owner": "t"})).json()["owner"] == "t"
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "hers", "prompt": "hi"}}
    upload = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", json.dumps(line).encode())}}
    file = (await ring.ask("alice", "POST /v1/files", **upload)).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    job = {"kind": "generate", "model": MODEL, "adapter": "hers", "prompts": ["hi"], "idempotency_key": "k"}
    body = {"prompt": "go", "stream_options": {"include_event_ids": True}, "stream": True}
    request = ring.server.http.stream(
        "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {KEYS['alice']}"}
    )
    async with request as response:
        (chunk, *_) = await Events(response).all()
    ring.things = {
        "file": file,
        "batch": (await ring.ask("alice", "POST /v1/batches", json=batch)).json()["id"],
        "job": (await ring.ask("alice", "POST /v1/jobs", json=job)).json()["id"],
        "stream": chunk["id"],
        "dead letter": await letter(redis, "acme"),
        "policy": "hers",
    }

    async def begun() -> bool:
        ring.things["batch's job"] = (await ring.server.ring.batches.find(ring.things["batch"])).job
        return bool(ring.things["batch's job"])

    await wait_until(begun)


async def letter(redis: Redis, tenant: str) -> str:
    spec = SequenceSpec("bad", MODEL, (1, 2), SamplingParams(max_tokens=1, seed=0), tenant=tenant)
    fields = {"id": "bad", "reason": "it kills", "worker": "w", "attempt": 3, "spec": encode(spec)}
    key = keys.dead_letters(MODEL)
    entry = await redis.xadd(key, {**fields, "stream": keys.queue(MODEL, "interactive")})
    await redis.expire(key, 60)
    return f"{MODEL}:{entry.decode()}"


def filled(route: str, rule: Rule, thing: str) -> str:
    path = route.split(" ", 1)[1].replace("{version}", "1")
    return re.sub(r"\{" + rule.name + r"(:path)?\}", thing, path)


def told(response: httpx.Response, name: str) -> tuple[int, str]:
    return response.status_code, response.text.replace(name, "<it>")


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    found = dict(routes())
    assert [route for route, rule in found.items() if rule is None] == [], "state a rule in api/tenants.py"
    assert RULES.keys() - found.keys() == set(), "rules of routes that are not there"
    asked = named("a", "f").keys() | NAMES_NOTHING
    free = {route for route, rule in found.items() if rule == LIST and rule.kind is None} - asked
    shown = {"GET /v1/models", "GET /models", "GET /v1/files", "GET /v1/batches", "GET /v1/jobs", "GET /v1/adapters"}
    shown |= {"GET /v1/deadletters", "GET /health", "GET /livez", "GET /readyz", "GET /metrics", "GET /is_paused"}
    shown |= {"GET /version", "GET /ping", "POST /ping", "GET /load", "GET /server_info"}
    assert free == shown | {"GET /v1/spec_decode/metrics"}, "say in `named` how it names another's things"
    assert NOTHING == LIST


async def test_another_tenant_s_thing_is_answered_as_one_that_never_was(ring: Ring) -> None:
    looked = 0
    for route, rule in routes():
        if rule is None or rule.kind is None:
            continue
        thing, unknown = ring.things[rule.kind], UNKNOWN[rule.kind]
        body = BODIES.get(route, {})
        foreign = await ring.ask("bob", route, path=filled(route, rule, thing), **body)
        assert foreign.status_code == 404, (route, foreign.text)
        if rule.right != "make":
            never = await ring.ask("bob", route, path=filled(route, rule, unknown), **body)
            assert told(foreign, thing) == told(never, unknown), route
        looked += 1
    assert looked > 20
    held = await ring.ask("bob", "PUT /v1/trainers/learns", json={"owner": "b", "instead_of": "t"})
    assert held.status_code == 404, "a policy that has a trainer and no version yet"
    await check_nothing_has_changed(ring)


async def test_what_a_body_names_is_looked_at_too(ring: Ring) -> None:
    foreign, unknown = named("hers", ring.things["file"]), named("nobodys", UNKNOWN["file"])
    for route, request in foreign.items():
        answer = await ring.ask("bob", route, **request)
        if route in MAKES:
            assert answer.status_code == 409 and "not free" in answer.text, (route, answer.text)
            continue
        assert answer.status_code == 404, (route, answer.text)
        never = await ring.ask("bob", route, **unknown[route])
        there = ring.things["file"] if route == "POST /v1/batches" else "hers"
        missing = UNKNOWN["file"] if route == "POST /v1/batches" else "nobodys"
        assert told(answer, there) == told(never, missing), route
    collected = {"prompt": "hi", "collect_trajectory": True}
    shared = {**collected, "adapter": "shared"}
    assert (await ring.ask("bob", "POST /v1/completions", json=shared)).status_code == 200
    assert (await ring.ask("alice", "PUT /v1/trainers/policy", json={"owner": "t"})).status_code == 200
    default = [await ring.ask(who, "POST /v1/completions", json=collected) for who in ("alice", "bob")]
    assert [answer.status_code for answer in default] == [200, 404], "the default policy has become alice's"
    await check_nothing_has_changed(ring)


async def test_lists_show_one_s_own_and_pages_go_on_only_from_one_s_own(ring: Ring) -> None:
    for route, kind, after in (
        ("GET /v1/jobs", "job", "before"),
        ("GET /v1/files", "file", "after"),
        ("GET /v1/batches", "batch", "after"),
        ("GET /v1/deadletters", "dead letter", ""),
    ):
        shown = {who: await listed(ring, who, route) for who in ("alice", "anna", "bob", "root")}
        thing = ring.things[kind]
        theirs = [ring.things["batch's job"]] * (kind == "job") + [thing]
        everybody = {"alice": theirs, "anna": theirs, "bob": [], "root": theirs}
        assert {who: sorted(ids) for who, ids in shown.items()} == {w: sorted(i) for w, i in everybody.items()}, route
        if after:
            foreign = await ring.ask("bob", route, params={after: thing})
            never = await ring.ask("bob", route, params={after: UNKNOWN[kind]})
            assert foreign.status_code == 404
            assert told(foreign, thing) == told(never, UNKNOWN[kind]), route
    assert await listed(ring, "bob", "GET /v1/adapters", "name") == ["shared"]
    assert sorted(await listed(ring, "anna", "GET /v1/adapters", "name")) == ["hers", "shared"]
    assert "hers" not in await listed(ring, "bob", "GET /v1/models")
    assert "hers" in await listed(ring, "root", "GET /models")


async def listed(ring: Ring, who: str, route: str, field: str = "id") -> list[str]:
    answer = await ring.ask(who, route)
    assert answer.status_code == 200, answer.text
    return [each[field] for each in answer.json()["data"]]


async def test_one_s_own_jobs_are_found_behind_those_of_others_until_they_are_deleted(ring: Ring) -> None:
    job = {"kind": "generate", "model": MODEL, "prompts": ["hi"]}
    mine = [(await ring.ask("bob", "POST /v1/jobs", json=job)).json()["id"] for _ in range(2)]
    for _ in range(5):
        await ring.ask("alice", "POST /v1/jobs", json=job)
    assert sorted(await listed(ring, "bob", "GET /v1/jobs")) == sorted(mine)
    first = await ring.ask("bob", "GET /v1/jobs", params={"limit": 1})
    second = await ring.ask("bob", "GET /v1/jobs", params={"limit": 1, "before": first.json()["data"][0]["id"]})
    assert sorted(each.json()["data"][0]["id"] for each in (first, second)) == sorted(mine)
    await ring.ask("bob", f"POST /v1/jobs/{mine[0]}/cancel")
    assert (await ring.ask("bob", f"DELETE /v1/jobs/{mine[0]}")).status_code == 200
    assert await listed(ring, "bob", "GET /v1/jobs") == mine[1:]
    assert mine[0] not in await listed(ring, "root", "GET /v1/jobs")


async def test_what_concerns_the_ring_takes_an_admin_s_key(ring: Ring) -> None:
    for route, rule in routes():
        if rule != ADMIN:
            continue
        path = route.split(" ", 1)[1].replace("{letter_id:path}", ring.things["dead letter"])
        refused = await ring.ask("alice", route, path=path)
        assert refused.status_code == 403, (route, refused.text)
        assert "admin" in refused.json()["error"]["message"]
        if route.startswith("GET "):
            assert (await ring.ask("root", route, path=path)).status_code == 200, route
    assert (await ring.ask("alice", "GET /is_paused")).json()["is_paused"] is False


async def test_the_dashboard_takes_an_admin_s_key(ring: Ring) -> None:
    for route, rule in routes():
        if rule != PAGE or re.search(r"/(login|logout|static/\{name\})$", route):
            continue
        path = re.sub(r"\{(\w+)_id(:path)?\}", lambda m: ring.things.get(m[1], "x"), route.split(" ", 1)[1])
        path = path.replace("{name}", "hers").replace("{ordinal}", "0")
        signed = {"headers": {"origin": ring.server.url}}
        refused = await ring.ask(
            "alice", route, path=path, data={"version": "1"} if "POST" in route else None, **signed
        )
        assert refused.status_code in (303, 401), (route, refused.status_code, refused.text)
        assert "login" in refused.headers.get("location", "login")
    same = {"origin": ring.server.url}
    wrong = await ring.server.http.post("/dashboard/login", data={"key": KEYS["alice"]}, headers=same)
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False) and "tenant" in wrong.text
    right = await ring.server.http.post("/dashboard/login", data={"key": KEYS["root"]}, headers=same)
    assert right.status_code == 303
    page = await ring.server.http.get(f"/dashboard/jobs/{ring.things['job']}")
    assert page.status_code == 200


async def test_the_tenant_and_an_admin_see_and_do_all(ring: Ring) -> None:
    things = ring.things
    for who in ("anna", "root"):
        await check_visible(ring, who)
    cancelled = await ring.ask("root", f"POST /v1/jobs/{things['job']}/cancel")
    assert cancelled.json()["status"] == "cancelled" and cancelled.json()["tenant"] == "acme"
    again = (await ring.ask("root", f"POST /v1/jobs/{things['job']}/retry")).json()
    assert again["tenant"] == "acme", "whoever submits it again"
    assert (await ring.ask("anna", f"GET /v1/jobs/{again['id']}")).status_code == 200
    more = await ring.ask("root", "POST /v1/adapters/hers/versions", files=files(mlx_config(), lora(seed=1)))
    assert (more.status_code, more.json()["tenant"]) == (201, "acme")
    assert (await ring.ask("bob", "GET /v1/adapters/hers/versions/2")).status_code == 404
    assert (await ring.ask("anna", "POST /v1/adapters/hers/rollback")).json()["policy_version"] == 1


async def test_what_is_nobody_s_is_used_by_all_and_changed_by_admins(ring: Ring) -> None:
    used = await ring.ask("bob", "POST /v1/completions", json={"model": "shared", "prompt": "hi"})
    assert used.status_code == 200, used.text
    assert (await ring.ask("bob", "GET /v1/adapters/shared")).status_code == 200
    for route, request in (
        ("POST /v1/adapters/shared/promote", {"json": {"version": 1}}),
        ("POST /v1/adapters/shared/versions", {"files": files(mlx_config())}),
        ("PUT /v1/trainers/shared", {"json": {"owner": "b"}}),
        ("DELETE /v1/adapters/shared", {}),
        ("POST /upload_adapter", {"data": {"name": "shared"}, "files": files(mlx_config())}),
        ("POST /v1/unload_lora_adapter", {"json": {"lora_name": "shared"}}),
        ("POST /model/switch-lora", {"json": {"name": "shared", "version": 1}}),
        ("POST /v1/training/update", {"json": {"policy": "shared", "trajectories": [ONE]}}),
    ):
        refused = await ring.ask("bob", route, **request)
        assert refused.status_code == 403, (route, refused.text)
    by_admin = await ring.ask("root", "POST /v1/adapters", data={"name": "ours"}, files=files(mlx_config()))
    assert by_admin.json()["tenant"] == ""
    assert sorted(await listed(ring, "bob", "GET /v1/adapters", "name")) == ["ours", "shared"]


async def test_what_an_admin_makes_is_no_tenant_s_to_see(ring: Ring) -> None:
    job = {"kind": "generate", "model": MODEL, "prompts": ["hi"]}
    made = (await ring.ask("root", "POST /v1/jobs", json=job)).json()
    assert made["tenant"] == ADMINS
    assert (await ring.ask("bob", f"GET /v1/jobs/{made['id']}")).status_code == 404


async def test_idempotency_keys_are_each_tenant_s_own(ring: Ring) -> None:
    job = {"kind": "generate", "model": MODEL, "prompts": ["hi"], "idempotency_key": "k"}
    mine = await ring.ask("bob", "POST /v1/jobs", json=job)
    assert mine.status_code == 202 and mine.json()["id"] != ring.things["job"]
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "hi"}}
    batches = []
    for who in ("alice", "bob"):
        upload = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", json.dumps(line).encode())}}
        file = (await ring.ask(who, "POST /v1/files", **upload)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = await ring.ask(who, "POST /v1/batches", json=body, headers={"idempotency-key": "k"})
        assert made.status_code == 200, made.text
        batches.append(made.json()["id"])
    assert batches[0] != batches[1]


async def test_a_sequence_and_what_is_collected_of_it_keep_the_tenant(ring: Ring, redis: Redis) -> None:
    await ring.ask("bob", "POST /v1/completions", json={"model": "shared", "prompt": "hi"})
    assert ring.worker.specs[-1].tenant == "bobs"
    empty = Trajectory(0, 0, (1,), (2,), "a", (0.0,), "stop")
    for tenant in ("acme", "bobs"):
        live = LiveTrajectory(f"of-{tenant}", "shared", MODEL, empty, tenant=tenant)
        assert await TrajectoryQueue(redis, "shared").add(live)
    seen = {
        who: [
            each["id"] for each in (await ring.ask(who, "GET /v1/training/trajectories?policy=shared")).json()["data"]
        ]
        for who in ("alice", "bob", "root")
    }
    assert seen == {"alice": ["of-acme"], "bob": ["of-bobs"], "root": ["of-acme", "of-bobs"]}


async def test_a_letter_that_cannot_be_read_may_be_anybody_s_and_is_for_admins(ring: Ring, redis: Redis) -> None:
    entry = await redis.xadd(keys.dead_letters(MODEL), {"id": "x", "reason": "unreadable", "spec": b"\xc1"})
    name = f"{MODEL}:{entry.decode()}"
    assert (await ring.ask("alice", f"GET /v1/deadletters/{name}")).status_code == 404
    assert (await ring.ask("root", f"GET /v1/deadletters/{name}")).status_code == 200
    requeued = await ring.ask("root", f"POST /v1/deadletters/{ring.things['dead letter']}/requeue")
    assert requeued.status_code == 200
    path = f"GET /v1/deadletters/{ring.things['dead letter']}"
    assert [(await ring.ask(who, path)).status_code for who in ("alice", "bob")] == [200, 404], "its second life, too"


async def test_without_tenants_a_thing_with_an_owner_is_everybody_s(ring: Ring, redis_url: str) -> None:
    async with api(redis_url, api_key="one-key-that-is-long,another-key-that-is-long") as server:
        for key in ("one-key-that-is-long", "another-key-that-is-long"):
            bearer = {"authorization": f"Bearer {key}"}
            found = await server.http.get(f"/v1/jobs/{ring.things['job']}", headers=bearer)
            assert found.status_code == 200
            made = await server.post("/v1/jobs", {"kind": "generate", "prompts": ["hi"]}, headers=bearer)
            assert made.json()["tenant"] == ""
    assert (await ring.ask("bob", f"GET /v1/jobs/{made.json()['id']}")).status_code == 200, "no one's: all may look"
    assert (await ring.ask("bob", f"DELETE /v1/jobs/{made.json()['id']}")).status_code == 403


async def check_visible(ring: Ring, who: str) -> None:
    things = ring.things
    for path in (
        f"/v1/jobs/{things['job']}",
        f"/v1/jobs/{things['job']}/results",
        f"/v1/files/{things['file']}/content",
        f"/v1/batches/{things['batch']}",
        f"/v1/deadletters/{things['dead letter']}",
        f"/v1/streams/{things['stream']}",
        "/v1/adapters/hers/versions/1",
        "/v1/models/hers",
        "/v1/training/status?policy=hers",
        "/debug/training?policy=learns",
    ):
        answer = await ring.ask(who, f"GET {path}")
        assert answer.status_code == 200, (who, path, answer.text)


async def check_nothing_has_changed(ring: Ring) -> None:
    await check_visible(ring, "alice")
    job = (await ring.ask("alice", f"GET /v1/jobs/{ring.things['job']}")).json()
    batch = (await ring.ask("alice", f"GET /v1/batches/{ring.things['batch']}")).json()
    adapter = (await ring.ask("alice", "GET /v1/adapters/hers")).json()
    assert (job["status"], batch["cancelling_at"]) == ("queued", None)
    assert (adapter["latest"], adapter["best"], len(adapter["versions"])) == (1, 0, 1)
    assert (await ring.ask("alice", "GET /debug/training?policy=learns")).json()["alive"] == "t"
    assert not ring.worker.cancelled
