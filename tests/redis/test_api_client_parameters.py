"""What other clients send besides OpenAI's core, through a real Redis, answered by a scripted worker."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.openai.chat import UNUSED_HEADER
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, Answer, ScriptedWorker, working
from tests.unit.api_texts import codec
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "hi"}]


def script(spec: SequenceSpec) -> Answer:
    """The prompt decides."""
    return Answer("held back", hold_at=2) if codec().decode(spec.prompt_ids).startswith("hold") else Answer("hello")


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with working(redis_url, script) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        yield serving


# -- what happens to new requests under a pause


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/embeddings", {"input": "say"}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_a_server_may_refuse_new_requests_while_paused(redis_url: str, path: str, body: dict[str, Any]) -> None:
    async with api(redis_url, pause_new_requests="refuse") as refusing:
        assert (await refusing.http.post("/pause")).status_code == 200, "nobody is there to wait for"
        async with working(redis_url, script):  # comes later, and does not look at the pause
            refused = await refusing.post(path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused")
            assert "POST /resume" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            await refusing.ring.redis.delete("parallm:pause")
            assert (await refusing.post("/v1/completions", {"prompt": "say"})).status_code == 200


async def test_by_default_a_request_under_a_pause_waits(redis_url: str) -> None:
    async with api(redis_url) as waiting:
        assert (await waiting.http.post("/pause")).status_code == 200
        async with working(redis_url, script) as worker:
            worker.paused = True
            asking = asyncio.create_task(waiting.post("/v1/completions", {"prompt": "say"}))
            await wait_until(lambda: waiting.ring.load.under_way == 1)
            worker.paused = False
            assert (await asking).status_code == 200


# -- hints and limits


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reasoning_effort_that_the_template_does_not_know_is_said_in_a_header(
    server: Api, stream: bool
) -> None:
    body = {"messages": HELLO, "reasoning_effort": "high", "stream": stream}
    response = await server.post("/v1/chat/completions", body)
    assert (response.status_code, response.headers[UNUSED_HEADER]) == (200, "reasoning_effort")
    body = {"input": "hi", "reasoning": {"effort": "low"}, "stream": stream}
    response = await server.post("/v1/responses", body)
    assert (response.status_code, response.headers[UNUSED_HEADER]) == (200, "reasoning.effort")
    assert UNUSED_HEADER not in (await server.post("/v1/chat/completions", {"messages": HELLO})).headers


async def test_max_tokens_beyond_the_context_are_cut_to_it_where_the_server_says_so(
    redis_url: str, server: Api, worker: ScriptedWorker
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "say", "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 32_000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 32_000}}),
        ("/generate", {"prompt": "say", "max_tokens": 32_000}),
    ]
    for path, body in asked:
        response = await server.post(path, body)
        assert response.json()["error"]["code"] == "context_length_exceeded", path
    async with api(redis_url, clamp_max_tokens=True) as clamping:
        for path, body in asked:
            response = await clamping.post(path, body)
            assert response.status_code == 200, (path, response.text)
            spec = worker.specs[-1]
            assert spec.sampling.max_tokens == CARD.context_length - len(spec.prompt_ids)
        full = await clamping.post("/v1/completions", {"prompt": "x" * CARD.context_length, "max_tokens": 1})
        assert full.json()["error"]["code"] == "context_length_exceeded", "no room for any token"
