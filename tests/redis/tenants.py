"""A server with tenants, one of everything made by alice, and a request of every route that names a thing."""

import contextlib
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
from api.tenants import Rule, rule_of
from shared.learners import LearnerSpec
from shared.process.api_settings import ApiSettings
from shared.redis import keys
from shared.redis.training.tinker_store import TinkerSampler, TinkerSession
from shared.sequences import SamplingParams, SequenceSpec, encode
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
    "PUT /v1/adapters/{name}/split": {"json": {"split": "hers@1:0.5,hers@2:0.5"}},
    "POST /v1/adapters/{name}/versions": {"files": files(mlx_config())},
    "PUT /v1/trainers/{policy}": {"json": {"owner": "b"}},
    "DELETE /v1/trainers/{policy}": {"params": {"owner": "b"}},
    "POST /v1/trainers/{policy}/alerts": {"json": {"policy": "p", "kind": "no_signal", "message": "m", "at_ms": 1}},
    "POST /v1/trainers/{policy}/orders": {"json": {"owner": "b"}},
    "POST /v1/trainers/{policy}/orders/answers": {"json": {"owner": "b", "entry": "1-1", "id": "order-1"}},
    # Anthropic's errors tell the id of the request
    "GET /v1/messages/batches/{batch_id}": {"headers": {"x-request-id": "r"}},
    "GET /v1/messages/batches/{batch_id}/results": {"headers": {"x-request-id": "r"}},
    "POST /v1/messages/batches/{batch_id}/cancel": {"headers": {"x-request-id": "r"}},
    "DELETE /v1/messages/batches/{batch_id}": {"headers": {"x-request-id": "r"}},
}


