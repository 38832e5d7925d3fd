"""The act in which a worker with a model that sees joins the ring, and is asked what is in pictures."""

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openai import AsyncOpenAI
from rich.console import Console

from api.demo.serving import DemoRing, stop

MODEL = "tiny-vision"
EXAMPLES = Path("models") / MODEL / "examples"
GOAL = 0.8  # share of right answers; 0.9 of 1,024 pictures of each task were
QUIET_S = 120.0  # for which a worker that joins may write nothing into its log


class PictureAct:
    """One round of questions; the chats of the other model's workers are not touched."""

    def __init__(self, served: DemoRing, out: Path, console: Console) -> None:
        self._served = served
        self._out = out
        self._console = console

    async def run(self) -> bool:
        """Join, ask, leave; whether enough answers were right."""
        with self._worker() as worker:
            async with AsyncOpenAI(base_url=f"{self._served.url}/v1", api_key="none") as openai:
                await self._joined(openai, worker)
                return await self._ask(openai)

    @contextlib.contextmanager
    def _worker(self) -> Iterator["subprocess.Popen[str]"]:
        command = [sys.executable, "-m", "worker", "--redis", self._served.redis_url, "--model", f"models/{MODEL}"]
        with (self._out / "pictures.log").open("w") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
            try:
                yield worker
            finally:
                stop(worker)

    async def _joined(self, openai: AsyncOpenAI, worker: "subprocess.Popen[str]") -> None:
        log, size, heard = self._out / "pictures.log", 0, time.monotonic()
        while time.monotonic() - heard < QUIET_S and worker.poll() is None:
            if MODEL in {model.id async for model in openai.models.list()}:
                return
            if size != (size := log.stat().st_size):  # a GPU may compile for minutes
                heard = time.monotonic()
            await asyncio.sleep(0.2)
        raise SystemExit(f"the worker with {MODEL} did not join; see {log}")

    async def _ask(self, openai: AsyncOpenAI) -> bool:
        lines = (EXAMPLES / "questions.jsonl").read_text().splitlines()
        asked = [json.loads(line) for line in lines]
        began = time.monotonic()
        answers = await asyncio.gather(*(self._answer(openai, each["picture"], each["question"]) for each in asked))
        took_s = time.monotonic() - began
        right, of = Counter[str](), Counter[str]()
        for each, answer in zip(asked, answers, strict=True):
            task = each["picture"].split("-")[0]
            of[task] += 1
            right[task] += answer == each["reference"]
        for each, answer in list(zip(asked, answers, strict=True))[:: len(asked) // len(of)]:
            self._console.print(f"  {each['picture']}: {each['question']} {answer}", markup=False)
        share = right.total() / of.total()
        tasks = ", ".join(f"{task} {right[task]} of {of[task]}" for task in of)
        self._console.print(f"  {len(asked)} pictures in one batch, {took_s:.1f} s: {tasks}; {share:.2f} right")
        return share >= GOAL

    async def _answer(self, openai: AsyncOpenAI, picture: str, question: str) -> str:
        data = base64.b64encode((EXAMPLES / picture).read_bytes()).decode()
        answer = await openai.chat.completions.create(
            model=MODEL,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            temperature=0,
            max_tokens=8,
        )
        return (answer.choices[0].message.content or "").strip()
