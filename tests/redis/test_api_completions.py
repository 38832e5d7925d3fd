"""Completions and chats through a real Redis, answered by a scripted worker."""

import asyncio
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from shared.frames import Finish
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL, Answer, ScriptedWorker, working
from tests.unit.api_texts import bundle, codec, ids
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "hi"}]


def script(spec: SequenceSpec) -> Answer:
    """The prompt decides."""
    prompt = codec().decode(spec.prompt_ids)
    if prompt.startswith("fail"):
        return Answer(finish=Finish("error", None, "context_length_exceeded", "too long for this worker"))
    if prompt.startswith("late"):
        return Answer(finish=Finish("deadline"))
    if prompt.startswith("hold"):
        return Answer("held back", hold_at=2)
    if prompt.startswith("long"):
        return Answer("héllo 👍", Finish("length"))
    return Answer("hello")


async def test_a_completion_is_whole_and_counted(server: Api, worker: ScriptedWorker) -> None:
    response = await server.post("/v1/completions", {"model": MODEL, "prompt": "say", "seed": 7})
    body = response.json()
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (spec,) = worker.specs
    assert (spec.prompt_ids, spec.sampling.seed, spec.sampling.max_tokens) == (
        tuple(ids("say")),
        7,
        CARD.context_length - 3,
    )
    assert spec.api == server.ring.api_id
    assert spec.deadline_ms > spec.enqueued_ms


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/responses", {"input": "say"}),
        ("/generate", {"prompt": "say"}),
    ],
)
async def test_a_request_that_does_not_say_gets_the_servers_default(
    redis_url: str, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    async with api(redis_url, default_max_tokens=5) as server:
        response = await server.post(path, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert [spec.sampling.max_tokens for spec in worker.specs] == [5]


async def test_a_chat_goes_through_the_models_template(server: Api, worker: ScriptedWorker) -> None:
    response = await server.post("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 9})
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    (spec,) = worker.specs
    assert codec().decode(spec.prompt_ids) == "user: hi\n"
    assert spec.sampling.max_tokens == 9


@pytest.mark.parametrize("prompt", ["say", "long"])
async def test_a_stream_says_what_the_whole_answer_says(server: Api, prompt: str) -> None:
    body = {"model": MODEL, "prompt": prompt, "logprobs": 1, "echo": True}
    whole = (await server.post("/v1/completions", body)).json()
    async with server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}) as events:
        chunks = await events.all()
    assert events.done
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    for field, values in whole["choices"][0]["logprobs"].items():
        assert values == [value for choice in choices for value in choice["logprobs"][field]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_can_tell_its_counts_with_every_chunk(server: Api, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "long"} if path == "/v1/completions" else {"messages": HELLO}
    async with server.stream(path, {**body, "n": 2, "stream_options": options}) as events:
        chunks = await events.all()
    *parts, last = chunks
    for index in (0, 1):
        own = [chunk["usage"] for chunk in parts if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        assert len(counts) > 1 and counts == sorted(counts)
        assert own[-1]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert 2 * counts[-1] == last["usage"]["completion_tokens"]
    async with server.stream(path, {**body, "stream_options": {"continuous_usage_stats": True}}) as events:
        assert all("usage" not in chunk for chunk in await events.all()), "as vLLM: only with include_usage"


async def test_n_samples_share_a_group_and_draw_from_different_seeds(server: Api, worker: ScriptedWorker) -> None:
    body = {"prompt": ["say", "long"], "n": 3, "seed": 5}
    choices = (await server.post("/v1/completions", body)).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["text"] for choice in choices] == ["hello"] * 3 + ["héllo 👍"] * 3
    groups: dict[str, set[int]] = {}
    for spec in worker.specs:
        groups.setdefault(spec.group, set()).add(spec.sampling.seed)
    assert [len(seeds) for seeds in groups.values()] == [3, 3]
    assert all(5 in seeds for seeds in groups.values())


async def test_a_chat_stream_with_n_opens_every_choice_with_its_role(server: Api) -> None:
    async with server.stream("/v1/chat/completions", {"messages": HELLO, "n": 2}) as events:
        chunks = [chunk["choices"][0] for chunk in await events.all()]
    assert [(c["index"], c["delta"]) for c in chunks[:2]] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
    ]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["delta"].get("content", "") for chunk in own) == "hello"
        assert own[-1]["finish_reason"] == "stop"


