"""A chat's way from its route to the queue: no file of the rooms that plan it is entered twice."""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import Answer, working

ROOMS = ("/api/generation/", "/api/openai/")
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[Api]:
    async with working(redis_url, lambda spec: Answer("hello")), api(redis_url) as serving:
        yield serving


def room_file(frame: FrameType | None) -> str:
    name = "" if frame is None else frame.f_code.co_filename
    return next((name[name.index(room) + 1 :] for room in ROOMS if room in name), "")


@contextmanager
def entries(route: str) -> Iterator[Counter[str]]:
    """How often each file is entered from another one, from the route's first call to the enqueueing."""
    counts: Counter[str] = Counter()
    known: set[FrameType] = set()  # a coroutine that goes on is not entered again
    under_way = False

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal under_way
        if event != "call":
            return
        under_way = under_way or frame.f_code.co_name == route
        if frame.f_code.co_qualname == "SequenceQueue.enqueue":
            sys.setprofile(None)
        if not under_way or not room_file(frame) or frame in known:
            return
        known.add(frame)
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.find("/site-packages/") >= 0:
            caller = caller.f_back
        if room_file(caller) != room_file(frame):
            counts[room_file(frame)] += 1

    sys.setprofile(look)
    try:
        yield counts
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"truncate_prompt_tokens": -1, "stop": ["x"], "adapter_policy": "follow"},
    ],
)
async def test_a_chats_way_to_the_queue_enters_no_file_twice(server: Api, more: dict[str, Any]) -> None:
    with entries("create_chat_completion") as counts:
        answer = await server.post("/v1/chat/completions", {**HELLO, **more})
    assert answer.status_code == 200, answer.text
    assert counts["api/generation/plan.py"] == counts["api/generation/running.py"] == 1, "the way is seen at all"
    assert {file: count for file, count in counts.items() if count > 1} == {}
