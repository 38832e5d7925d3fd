"""The dashboard in a real Chromium over a real ring. Skipped where no browser is installed: the pages, their events
and actions are tested without one in tests/redis/test_dashboard.py.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from api.cli.client import InferenceClient, JobRequest
from shared.jobs import JobInput, RewardSpec
from tests.e2e.browser import Browser, Tab, browser, find_browser
from tests.e2e.rings import MODEL, Ring

BINARY = find_browser()
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="no Chromium on this machine (apt install chromium, or name one in PARALLM_TEST_BROWSER)"
)
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
LIVE = "document.getElementById('live')?.textContent === 'live'"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BINARY is not None
    with browser(BINARY, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def opened() -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def open_one(*arguments: Any, **named: Any) -> Tab:
        tabs.append(Tab(*arguments, **named))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


@pytest.fixture(scope="module")
def job(served: Ring) -> str:
    async def submit() -> str:
        async with InferenceClient(served.url) as client:
            request = JobRequest(kind="rollout", model=MODEL, n=3, max_tokens=12, reward=RewardSpec("exact"))
            status = await client.submit(request, [JobInput(f"{HOSTILE} 2+2?", reference="4")])
            async for _ in client.chat(MODEL, [{"role": "user", "content": "hi"}], max_tokens=8, ignore_eos=True):
                pass
            return (await client.wait(status.id)).id

    return asyncio.run(submit())


def checked(tab: Tab, served: Ring) -> None:
    """Nothing was run that should not be, nothing was asked of anybody else, nothing sticks out."""
    assert tab.complaints() == []
    assert not tab.run("window.broken")
    assert [url for url in tab.requested() if not url.startswith((served.url, "about:", "data:"))] == []
    assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_ring_is_live_and_draws_its_curves(
    served: Ring, chromium: Browser, job: str, width: int, dark: bool, opened: Callable[..., Tab]
) -> None:
    tab = opened(chromium, width, dark=dark)
    tab.open(f"{served.url}/dashboard", LIVE)
    tab.wait("document.querySelectorAll('.uplot canvas').length === 4", timeout_s=30)
    assert tab.run("document.querySelector('#jobs a').textContent") == job
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 18, 17)") == dark
    checked(tab, served)


def test_a_hostile_prompt_is_shown_and_not_run(
    served: Ring, chromium: Browser, job: str, opened: Callable[..., Tab]
) -> None:
    tab = opened(chromium)
    tab.open(f"{served.url}/dashboard/jobs/{job}", LIVE)
    tab.run("document.querySelector('details.sample summary').focus()")
    tab.press("Enter")  # by keyboard
    tab.wait("document.querySelector('details.sample pre')")
    assert HOSTILE in tab.run("document.querySelector('details.sample pre').textContent")
    assert tab.run("document.querySelectorAll('details.sample .tokens span[title^=log]').length") > 0
    checked(tab, served)


def test_a_change_elsewhere_appears_without_a_reload(
    served: Ring, chromium: Browser, job: str, opened: Callable[..., Tab]
) -> None:
    tab = opened(chromium)
    tab.open(f"{served.url}/dashboard/jobs", LIVE)
    before = tab.run("document.querySelectorAll('#jobs tbody tr').length")
    assert httpx.post(f"{served.url}/v1/jobs/{job}/retry", timeout=20).status_code == 202
    tab.wait(f"document.querySelectorAll('#jobs tbody tr').length === {before + 1}")
    checked(tab, served)


def test_a_button_acts_and_says_so(served: Ring, chromium: Browser, job: str, opened: Callable[..., Tab]) -> None:
    tab = opened(chromium)
    tab.open(f"{served.url}/dashboard/jobs/{job}", LIVE)
    tab.run("window.confirm = () => true; document.getElementById('retry').click()")
    tab.wait(f"location.pathname.startsWith('/dashboard/jobs/job-') && !location.pathname.endsWith('{job}')")
    tab.wait("document.querySelector('#job .state.succeeded')")
    checked(tab, served)


def test_a_batch_goes_on_under_one_s_eyes_and_is_cancelled_there(
    served: Ring, chromium: Browser, opened: Callable[..., Tab]
) -> None:
    body = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 100, "ignore_eos": True}
    lines = [
        {"custom_id": f"{HOSTILE} {at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at in range(1500)
    ]
    files = {"file": ("requests.jsonl", "".join(json.dumps(each) + "\n" for each in lines).encode())}
    file = httpx.post(f"{served.openai_url}/files", data={"purpose": "batch"}, files=files, timeout=20).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = httpx.post(f"{served.openai_url}/batches", json=asked, timeout=20).json()["id"]

    tab = opened(chromium, 390)
    tab.open(f"{served.url}/dashboard/batches", LIVE)
    tab.wait("document.querySelector('#batches .state.in_progress')")
    checked(tab, served)
    tab.run("document.querySelector('#batches tbody a').focus()")
    tab.press("Enter")
    tab.wait(f"location.pathname.endsWith('/batches/{batch}') && {LIVE}")
    tab.wait("parseInt(document.querySelector('#batch .progress p').textContent.split('%')[1]) > 0", timeout_s=30)
    tab.run("window.confirm = () => true; document.getElementById('cancel').click()")
    tab.wait("document.getElementById('notice').textContent.includes('being cancelled')")
    tab.wait("document.querySelector('#batch .state.cancelled') && !document.getElementById('cancel')", timeout_s=30)
    tab.wait("document.querySelectorAll('#files .files a[download]').length === 3")
    assert tab.run("[...document.querySelectorAll('.timeline .state')].at(-1).textContent") == "cancelled"
    checked(tab, served)

    tab.run("document.getElementById('look-3').click()")
    tab.wait("location.pathname.startsWith('/dashboard/files/') && document.querySelector('details.line')")
    assert HOSTILE in tab.run("document.querySelector('details.line .snippet').textContent")
    assert tab.run("document.querySelector('details.line .bad').textContent") == "batch_cancelled"
    checked(tab, served)


def test_a_page_that_nobody_looks_at_gives_its_connection_back(
    served: Ring, chromium: Browser, opened: Callable[..., Tab]
) -> None:
    tab = opened(chromium)
    tab.open(f"{served.url}/dashboard/jobs", LIVE)
    look = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    tab.run(look % "true" + event)
    tab.wait("document.getElementById('live').textContent === 'paused'")
    before = tab.run("document.querySelectorAll('#jobs tbody tr').length")
    body = {"kind": "generate", "model": MODEL, "prompts": ["hi"]}
    assert httpx.post(f"{served.url}/v1/jobs", json=body, timeout=20).status_code == 202
    tab.run(look % "false" + event)
    tab.wait(f"{LIVE} && document.querySelectorAll('#jobs tbody tr').length === {before + 1}")
    checked(tab, served)