async def test_the_prompt_alone_can_be_scored(server: Api, worker: ScriptedWorker) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert worker.specs[0].kind == "score"


async def test_ids_go_in_and_out(server: Api) -> None:
    body = {"prompt": ids("say"), "return_token_ids": True, "prompt_logprobs": 0}
    choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids("say")
    assert codec().decode(choice["token_ids"]) == "hello"
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids("a")[0])]["logprob"] == -1.0


@pytest.mark.parametrize(
    ("prompt", "status", "code"), [("fail", 400, "context_length_exceeded"), ("late", 504, "deadline_exceeded")]
)
async def test_what_a_worker_refuses_is_an_error(server: Api, prompt: str, status: int, code: str) -> None:
    response = await server.post("/v1/completions", {"prompt": prompt})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    async with server.stream("/v1/completions", {"prompt": prompt}) as events:
        chunks = await events.all()
    assert chunks[-1]["error"]["code"] == code
    assert events.done, "[DONE] comes after an error, too"


async def test_one_failed_choice_ends_the_request_and_cancels_the_others(server: Api, worker: ScriptedWorker) -> None:
    response = await server.post("/v1/completions", {"prompt": ["hold", "fail"]})
    assert response.status_code == 400
    await wait_until(lambda: len(worker.cancelled) == 1)


async def test_a_deadline_holds_even_when_no_worker_takes_the_sequence(redis_url: str) -> None:
    redis = connect(redis_url)
    await ScriptedWorker(redis, script).join()  # it never claims
    async with api(redis_url, request_timeout_s=0.1) as server:
        response = await server.post("/v1/completions", {"prompt": "say"})
        depth = await server.ring.queue(MODEL).depth()
    await redis.aclose()
    assert response.status_code == 504
    assert depth["interactive"].waiting <= 1


async def test_a_client_that_leaves_a_stream_frees_its_rows(server: Api, worker: ScriptedWorker) -> None:
    async with server.stream("/v1/completions", {"prompt": "hold", "n": 2}) as events:
        await events.next()
        await wait_until(lambda: len(worker.specs) == 2)
    await wait_until(lambda: len(worker.cancelled) == 2)


async def test_a_client_that_leaves_a_whole_answer_frees_its_row(server: Api, worker: ScriptedWorker) -> None:
    asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "hold"}))
    await wait_until(lambda: len(worker.specs) == 1)
    asking.cancel()
    await wait_until(lambda: len(worker.cancelled) == 1)


async def test_a_client_that_leaves_before_any_worker_came_leaves_the_queue_empty(redis_url: str) -> None:
    redis = connect(redis_url)
    await ScriptedWorker(redis, script).join()
    async with api(redis_url) as server:

        async def waiting(count: int) -> bool:
            return (await server.ring.queue(MODEL).depth())["interactive"].waiting == count

        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "hold"}))
        await wait_until(lambda: waiting(1))
        asking.cancel()
        await wait_until(lambda: waiting(0))
    await redis.aclose()


async def test_a_full_queue_is_429_with_retry_after(redis_url: str) -> None:
    redis = connect(redis_url)
    await ScriptedWorker(redis, script).join()
    async with api(redis_url, max_queue_size=1) as server:
        response = await server.post("/v1/completions", {"prompt": "say", "n": 2})
    await redis.aclose()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"


