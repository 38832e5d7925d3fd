"""Chats that go on while something else happens: streamed, timed, and judged whole or broken.

The client repeats nothing by itself (`max_retries=0`): a request that fails, or a stream that ends without its finish
reason, is counted.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

QUESTIONS = ("hello", "What is 12 + 35?", "who are you?", "Count from 3 to 9.", "Repeat: apple river stone")


@dataclass(frozen=True)
class StreamedChat:
    """One chat of the demo and what its client measured."""

    model: str
    at_s: float  # when it was asked, since the start
    first_ms: float = 0.0  # to the first token
    tokens: int = 0
    versions: tuple[str, ...] = ()  # adapter versions of its tokens, in order
    error: str = ""  # why it is not whole


@dataclass
class ChatLog:
    """The chats of the demo, as their clients measured them."""

    chats: list[StreamedChat] = field(default_factory=list)

    @property
    def broken(self) -> list[StreamedChat]:
        """Chats that failed, were cut off, or were answered by a version that was not asked for."""
        return [chat for chat in self.chats if chat.error]

    def first_ms(self, model: str = "") -> list[float]:
        """Times to the first token, of one model or of all."""
        return [chat.first_ms for chat in self.chats if not chat.error and model in ("", chat.model)]


@contextlib.asynccontextmanager
async def chatting(url: str, models: tuple[str, ...], pause_s: float, began: float) -> AsyncIterator[ChatLog]:
    """Stream chats on each of the models, one after the other, as long as the block lasts; the last ones end whole."""
    log, over = ChatLog(), asyncio.Event()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        tasks = [asyncio.create_task(_chat_on(openai, model, pause_s, began, log, over)) for model in models]
        try:
            yield log
        finally:
            over.set()
            await asyncio.gather(*tasks)


async def _chat_on(
    openai: AsyncOpenAI, model: str, pause_s: float, began: float, log: ChatLog, over: asyncio.Event
) -> None:
    number = 0
    while not over.is_set():
        log.chats.append(await one_chat(openai, model, QUESTIONS[number % len(QUESTIONS)], began))
        number += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), pause_s)


async def one_chat(openai: AsyncOpenAI, model: str, question: str, began: float) -> StreamedChat:
    """Stream one answer to its end."""
    asked, first, tokens, finish = time.monotonic(), 0.0, 0, ""
    versions: list[str] = []
    wishes: dict[str, Any] = {"return_weight_versions": True, "return_token_ids": True}
    if "@" not in model:
        wishes["adapter_policy"] = "follow"  # take the newest version at the next decode step, in mid-answer too
    try:
        stream = await openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            temperature=0,
            max_tokens=48,
            extra_body=wishes,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                extra: dict[str, Any] = choice.model_extra or {}
                ids = extra.get("token_ids") or []
                if ids and not first:
                    first = time.monotonic()
                tokens += len(ids)
                for span in extra.get("weight_versions") or []:
                    versions += [span["version"]] if versions[-1:] != [span["version"]] else []
                finish = choice.finish_reason or finish
    except (OpenAIError, httpx.HTTPError) as failure:
        return StreamedChat(model, asked - began, error=f"{type(failure).__name__}: {failure}")
    wrong = "@" in model and versions != [model]
    error = "" if finish else "ended without a finish reason"
    return StreamedChat(
        model,
        asked - began,
        1000 * ((first or time.monotonic()) - asked),
        tokens,
        tuple(versions),
        f"answered by {versions}" if wrong else error,
    )
