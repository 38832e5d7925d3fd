"""What the tests of batches send and ask."""

import json
from typing import Any

from redis.asyncio import Redis

from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from tests.redis.api_servers import Api
from tests.redis.scripted_worker import MODEL
from tests.waiting import wait_until

URL = "/v1/completions"
MESSAGES = "/v1/messages/batches"
DAY = {"endpoint": URL, "completion_window": "24h"}


async def join_worker(redis: Redis) -> None:
    status = WorkerStatus("w1", MODEL, "host", 1, "ready", 0, 8, 0, 0, 1, 0.0, 0, 1, 2**40)
    await WorkerRegistry(redis).heartbeat(status)


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body, **more}


def text(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


async def uploaded(server: Api, data: bytes, purpose: str = "batch") -> Any:
    files = {"file": ("requests.jsonl", data)}
    return await server.http.post("/v1/files", data={"purpose": purpose}, files=files)


async def created(server: Api, data: bytes) -> str:
    file_id = (await uploaded(server, data)).json()["id"]
    answer = await server.post("/v1/batches", {**DAY, "input_file_id": file_id})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def batch_of(server: Api, batch_id: str) -> Any:
    return (await server.http.get(f"/v1/batches/{batch_id}")).json()


async def in_state(server: Api, batch_id: str, *states: str) -> Any:
    found: dict[str, Any] = {}

    async def reached() -> bool:
        found.update(await batch_of(server, batch_id))
        return found["status"] in states

    await wait_until(reached)
    return found


async def content(server: Api, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(each) for each in (await server.http.get(f"/v1/files/{file_id}/content")).text.splitlines()]
