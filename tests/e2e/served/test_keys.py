"""What a run leaves in Redis: documented keys only, each with a time to live."""

from fnmatch import fnmatchcase

import httpx

from api.cli.client import InferenceClient, JobRequest
from shared.jobs import JobInput
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs.ticks import queue_name
from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S, wait_until


async def test_a_run_leaves_no_key_without_owner_or_ttl(served: Ring) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "stream": True}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    async with InferenceClient(served.url) as client:
        job = await client.submit(JobRequest(kind="generate", model=MODEL, max_tokens=8), [JobInput("hello")])
        await client.wait(job.id)
    redis = connect(served.redis_url)

    async def no_tick_waits() -> bool:  # the last one is taken out of arq's queue after its job has ended
        return not await redis.exists(queue_name(redis))

    try:
        await wait_until(no_tick_waits)
        found = [key.decode() async for key in redis.scan_iter(count=1000)]
        assert len(found) > 8
        undocumented = [key for key in found if not any(fnmatchcase(key, glob(k.pattern)) for k in keys.DOCUMENTED)]
        immortal = [key for key in found if await redis.ttl(key) == -1]
    finally:
        await redis.aclose()
    assert undocumented == []
    assert immortal == []


def glob(pattern: str) -> str:
    return pattern.replace("[", "[[]")
