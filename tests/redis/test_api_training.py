"""The training endpoints and quick scores, with the real stream of orders and a trainer that is played by the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.training.board import TrainingBoard
from shared.redis.training.orders import Orders, Received
from shared.scoring.pool import RewardPool
from shared.training import (
    Answer,
    CheckpointAnswer,
    CheckpointOrder,
    Order,
    Refusal,
    ResumeAnswer,
    ResumeOrder,
    TrainerStatus,
    UpdateAnswer,
    UpdateOrder,
)
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import Answer as Reply
from tests.redis.scripted_worker import working
from tests.unit.api_texts import ids
from tests.waiting import HANG_S, wait_until
from trainer.ring.mailbox import RingMailbox
from worker.jobs.context import TickContext
from worker.jobs.scores import Scores

ONE: dict[str, Any] = {"prompt_ids": ids("say"), "completion_ids": ids("ab"), "logprobs": [-1.0, -0.5], "reward": 1}
UPDATED = UpdateAnswer("updated", 3, 4, 5, True, 2, {}, 0.5, 0.25, 0.0, "", "mine")


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[Api]:
    async with working(redis_url, lambda spec: Reply()), api(redis_url, request_timeout_s=HANG_S) as serving:
        await publish(serving.ring.adapters)
        yield serving


@contextlib.asynccontextmanager
async def trainer(
    redis_url: str, play: Callable[[Received[Order]], Answer | None]
) -> AsyncIterator[list[Received[Order]]]:
    """A trainer of `policy` that says what `play` says; None: nothing."""
    redis, blocking = connect(redis_url), connect(redis_url, blocking=True)
    seen: list[Received[Order]] = []
    await TrainingBoard(redis, "policy").hold("me")

    async def answer(mailbox: RingMailbox) -> None:
        while True:
            seen.append(await mailbox.next())
            if (said := play(seen[-1])) is not None:
                await mailbox.answer(seen[-1], said)

    async with RingMailbox(Orders(redis, keys.training_orders("policy"), blocking=blocking)) as mailbox:
        mailbox.known([])
        task = asyncio.create_task(answer(mailbox))
        yield seen
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await TrainingBoard(redis, "policy").let_go("me")
    await redis.aclose()
    await blocking.aclose()


async def test_an_update_reaches_the_trainer_and_its_answer_comes_back(server: Api, redis_url: str) -> None:
    body = {"trajectories": [ONE, {**ONE, "reward": 0, "weight_versions": [["policy@1", 0, 2]]}]}
    async with trainer(redis_url, lambda received: UPDATED) as seen:
        answer = await server.post("/v1/training/update", {**body, "checkpoint_name": "mine"})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "object": "training.update", "policy": "policy", "status": "updated", "train_step": 3, "policy_step": 4,
            "version": 5, "served": True, "trajectories": 2, "dropped": {}, "reward": 0.5, "loss": 0.25, "kl": 0.0,
            "gate": "", "checkpoint": "mine", "unchecked": 0, "lora": "policy@5",
        }  # fmt: skip
        keyed = {"headers": {"idempotency-key": "k"}}
        twice = [await server.post("/v1/training/update", body, **keyed) for _ in range(2)]
        assert twice[0].json() == twice[1].json()
    order = seen[0].body
    assert isinstance(order, UpdateOrder) and order.update_inference and order.checkpoint_name == "mine"
    assert [t.trajectory.reward.value for t in order.trajectories if t.trajectory.reward] == [1.0, 0.0]
    assert order.trajectories[1].trajectory.spans[0].version == "policy@1"
    assert len(seen) == 2, "the same key asks once"


async def test_a_checkpoint_is_ordered_by_name(server: Api, redis_url: str) -> None:
    async with trainer(redis_url, lambda received: CheckpointAnswer("step-000007", 7)) as seen:
        answer = await server.http.post("/training/checkpoint")
        assert answer.json() == {
            "object": "training.checkpoint", "policy": "policy", "checkpoint": "step-000007", "train_step": 7
        }  # fmt: skip
        await server.post("/training/checkpoint", {"checkpoint_name": "mine"})
    assert [received.body for received in seen] == [CheckpointOrder(""), CheckpointOrder("mine")]


async def test_a_paused_run_is_told_how_to_go_on(server: Api, redis_url: str) -> None:
    async with trainer(redis_url, lambda received: ResumeAnswer("adopt", 2)) as seen:
        answer = await server.post("/v1/training/resume", {"action": "adopt"})
        assert answer.json() == {
            "object": "training.resume", "policy": "policy", "action": "adopt", "version": 2, "lora": "policy@2"
        }  # fmt: skip
        wrong = await server.post("/v1/training/resume", {"action": "sideways"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "action")
    assert [received.body for received in seen] == [ResumeOrder("adopt")]
    assert (await server.post("/v1/training/resume", {"action": "override"})).status_code == 503


async def test_what_the_trainer_refuses_the_client_hears(server: Api, redis_url: str) -> None:
    async with trainer(redis_url, lambda received: Refusal("conflict", "too many")):
        answer = await server.post("/v1/training/update", {"trajectories": [ONE]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "too many")


async def test_without_a_trainer_it_is_503_by_name_and_status_still_answers(server: Api, redis: Redis) -> None:
    for path, body in (("/v1/training/update", {"trajectories": [ONE]}), ("/training/checkpoint", {})):
        answer = await server.post(path, body)
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "no trainer of policy 'policy' is alive" in message and "--source posted" in message
    told = (await server.http.get("/v1/training/status")).json()
    assert (told["training_enabled"], told["current_lora"], told["loss"]) == (False, "policy@1", None)
    await TrainingBoard(redis, "policy").write(
        TrainerStatus(policy="policy", run="r", owner="o", last_update_ms=1_000, loss=0.5, checkpoints=("a",))
    )
    told = (await server.http.get("/v1/training/status")).json()
    assert (told["last_update"], told["loss"]) == ("1970-01-01T00:00:01Z", 0.5)
    assert told["available_checkpoints"] == ["a"]
    assert (await server.http.get("/v1/training/status?policy=nobody")).status_code == 404


async def test_a_trainer_that_is_starting_is_waited_for_not_unknown(server: Api, redis: Redis) -> None:
    """The documented example failed with 404 until the trainer had loaded its model."""
    board, chat = TrainingBoard(redis, "fresh"), {"messages": [{"role": "user", "content": "a"}], "model": "fresh"}
    update = {"trajectories": [ONE], "policy": "fresh"}
    assert (await server.post("/v1/chat/completions", chat)).status_code == 404
    await board.hold("me")
    for path, body in (("/v1/chat/completions", chat), ("/v1/training/update", update)):
        answer = await server.post(path, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), answer.text
        assert "is starting" in answer.json()["error"]["message"]
    status = TrainerStatus(policy="fresh", run="r", owner="me", mode="sft", train_step=3, steps=100, next_version_at=7)
    for owner, said in (
        ("earlier", "is starting"),
        ("me", "made 3 of 100 train steps, and offers its first version a"),
    ):
        await board.write(msgspec.structs.replace(status, owner=owner))
        answer = await server.post("/v1/chat/completions", chat)
        assert answer.status_code == 503 and said in answer.json()["error"]["message"]
    assert (await server.post("/v1/chat/completions", {**chat, "model": "fresh@3"})).status_code == 404
    await publish(server.ring.adapters, "fresh")
    assert (await server.post("/v1/chat/completions", chat)).status_code == 200
    await board.let_go("me")


async def test_a_trainer_that_dies_meanwhile_is_noticed(server: Api, redis: Redis, redis_url: str) -> None:
    async with trainer(redis_url, lambda received: None) as seen:
        asking = asyncio.create_task(server.post("/v1/training/update", {"trajectories": [ONE]}))
        await wait_until(lambda: bool(seen))
        await TrainingBoard(redis, "policy").let_go("me")
        answer = await asking
    assert answer.status_code == 503 and "ended before it answered" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/training/update", {"trajectories": [ONE, {**ONE, "logprobs": [0.0]}]}, "trajectories[1].logprobs"),
        ("/v1/training/update", {"trajectories": [{**ONE, "spans": [["policy@9", 0, 2]]}]}, "trajectories[0].spans"),
        ("/v1/training/update", {"trajectories": [{**ONE, "spans": [["policy", 0, 2]]}]}, "trajectories[0].spans"),
        ("/v1/training/update", {"trajectories": [ONE], "checkpoint_name": "latest"}, "checkpoint_name"),
        ("/v1/training/update", {"trajectories": [ONE], "policy": "no/name"}, "policy"),
        ("/v1/training/update", {"trajectories": []}, "trajectories"),
        ("/training/checkpoint", {"name": "../up"}, "checkpoint_name"),
        ("/training/checkpoint", {"nam": "x"}, "nam"),
        ("/v1/rewards/score", {"completions": "a", "reward": "no_such"}, "reward"),
        ("/v1/rewards/score", {"completions": "a", "scoring_function": "exact"}, "references"),
        ("/v1/rewards/score", {"completions": ["a"], "references": ["a", "b"], "reward": "exact"}, "references"),
        ("/v1/rewards/score", {"completions": "a"}, "reward"),
        ("/v1/rewards/score", {"completions": "a", "reward": "exact", "model": "rm"}, "model"),
    ],
)
async def test_bad_bodies_are_refused_by_field(server: Api, path: str, body: dict[str, Any], param: str) -> None:
    answer = await server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_texts_are_scored_by_a_job_runner(server: Api, redis_url: str) -> None:
    redis, blocking, pool = connect(redis_url), connect(redis_url, blocking=True), RewardPool(1)
    scoring = asyncio.create_task(Scores(TickContext("r", redis, blocking, pool)).run())
    try:
        body = {"completions": ["#### 42", "41"], "references": ["42", "42"], "reward": {"name": "gsm8k"}}
        answer = (await server.post("/v1/rewards/score", body)).json()
        assert [each["score"] for each in answer["data"]] == [1.0, 0.0] and answer["mean_score"] == 0.5
        one = {"completions": "abc", "scoring_function": {"name": "length", "target": 3}}
        assert (await server.post("/v1/rewards/score", one)).json()["data"][0]["score"] == 1.0
        odd = {"completions": ["x"], "references": [{"no": "text"}], "reward": "exact"}
        (failed,) = (await server.post("/v1/rewards/score", odd)).json()["data"]
        assert failed["score"] is None and "exact needs a reference" in failed["error"]
    finally:
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        pool.close()
        await redis.aclose()
        await blocking.aclose()


async def test_a_page_behind_no_entry_is_refused_or_empty(server: Api) -> None:
    for after, expected in (("9" * 30 + "-1", 400), ("x", 400), ("9" * 19 + "-0", 200)):
        answer = await server.http.get("/v1/training/trajectories", params={"after": after})
        assert answer.status_code == expected, answer.text


async def test_orders_are_bounded(server: Api, redis: Redis) -> None:
    orders = Orders(redis, keys.training_orders("policy"))
    await TrainingBoard(redis, "policy").hold("me")
    for i in range(32):
        await orders.place(f"o{i}", b"{}", 60)
    answer = await server.post("/v1/training/update", {"trajectories": [ONE]})
    assert answer.status_code == 429 and "32 orders are waiting" in answer.json()["error"]["message"]


async def test_an_order_that_nobody_took_in_time_is_not_carried_out(redis: Redis, redis_url: str) -> None:
    orders = Orders(redis, keys.training_orders("policy"))
    await orders.place("late", msgspec.json.encode(CheckpointOrder()), 0)
    await orders.place("fresh", msgspec.json.encode(CheckpointOrder()), int(HANG_S))
    async with trainer(redis_url, lambda received: CheckpointAnswer("c", 1)) as seen:
        assert await orders.answer("fresh", HANG_S) is not None
        await wait_until(lambda: _none_waits(orders))  # the answer is told before the order is done
    assert [received.id for received in seen] == ["fresh"]


async def _none_waits(orders: Orders) -> bool:
    return await orders.length() == 0
