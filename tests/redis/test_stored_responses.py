"""Responses that are kept, with the openai package: followed, fetched, deleted, in conversations, in the background."""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from shared.errors import UnknownModelError
from shared.frames import Finish
from shared.redis import keys
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker
from tests.redis.sequences import end_leases
from tests.unit.api_texts import codec
from tests.waiting import wait_until


def script(spec: SequenceSpec) -> Answer:
    asked = codec().decode(spec.prompt_ids)
    if "hold" in asked.splitlines()[-1]:
        return Answer("held back", hold_at=3)
    return Answer("cut", finish=Finish("length")) if "cut" in asked else Answer("hello")


@pytest.fixture
async def client(server: Api) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt(worker: ScriptedWorker) -> str:
    return codec().decode(worker.specs[-1].prompt_ids)


async def test_a_response_follows_another_one(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    first = await client.responses.create(model=MODEL, input="one", instructions="be kind")
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt(worker) == "user: one\nassistant: hello\nuser: two\n", "without the instructions of the turn before"
    third = await client.responses.create(model=MODEL, input="three", previous_response_id=second.id, store=False)
    assert prompt(worker).startswith("user: one\nassistant: hello\nuser: two\nassistant: hello\nuser: three")
    with pytest.raises(openai.NotFoundError) as raised:
        await client.responses.create(model=MODEL, input="four", previous_response_id=third.id)
    assert raised.value.code == "response_not_found" and raised.value.param == "previous_response_id"
    branch = await client.responses.create(model=MODEL, input="other", previous_response_id=first.id)
    assert branch.previous_response_id == first.id
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="follows"):
        await client.responses.create(model=MODEL, input="x", previous_response_id=second.id)


