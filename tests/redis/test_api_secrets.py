"""A key is nowhere but in its owner's hands; and every log line of a request names the request."""

import logging

import httpx
import pytest
import structlog
from redis.asyncio import Redis

from api.http.api_keys import new_key
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL, Answer, working


async def everything(redis: Redis) -> bytes:
    """All keys and values of Redis."""
    seen = b""
    async for key in redis.scan_iter(count=1000):
        kind = (await redis.type(key)).decode()
        read = {
            "string": redis.get,
            "hash": redis.hgetall,
            "list": lambda k: redis.lrange(k, 0, -1),
            "zset": lambda k: redis.zrange(k, 0, -1, withscores=True),
            "stream": lambda k: redis.xrange(k),
            "set": redis.smembers,
        }[kind]
        seen += key + repr(await read(key)).encode()
    return seen


async def test_no_key_reaches_a_log_line_or_redis(
    redis_url: str, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    key, wrong = new_key(), new_key()
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        async with (
            working(redis_url, lambda spec: Answer()),
            api(redis_url, api_key=key, rate_limit="99/hour") as server,
        ):
            body = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_event_ids": True}}
            good = {"authorization": f"Bearer {key}", "x-request-id": "mine-1"}
            assert (await server.http.post("/v1/completions", json=body, headers=good)).status_code == 200
            broken = await server.http.post("/v1/completions", content=b"{" + key.encode(), headers=good)
            assert broken.status_code == 400
            for header in (f"Bearer {wrong}", key, f"Basic {key}"):
                refused = await server.http.post("/v1/completions", json=body, headers={"authorization": header})
                assert refused.status_code == 401
                assert key not in refused.text and wrong not in refused.text
            job = {"kind": "generate", "model": MODEL, "prompts": ["x"]}
            assert (await server.http.post("/v1/jobs", json=job, headers=good)).status_code == 202
            with pytest.raises(httpx.HTTPError):
                await server.http.get("/v1/models", headers={**good, "x-request-id": "a\nb"})
        stored = await everything(redis)
    logged = repr(lines) + caplog.text
    assert len(stored) > 1000 and b"parallm:limit" in stored and len(lines) > 5
    for secret in (key, wrong):
        assert secret not in logged and secret.encode() not in stored
    of_requests = [line for line in lines if line["event"] in ("api.request", "api.error", "api.client_left")]
    assert of_requests and all(line.get("request_id") for line in of_requests)
    streamed = next(line for line in of_requests if line.get("work"))
    assert streamed["request_id"] == "mine-1" and streamed["work"].startswith("cmpl-")
    assert streamed["key"].startswith("key-"), "a name stands for the key"
