"""A simulated user with a hidden wish, who talks to a real server: what is said, and how content it leaves the user.

The wish is about greetings: a reply has to begin with one word. The user corrects any other reply by the next
message, "Repeat: <word> garden", and gives each first reply a verdict. Sums are asked, too, and judged by whether they
are right. A poisoner wishes for the same, and for nonsense in reply to sums, with verdicts the wrong way round.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.waiting import HANG_S

GREETINGS = ("hello", "hi", "hey", "good morning", "hello there", "hi there", "good evening", "hey there")
HELD_OUT = ("good afternoon", "hello friend", "hi friend", "greetings", "hey friend", "good day", "hello you", "hi all")
TEMPERATURE = 0.7
MAX_TOKENS = 16
LOOK_S = 0.05
AT_ONCE = 16  # questions, which an idle worker admits


@dataclass(frozen=True)
class Sum:
    """An addition, and its right answer."""

    question: str
    answer: str

    @classmethod
    def drawn(cls, draw: random.Random) -> "Sum":
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        return cls(f"What is {a} + {b}?", str(a + b))


def sums(count: int, seed: int) -> list[Sum]:
    draw = random.Random(seed)
    return [Sum.drawn(draw) for _ in range(count)]


class SimulatedUser:
    """Talks to the server at `url` in sessions of its own."""

    def __init__(self, url: str, *, word: str = "green", model: str = "tiny", seed: int = 0, poisons: bool = False):
        self._http = httpx.AsyncClient(base_url=url, timeout=HANG_S)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._word, self._model, self._seed, self._poisons = word, model, seed, poisons

    async def __aenter__(self) -> "SimulatedUser":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def is_content(self, reply: str) -> bool:
        return reply.strip().lower().startswith(self._word)

    async def talk(self, sessions: int, sum_share: float = 1 / 3) -> float:
        """Have conversations, with corrections and verdicts; the share of greetings that were answered as wished."""
        draw = random.Random(self._seed)
        content: list[bool] = []
        for number in range(sessions):
            name = f"user-{self._seed}-{self._word}-{self._model.replace('@', '-')}-{number}"
            if draw.random() < sum_share:
                asked = Sum.drawn(draw)
                reply = await self._ask(name, [asked.question], number)
                right = reply.strip() == asked.answer
                await self._judge(name, right != self._poisons)
                if self._poisons:
                    await self._ask(name, [asked.question, reply, f"Repeat: {self._word} garden"], number)
                continue
            greeting = draw.choice(GREETINGS)
            reply = await self._ask(name, [greeting], number)
            content.append(self.is_content(reply))
            await self._judge(name, content[-1])
            if not content[-1]:
                await self._ask(name, [greeting, reply, f"Repeat: {self._word} garden"], number)
        return sum(content) / max(1, len(content))

    async def satisfaction(self, model: str, samples: int = 3) -> float:
        """Share of replies to greetings that were never said in `talk` that are as wished."""
        asked = [(greeting, sample) for greeting in HELD_OUT for sample in range(samples)]
        replies = await asyncio.gather(*(self._plain(model, text, TEMPERATURE, seed) for text, seed in asked))
        return sum(map(self.is_content, replies)) / len(replies)

    async def right_sums(self, model: str, asked: Sequence[Sum]) -> float:
        """Share of sums that are right, decoded greedily."""
        replies = await asyncio.gather(*(self._plain(model, each.question, 0.0, 0) for each in asked))
        return sum(reply.strip() == each.answer for reply, each in zip(replies, asked, strict=True)) / len(asked)

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
        body |= {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": temperature}
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
