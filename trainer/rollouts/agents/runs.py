"""One run of an agent's program: what it asks, one question after another, until it has ended."""

import asyncio
import contextlib
import secrets
from typing import Any

from shared.jobs import Message
from trainer.rollouts.agents.endpoint import ChatCall, EpisodeOverError, Feedback, ModelEndpoint
from trainer.rollouts.agents.program import AgentError, Program, ProgramEpisode


class AgentRun:
    """Starts with `begin`; after that questions are answered in their order."""

    def __init__(self, program: Program, endpoint: ModelEndpoint, task: int, line: Any, most_calls: int) -> None:
        self._program, self._endpoint = program, endpoint
        self._task, self._line = task, line
        self._left = most_calls
        self._calls: asyncio.Queue[ChatCall | None] = asyncio.Queue()  # None: it has ended
        self._posted: Feedback | None = None
        self._playing: asyncio.Task[Feedback] | None = None
        self.asked: ChatCall | None = None  # the question that waits for its answer
        self.messages: tuple[Message, ...] = ()  # of the conversation that is learned from, as the agent has shown it
        self.key = secrets.token_hex(16)

    async def begin(self) -> None:
        url = await self._endpoint.url()
        self._playing = asyncio.create_task(
            self._play(ProgramEpisode(self._task, self._line, f"{url}/{self.key}/v1", self.key))
        )

    async def next(self) -> ChatCall | Feedback:
        """The program's next question, or its verdict at its end; AgentError when it failed without one."""
        call = await self._calls.get()
        if call is not None:
            self.asked = call
            return call
        assert self._playing is not None, "it has begun"
        try:
            verdict = await self._playing
        except AgentError:
            if self._posted is None:
                raise
            return self._posted
        return self._posted or verdict

    def answer(self, message: Message) -> None:
        """Answer the question that waits."""
        assert self.asked is not None, "a question waits"
        if not self.asked.answer.done():  # else the agent has given it up
            self.asked.answer.set_result(message)
        self.asked = None

    async def end(self) -> None:
        """End the program, if it still runs; one that serves gets an error for the question that waits."""
        waiting = [self.asked]
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait())
        for call in waiting:
            if call is not None and not call.answer.done():
                call.answer.set_exception(EpisodeOverError("the episode was given up"))
        if self._playing is not None:
            self._playing.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentError):
                await self._playing

    async def _play(self, episode: ProgramEpisode) -> Feedback:
        try:
            with self._endpoint.takes(self.key, self._take):
                return await self._program.play(episode)
        finally:
            self._calls.put_nowait(None)

    def _take(self, said: ChatCall | Feedback) -> None:
        if isinstance(said, Feedback):
            self._posted = said
            return
        self._left -= 1
        if self._left < 0:
            said.answer.set_exception(EpisodeOverError("the episode has had all its turns"))
        else:
            self._calls.put_nowait(said)
