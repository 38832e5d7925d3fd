"""A stream goes on after its connection, and after its api process, are gone."""

import asyncio
import time
from typing import Any

import pytest

from api.generation import resume as api_resume
from shared.redis import keys
from shared.redis.connection.client import ask, connect
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Events, api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.waiting import wait_until

TEXT = "a stream that outlives the one who began it: 👍é."
BODY = {
    "prompt": "go",
    "max_tokens": 100,
    "logprobs": 0,
    "stream_options": {"include_event_ids": True, "include_usage": True},
}


def held(spec: SequenceSpec) -> Answer:
    return Answer(TEXT, hold_at=12)


def text_of(*parts: Events) -> str:
    return "".join(choice["text"] for part in parts for chunk in part.chunks for choice in chunk["choices"])


async def read(events: Events, chunks: int) -> None:
    for _ in range(chunks):
        assert await events.next() is not None


async def test_another_process_goes_on_where_the_client_stopped_reading(redis_url: str) -> None:
    async with working(redis_url, held) as worker, api(redis_url) as first, api(redis_url) as second:
        async with first.stream("/v1/completions", BODY) as begun:
            await read(begun, 7)
        async with second.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await read(resumed, 1)  # all that was missed, in one chunk
            assert worker.routes == {f"{begun.chunks[0]['id']}-0": second.ring.api_id}
            worker.go.set()
            await resumed.all()
    assert resumed.done
    assert text_of(begun, resumed) == TEXT
    assert resumed.chunks[-1]["usage"]["completion_tokens"] == len(TEXT.encode()) + 1
    assert worker.cancelled == []


async def test_a_finished_stream_can_be_read_again_from_the_start(redis_url: str) -> None:
    async with working(redis_url, lambda spec: Answer(TEXT)), api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await begun.all()
        async with server.resume(begun.chunks[0]["id"], "") as again:
            await again.all()
        async with server.resume(begun.chunks[0]["id"], begun.last_event_id) as nothing:
            await nothing.all()
    assert text_of(again) == text_of(begun) == TEXT
    assert again.chunks[-1]["usage"] == begun.chunks[-1]["usage"]
    assert text_of(nothing) == ""
    assert nothing.done


async def test_a_chat_with_several_choices_resumes_each_of_them(redis_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream_options": {"include_event_ids": True}}
    async with working(redis_url, held) as worker, api(redis_url) as first, api(redis_url) as second:
        async with first.stream("/v1/chat/completions", body) as begun:
            await read(begun, 9)
        worker.go.set()
        async with second.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await resumed.all()
    for index in (0, 1):
        own = [c for part in (begun, resumed) for k in part.chunks for c in k["choices"] if c["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == TEXT
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert sum("role" in choice["delta"] for choice in own) == 1


async def test_a_resumable_stream_that_nobody_resumes_is_cancelled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_resume, "GRACE_S", 0.2)
    async with working(redis_url, held) as worker, api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await read(begun, 3)
        await wait_until(lambda: len(worker.cancelled) == 1)


async def test_a_stream_resumed_in_the_same_process_is_not_cancelled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_resume, "GRACE_S", 1.0)
    async with working(redis_url, held) as worker, api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await read(begun, 3)
        await wait_until(lambda: bool(api_resume.lingering))
        async with server.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await read(resumed, 1)
            await wait_until(lambda: not api_resume.lingering)  # the grace of the first connection ends
            worker.go.set()
            await resumed.all()
        assert worker.cancelled == []
    assert text_of(begun, resumed) == TEXT


async def test_while_its_process_is_frozen_no_client_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_resume, "GRACE_S", 0.5)
    waiting = asyncio.create_task(api_resume.time_of_grace())
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 as a freeze: nothing of this process runs
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "who knocked meanwhile is heard first"
    await waiting


async def test_a_client_whose_resumption_waits_for_redis_is_not_late(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go, passed = asyncio.Event(), asyncio.Event(), 0

    async def slow_ask(*command: Any) -> Any:
        arrived.set()
        await go.wait()
        return await ask(*command)

    async def grace() -> None:
        nonlocal passed
        await arrived.wait()
        passed += 1
        if passed > 3:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    monkeypatch.setattr(api_resume, "ask", slow_ask)
    monkeypatch.setattr(api_resume, "time_of_grace", grace)
    async with working(redis_url, held) as worker, api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await read(begun, 3)

        async def resume() -> Events:
            async with server.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
                await read(resumed, 1)
                worker.go.set()
                await resumed.all()
            return resumed

        resuming = asyncio.create_task(resume())
        await wait_until(lambda: passed > 3 or bool(worker.cancelled))
        go.set()
        assert text_of(begun, await resuming) == TEXT
        assert worker.cancelled == []


async def test_streams_of_a_process_that_stops_wait_for_their_clients(redis_url: str) -> None:
    async with working(redis_url, held) as worker:
        async with api(redis_url) as first, first.stream("/v1/completions", BODY) as begun:
            await read(begun, 7)
        redis = connect(redis_url)
        assert await redis.exists(keys.api(first.ring.api_id)), "else workers cancel what it had (end_orphans)"
        await redis.aclose()
        async with api(redis_url) as second, second.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await read(resumed, 1)
            worker.go.set()
            await resumed.all()
    assert text_of(begun, resumed) == TEXT and worker.cancelled == []


async def test_the_time_of_grace_begins_with_the_last_client_that_leaves(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[asyncio.Event] = []  # each over when it is set: a machine may be slower than any number of seconds

    async def grace() -> None:
        graces.append(asyncio.Event())
        await graces[-1].wait()

    monkeypatch.setattr(api_resume, "time_of_grace", grace)
    async with working(redis_url, held) as worker, api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await read(begun, 3)
        await wait_until(lambda: len(graces) == 1)
        first = api_resume.left_last[begun.chunks[0]["id"]]
        async with server.resume(begun.chunks[0]["id"], begun.last_event_id) as resumed:
            await read(resumed, 1)
        await wait_until(lambda: len(graces) == 3)  # one began before the second client has read, one when it left
        graces[0].set()
        await first
        async with server.resume(begun.chunks[0]["id"], resumed.last_event_id) as again:
            worker.go.set()
            await again.all()
        assert worker.cancelled == []
    assert text_of(begun, resumed, again) == TEXT


@pytest.mark.parametrize(("path", "header", "status"), [("cmpl-none", "", 404), ("", "nonsense", 400)])
async def test_what_cannot_be_resumed_is_an_error(redis_url: str, path: str, header: str, status: int) -> None:
    async with working(redis_url, lambda spec: Answer("x")), api(redis_url) as server:
        async with server.stream("/v1/completions", BODY) as begun:
            await begun.all()
        url = f"/v1/streams/{path or begun.chunks[0]['id']}"
        response = await server.http.get(url, headers={"Last-Event-ID": header})
    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_streams_without_event_ids_leave_nothing_behind(redis_url: str) -> None:
    async with working(redis_url, lambda spec: Answer("x")), api(redis_url) as server:
        async with server.stream("/v1/completions", {"prompt": "go", "model": MODEL}) as events:
            await events.all()
        assert events.last_event_id == ""
        response = await server.http.get(f"/v1/streams/{events.chunks[0]['id']}")
    assert response.status_code == 404
