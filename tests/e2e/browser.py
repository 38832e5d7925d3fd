"""A real Chromium without a head, driven over its debugging pipe: no driver package is needed.

https://chromedevtools.github.io/devtools-protocol: JSON messages that end in a zero byte, in on fd 3, out on fd 4.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_S = 30
_WITH_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]  # away from 3 and 4
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """PARALLM_TEST_BROWSER, or a Chromium on the path, or Chrome on a Mac."""
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    found = os.environ.get("PARALLM_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    return found or (mac if Path(mac).exists() else None)


class Browser:
    """One browser process; a session is one page."""

    def __init__(self, binary: str, profile: Path) -> None:
        to_it, ours_out = os.pipe()
        ours_in, from_it = os.pipe()
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb", 0)
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(to_it), str(from_it), binary, *flags, "about:blank"],
            pass_fds=(to_it, from_it),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        buffer = b""
        with contextlib.suppress(OSError, ValueError):
            while data := self._in.read(65_536):
                *messages, buffer = (buffer + data).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]].put(message)
                    else:
                        self.events.append(message)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """One command's answer."""
        self._number += 1
        answers = self._answers[self._number] = Queue()
        message = {"id": self._number, "method": method, "params": params}
        self._out.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        try:
            answer = answers.get(timeout=ANSWER_S)
        except Empty:
            raise AssertionError(f"the browser does not answer {method}") from None
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group: the renderers, too
        self._process.wait()
        self._out.close()
        self._reader.join(5)
        self._in.close()


class Tab:
    """One page."""

    def __init__(self, browser: Browser, width: int = 1280, *, dark: bool = False) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        """A page that is left open holds one of the browser's six connections to the server."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; what it throws is an error here."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url: str, ready: str) -> None:
        """Go to a page and wait until `ready` holds in it."""
        self.call("Page.navigate", url=url)
        self.wait(ready)

    def wait(self, condition: str, timeout_s: float = 15) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(f"document.readyState === 'complete' && Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true; complaints: {self.complaints()}"
            threading.Event().wait(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def complaints(self) -> list[str]:
        """What the browser has complained about: errors of scripts, violations of the policy, failed loads."""
        found = []
        for event in [event for event in self._browser.events if event.get("sessionId") == self._session]:
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
        return found

    def requested(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in list(self._browser.events)
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def browser(binary: str, profile: Path) -> Iterator[Browser]:
    """A browser for a block."""
    started = Browser(binary, profile)
    try:
        yield started
    finally:
        started.close()
