"""What a trainer over HTTP says and how often, to an api that loses answers, jobs and patience."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.adapters import GateCheck
from shared.errors import (
    AdapterRejectedError,
    ConflictError,
    InvalidRequestError,
    ServiceUnavailableError,
    SetupError,
)
from shared.jobs import JobCounts, JobState, JobStatus, JobUsage, SamplingOverrides
from shared.process import patience
from shared.trajectories import Trajectory
from trainer.ring import over_http as http_ring
from trainer.ring.http_client import HttpApi
from trainer.ring.over_http import HttpOrders, HttpSink, HttpSource
from trainer.ring.ring import Candidate
from trainer.rollouts.groups import RolloutRequest

ASKED = RolloutRequest("run-0-7", (5, 6), 2, SamplingOverrides(seed=2**62 + 1, max_tokens=4), "policy@3", {"index": 7})
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", (0.01, 0.01))
    monkeypatch.setattr(http_ring, "POLL_S", (0.01, 0.01))


def job(job_id: str, state: JobState = "queued") -> dict[str, Any]:
    counts = JobCounts(2, 0, 0, 2, 0, 0, 0)
    status = JobStatus(
        job_id, "generate", "m", state, counts, 1.0, JobUsage(), None, 0, 1, 1, 1, 2, "", {}, 2
    )  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins(status)
    return found


def refusal(status: int, code: str = "", message: str = "no") -> httpx.Response:
    return httpx.Response(
        status, json={"error": {"message": message, "type": "t", "param": None, "code": code or None}}
    )


class FakeApi:
    """Jobs under idempotency keys, as the real api has them; `trouble` may answer first."""

    def __init__(self, trouble: Answer | None = None) -> None:
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.jobs: dict[str, str] = {}  # key -> job
        self.deleted: list[str] = []
        self.made = 0
        self.trouble: Callable[[httpx.Request], httpx.Response | None] = trouble or (lambda request: None)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = f"{request.method} {request.url.path}"
        self.seen[name] += 1
        answer = self._answer(request)
        return self.trouble(request) or answer

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/jobs":
            body = msgspec.json.decode(request.content)
            self.bodies.append(body)
            key = body["idempotency_key"]
            if key not in self.jobs:
                self.made += 1
                self.jobs[key] = f"job-{self.made}"
            return httpx.Response(202, json=job(self.jobs[key]))
        if path.endswith("/results"):
            lines = [Trajectory(0, i, (5, 6), (i,), str(i), (-1.0,), "stop") for i in range(2)]
            return httpx.Response(200, content=b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
        if request.method == "DELETE":
            self.deleted.append(path.rsplit("/", 1)[1])
            return httpx.Response(200, json={})
        if path.endswith("/cancel"):
            return httpx.Response(200, json=job("job-1", "running"))
        return httpx.Response(200, json=job(path.rsplit("/", 1)[1], "succeeded"))


@pytest.fixture
async def fake() -> FakeApi:
    return FakeApi()


@pytest.fixture
async def api(fake: FakeApi) -> AsyncIterator[HttpApi]:
    async with HttpApi("http://ring", "k", patience_s=60, transport=httpx.MockTransport(fake)) as made:
        yield made


async def test_a_group_is_one_job_which_is_read_and_deleted(fake: FakeApi, api: HttpApi) -> None:
    found = await HttpSource(api, "m", "run", 60.0).generate(ASKED)
    assert [(t.sample_index, t.completion_ids, t.metadata) for t in found] == [
        (0, (0,), ASKED.metadata),
        (1, (1,), ASKED.metadata),
    ]
    (body,) = fake.bodies
    assert body["prompts"] == [[5, 6]] and (body["n"], body["seed"], body["adapter"]) == (2, 2**62 + 1, "policy@3")
    assert (body["adapter_policy"], body["idempotency_key"], body["deadline_s"]) == (
        "pin",
        "train-run-run-0-7-policy@3",
        60.0,
    )
    assert fake.deleted == ["job-1"]


@pytest.mark.parametrize("has_next_turn", [False, True])
async def test_a_group_of_an_episode_says_that_it_goes_on(fake: FakeApi, api: HttpApi, has_next_turn: bool) -> None:
    await HttpSource(api, "m", "run", 60.0).generate(replace(ASKED, has_next_turn=has_next_turn))
    assert fake.bodies[0].get("has_next_turn", False) == has_next_turn


async def test_a_lost_answer_generates_nothing_twice(fake: FakeApi, api: HttpApi) -> None:
    def lose(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v1/jobs" and fake.seen["POST /v1/jobs"] < 3:
            raise httpx.ReadError("gone", request=request)
        busy = request.url.path == "/v1/jobs/job-1" and fake.seen["GET /v1/jobs/job-1"] == 1
        return refusal(503) if busy else None

    fake.trouble = lose
    assert len(await HttpSource(api, "m", "run", 60.0).generate(ASKED)) == 2
    assert (fake.seen["POST /v1/jobs"], fake.made) == (3, 1)


async def test_a_job_that_the_ring_lost_is_submitted_anew(fake: FakeApi, api: HttpApi) -> None:
    def lost(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v1/jobs/job-1":
            fake.jobs.clear()
            return refusal(404, "job_not_found")
        return None

    fake.trouble = lost
    assert len(await HttpSource(api, "m", "run", 60.0).generate(ASKED)) == 2
    assert fake.made == 2


async def test_a_cancelled_group_cancels_its_job_even_while_it_is_submitted(fake: FakeApi, api: HttpApi) -> None:
    fake.trouble = lambda request: httpx.Response(202, json=job("job-1")) if request.method == "GET" else None
    asked = asyncio.create_task(HttpSource(api, "m", "run", 60.0).generate(ASKED))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert fake.seen["POST /v1/jobs/job-1/cancel"] == 1


async def test_a_job_that_ended_early_makes_room_for_another_try(fake: FakeApi, api: HttpApi) -> None:
    fake.trouble = lambda request: httpx.Response(200, content=b"") if "results" in request.url.path else None
    with pytest.raises(ServiceUnavailableError, match="0 samples"):
        await HttpSource(api, "m", "run", 60.0).generate(ASKED)
    assert fake.deleted == ["job-1"], "the same key would find it again"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refusal(401), SetupError),
        (refusal(400), InvalidRequestError),
        (refusal(400, "adapter_rejected"), AdapterRejectedError),
        (refusal(409), ConflictError),
        (refusal(503, "service_unavailable", "busy"), ServiceUnavailableError),
        (httpx.Response(502, content=b"<html>"), ServiceUnavailableError),
        (httpx.Response(200, content=b"<html>hello</html>"), SetupError),
    ],
)
async def test_refusals_are_errors_of_ours(answer: httpx.Response, error: type[Exception]) -> None:
    async with HttpApi("http://ring", patience_s=0.05, transport=httpx.MockTransport(lambda request: answer)) as api:
        with pytest.raises(error):
            await api.call("GET", "/v1/jobs/x", JobStatus)


async def test_a_candidate_is_uploaded_unserved_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapters.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        manifest = {
            "name": "p", "version": 4, "kind": "lora", "rank": 1, "scale": 1.0, "modules": [], "base_sha256": "b",
            "parent": 3, "sha256": "s", "size": 1, "chunk_size": 1, "created_ms": 1, "id": "p@4",
        }  # fmt: skip
        return httpx.Response(201, json=manifest)

    candidate = Candidate(tmp_path, 9, 3, "b", {"loss": float("nan"), "kl": 0.5}, (GateCheck("finite", True, "ok"),))
    async with HttpApi("http://ring", transport=httpx.MockTransport(answer)) as api:
        assert await HttpSink(api, "p", "m").stage(candidate) == 4
    form = seen[0].content.decode()
    assert '{"kl":0.5}' in form and '[{"name":"finite","passed":true,"detail":"ok","value":null}]' in form
    for name, value in (("set_latest", "false"), ("parent", "3"), ("train_step", "9"), ("model", "m")):
        assert f'name="{name}"\r\n\r\n{value}\r\n' in form
    assert 'filename="adapters.safetensors"' in form


async def test_unfinished_orders_of_an_earlier_life_come_first_and_once() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        after = msgspec.json.decode(request.content)["after"]
        asked.append(after)
        order = {
            "entry": "5-0",
            "id": "o",
            "order": {"type": "checkpoint"},
            "deadline_ms": 1,
            "again": True,
            "too_late": False,
        }
        return httpx.Response(200, json=[order] if after == "0-0" else [])

    async with HttpApi("http://ring", transport=httpx.MockTransport(answer)) as api:
        orders = HttpOrders(api, "p", "me")
        (first,) = await orders.take("trainer")
        assert (first.entry, first.again, first.too_late) == ("5-0", True, False)
        assert await orders.take("trainer") == [] == await orders.take("trainer")
    assert asked == ["0-0", "5-0", ""]


async def test_the_latest_version_is_that_of_the_trainers_own_policy() -> None:
    known = {"p": "p@7", "unserved": None}
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/training/status":
            policy = request.url.params["policy"]
            return httpx.Response(200, json={"current_lora": known[policy]}) if policy in known else refusal(404)
        asked.append(msgspec.json.decode(request.content))
        return refusal(409, "conflict", "the latest version of 'p' is 7, not 6")

    async with HttpApi("http://api", transport=httpx.MockTransport(answer)) as api:
        found = [await HttpSink(api, name, "m").latest_version() for name in ("p", "unserved")]
        assert found == [7, 0]
        with pytest.raises(ConflictError, match="not 6"):
            await HttpSink(api, "p", "m").promote(8, (), if_latest=6)
        with pytest.raises(ConflictError, match="over HTTP"):
            await HttpSink(api, "p", "m").fetch(3)
    assert asked == [{"version": 8, "gate": [], "if_latest": 6}]
