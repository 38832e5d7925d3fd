"""A simulated user with a hidden wish, who talks to a real server: what is said, and how content it leaves the user.

The wish is about some questions (tests/training/wishes.py). The user corrects any reply that is not as wished by the
next message, and gives each first reply a verdict. Tasks are asked, too, and judged by whether they are right. A
poisoner wishes for the same, and for nonsense in reply to tasks, with verdicts the wrong way round.
"""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx

from tests.training.wishes import Greeting, Task, Wish
from tests.waiting import HANG_S

TEMPERATURE = 0.7
LOOK_S = 0.05
AT_ONCE = 16  # questions, which an idle worker admits


class SimulatedUser:
    """Talks to the server at `url` in sessions of its own."""

    def __init__(
        self, url: str, *, wish: Wish | None = None, model: str = "tiny", seed: int = 0, poisons: bool = False,
        key: str = "",
    ) -> None:  # fmt: skip
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._http = httpx.AsyncClient(base_url=url, timeout=HANG_S, headers=headers)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._wish, self._model, self._seed, self._poisons = wish or Greeting(), model, seed, poisons

    async def __aenter__(self) -> "SimulatedUser":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def talk(self, sessions: int, task_share: float = 1 / 3) -> float:
        """Have conversations, with corrections and verdicts; the share of first replies that were as wished."""
        draw, wish = random.Random(self._seed), self._wish
        talks: list[Coroutine[Any, Any, bool | None]] = []
        for number in range(sessions):
            name = f"user-{self._seed}-{int(self._poisons)}-{self._model.replace('@', '-')}-{number}"
            if draw.random() < task_share:
                talks.append(self._task(name, wish.drawn(draw), number))
            else:
                talks.append(self._wished(name, draw.choice(wish.asked), number))
        content = [each for each in await asyncio.gather(*talks) if each is not None]
        return sum(content) / max(1, len(content))

    async def satisfaction(self, model: str, samples: int = 3) -> float:
        """Share of replies to questions that were never asked in `talk` that are as wished."""
        asked = [(text, sample) for text in self._wish.held_out for sample in range(samples)]
        replies = await asyncio.gather(*(self._plain(model, text, TEMPERATURE, seed) for text, seed in asked))
        return sum(map(self._wish.is_content, replies)) / len(replies)

    async def right(self, model: str, asked: Sequence[Task]) -> float:
        """Share of tasks that are right, decoded greedily."""
        replies = await asyncio.gather(*(self._plain(model, each.question, 0.0, 0) for each in asked))
        return sum(each.is_right(reply) for reply, each in zip(replies, asked, strict=True)) / max(1, len(asked))

    async def _task(self, session: str, asked: Task, seed: int) -> None:
        async with self._room:
            reply = await self._ask(session, [asked.question], seed)
            await self._judge(session, asked.is_right(reply) != self._poisons)
            if self._poisons:
                await self._ask(session, [asked.question, reply, self._wish.poison], seed)

    async def _wished(self, session: str, text: str, seed: int) -> bool:
        async with self._room:
            reply = await self._ask(session, [text], seed)
            content = self._wish.is_content(reply)
            await self._judge(session, content)
            if not content:
                await self._ask(session, [text, reply, self._wish.correction(text)], seed)
            return content

    async def _plain(self, model: str, text: str, temperature: float, seed: int) -> str:
        async with self._room:
            return await self._completed({"collect_trajectory": False}, model, [text], temperature, seed)

    async def _ask(self, session: str, texts: Sequence[str], seed: int) -> str:
        return await self._completed({}, self._model, texts, TEMPERATURE, seed, {"X-Session-Id": session})

    async def _completed(
        self, body: dict[str, Any], model: str, texts: Sequence[str], temperature: float, seed: int,
        headers: dict[str, str] | None = None,
    ) -> str:  # fmt: skip
        messages = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(texts)]
        body |= {"model": model, "messages": messages, "temperature": temperature, "max_tokens": self._wish.max_tokens}
        answer = await self._http.post("/v1/chat/completions", json=body | {"seed": seed}, headers=headers)
        while answer.status_code in (429, 503):  # more ask at once than the worker admits
            await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
            answer = await self._http.post("/v1/chat/completions", json=body | {"seed": seed}, headers=headers)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"] or "")

    async def _judge(self, session: str, good: bool) -> None:
        body = {"session": session, "rating": "up" if good else "down"}
        for _ in range(int(HANG_S / LOOK_S)):
            answer = await self._http.post("/v1/feedback", json=body)
            if answer.status_code != 404:  # a session is stored a moment after its reply
                break
            await asyncio.sleep(LOOK_S)
        answer.raise_for_status()
