"""The dashboard in a real Chromium over a real ring. Skipped where no browser is installed: the pages, their events
and actions are tested without one in tests/redis/test_dashboard.py.
"""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from api.cli.client import InferenceClient, JobRequest
from shared.jobs import JobInput, RewardSpec
from shared.redis.connection.client import connect
from shared.redis.training.board import TrainingBoard
from shared.training import TrainerStatus, TrainingPoint
from tests.e2e.browser import Browser, Tab, browser, expect, find_browser, tab
from tests.e2e.rings import MODEL, Ring, ring
from tests.waiting import HANG_S, wait_until

BINARY = find_browser()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        BINARY is None, reason="no Chromium on this machine (apt install chromium, or name one in PARALLM_TEST_BROWSER)"
    ),
]
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--feedback-ttl-days", "1") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncIterator[Browser]:
    assert BINARY is not None
    async with browser(BINARY) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def job(served: Ring) -> str:
    async with InferenceClient(served.url) as client:
        request = JobRequest(kind="rollout", model=MODEL, n=3, max_tokens=12, reward=RewardSpec("exact"))
        status = await client.submit(request, [JobInput(f"{HOSTILE} 2+2?", reference="4")])
        async for _ in client.chat(MODEL, [{"role": "user", "content": "hi"}], max_tokens=8, ignore_eos=True):
            pass
        return (await client.wait(status.id)).id


async def check(shown: Tab, served: Ring) -> None:
    """Nothing was run that should not be, nothing was asked of anybody else, nothing sticks out."""
    assert shown.complaints == []
    assert not await shown.page.evaluate("window.broken")
    assert shown.requested
    assert [url for url in shown.requested if not url.startswith((served.url, "about:", "data:"))] == []
    assert await shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


async def post(url: str, status: int = 200, **arguments: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        answer = await http.post(url, **arguments)
    assert answer.status_code == status, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


async def test_the_browser_tells_of_what_a_page_must_not_do(served: Ring, chromium: Browser) -> None:
    """What `check` looks at, seen to happen."""
    async with tab(chromium) as shown:
        await shown.page.goto(f"{served.url}/dashboard/jobs")
        await shown.page.evaluate("document.body.append(new Image()), document.images[0].src = 'http://127.0.0.1:9/x'")
        # Chromium 150 looks at what an attribute would run when its event comes, later ones when it is written.
        await shown.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<b onclick=alert(1)>')")
        await shown.page.evaluate("document.querySelector('b[onclick]').click()")
        await shown.page.evaluate("setTimeout(() => { throw new Error('thrown') })")
        await wait_until(lambda: len(shown.complaints) == 3)
        for wrong in ("Loading the image", "Executing inline event handler", "thrown"):
            assert any(wrong in text for text in shown.complaints), shown.complaints


async def test_a_page_becomes_idle_for_tools_that_wait_for_it(served: Ring, chromium: Browser, tmp_path: Path) -> None:
    async with tab(chromium) as shown:
        session, reached = await shown.page.context.new_cdp_session(shown.page), list[str]()
        session.on("Page.lifecycleEvent", lambda event: reached.append(event["name"]))
        await session.send("Page.enable")
        await session.send("Page.setLifecycleEventsEnabled", {"enabled": True})
        await shown.open(f"{served.url}/dashboard")
        await wait_until(lambda: "networkIdle" in reached[reached.index("init") :])  # before it: of an empty page

    picture, profile = tmp_path / "dashboard.png", tmp_path / "profile"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--virtual-time-budget=5000"]
    command = [BINARY, *flags, f"--screenshot={picture}", f"{served.url}/dashboard"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=HANG_S)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_the_ring_is_live_and_draws_its_curves(
    served: Ring, chromium: Browser, job: str, width: int, dark: bool
) -> None:
    async with tab(chromium, width, dark=dark) as shown:
        await shown.open(f"{served.url}/dashboard")
        await expect(shown.page.locator(".uplot canvas")).to_have_count(4)
        assert await shown.page.locator("#jobs a").first.text_content() == job
        background = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 18, 17)") == dark
        await check(shown, served)


async def test_a_hostile_prompt_is_shown_and_not_run(served: Ring, chromium: Browser, job: str) -> None:
    async with tab(chromium) as shown:
        await shown.open(f"{served.url}/dashboard/jobs/{job}")
        await shown.page.locator("details.sample summary").first.press("Enter")  # by keyboard
        await expect(shown.page.locator("details.sample pre").first).to_contain_text(HOSTILE)
        assert await shown.page.locator("details.sample .tokens span[title^=log]").count() > 0
        await check(shown, served)


async def test_a_change_elsewhere_appears_without_a_reload(served: Ring, chromium: Browser, job: str) -> None:
    async with tab(chromium) as shown:
        await shown.open(f"{served.url}/dashboard/jobs")
        rows = shown.page.locator("#jobs tbody tr")
        before = await rows.count()
        await post(f"{served.url}/v1/jobs/{job}/retry", 202)
        await expect(rows).to_have_count(before + 1)
        await check(shown, served)


