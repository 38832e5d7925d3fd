"""Tenants: who may do what with a thing, and what keeps the tenant of who made it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from shared.owners import ADMINS
from shared.redis import keys
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.trajectories import LiveTrajectory, Trajectory
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL
from tests.redis.tenants import (
    Ring,
    check_visible,
    listed,
    tenants_ring,
)
from tests.redis.test_api_adapters import files
from tests.redis.test_api_training import ONE
from tests.unit.adapter_files import lora, mlx_config


@pytest.fixture
async def ring(redis_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ring]:
    async with tenants_ring(redis_url, redis, tmp_path, monkeypatch) as made:
        yield made


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