def named(adapter: str, file: str) -> dict[str, dict[str, Any]]:
    """A request of every route that names an adapter, a policy or a file elsewhere than in its path."""
    upload = {"data": {"name": adapter}, "files": files(mlx_config())}
    said, talk = f"/v1/responses/resp_{adapter}", f"/v1/conversations/conv_{adapter}"
    tinker, learner, asked = "/api/v1", f"{adapter}:train:0", {"model_id": f"{adapter}:train:0", "seq_id": 1}
    run, saved = f"{tinker}/training_runs/{learner}", "checkpoints/weights/a"
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {}}
    passed = {"forward_backward_input": {"data": [datum], "loss_fn": "ppo"}}
    drawn = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 1}
    return {
        "POST /v1/completions": {"json": {"model": adapter, "prompt": "hi"}},
        "POST /v1/chat/completions": {"json": {"model": MODEL, "adapter": f"{adapter}@1", **CHAT}},
        "POST /v1/embeddings": {"json": {"model": adapter, "input": "hi"}},
        "POST /v1/responses": {"json": {"model": adapter, "input": "hi"}},
        "POST /v1/responses/input_tokens": {"json": {"model": adapter, "input": "hi"}},
        "POST /v1/responses/compact": {"json": {"model": adapter, "input": "hi"}},
        "GET /v1/responses/{response_id}": {"path": said},
        "DELETE /v1/responses/{response_id}": {"path": said},
        "POST /v1/responses/{response_id}/cancel": {"path": f"{said}/cancel"},
        "GET /v1/responses/{response_id}/input_items": {"path": f"{said}/input_items"},
        "GET /v1/conversations/{conversation_id}": {"path": talk},
        "POST /v1/conversations/{conversation_id}": {"path": talk, "json": {"metadata": {}}},
        "DELETE /v1/conversations/{conversation_id}": {"path": talk},
        "GET /v1/conversations/{conversation_id}/items": {"path": f"{talk}/items"},
        "POST /v1/conversations/{conversation_id}/items": {"path": f"{talk}/items", "json": {"items": "hi"}},
        "GET /v1/conversations/{conversation_id}/items/{item_id}": {"path": f"{talk}/items/i"},
        "DELETE /v1/conversations/{conversation_id}/items/{item_id}": {"path": f"{talk}/items/i"},
        "POST /v1/messages": {"json": {"model": adapter, "max_tokens": 9, **CHAT}, "headers": {"x-request-id": "r"}},
        "POST /v1/messages/count_tokens": {"json": {"model": adapter, **CHAT}, "headers": {"x-request-id": "r"}},
        "POST /v1/messages/batches": {
            "json": {"requests": [{"custom_id": "a", "params": {"model": adapter, "max_tokens": 9, **CHAT}}]},
            "headers": {"x-request-id": "r"},
        },
        "POST /api/chat": {"json": {"model": adapter, **CHAT}},
        "POST /api/generate": {"json": {"model": adapter, "prompt": "hi"}},
        "POST /api/embed": {"json": {"model": adapter, "input": "hi"}},
        "POST /api/embeddings": {"json": {"model": adapter, "prompt": "hi"}},
        "POST /api/show": {"json": {"model": adapter}},
        "POST /api/pull": {"json": {"model": adapter}},
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
        "POST /v1/rl/rollout": {"json": {"model": adapter, "observations": ["hi"]}},
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
        "POST /api/v1/session_heartbeat": {"json": {"session_id": adapter}},
        "POST /api/v1/sessions/{session_id}/finish": {"path": f"{tinker}/sessions/{adapter}/finish"},
        "GET /api/v1/sessions/{session_id}": {"path": f"{tinker}/sessions/{adapter}"},
        "POST /api/v1/create_model": {"json": {"session_id": adapter, "model_seq_id": 0, "base_model": MODEL}},
        "POST /api/v1/forward_backward": {"json": asked | passed},
        "POST /api/v1/forward": {"json": asked | passed},
        "POST /api/v1/optim_step": {"json": asked | {"adam_params": {}}},
        "POST /api/v1/save_weights": {"json": asked},
        "POST /api/v1/save_weights_for_sampler": {"json": asked},
        "POST /api/v1/load_weights": {
            "json": asked | {"path": f"tinker://{learner}/weights/a", "optimizer": True},
        },
        "POST /api/v1/get_info": {"json": {"model_id": learner}},
        "POST /api/v1/unload_model": {"json": {"model_id": learner}},
        "POST /api/v1/create_sampling_session": {
            "json": {"session_id": adapter, "sampling_session_seq_id": 0, "base_model": MODEL}
        },
        "GET /api/v1/samplers/{sampler_id}": {"path": f"{tinker}/samplers/{adapter}:sample:0"},
        "POST /api/v1/asample": {"json": {"sampling_session_id": f"{adapter}:sample:0", **drawn}},
        "POST /api/v1/retrieve_future": {"json": {"request_id": f"{learner}:1"}},
        "GET /api/v1/training_runs/{run}": {"path": run},
        "GET /api/v1/training_runs/{run}/checkpoints": {"path": f"{run}/checkpoints"},
        "DELETE /api/v1/training_runs/{run}/checkpoints/{segment}/{name}": {"path": f"{run}/{saved}"},
        "PUT /api/v1/training_runs/{run}/checkpoints/{segment}/{name}/ttl": {"path": f"{run}/{saved}/ttl", "json": {}},
        "GET /api/v1/training_runs/{run}/checkpoints/{segment}/{name}/archive": {"path": f"{run}/{saved}/archive"},
        "GET /api/v1/training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls": {
            "path": f"{run}/checkpoints/external_weights/a/external_weights_urls"
        },
        "POST /api/v1/save_weights_external": {"json": asked | {"path": "a"}},
        "POST /api/v1/weights_info": {"json": {"tinker_path": f"tinker://{learner}/weights/a"}},
    }


