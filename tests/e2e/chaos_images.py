"""What is said of images while processes die: each answer is the one from before, whole and in a stream."""

import asyncio
import base64
import json
import random
import time
from typing import Any

import httpx

from tests.e2e.chaos_load import BUSY, EXCUSED, GIVEN_UP, Load, bearer
from tests.e2e.chaos_ring import VISION_MODEL
from tests.e2e.rings import ROOT
from tests.waiting import HANG_S

EXAMPLES = ROOT / "models" / VISION_MODEL / "examples"
ASKED = 6  # examples
PAUSE_S = 0.5


class Images:
    """One chat about an image after another until the load is told to stop; every other one is streamed."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        self._load, self._rng = load, rng
        self._said: list[tuple[dict[str, Any], str]] = []  # bodies and their answers

    async def learn(self, url: str) -> None:
        """Ask while nothing is harmed."""
        lines = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text().splitlines()]
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, headers=bearer(self._load.ring.key)) as http:
            for line in lines[:: len(lines) // ASKED][:ASKED]:
                asked, until = _body(line["picture"], line["question"]), time.monotonic() + HANG_S
                while (answer := await http.post("/v1/chat/completions", json=asked)).status_code in BUSY:
                    assert time.monotonic() < until, answer.text
                    await asyncio.sleep(0.2)
                self._said.append((asked, answer.raise_for_status().json()["choices"][0]["message"]["content"]))

    async def run(self) -> None:
        """Compare each answer."""
        async with self._load.client(httpx.Timeout(30, connect=2)) as http:
            while not self._load.stopping:
                asked, said = self._rng.choice(self._said)
                stream = self._rng.random() < 0.5
                path = "/v1/chat/completions"
                answer = await self._load.patiently(http, path, asked | {"stream": stream})
                if answer is not None:
                    self._judge(_text(answer) if stream else answer.json()["choices"][0]["message"]["content"], said)
                await asyncio.sleep(PAUSE_S)

    def _judge(self, text: str | None, said: str) -> None:
        """`text`: None for a stream that broke off with its api, or with an error that names a reason."""
        if text is None:
            return
        if text != said:
            self._load.report.violation(f"another answer to an image: {text!r} in place of {said!r}")
        self._load.report.seen += 1


def _text(answer: httpx.Response) -> str | None:
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if not chunks or chunks[-1] != "[DONE]":
        return None
    parsed = [json.loads(chunk) for chunk in chunks[:-1]]
    errors = [str(chunk["error"]) for chunk in parsed if "error" in chunk]
    if errors:
        return None if any(text in errors[0] for text in (*EXCUSED, GIVEN_UP)) else errors[0]
    return "".join(choice["delta"].get("content") or "" for chunk in parsed for choice in chunk["choices"])


def _body(picture: str, question: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode((EXAMPLES / picture).read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    return {"model": VISION_MODEL, "messages": [{"role": "user", "content": content}], **greedy}