async def test_a_stored_response_is_found_listed_and_deleted(client: AsyncOpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "7"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = [{"role": "user", "content": "hi"}, thought, call, output, {"role": "user", "content": "so?"}]
    made = await client.responses.create(model=MODEL, input=said, metadata={"a": "b"})  # type: ignore[arg-type]
    found = await client.responses.retrieve(made.id)
    assert found.model_dump() == made.model_dump()
    async with client.responses.stream(model=MODEL, input="hi") as stream:
        last = await stream.get_final_response()
    assert (await client.responses.retrieve(last.id)).output_text == "hello"
    items = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
    kinds = ["message", "reasoning", "function_call", "function_call_output", "message"]
    assert [item.type for item in items] == kinds
    assert len({item.id for item in items}) == 5
    newest = await client.responses.input_items.list(made.id, limit=1)
    assert [item.type for item in newest.data] == ["message"] and newest.has_more
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(made.id)
    await client.responses.delete(made.id)
    for gone in (client.responses.retrieve(made.id), client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_a_conversation_grows_by_its_responses(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    begun: list[Any] = [{"type": "message", "role": "user", "content": "one"}]
    assert (await client.conversations.items.list((await client.conversations.create(items=[])).id)).data == []
    made = await client.conversations.create(items=begun, metadata={"topic": "sums"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"topic": "sums"}
    await client.conversations.update(made.id, metadata={"topic": "none"})
    answered = await client.responses.create(model=MODEL, input="two", conversation=made.id)
    assert answered.conversation is not None and answered.conversation.id == made.id
    async with client.responses.stream(model=MODEL, input="three", conversation={"id": made.id}, store=False) as stream:
        await stream.until_done()
    assert prompt(worker).startswith("user: one\nuser: two\nassistant: hello\nuser: three")
    items = [item async for item in client.conversations.items.list(made.id, limit=2, order="asc")]
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    one = await client.conversations.items.retrieve(items[0].id, conversation_id=made.id)  # type: ignore[arg-type]
    assert one == items[0]
    await client.conversations.items.delete(items[0].id, conversation_id=made.id)  # type: ignore[arg-type]
    added = await client.conversations.items.create(made.id, items=begun)
    assert len(added.data) == 1
    assert len((await client.conversations.items.list(made.id)).data) == 5
    with pytest.raises(openai.BadRequestError, match="conversation"):
        await client.responses.create(model=MODEL, input="x", previous_response_id=answered.id)
    with pytest.raises(openai.BadRequestError, match="exclude"):
        await client.responses.create(model=MODEL, input="x", previous_response_id="r", conversation=made.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve("nothing", conversation_id=made.id)
    await client.conversations.delete(made.id)
    for gone in (
        client.conversations.retrieve(made.id),
        client.responses.create(model=MODEL, input="x", conversation=made.id),
        client.conversations.retrieve(answered.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_a_background_response_is_polled(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    begun = await client.responses.create(model=MODEL, input="hold", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    with pytest.raises(openai.ConflictError, match="not ended"):
        await client.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    worker.go.set()
    found = await ended(client, begun.id)
    assert (found.status, found.output_text) == ("completed", "held back")
    assert found.usage is not None and found.usage.output_tokens == len(Answer("held back").tokens)
    await client.responses.create(model=MODEL, input="and?", previous_response_id=begun.id)
    assert prompt(worker) == "user: hold\nassistant: held back\nuser: and?\n"
    assert (await client.responses.cancel(begun.id)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="events"):
        await client.responses.retrieve(begun.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="store"):
        await client.responses.create(model=MODEL, input="x", background=True, store=False)


async def ended(client: AsyncOpenAI, name: str) -> Any:
    async def is_over() -> bool:
        return (await client.responses.retrieve(name)).status not in ("queued", "in_progress")

    await wait_until(is_over)
    return await client.responses.retrieve(name)


async def test_a_background_stream_goes_on_after_any_event_on_any_process(
    client: AsyncOpenAI, server: Api, worker: ScriptedWorker, redis_url: str
) -> None:
    seen: list[Any] = []
    stream = await client.responses.create(model=MODEL, input="hold", background=True, stream=True)
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta" and event.delta == "l":
            break
    await stream.close()
    name = seen[0].response.id
    async with api(redis_url) as other, AsyncOpenAI(base_url=f"{other.url}/v1", api_key="none") as theirs:
        after = seen[-1].sequence_number
        again = await theirs.responses.retrieve(name, stream=True, starting_after=after)
        worker.go.set()
        rest = [event async for event in again]
    assert [event.sequence_number for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    assert rest[-1].type == "response.completed" and rest[-1].response.output_text == "held back"
    text = "".join(e.delta for e in [*seen, *rest] if e.type == "response.output_text.delta")
    assert text == "held back"
    whole = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert whole == [*seen, *rest]
    server_events = keys.kept_events(keys.keeper(""), name)
    assert 0 < await server.ring.redis.ttl(server_events) <= keys.SEQUENCE_TTL_S
    await server.ring.redis.delete(server_events)
    with pytest.raises(openai.NotFoundError, match="an hour"):
        await client.responses.retrieve(name, stream=True)


async def test_a_background_response_outlives_the_process_that_took_it_in(
    redis_url: str, redis: Redis, worker: ScriptedWorker
) -> None:
    async with api(redis_url) as first, AsyncOpenAI(base_url=f"{first.url}/v1", api_key="none") as client:
        made = await client.conversations.create()
        stream = await client.responses.create(
            model=MODEL, input="hold", background=True, stream=True, conversation=made.id
        )
        seen = [await anext(aiter(stream)) for _ in range(5)]
        name = seen[0].response.id  # type: ignore[union-attr]
    await end_leases(redis, "background")
    async with api(redis_url) as second, AsyncOpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
        worker.go.set()
        assert (await ended(client, name)).output_text == "held back"
        whole = [event async for event in await client.responses.retrieve(name, stream=True)]
        assert whole[:5] == seen
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        items = (await client.conversations.items.list(made.id, order="asc")).data
        assert [item.role for item in items] == ["user", "assistant"]  # type: ignore[union-attr]
        assert await second.ring.redis.zcard(keys.due("background")) == 0
    assert len(worker.specs) == 1, "it was computed once"


async def test_a_background_response_is_cancelled_and_deleted(client: AsyncOpenAI, worker: ScriptedWorker) -> None:
    begun = await client.responses.create(model=MODEL, input="hold", background=True)
    await wait_until(lambda: bool(worker.specs))
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    await wait_until(lambda: bool(worker.cancelled))
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    other = await client.responses.create(model=MODEL, input="hold", background=True)
    await client.responses.delete(other.id)
    await wait_until(lambda: len(worker.cancelled) == 2)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(other.id)


async def test_what_is_kept_stays_within_its_bound_and_its_time(redis_url: str, worker: ScriptedWorker) -> None:
    async with api(redis_url, response_store_mb=1, response_ttl_s=60) as server:
        made = []
        for _ in range(5):
            response = await server.post("/v1/responses", {"input": "hi", "metadata": {"x": "y" * 300_000}})
            made.append(response.json()["id"])
        found = [(await server.http.get(f"/v1/responses/{name}")).status_code for name in made]
        assert found == [404, 404, 200, 200, 200]
        kept = keys.kept(keys.keeper(""), made[-1])
        assert 0 < await server.ring.redis.ttl(kept) <= 60
        total = int(await server.ring.redis.hget(keys.kept_sizes(keys.keeper("")), "all"))  # type: ignore[misc]
        assert 900_000 < total <= 1 << 20
        for name in made[2:]:
            await server.http.delete(f"/v1/responses/{name}")
        assert await server.ring.redis.hgetall(keys.kept_sizes(keys.keeper(""))) == {b"all": b"0"}  # type: ignore[misc]


async def test_what_runs_is_not_let_go_and_leaves_room_for_no_more(redis_url: str, worker: ScriptedWorker) -> None:
    body = {"input": "hold", "background": True, "metadata": {"x": "y" * 200_000}}
    async with api(redis_url, response_store_mb=1) as server:
        made = [await server.post("/v1/responses", body) for _ in range(3)]
        assert [answer.status_code for answer in made] == [200, 200, 429], made[-1].text
        assert made[-1].headers["retry-after"]
        await server.post("/v1/responses", {"input": "hi"})
        running = [(await server.http.get(f"/v1/responses/{each.json()['id']}")).json()["status"] for each in made[:2]]
        assert set(running) <= {"queued", "in_progress"}
        worker.go.set()
        for each in made[:2]:
            await wait_until(partial(has_ended, server, each.json()["id"]))
        last = await server.post("/v1/responses", body)
        assert last.status_code == 200, last.text
        await wait_until(partial(has_ended, server, last.json()["id"]))
        talk = (await server.post("/v1/conversations", {"items": "x" * 700_000})).json()["id"]
        full = await server.post(f"/v1/conversations/{talk}/items", {"items": "x" * 700_000})
        assert full.status_code == 400 and full.json()["error"]["param"] == "conversation"


async def has_ended(server: Api, name: str) -> bool:
    return (await server.http.get(f"/v1/responses/{name}")).json()["status"] == "completed"


async def test_a_background_response_that_nobody_can_read_ends_as_failed(
    client: AsyncOpenAI, server: Api, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(name: str) -> Any:
        raise UnknownModelError(f"model {name!r} does not exist")

    monkeypatch.setattr(server.ring, "known", unknown)
    begun = await client.responses.create(model=MODEL, input="hold", background=True)
    failed = await ended(client, begun.id)
    assert failed.status == "failed" and "does not exist" in failed.error.message
    assert await server.ring.redis.zcard(keys.due("background")) == 0


async def test_a_server_that_keeps_nothing_says_so(redis_url: str, worker: ScriptedWorker, redis: Redis) -> None:
    async with api(redis_url, response_ttl_s=0) as server:
        assert (await server.post("/v1/responses", {"input": "hi"})).status_code == 200
        for wanted in ({"store": True}, {"background": True}, {"previous_response_id": "r"}, {"conversation": "c"}):
            refused = (await server.post("/v1/responses", {"input": "hi", **wanted})).json()["error"]
            assert refused["code"] == "unsupported_parameter" and refused["param"] == next(iter(wanted))
        assert (await server.post("/v1/conversations", {})).status_code == 400
    assert not [key async for key in redis.scan_iter("parallm:kept:*")]


async def test_another_key_s_response_is_not_there(redis_url: str, worker: ScriptedWorker) -> None:
    async with api(redis_url, api_key="first-key-of-these,second-key-of-these") as server:

        async def ask(method: str, path: str, key: str, **arguments: Any) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            return await server.http.request(method, path, headers=headers, **arguments)

        made = (await ask("POST", "/v1/responses", "first-key-of-these", json={"input": "hi"})).json()["id"]
        talk = (await ask("POST", "/v1/conversations", "first-key-of-these", json={})).json()["id"]
        for path in (f"/v1/responses/{made}", f"/v1/responses/{made}/input_items", f"/v1/conversations/{talk}"):
            assert (await ask("GET", path, "first-key-of-these")).status_code == 200
            assert (await ask("GET", path, "second-key-of-these")).status_code == 404
        for body in ({"previous_response_id": made}, {"conversation": talk}):
            answer = await ask("POST", "/v1/responses", "second-key-of-these", json={"input": "hi", **body})
            assert answer.status_code == 404, answer.text
        assert (await ask("DELETE", f"/v1/responses/{made}", "second-key-of-these")).status_code == 404
        assert (await ask("GET", f"/v1/responses/{made}", "first-key-of-these")).status_code == 200


async def test_wrong_bodies_are_refused_by_name(server: Api) -> None:
    for body, param in (
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"conversation": {}}, "conversation.id"),
        ({"store": "maybe"}, "store"),
    ):
        refused = await server.post("/v1/responses", {"input": "hi", **body})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    for body, param in (({"metadata": {"a": "b" * 513}}, "metadata.a"), ({"items": [{"type": "x"}]}, "items[0].type")):
        refused = await server.post("/v1/conversations", body)
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith(param[:8]), refused.text
    answer = await server.http.get("/v1/responses/resp_x?starting_after=-5")
    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["type"] == "invalid_request_error"