async def test_a_model_without_a_live_worker_is_503_and_an_unknown_one_404(redis_url: str) -> None:
    redis = connect(redis_url)
    await WorkerRegistry(redis).register_model(CARD, bundle())
    async with api(redis_url) as server:
        known = await server.post("/v1/completions", {"model": MODEL, "prompt": "say"})
        unknown = await server.post("/v1/completions", {"model": "nobody", "prompt": "say"})
        unnamed = await server.post("/v1/completions", {"prompt": "say"})
        listed = (await server.http.get("/v1/models")).json()
        ready = await server.http.get("/readyz")
    await redis.aclose()
    assert (known.status_code, known.headers["retry-after"]) == (503, "2")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert unnamed.status_code == 503
    assert listed["data"] == []
    assert (ready.status_code, ready.json()["reason"]) == (503, "no worker takes work")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": [[1], []]}, None),
        ({"prompt": [10_000]}, "token_out_of_range"),
        ({"prompt": "a" * 256}, "context_length_exceeded"),
        ({"prompt": "a", "max_tokens": 256}, "context_length_exceeded"),
        ({"prompt": "a", "min_tokens": 256}, None),
    ],
)
async def test_impossible_prompts_are_refused_before_the_queue(
    server: Api, worker: ScriptedWorker, body: dict[str, Any], code: str | None
) -> None:
    response = await server.post("/v1/completions", body)
    assert response.status_code == 400
    if code:
        assert response.json()["error"]["code"] == code
    assert worker.specs == []


async def test_models_and_health_tell_what_is_served(server: Api) -> None:
    (model,) = (await server.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 256)
    assert (await server.http.get(f"/v1/models/{MODEL}")).json() == model
    assert (await server.http.get("/v1/models/nobody")).status_code == 404
    health = (await server.http.get("/health")).json()
    assert (health["status"], health["model_loaded"], health["queue_depth"]) == ("ok", True, 0)
    assert [worker["state"] for worker in health["workers"]] == ["ready"]
    assert (await server.http.get("/readyz")).status_code == 200
    assert (await server.http.get("/livez")).status_code == 200


async def test_the_openai_client_reads_our_streams_and_errors(server: Api) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)  # type: ignore[arg-type]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
        assert text == "hello"
        import openai

        failing = await client.completions.create(model=MODEL, prompt="fail", stream=True)
        with pytest.raises(openai.APIError, match="too long for this worker"):
            async for _ in failing:
                pass


async def test_the_description_of_the_api_is_complete(server: Api) -> None:
    described = (await server.http.get("/openapi.json")).json()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/jobs", "/v1/models", "/health"):
        assert path in described["paths"]
    assert "429" in described["paths"]["/v1/completions"]["post"]["responses"]


async def test_a_model_may_be_called_what_its_workers_were_given(redis_url: str, redis: Redis) -> None:
    registry = WorkerRegistry(redis)
    async with working(redis_url, lambda spec: Answer("hi")), api(redis_url) as server:
        for source in ("org/tiny-4bit", "models/tiny"):  # of two workers
            await registry.register_model(msgspec.structs.replace(CARD, sources=(source,)), bundle())
        for model in ("org/tiny-4bit", "models/tiny", MODEL):
            answer = await server.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 3})
            assert (answer.status_code, answer.json()["model"]) == (200, model)
        job = await server.post("/v1/jobs", {"kind": "generate", "model": "org/tiny-4bit", "prompts": ["a"]})
        assert job.json()["model"] == MODEL
        assert (await server.http.get("/v1/models/org/tiny-4bit")).json()["id"] == MODEL
        unknown = await server.post("/v1/completions", {"model": "other/tiny-4bit", "prompt": "a"})
        assert unknown.json()["error"]["code"] == "model_not_found"
        await registry.register_model(msgspec.structs.replace(CARD, base_sha256="c" * 64), bundle())
        assert (await registry.card(MODEL)).sources == ()  # type: ignore[union-attr]  # other weights
