"""A dashboard over a ring without workers whose every word tries to break out, and a reader of its pages."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any

import msgspec
from redis.asyncio import Redis

from shared.adapters import GateCheck
from shared.frames import VersionSpan
from shared.night import Compared, NightReport
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.files.batch_store import BatchError, BatchSpec, BatchStore, new_batch_id
from shared.redis.files.file_store import FileStore
from shared.redis.jobs.ledger import JobLedger, SampleRecord
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.training.board import TrainingBoard
from shared.training import BoardSample, TrainerStatus, TrainingPoint
from shared.trajectories import Reward, Trajectory
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle, ids
from tests.waiting import HANG_S

SAME = {"Sec-Fetch-Site": "same-origin"}
HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "link", "img", "input", "br"}


class Checked(HTMLParser):
    """Fails on tags that are not closed in order; keeps what a browser would run or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.buttons = 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "action", "sse-connect")]
        self.inline += [name for name in found if name.startswith("on") or name == "style"]
        self.inline += ["script"] if tag == "script" and "src" not in found else []
        self.buttons += tag == "button"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@contextlib.asynccontextmanager
async def dashboard(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    """An api process in a ring with one model."""
    registry = WorkerRegistry(redis)
    await registry.register_model(CARD, bundle())
    await registry.heartbeat(
        WorkerStatus(HOSTILE, MODEL, "h", 1, "ready", 2, 8, 0, 5, 9, 1.5, 0, 1, 2**40, {"policy": 1})
    )
    async with api(redis_url) as serving:
        yield serving


async def finished_job(server: Api, redis: Redis) -> str:
    """A job with one sample that tries to break out, and one that is still queued."""
    body = {
        "kind": "rollout",
        "model": MODEL,
        "reward": {"name": "exact"},
        "prompts": [HOSTILE, "b"],
        "references": ["1", "2"],
    }
    job = (await server.post("/v1/jobs", {**body, "metadata": {"note": HOSTILE}})).json()["id"]
    sample = Trajectory(
        0, 0, tuple(ids(HOSTILE)), tuple(ids(HOSTILE + "\nb")), HOSTILE, (-0.01, -3.5), "stop",
        (VersionSpan("policy@1", 0, 3), VersionSpan("policy@2", 3, 99)), reward=Reward("exact", 0.25), worker=HOSTILE,
    )  # fmt: skip
    record = SampleRecord(0, msgspec.json.encode(sample), "succeeded", reward=sample.reward)
    assert await JobLedger(redis).record(job, [record]) == 1
    return str(job)


async def failed_batch(redis: Redis) -> tuple[str, list[str]]:
    """A batch whose every word tries to break out, and its files."""
    lines = [
        b'{"custom_id": %s, "response": {"status_code": 400}}\n' % msgspec.json.encode(HOSTILE),
        HOSTILE.encode() + b"\n",
        b'{"custom_id": "late", "error": {"code": "batch_expired"}}\n',
    ]
    files = []
    for _ in range(3):
        writer = FileStore(redis).writer()
        await writer.add(b"".join(lines))
        files.append((await writer.close(HOSTILE, "batch_output", 3600)).id)
    now = int(time.time())
    spec = BatchSpec(
        new_batch_id(), "/v1/completions", files[0], "24h", now - 60, now + 86_400, *files[1:], 3600, {HOSTILE: HOSTILE}
    )
    store = BatchStore(redis)
    await store.create(spec)
    fields = {"errors": (BatchError("x", HOSTILE, None, 1),), "model": HOSTILE, "lines": 3, "failed": 2}
    await store.end(spec.id, "failed", has_output=1, has_errors=1, finalizing_at=now, **fields)
    return spec.id, files


async def filled(server: Api, redis: Redis) -> list[str]:
    """Something on every page; their addresses."""
    job = await finished_job(server, redis)
    store = AdapterStore(redis)
    for seed in (1, 2):
        await publish(store, seed=seed, metrics={"reward": 0.5}, gate=[GateCheck("norm", True)])
    rejected = await publish(store, seed=3, set_latest=False)
    await store.reject("policy", rejected.version, [GateCheck("probe_kl", False, HOSTILE)])
    board = TrainingBoard(redis, "policy")
    await board.write(
        TrainerStatus(
            policy="policy",
            run=HOSTILE,
            owner="o",
            loss=0.5,
            state="paused",
            problem=f"since {HOSTILE}",
            steps=40,
            groups=4,
            taught=3,
            samples=(BoardSample(0.75, HOSTILE, f"luxurious {HOSTILE}", components={HOSTILE: 1.0}),),
        )
    )
    await board.add(TrainingPoint(train_step=0, policy_step=1, version=1, at_ms=1, reward=0.5, held_out_true=0.25))
    await board.alert("gate_failed", HOSTILE)
    await board.put_night(
        NightReport(
            policy="policy", run=HOSTILE, began_ms=1, ended_ms=2, outcome="proposed", why=HOSTILE, began_with=1,
            version=9, replaces=1, signals={HOSTILE: 1}, suite_before=0.5, suite_after=0.25, interruptions={HOSTILE: 2},
            checks=(GateCheck("suite", False, HOSTILE),), samples=(Compared(HOSTILE, HOSTILE, HOSTILE, 1.0, 0.0),),
        )
    )  # fmt: skip
    letter = {"id": HOSTILE, "reason": HOSTILE, "worker": "w", "attempt": "3"}
    await redis.xadd(keys.dead_letters(MODEL), letter)
    await redis.expire(keys.dead_letters(MODEL), 60)
    batch, files = await failed_batch(redis)
    shown = ["", "/jobs", f"/jobs/{job}", f"/jobs/{job}/samples/0", "/batches", f"/batches/{batch}"]
    return [
        *shown,
        *(f"/files/{each}" for each in files),
        "/adapters",
        "/adapters/policy",
        "/training",
        "/nights",
        "/deadletters",
    ]


async def events(server: Api, path: str, until: str, **arguments: Any) -> dict[str, str]:
    """The newest data of each event, once `until` has been seen in one of them."""
    found: dict[str, str] = {}
    async with asyncio.timeout(HANG_S), server.http.stream("GET", path, **arguments) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        name, data = "", []
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
            elif not line and name:
                found[name], name, data = "\n".join(data), "", []
                if any(until in value for value in found.values()) and len(found) > 1:
                    return found
    raise AssertionError("the stream ended")
