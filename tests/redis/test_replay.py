"""POST /v1/replay for tenants, and what is recorded of whose requests."""

from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared.redis import keys
from shared.sequences import SequenceSpec
from tests.redis.api_servers import api, key_file
from tests.redis.scripted_worker import MODEL, Answer, working

ASK: dict[str, Any] = {"model": MODEL, "prompt": "say", "max_tokens": 16}


def script(spec: SequenceSpec) -> Answer:
    return Answer("hello")


async def test_a_tenant_replays_its_own_and_who_did_not_consent_is_not_recorded(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    file, headers = key_file(
        tmp_path, alice={"tenant": "acme"}, bob={"tenant": "bobs"}, carl={"tenant": "acme", "feedback": "no"}
    )
    async with working(redis_url, script), api(redis_url, record_ttl_s=60, api_key_file=file) as server:
        hers = (await server.post("/v1/completions", ASK, headers=headers["alice"])).json()["id"]
        for more, key in (({"collect_trajectory": False}, "alice"), ({"cache": False}, "alice"), ({}, "carl")):
            reply = await server.post("/v1/completions", ASK | more, headers=headers[key])
            assert reply.status_code == 200, reply.text
        assert [key async for key in redis.scan_iter(keys.recording(MODEL, "*"))] == [
            keys.recording(MODEL, f"{hers}-0").encode()
        ]
        foreign = await server.post("/v1/replay", {"id": hers}, headers=headers["bob"])
        unknown = await server.post("/v1/replay", {"id": "cmpl-none"}, headers=headers["bob"])
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "recording_not_found")
        assert foreign.text.replace(hers, "cmpl-none") == unknown.text
        own = await server.post("/v1/replay", {"id": hers}, headers=headers["alice"])
        assert own.status_code != 404, own.text
