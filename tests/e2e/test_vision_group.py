"""Two ranks that see as one worker: the tokens of mlx-vlm alone, bad pictures, and a rank that dies amid images."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from openai import OpenAI

pytest.importorskip("mlx_vlm")

from shared.redis import keys
from tests.e2e.bad_images import attack
from tests.e2e.rings import MODEL, Ring, ring
from tests.e2e.served.test_group import RANKS, children, worker_of
from tests.e2e.test_vision import ask, shown
from tests.engine.vision_models import alone, picture, whole_model, write_vision_model
from tests.waiting import HANG_S, wait_until


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = write_vision_model(tmp_path_factory.mktemp("model") / MODEL)
    settings = ("--max-batch-size", "8", "--lease-ms", "1000")
    with ring(tmp_path_factory.mktemp("group"), *RANKS, *settings, model=folder) as started:
        yield started


@pytest.fixture
def client(group: Ring) -> Iterator[OpenAI]:
    with OpenAI(base_url=group.openai_url, api_key="none", max_retries=0, timeout=HANG_S) as made:
        yield made


def test_chats_with_images_say_what_mlx_vlm_says(client: OpenAI) -> None:
    asked = [("What?", shown(1)), ("What?", shown(2)), ("No picture",), ("A", shown(1), "B", shown(3), "C")]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda parts: ask(client, *parts, n=2), asked))
    model = whole_model("smolvlm")
    for answer, seeds in zip(answers, ([1], [2], [], [1, 3]), strict=True):
        said = alone(model, tuple(answer.prompt_token_ids), [picture(seed) for seed in seeds], 6)
        for choice in answer.choices:
            assert choice.token_ids == said[: len(choice.token_ids)]


def test_damaged_pictures_among_good_ones_are_answered_and_lose_no_rank(client: OpenAI, group: Ring) -> None:
    leading = worker_of(group)
    counts = asyncio.run(attack(group.url, MODEL, 40))
    assert {status for kind, status in counts if kind == "noise"} == {400} and counts["good", 200] > 3
    assert worker_of(group) == leading


def is_asked(at: Ring) -> bool:
    """Whether the ring has taken a sequence on that is not over."""
    with redis.Redis.from_url(at.redis_url) as client:
        found = list(client.scan_iter(match=keys.sequence(MODEL, "*"), count=1000))
        return any(client.hget(key, "state") in (b"queued", b"running") for key in found)


def test_a_rank_that_dies_amid_images_costs_no_token(client: OpenAI, group: Ring) -> None:
    leading, seeds = worker_of(group), range(100, 106)
    follower, *_ = children(leading)  # what it has started later reads images
    parts = [shown(seed) for seed in seeds]
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, client, "Which?", *parts, max_tokens=40) for _ in range(4)]  # one may be over by now
        asyncio.run(wait_until(lambda: asked[0].done() or is_asked(group)))  # without a worker it would be refused
        os.kill(follower, signal.SIGKILL)
        answers = [each.result() for each in asked]
    prompt = tuple(answers[0].prompt_token_ids)
    said = alone(whole_model("smolvlm"), prompt, [picture(seed) for seed in seeds], 40)
    for answer in answers:
        (choice,) = answer.choices
        assert choice.token_ids == said[: len(choice.token_ids)]

    async def is_another() -> bool:
        return any(worker.pid != leading for worker in await asyncio.to_thread(group.workers))

    asyncio.run(wait_until(is_another))
