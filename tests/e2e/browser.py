"""A real Chromium without a head, driven by playwright: the machine's own, none is downloaded."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S

# Playwright's own, which takes a second to import, and every process of the tests would: only who shows a page does.
Browser = Any
Page = Any
ConsoleMessage = Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def expect(what: Any) -> Any:
    """Playwright's, with time for a busy machine."""
    from playwright.async_api import expect

    expect.set_options(timeout=1000 * HANG_S)
    return expect(what)


def find_browser() -> str | None:
    """PARALLM_TEST_BROWSER, or a Chromium on the path, or Chrome on a Mac."""
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    found = os.environ.get("PARALLM_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    return found or (mac if Path(mac).exists() else None)


@asynccontextmanager
async def browser(binary: str) -> AsyncIterator[Browser]:
    """A browser for a block, with a profile of its own."""
    from playwright.async_api import async_playwright

    async with (
        async_playwright() as playwright,
        await playwright.chromium.launch(executable_path=binary, args=["--disable-gpu"]) as chromium,
    ):
        yield chromium


class Tab:
    """One page, what it has asked for, and what the browser has complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requested: list[str] = []
        self.complaints: list[str] = []  # errors of scripts, violations of the policy, failed loads
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)
        page.on("dialog", lambda dialog: dialog.accept())

    def _note(self, message: ConsoleMessage) -> None:
        # The browser's own words carry no values. The page's do: htmx prints an error when a stream is opened anew.
        if message.type == "error" and not message.args:
            self.complaints.append(message.text)

    async def open(self, url: str) -> None:
        """Go to a page of the dashboard and wait until it is live."""
        await self.page.goto(url)
        await self.live()

    async def live(self) -> None:
        """Wait until the page gets events."""
        await expect(self.page.locator("#live")).to_have_text("live")


@asynccontextmanager
async def tab(chromium: Browser, width: int = 1280, *, dark: bool = False) -> AsyncIterator[Tab]:
    """A page in a context of its own: one that is left open holds one of the six connections to the server."""
    context = await chromium.new_context(
        viewport={"width": width, "height": 900}, is_mobile=width < 600, color_scheme="dark" if dark else "light"
    )
    async with context:
        context.set_default_timeout(1000 * HANG_S)
        yield Tab(await context.new_page())
