import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from shared.errors import InvalidRequestError
from trainer.learn.batches import sample_groups
from trainer.rollouts.atropos import AtroposApi, AtroposCollector, Registration, Scored, group_of

M = -100
REGISTRATION = Registration("run", "project", 4, 2048, "checkpoints", 0, 0, 10)


def scored(**changes: Any) -> Scored:
    """Two sequences as ManagedServer makes them: prompt 1 2 3, one with a tool's tokens 7 8 between two replies."""
    fields: dict[str, Any] = {
        "tokens": [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8, 9]],
        "masks": [[M, M, M, 4, 5], [M, M, M, 6, M, M, 9]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.1, -0.2], [1.0, 1.0, 1.0, -0.3, 1.0, 1.0, -0.4]],
    }
    return Scored(**(fields | changes))


def test_a_group_becomes_trajectories_with_the_prompt_they_share() -> None:
    first, second = group_of(scored(), 7).trajectories
    assert first.prompt_ids == second.prompt_ids == (1, 2, 3)
    assert first.completion_ids == (4, 5) and first.logprobs == (-0.1, -0.2) and first.loss_mask == (1, 1)
    assert second.completion_ids == (6, 7, 8, 9)
    assert second.loss_mask == (1, 0, 0, 1), "a tool's tokens stay out of the loss"
    assert second.logprobs == (-0.3, 0.0, 0.0, -0.4)
    (group,), dropped = sample_groups([group_of(scored(), 7)], {})
    assert [sample.advantage for sample in group.samples] == [0.5, -0.5]
    assert dropped.failed == 0


def test_prompts_that_differ_share_their_beginning_and_mask_the_rest() -> None:
    group = group_of(scored(tokens=[[1, 2, 3, 4, 5], [1, 9, 3, 6, 7, 8, 9]]), 0)
    assert [t.prompt_ids for t in group.trajectories] == [(1,), (1,)]
    assert [t.loss_mask for t in group.trajectories] == [(0, 0, 1, 1), (0, 0, 1, 0, 0, 1)]


def test_advantages_of_the_environment_replace_ours() -> None:
    advantages = [[0.0, 0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 0.0, -1.0, 0.0, 0.0, -1.0]]
    (group,), _ = sample_groups([group_of(scored(advantages=advantages), 0)], {})
    assert [sample.advantage for sample in group.samples] == [2.0, -1.0]


def test_a_sample_may_be_left_out_by_override_and_still_count_in_the_baseline() -> None:
    group = group_of(scored(overrides=[{"set_advantage_to_zero": True}, {}]), 0)
    assert group.advantages == (0.0, -0.5)
    group = group_of(scored(group_overrides={"set_advantage_to_zero": True}), 0)
    assert sample_groups([group], {})[0] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"masks": [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 1]]}, "not 0 or 1"),
        ({"inference_logprobs": None}, "ManagedServer"),
        ({"scores": [1.0]}, "are no group"),
        ({"masks": [[M, M, M, 4], [M, M, M, 6, M, M, 9]]}, "masks and tokens differ in length"),
        ({"inference_logprobs": [[1.0] * 5, [1.0] * 7]}, "above 0"),
        ({"masks": [[1, 2, 3, 4, 5], [M, M, M, 6, M, M, 9]]}, "no prompt"),
        ({"masks": [[M] * 5, [M, M, M, 6, M, M, 9]]}, "everything is masked"),
        ({"group_overrides": {"sft": True}}, "supervised"),
        ({"images": ["x"]}, "images"),
        ({"advantages": [[0.0, 0.0, 0.0, 1.0, 2.0], [0.0] * 7]}, "one a sequence"),
    ],
)
def test_what_means_something_else_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        group_of(scored(**changes), 0)


class RunApi:
    """Answers /batch as run-api does: a batch that was handed out is forgotten."""

    def __init__(self, *batches: list[Scored] | None) -> None:
        self.batches = list(batches)
        self.registered: list[Registration] = []
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/register":
            self.registered.append(msgspec.json.decode(request.content, type=Registration))
            return httpx.Response(200, json={"uuid": 1})
        if request.url.path == "/status":
            return httpx.Response(200, json={"current_step": 0, "queue_size": 3})
        batch = self.batches.pop(0) if self.batches else None
        self.asked.set()
        await self.may_answer.wait()
        return httpx.Response(200, content=msgspec.json.encode({"batch": batch}))

    def collector(self, **books: Any) -> AtroposCollector:
        return AtroposCollector(AtroposApi("http://atropos", httpx.MockTransport(self)), REGISTRATION, **books)


def no_lag(group: Any) -> int:
    return 0


async def test_a_batch_comes_as_soon_as_there_is_one_without_what_cannot_be_learned_from() -> None:
    run_api = RunApi(None, [scored(), scored(inference_logprobs=None), scored()])
    async with run_api.collector(cursor=4, consumed=3) as collector:
        batch = await collector.next_batch(0, no_lag)
        assert [group.index for group in batch] == [4, 6]
        assert (collector.cursor, collector.consumed, collector.take_dropped()) == (7, 5, [5])
    assert run_api.registered == [REGISTRATION]


async def test_a_wait_that_is_cancelled_while_the_batch_is_on_its_way_loses_nothing() -> None:
    run_api = RunApi([scored()])
    run_api.may_answer.clear()
    async with run_api.collector() as collector:
        waiting = asyncio.create_task(collector.next_batch(0, no_lag))
        await run_api.asked.wait()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        run_api.may_answer.set()
        (group,) = await collector.next_batch(0, no_lag)
        collector.give_back([group])
        assert collector.pending() == [0] and collector.consumed == 0
        assert await collector.next_batch(0, no_lag) == [group]


async def test_what_a_killed_start_had_in_hand_counts_as_dropped() -> None:
    async with RunApi().collector(cursor=3, pending=[1, 2], consumed=1) as collector:
        assert collector.take_dropped() == [1, 2]


async def test_a_run_api_that_is_away_is_reported_at_once_and_again_when_it_is_back() -> None:
    answers = iter([httpx.ConnectError("connection refused"), httpx.Response(503, text="starting"), None])
    problems: list[str] = []

    async def away(request: httpx.Request) -> httpx.Response:
        answer = next(answers)
        if isinstance(answer, httpx.ConnectError):
            raise answer
        return answer or httpx.Response(200, content=b"{}")

    api = AtroposApi("http://atropos:8001", httpx.MockTransport(away), problems.append)
    with capture_logs() as lines:
        await api.register(REGISTRATION)
    await api.aclose()
    assert problems == ["cannot reach Atropos at http://atropos:8001: connection refused", ""]
    assert [line["event"] for line in lines] == ["atropos.away", "atropos.back"]
    assert lines[0]["reason"] == problems[0] and lines[0]["log_level"] == "warning"
