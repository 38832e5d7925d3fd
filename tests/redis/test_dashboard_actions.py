"""The dashboard over a real ring without workers: what its buttons do, and who may press them."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from api.http.api_keys import line_of, new_key
from api.ops.dashboard.samples import SHOWN
from shared.frames import VersionSpan
from shared.night import NightReport
from shared.redis.adapters.store import AdapterStore
from shared.redis.files.batch_store import BatchSpec, BatchStore, new_batch_id
from shared.redis.files.file_store import FileStore
from shared.redis.kept.answer_store import Verdict, answers_of
from shared.redis.training.board import TrainingBoard
from shared.training import TrainerStatus
from shared.trajectories import LiveTrajectory, Trajectory
from tests.e2e.rings import Process
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api, api
from tests.redis.dashboard_pages import HOSTILE, SAME, Checked, dashboard, events, failed_batch, filled, finished_job
from tests.redis.scripted_worker import MODEL
from tests.unit.api_texts import ids
from tests.waiting import HANG_S
from trainer.night.morning import publish as publish_report


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    async with dashboard(redis_url, redis) as serving:
        yield serving


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
    candidate = await publish(AdapterStore(redis), seed=4, set_latest=False)
    promote, data = "/dashboard/adapters/policy/promote", {"version": str(candidate.version)}
    assert (await server.http.post(promote, data=data, headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403
    assert (await server.http.post(promote, data=data, headers=htmx)).status_code == 200
    assert (await server.http.get("/v1/adapters/policy")).json()["latest"] == candidate.version
    refused = await server.http.post("/dashboard/adapters/policy/rollback", data={"version": "3"}, headers=htmx)
    assert (refused.status_code, "did not pass its gate" in refused.text) == (409, True)
    letter = (await server.http.get("/v1/deadletters")).json()["data"][0]["id"]
    unreadable = await server.http.post(f"/dashboard/deadletters/{letter}/requeue", headers=htmx)
    assert unreadable.status_code == 409
    await server.http.post(f"/dashboard/deadletters/{letter}/drop", headers=htmx)
    assert (await server.http.get("/v1/deadletters")).json()["data"] == []


async def test_after_the_first_night_too_there_is_a_way_back(server: Api, redis: Redis, tmp_path: Path) -> None:
    """A night that began with the base: its promotion replaces the version that changes nothing."""
    store = AdapterStore(redis)
    await publish(store)
    candidate = (await publish(store, seed=4, set_latest=False)).version
    report = NightReport(policy="policy", run="night", began_ms=1, ended_ms=2, outcome="proposed", version=candidate)
    await TrainingBoard(redis, "policy").write(TrainerStatus(policy="policy", run="night", owner="o"))
    await publish_report(report, tmp_path, redis)
    assert "rollback policy 1" in (tmp_path / "report.md").read_text()
    promote, back = f"promote-policy-{candidate}", "rollback-policy-1"
    page = (await server.http.get("/dashboard/nights")).text
    assert promote in page and back not in page
    await server.http.post("/dashboard/adapters/policy/promote", data={"version": str(candidate)}, headers=SAME)
    page = (await server.http.get("/dashboard/nights")).text
    assert promote not in page and back in page
    await server.http.post("/dashboard/adapters/policy/rollback", data={"version": "1"}, headers=SAME)
    assert promote in (await server.http.get("/dashboard/nights")).text


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
            httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http,
            http.stream("GET", "/dashboard/events/ring") as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            process.popen.send_signal(signal.SIGTERM)
            rest = [line async for line in lines]
        assert await asyncio.to_thread(process.wait) == 0
    finally:
        await asyncio.to_thread(process.stop)
    assert not any("shutting down" in line for line in rest), "it was cut off after a wait instead of ending"


async def test_answers_are_judged_on_a_page(redis_url: str, redis: Redis) -> None:
    live = LiveTrajectory(
        "cmpl-1-0",
        "policy",
        MODEL,
        Trajectory(0, 0, tuple(ids(HOSTILE)), (1,), HOSTILE, (-0.5,), "stop", spans=(VersionSpan("policy@3", 0, 1),)),
    )
    async with api(redis_url, feedback_ttl_days=1) as server:
        live = msgspec.structs.replace(live, collected_ms=time.time_ns() // 1_000_000)
        await server.ring.answers.keep("1-0", live)
        nothing = msgspec.structs.replace(live.trajectory, text=" \n")
        await server.ring.answers.keep("2-0", msgspec.structs.replace(live, id="cmpl-2-0", trajectory=nothing))
        page = (await server.http.get("/dashboard/feedback")).text
        assert Checked(page).inline == [] and "policy@3" in page
        assert page.count('<th scope="row">(nothing)') == 1
        await server.ring.answers.judge(answers_of(""), {"2-0": Verdict(0.0)})
        form = {"name": "1-0", "rating": "down"}
        foreign = await server.http.post("/dashboard/feedback", data=form)
        judged = await server.http.post("/dashboard/feedback", data=form, headers=SAME)
        other = await server.http.post("/dashboard/feedback", data={**form, "rating": "up"}, headers=SAME)
        assert [each.status_code for each in (foreign, judged, other)] == [403, 303, 409]
        answer = await server.ring.answers.find(answers_of(""), "1-0")
        assert answer is not None and answer.verdict == Verdict(0.0)
        assert "No answer waits" in (await server.http.get("/dashboard/feedback")).text


async def test_the_newest_answers_of_all_tenants_are_shown_and_a_verdict_stands_in_its_row(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    key, root = new_key(), new_key()
    (tmp_path / "keys").write_text(f"{line_of(key)} tenant=acme\n{line_of(root)} role=admin\n")
    now = time.time_ns() // 1_000_000
    trajectory = Trajectory(0, 0, tuple(ids("say")), (1,), "said", (-0.5,), "stop")
    async with api(redis_url, feedback_ttl_days=1, api_key_file=tmp_path / "keys") as server:
        for at in range(2 * SHOWN + 2):
            tenant = "acme" if at > 2 * SHOWN else ""
            name = f"a{at:02}-0"
            live = LiveTrajectory(name, "p", MODEL, trajectory, collected_ms=now + at, tenant=tenant)
            await server.ring.answers.keep(name, live)
        signed_in = await server.http.post("/dashboard/login", data={"key": root}, headers=SAME)
        assert signed_in.status_code == 303
        page = (await server.http.get("/dashboard/feedback")).text
        shown = re.findall(r'name="name" value="([^"]+)"', page)[::2]
        assert shown == [f"a{at:02}-0" for at in reversed(range(SHOWN + 2, 2 * SHOWN + 2))]
        form = {"name": shown[0], "tenant": "acme", "rating": "up", "row": "1"}
        judged = await server.http.post("/dashboard/feedback", data=form, headers={**SAME, "hx-request": "true"})
        assert judged.status_code == 200 and 'id="answer-1"' in page
        assert 'hx-swap-oob="innerHTML:#answer-1">counted as good<' in judged.text
