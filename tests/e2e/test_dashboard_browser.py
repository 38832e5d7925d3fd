"""The dashboard in a real Chromium over a real ring. Skipped where no browser is installed: the pages, their events
and actions are tested without one in tests/redis/test_dashboard.py.
"""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from api.client import InferenceClient, JobRequest
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


@pytest.fixture(scope="module")
def job(served: Ring) -> str:
    async def submit() -> str:
        async with InferenceClient(served.url) as client:
            request = JobRequest(kind="rollout", model=MODEL, n=3, max_tokens=12, reward=RewardSpec("exact"))
            status = await client.submit(request, [JobInput(f"{HOSTILE} 2+2?", reference="4")])
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
    served: Ring, chromium: Browser, job: str, width: int, dark: bool
) -> None:
    tab = Tab(chromium, width, dark=dark)
    tab.open(f"{served.url}/dashboard", LIVE)
    tab.wait("document.querySelectorAll('.uplot canvas').length === 4", timeout_s=30)
    assert tab.run("document.querySelector('#jobs a').textContent") == job
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 18, 17)") == dark
    checked(tab, served)


def test_a_hostile_prompt_is_shown_and_not_run(served: Ring, chromium: Browser, job: str) -> None:
    tab = Tab(chromium)
    tab.open(f"{served.url}/dashboard/jobs/{job}", LIVE)
    tab.run("document.querySelector('details.sample summary').focus()")
    tab.press("Enter")  # by keyboard
    tab.wait("document.querySelector('details.sample pre')")
    assert HOSTILE in tab.run("document.querySelector('details.sample pre').textContent")
    assert tab.run("document.querySelectorAll('details.sample .tokens span[title^=log]').length") > 0
    checked(tab, served)


def test_a_change_elsewhere_appears_without_a_reload(served: Ring, chromium: Browser, job: str) -> None:
    tab = Tab(chromium)
    tab.open(f"{served.url}/dashboard/jobs", LIVE)
    before = tab.run("document.querySelectorAll('#jobs tbody tr').length")
    assert httpx.post(f"{served.url}/v1/jobs/{job}/retry", timeout=20).status_code == 202
    tab.wait(f"document.querySelectorAll('#jobs tbody tr').length === {before + 1}")
    checked(tab, served)


def test_a_button_acts_and_says_so(served: Ring, chromium: Browser, job: str) -> None:
    tab = Tab(chromium)
    tab.open(f"{served.url}/dashboard/jobs/{job}", LIVE)
    tab.run("window.confirm = () => true; document.getElementById('retry').click()")
    tab.wait(f"location.pathname.startsWith('/dashboard/jobs/job-') && !location.pathname.endsWith('{job}')")
    tab.wait("document.querySelector('#job .state.succeeded')")
    checked(tab, served)
