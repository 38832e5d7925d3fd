"""The dashboard over a real ring without workers: pages, events, actions, who may."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from api.ops.dashboard.parts import RewardsKept
from api.ops.dashboard.render import duration, number
from api.ops.dashboard.samples import histogram
from shared.adapters import GateCheck
from shared.frames import VersionSpan
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.files.batch_store import BatchError, BatchSpec, BatchStore, new_batch_id
from shared.redis.files.file_store import FileStore
from shared.redis.jobs.ledger import JobLedger, SampleRecord
from shared.redis.ring.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.training.board import TrainingBoard
from shared.training import TrainerStatus, TrainingPoint
from shared.trajectories import Reward, Trajectory
from tests.e2e.rings import Process
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, MODEL
from tests.unit.api_texts import bundle, ids
from tests.waiting import wait_until

HOSTILE = '<script>alert("x")</script>'
STATIC = Path(__file__).parents[2] / "api" / "ops" / "dashboard" / "static"
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


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
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
        TrainerStatus(policy="policy", run=HOSTILE, owner="o", loss=0.5, state="paused", problem=f"since {HOSTILE}")
    )
    await board.add(TrainingPoint(train_step=0, policy_step=1, version=1, at_ms=1, reward=0.5))
    await board.alert("gate_failed", HOSTILE)
    letter = {"id": HOSTILE, "reason": HOSTILE, "worker": "w", "attempt": "3"}
    await redis.xadd(keys.dead_letters(MODEL), letter)
    await redis.expire(keys.dead_letters(MODEL), 60)
    batch, files = await failed_batch(redis)
    shown = ["", "/jobs", f"/jobs/{job}", f"/jobs/{job}/samples/0", "/batches", f"/batches/{batch}"]
    return [*shown, *(f"/files/{each}" for each in files), "/adapters", "/adapters/policy", "/training", "/deadletters"]


async def test_every_page_is_whole_escaped_and_asks_nobody_else(server: Api, redis: Redis) -> None:
    for path in await filled(server, redis):
        response = await server.http.get(f"/dashboard{path}")
        assert response.status_code == 200, path
        page = Checked(response.text)
        assert HOSTILE not in response.text
        assert page.inline == []
        assert [address for address in page.loaded if not address.startswith(("/", "#"))] == []
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


async def test_names_and_words_from_outside_are_shown_as_they_are(server: Api, redis: Redis) -> None:
    shown = "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;"
    for path in await filled(server, redis):
        if path in ("", "/batches", "/training", "/deadletters", "/adapters/policy") or path.startswith("/files"):
            assert shown in (await server.http.get(f"/dashboard{path}")).text, path


async def test_a_sample_is_coloured_by_how_sure_the_model_was_and_by_version(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)
    piece = (await server.http.get(f"/dashboard/jobs/{job}/samples/0", headers={"HX-Request": "true"})).text
    Checked(piece)
    assert "<html" not in piece
    assert re.search(r'class="q0 v0" title="log-probability -0.010, policy@1">&lt;<', piece)
    assert re.search(r'class="q4 v0" title="log-probability -3.500, policy@1">s<', piece)
    assert 'class="q0 v1" title="policy@2"' in piece
    missing = await server.http.get(f"/dashboard/jobs/{job}/samples/1")
    assert missing.status_code == 404
    assert "has not finished" in missing.text


def test_our_own_files_name_no_other_address() -> None:
    for name in ("dashboard.js", "dashboard.css", "theme.js"):
        assert "://" not in (STATIC / name).read_text(), name
    for name in ("htmx-2.0.11.min.js", "htmx-ext-sse-2.2.4.min.js", "uplot-1.6.32.min.js"):
        assert (STATIC / name).stat().st_size > 2_000
    assert "MIT License" in (STATIC / "LICENSES.txt").read_text()


async def test_static_files_are_kept_by_browsers_and_nothing_else_is_served(server: Api) -> None:
    page = (await server.http.get("/dashboard")).text
    for address in re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', page):
        response = await server.http.get(address)
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
    for name in ("../render.py", "..%2Frender.py", "nothing.js"):
        assert (await server.http.get(f"/dashboard/static/{name}")).status_code == 404


async def events(server: Api, path: str, until: str, **arguments: Any) -> dict[str, str]:
    """The newest data of each event, once `until` has been seen in one of them."""
    found: dict[str, str] = {}
    async with asyncio.timeout(10), server.http.stream("GET", path, **arguments) as response:
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


async def test_parts_of_the_page_arrive_as_events(server: Api, redis: Redis) -> None:
    await filled(server, redis)
    found = await events(server, "/dashboard/events/ring", '"throughput"')
    assert {"redis", "tiles", "workers", "queues", "jobs", "adapters", "trainings", "curves"} <= found.keys()
    for name, data in found.items():
        if name != "curves":
            Checked(data)
        assert HOSTILE not in data
    training = await events(server, "/dashboard/events/training", '"reward"')
    assert msgspec.json.decode(training["curves-policy"])["reward"] == {"x": [0], "series": [[0.5], [None]]}


async def test_a_change_is_pushed_to_an_open_page(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)

    async def cancel() -> None:
        await asyncio.sleep(0)
        await server.http.post(f"/v1/jobs/{job}/cancel")

    looking = asyncio.create_task(events(server, f"/dashboard/events/jobs/{job}", "state cancelled"))
    await cancel()
    assert "cancelled" in (await looking)["job"]


SAME = {"Sec-Fetch-Site": "same-origin"}


async def test_actions_do_what_they_say(server: Api, redis: Redis) -> None:
    await filled(server, redis)
    job = (await server.http.get("/v1/jobs")).json()["data"][0]["id"]
    htmx = {**SAME, "HX-Request": "true"}
    said = await server.http.post(f"/dashboard/jobs/{job}/cancel", headers=htmx)
    assert (said.status_code, "cancelled" in said.text) == (200, True)
    again = await server.http.post(f"/dashboard/jobs/{job}/retry", headers=htmx)
    retried = (await server.http.get(f"/v1/jobs/{again.headers['hx-redirect'].rpartition('/')[2]}")).json()
    assert (retried["status"], retried["counts"]["total"]) == ("queued", 2)
    assert retried["metadata"] == {"note": HOSTILE, "retry_of": job}
    rolled = await server.http.post("/dashboard/adapters/policy/rollback", data={"version": "1"}, headers=SAME)
    assert (rolled.status_code, rolled.headers["location"]) == (303, "/dashboard/adapters/policy")
    assert (await server.http.get("/v1/adapters/policy")).json()["latest"] == 1
    refused = await server.http.post("/dashboard/adapters/policy/rollback", data={"version": "3"}, headers=htmx)
    assert (refused.status_code, "did not pass its gate" in refused.text) == (409, True)
    letter = (await server.http.get("/v1/deadletters")).json()["data"][0]["id"]
    unreadable = await server.http.post(f"/dashboard/deadletters/{letter}/requeue", headers=htmx)
    assert unreadable.status_code == 409
    await server.http.post(f"/dashboard/deadletters/{letter}/drop", headers=htmx)
    assert (await server.http.get("/v1/deadletters")).json()["data"] == []


async def test_a_batch_is_shown_cancelled_and_its_files_saved(server: Api, redis: Redis) -> None:
    batch, files = await failed_batch(redis)
    page = (await server.http.get(f"/dashboard/batches/{batch}")).text
    assert 'state failed">failed<' in page
    assert "2 of 3 lines" in page
    assert "took</dt><dd>1 min" in page
    lines = (await server.http.get(f"/dashboard/files/{files[2]}")).text
    assert re.search(r'small bad">400<.*small soft"><.*small bad">batch_expired<', lines, re.DOTALL)
    saved = await server.http.get(f"/dashboard/files/{files[1]}/content")
    assert saved.headers["content-disposition"] == 'attachment; filename="_script_alert__x____script_"'
    assert saved.content == (await server.http.get(f"/v1/files/{files[1]}/content")).content
    await FileStore(redis).delete(files[1])
    found = await events(server, f"/dashboard/events/batches/{batch}", "deleted")
    assert {"batch", "batch_actions", "batch_files"} <= found.keys()
    assert (await server.http.get(f"/dashboard/files/{files[1]}")).status_code == 404
    assert (await server.http.get("/dashboard/batches/nobody")).status_code == 404

    htmx = {**SAME, "HX-Request": "true"}
    refused = await server.http.post(f"/dashboard/batches/{batch}/cancel", headers=htmx)
    assert (refused.status_code, "has ended" in refused.text) == (409, True)
    waiting = BatchSpec(new_batch_id(), "/v1/completions", files[0], "24h", 1, 2**40, *files[1:], 3600)
    await BatchStore(redis).take(waiting.id, "nobody")  # else this api would work on it
    await BatchStore(redis).create(waiting)
    assert "<button" in (await server.http.get(f"/dashboard/batches/{waiting.id}")).text.partition("<main")[2]
    assert (await server.http.post(f"/dashboard/batches/{waiting.id}/cancel")).status_code == 403
    said = await server.http.post(f"/dashboard/batches/{waiting.id}/cancel", headers=htmx)
    assert (said.status_code, "being cancelled" in said.text) == (200, True)
    assert (await server.http.get(f"/v1/batches/{waiting.id}")).json()["status"] == "cancelling"
    assert "<button" not in (await server.http.get("/dashboard/batches")).text.partition("<main")[2]


@pytest.mark.parametrize(
    ("value", "shown"), [(2716.4, "2716"), (0.5, "0.5"), (1234567, "1.23M"), (45678.9, "45.7k"), (None, "–"), (3, "3")]
)
def test_figures_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (300_000, "5 min"),
        (305_000, "5 min 5 s"),
        (1000, "1 s"),
        (1500, "1.5 s"),
        (7_200_000, "2 h"),
        (86_400_000, "24 h"),
    ],
)
def test_spans_say_no_zero_parts(milliseconds: float, shown: str) -> None:
    assert duration(milliseconds) == shown


async def test_other_sites_cannot_act(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        response = await server.http.post(f"/dashboard/jobs/{job}/cancel", headers=headers)
        assert response.status_code == 403
    assert (await server.http.get(f"/v1/jobs/{job}")).json()["status"] == "queued"
    ours = await server.http.post(f"/dashboard/jobs/{job}/cancel", headers={"Origin": server.url})
    assert ours.status_code == 303


async def test_with_a_key_one_signs_in(redis_url: str) -> None:
    async with api(redis_url, api_key="a-long-secret-key") as server:
        sent = await server.http.get("/dashboard/jobs")
        assert (sent.status_code, sent.headers["location"]) == (303, "/dashboard/login?next=/dashboard/jobs")
        assert (
            await server.http.get("/dashboard/events/ring", headers={"Accept": "text/event-stream"})
        ).status_code == 401
        assert (await server.http.get("/dashboard/login")).status_code == 200
        assert (await server.http.get("/v1/ring/snapshot")).status_code == 401
        wrong = await server.http.post("/dashboard/login", data={"key": "no"}, headers=SAME)
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        form = {"key": "a-long-secret-key", "next": "//evil.example"}
        assert (await server.http.post("/dashboard/login", data=form)).status_code == 403
        right = await server.http.post("/dashboard/login", data=form, headers=SAME)
        assert right.headers["location"] == "/dashboard"
        cookie = right.headers["set-cookie"]
        assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/dashboard"))
        assert "a-long-secret-key" not in cookie
        assert (await server.http.get("/dashboard/jobs")).status_code == 200
        assert (await server.http.get("/v1/jobs")).status_code == 401  # the cookie opens the dashboard alone
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as stranger:
            name, _, value = cookie.partition(";")[0].partition("=")
            until, _, signature = value.partition(".")
            for forged in (f"{int(until) + 1}.{signature}", f"1.{signature}", until, "", "²." + signature):
                headers = {"Cookie": f"{name}={forged}".encode()}
                assert (await stranger.get("/dashboard", headers=headers)).status_code == 303
            bearer = {"Authorization": "Bearer a-long-secret-key"}
            assert (await stranger.get("/dashboard", headers=bearer)).status_code == 200


async def test_an_open_page_does_not_hold_up_the_server_s_end(redis_url: str) -> None:
    process = Process.start("api", "--redis", redis_url, "--port", "0")
    try:
        url = (await asyncio.to_thread(process.wait_for_line, r"(http://127[.\d]+:\d+)")).group(1)
        async with (
            httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
            http.stream("GET", "/dashboard/events/ring") as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = [line async for line in lines]
    finally:
        code = await asyncio.to_thread(process.stop)
    assert code == 0
    assert not any("shutting down" in line for line in rest), "it was cut off after a wait instead of ending"


async def test_the_ring_is_told_as_json(server: Api, redis: Redis) -> None:
    await filled(server, redis)
    found: dict[str, Any] = {}

    async def is_fresh() -> bool:  # a snapshot is kept for a second
        found.update((await server.http.get("/v1/ring/snapshot")).json())
        return bool(found["dead_letters"])

    await wait_until(is_fresh)
    assert [worker["id"] for worker in found["workers"]] == [HOSTILE]
    assert {(q["model"], q["sequence_class"]) for q in found["queues"]} == {(MODEL, "interactive"), (MODEL, "batch")}
    assert (found["dead_letters"], found["jobs_active"]) == (1, 1)
    assert found["adapters"][0]["loaded"] == {HOSTILE: 1}


async def test_a_page_of_a_running_job_does_not_read_all_samples_every_second(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)
    status, kept = await server.ring.jobs.status(job), RewardsKept()
    first = await kept.read(server.ring, status)
    assert first is not None
    assert await kept.read(server.ring, msgspec.structs.replace(status, progress=0.6)) is first
    ended = msgspec.structs.replace(status, progress=1.0, status="succeeded")
    last = await kept.read(server.ring, ended)
    assert last == first
    assert last is not first
    assert await kept.read(server.ring, ended) is last


async def test_an_adapter_s_page_tells_live_workers_from_those_that_are_gone(server: Api, redis: Redis) -> None:
    store = AdapterStore(redis)
    await publish(store, "policy")
    for worker in (HOSTILE, "w-dead"):
        await store.acknowledge(worker, "policy", 1)
    page = (await server.http.get("/dashboard/adapters/policy")).text
    assert "w-dead" not in page and "and 1 that is gone" in page
    assert page.count("&lt;script&gt;") >= 1, "the live one is shown"


def test_rewards_that_are_all_alike_are_one_bar_in_the_middle() -> None:
    alike, spread = histogram([0.5] * 3), histogram([0.0, 1.0, 1.0])
    assert alike is not None and spread is not None
    assert [(at, bar.samples) for at, bar in enumerate(alike.bars) if bar.samples] == [(10, 3)]
    assert [(at, bar.samples) for at, bar in enumerate(spread.bars) if bar.samples] == [(0, 1), (19, 2)]
    assert len(alike.bars) == len(spread.bars) == 20