async def test_a_button_acts_and_says_so(served: Ring, chromium: Browser, job: str) -> None:
    async with tab(chromium) as shown:
        await shown.open(f"{served.url}/dashboard/jobs/{job}")
        await shown.page.locator("#retry").click()
        await expect(shown.page).to_have_url(re.compile(rf"/dashboard/jobs/(?!{job}$)job-"))
        await expect(shown.page.locator("#job .state.succeeded")).to_be_visible()
        await check(shown, served)


async def test_an_answer_is_judged_by_a_click_and_nothing_moves(served: Ring, chromium: Browser) -> None:
    for _ in range(2):
        body = {"model": MODEL, "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 3}
        await post(f"{served.openai_url}/chat/completions", json=body)
    async with tab(chromium) as shown:
        await shown.page.goto(f"{served.url}/dashboard/feedback")
        first = shown.page.locator("tbody tr").first
        await expect(first).to_contain_text(HOSTILE)
        await first.get_by_role("button", name="Bad").dblclick()
        await expect(first).to_contain_text("counted as bad")
        await expect(shown.page.locator("tbody tr").nth(1).get_by_role("button")).to_have_count(2)
        await check(shown, served)
        judged = await shown.page.evaluate("fetch('/v1/feedback?state=judged').then(each => each.json())")
    assert [each["reward"] for each in judged["data"]] == [0.0]


async def test_a_batch_goes_on_under_one_s_eyes_and_is_cancelled_there(served: Ring, chromium: Browser) -> None:
    body = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": f"{HOSTILE} {at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at in range(1500)
    ]
    files = {"file": ("requests.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())}
    file = (await post(f"{served.openai_url}/files", data={"purpose": "batch"}, files=files))["id"]
    order = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await post(f"{served.openai_url}/batches", json=order))["id"]

    async with tab(chromium, 390) as shown:
        page = shown.page
        await shown.open(f"{served.url}/dashboard/batches")
        await expect(page.locator("#batches .state.in_progress")).to_be_visible()
        await check(shown, served)
        await page.locator("#batches tbody a").first.press("Enter")
        await expect(page).to_have_url(re.compile(f"/batches/{batch}$"))
        await shown.live()
        await expect(page.locator("#batch .progress p").first).to_have_text(re.compile(r"%\D*[1-9]"))
        await page.locator("#cancel").click()
        await expect(page.locator("#notice")).to_contain_text("being cancelled")
        await expect(page.locator("#batch .state.cancelled")).to_be_visible()
        await expect(page.locator("#cancel")).to_have_count(0)
        await expect(page.locator("#files .files a[download]")).to_have_count(3)
        assert await page.locator(".timeline .state").last.text_content() == "cancelled"
        await check(shown, served)

        await page.locator("#look-3").click()
        await expect(page).to_have_url(re.compile("/dashboard/files/"))
        await expect(page.locator("details.line .snippet").first).to_contain_text(HOSTILE)
        assert await page.locator("details.line .bad").first.text_content() == "batch_cancelled"
        await check(shown, served)


async def test_a_run_names_the_figures_that_it_has(served: Ring, chromium: Browser) -> None:
    redis = connect(served.redis_url)
    board = TrainingBoard(redis, "curves")
    await board.write(TrainerStatus(policy="curves", run="r", owner="o"))
    for step, held_out in enumerate((None, 0.25)):
        await board.add(
            TrainingPoint(train_step=step, policy_step=step, version=1, at_ms=1, reward=step / 2, held_out=held_out)
        )
    await redis.aclose()
    async with tab(chromium) as shown:
        await shown.open(f"{served.url}/dashboard/training")
        run = shown.page.locator("[sse-swap=curves-curves]")
        await expect(run.locator("[data-chart=reward] output span")).to_have_text(["batch 0.5", "held out 0.25"])
        await expect(run.locator("[data-chart=lag] output span")).to_have_text(["oldest token 0 versions"])
        await expect(run.locator("[data-chart=kl]")).to_contain_text("no figures yet")
        await check(shown, served)


async def test_a_page_that_nobody_looks_at_gives_its_connection_back(served: Ring, chromium: Browser, job: str) -> None:
    async with tab(chromium) as shown:
        await shown.page.clock.install()  # a page may be out of sight for seconds
        await shown.open(f"{served.url}/dashboard/jobs")
        look = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        event = "document.dispatchEvent(new Event('visibilitychange'))"
        await shown.page.evaluate(look % "true" + event)
        await shown.page.clock.fast_forward("00:10")
        await expect(shown.page.locator("#live")).to_have_text("paused")
        rows = shown.page.locator("#jobs tbody tr")
        before = await rows.count()
        await post(f"{served.url}/v1/jobs", 202, json={"kind": "generate", "model": MODEL, "prompts": ["hi"]})
        await shown.page.evaluate(look % "false" + event)
        await shown.live()
        await expect(rows).to_have_count(before + 1)
        await check(shown, served)