MAKES = {"POST /v1/adapters", "POST /upload_adapter", "POST /load_adapter", "POST /v1/load_lora_adapter"}
NAMES_NOTHING = {
    "POST /v1/files",
    "POST /v1/conversations",
    "POST /abort_requests",
    "POST /inference/v1/abort_requests",
    "POST /v1/training/resume",
    "POST /api/v1/create_session",
    "GET /api/v1/downloads/{ring_name}/{ticket}/{file}",  # needs no key: tests/redis/test_tinker_downloads.py
    "POST /api/v1/cancel_future",  # of what is not there, or another's, nothing happens
    "POST /api/v1/telemetry",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /v1/replay",  # it names a completion: tests/redis/test_replay.py
    "GET /v1/sessions/{session_id}",  # found under the asker's own tenant alone: tests/redis/test_episodes.py
    "DELETE /v1/sessions/{session_id}",
    "POST /v1/feedback",  # it names an answer: tests/redis/test_feedback.py
}


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


KEY_LINES = [
    line_of(KEYS["alice"], name="alice", tenant="acme"),
    line_of(KEYS["anna"], name="anna", tenant="acme"),
    line_of(KEYS["bob"], name="bob", tenant="bobs", **{"class": "batch"}),
    line_of(KEYS["root"], name="root", role="admin"),
]


@contextlib.asynccontextmanager
async def tenants_ring(
    redis_url: str, redis: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ring]:
    """One server over a worker that answers everything; alice has made `things` on it."""
    monkeypatch.setattr("api.batches.work.LOOK_S", 0.05)
    monkeypatch.setattr("shared.redis.keys.TRAINER_TTL_S", 600)  # alice's trainer beats once
    key_file, adapters = folder / "keys", folder / "adapters"
    key_file.write_text("\n".join(KEY_LINES))
    write(adapters / "good", mlx_config(), lora())
    async with (
        working(redis_url, lambda spec: Answer()) as worker,
        api(redis_url, api_key_file=key_file, adapter_dirs=[adapters]) as server,
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
    kept = {"model": MODEL, "input": "hi", "request_id": "hers"}
    assert (await ring.ask("alice", "POST /v1/responses", json=kept)).status_code == 200
    talk = b'{"id":"conv_hers","created_at":1,"metadata":{}}'
    await ring.server.ring.conversations.create(keys.keeper("acme"), "conv_hers", talk)
    acme, tinker = keys.keeper("tinker of acme"), ring.server.ring.tinker
    await tinker.put(acme, "hers", TinkerSession("hers"))
    await tinker.put(acme, "hers:sample:0", TinkerSampler("hers:sample:0", MODEL))
    spec = LearnerSpec(id="hers:train:0", model=MODEL, rank=1, scale=1.0, owner="acme", keeper=acme)
    await ring.server.ring.learners.create(spec)
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


async def listed(ring: Ring, who: str, route: str, field: str = "id") -> list[str]:
    answer = await ring.ask(who, route)
    assert answer.status_code == 200, answer.text
    return [each[field] for each in answer.json()["data"]]


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
    tinker = ("sessions/hers", "training_runs/hers:train:0", "samplers/hers:sample:0")
    for path in ("/v1/responses/resp_hers", "/v1/conversations/conv_hers", *(f"/api/v1/{each}" for each in tinker)):
        answer = await ring.ask("anna", f"GET {path}")
        assert answer.status_code == 200, (path, answer.text)
    job = (await ring.ask("alice", f"GET /v1/jobs/{ring.things['job']}")).json()
    batch = (await ring.ask("alice", f"GET /v1/batches/{ring.things['batch']}")).json()
    adapter = (await ring.ask("alice", "GET /v1/adapters/hers")).json()
    assert (job["status"], batch["cancelling_at"]) == ("queued", None)
    assert (adapter["latest"], adapter["best"], len(adapter["versions"])) == (1, 0, 1)
    assert (await ring.ask("alice", "GET /debug/training?policy=learns")).json()["alive"] == "t"
    assert not ring.worker.cancelled
