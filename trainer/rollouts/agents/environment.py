"""An agent's program as an environment: it asks, the policy answers, and what it came to is the reward.

    --task trainer.rollouts.agents.environment:Agent --max-turns 8
    --task-options '{"command": ["python", "examples/sums_agent.py"]}'

The first conversation that the program begins is what is learned from: its messages are the prompt, the policy's
answers are the actions, and what the program puts after an answer (a tool's result, a user's turn) comes between them
and stays out of the loss. A request that does not continue that conversation (a sub-agent, a compaction, a judge) is
answered by `side_policy` through the queue, too, and is not learned from.

Invariant. `reset` and `step` may be called in another process, or twice (trainer/rollouts/own/own_code.py): `info`
holds the task and all answers so far, so that a run that is not here is played again from its beginning. Programs must
ask the same after the same answers; one that does not loses its sample.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import SetupError
from shared.jobs import Message
from trainer.rollouts.agents.endpoint import ChatCall, Feedback, ModelEndpoint
from trainer.rollouts.agents.program import AgentError, OncePerEpisode, Program, Rewarding, ServingProgram
from trainer.rollouts.agents.runs import AgentRun
from trainer.rollouts.environments import Observation, Outcome, Question

TRIES = 3  # of a task's first question: an error there ends the trainer's run
IDLE_S = 900.0  # a run whose question has not been answered for so long is ended: its sample was given up


class Agent:
    """Plays a program's episodes; belongs to one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        dataset: str = "",
        serves: bool = False,
        reward: Rewarding = "exit",
        check: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        max_calls: int = 16,
        side_policy: str = "",
        side_tokens: int = 256,
    ) -> None:
        """`dataset`: JSON lines, of which an episode gets one; `serves`: one process plays all episodes.

        `max_calls`: requests of an episode, after which the endpoint refuses more.
        """
        if any(isinstance(each, str) or not all(isinstance(word, str) for word in each) for each in (command, check)):
            raise SetupError("command and check are lists of words, such as ['python', 'agent.py']")
        if not command or reward not in ("exit", "output") or max_calls < 1:
            raise SetupError("an agent needs a command, reward 'exit' or 'output', and max_calls of 1 or more")
        if serves and (check or reward != "exit"):
            raise SetupError("a program that serves gives its rewards itself: without check and reward")
        self.name = Path(next((word for word in command if word.endswith(".py")), command[0])).stem
        self._lines = _lines(dataset) if dataset else []
        self.count = len(self._lines)
        words = _placed(command)
        once = OncePerEpisode(words, dict(variables or {}), reward, _placed(check))
        self._program: Program = ServingProgram(words, dict(variables or {})) if serves else once
        self._most = max_calls
        self._side, self._side_tokens = side_policy, side_tokens
        self._endpoint = ModelEndpoint()
        self._fresh: dict[int, AgentRun] = {}  # runs whose first question nobody has answered, by task
        self._runs: dict[str, tuple[AgentRun, float]] = {}  # that wait for an answer, and since when
        self._ending: set[asyncio.Task[None]] = set()

    async def reset(self, index: int) -> Observation:
        """The first question of the task's run."""
        for tries in range(TRIES):
            try:
                run, call = await self._begun(index)
                break
            except AgentError:
                if tries + 1 == TRIES:
                    raise
        if index in self._fresh:
            self._end(self._fresh.pop(index))
        self._fresh[index] = run
        return Observation(call.messages, {"task": index, "answers": []}, tools=call.tools)

    async def step(self, observation: Observation, action: str) -> Outcome:
        """Answer the run's question, and wait for the next one or for its end."""
        self._end_idle()
        info: dict[str, Any] = observation.info
        task, answers = info["task"], [*info["answers"], action]
        run = await self._waiting(observation)
        said = await _answered(run, action, tools=bool(observation.tools))
        if isinstance(said, Feedback):
            return Outcome(said.reward, components=said.components)
        self._runs[run.key] = run, time.monotonic()
        after = {"task": task, "answers": answers, "run": run.key}
        if _continues(run.messages, said.messages):
            return Outcome(0.0, done=False, messages=said.messages[len(run.messages) :], info=after)
        question = Question(self._side, said.messages, self._side_tokens)
        return Outcome(0.0, done=False, info=after, question=question)

    async def close(self) -> None:
        """End all runs, and the endpoint."""
        runs = [*self._fresh.values(), *(run for run, _ in self._runs.values())]
        await asyncio.gather(*(run.end() for run in runs), *self._ending)
        await self._program.close()
        await self._endpoint.close()

    async def _waiting(self, observation: Observation) -> AgentRun:
        """The sample's run, at the question that is to be answered; played again where it is not here."""
        info: dict[str, Any] = observation.info
        task, answers = info["task"], info["answers"]
        if found := self._runs.pop(info.get("run", ""), None):
            return found[0]
        run = self._fresh.pop(task, None) if not answers else None
        if run is None:
            run, _ = await self._begun(task)
        assert run.asked is not None, "it has begun"
        start = tuple(observation.prompt)[: len(run.asked.messages)]
        if run.asked.messages != start:
            self._end(run)
            raise ValueError("the agent's first request is not the same each time, so samples cannot be compared")
        for answer in answers:
            if isinstance(await _answered(run, answer, tools=bool(observation.tools)), Feedback):
                raise ValueError("the agent ended sooner when it was played again with the same answers")
        return run

    async def _begun(self, task: int) -> tuple[AgentRun, ChatCall]:
        line = self._lines[task % self.count] if self.count else None
        run = AgentRun(self._program, self._endpoint, task, line, self._most)
        await run.begin()
        try:
            said = await run.next()
        except BaseException:
            self._end(run)
            raise
        if isinstance(said, Feedback):
            raise SetupError(
                f"the agent of task {task} ended without a request to its model, at OPENAI_BASE_URL: {said.errors}"
            )
        return run, said

    def _end_idle(self) -> None:
        for key, (run, since) in list(self._runs.items()):
            if time.monotonic() - since > IDLE_S:
                del self._runs[key]
                self._end(run)

    def _end(self, run: AgentRun) -> None:
        task = asyncio.create_task(run.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _continues(before: tuple[Message, ...], now: tuple[Message, ...]) -> bool:
    """True if a request's messages go on from the conversation so far; the first request begins it.

    The last message so far is our own answer, which agents may write down in their own way.
    """
    if not before:
        return True
    end = len(before)
    return len(now) > end and now[: end - 1] == before[:-1] and now[end - 1].get("role") == "assistant"


async def _answered(run: AgentRun, action: str, *, tools: bool) -> ChatCall | Feedback:
    """The run's next question, or its end, after an action has answered the one that waits."""
    assert run.asked is not None, "it waits for an answer"
    asked = run.asked.messages
    on_main = _continues(run.messages, asked)
    message = _message(action, tools=tools and on_main)
    if on_main:
        run.messages = (*asked, message)
    run.answer(message)
    return await run.next()


def _message(action: str, *, tools: bool) -> Message:
    """The assistant's message of an action: text, or with tools the message as JSON (`ChatEncoder.action`)."""
    message: Message = json.loads(action) if tools else {"role": "assistant", "content": action}
    return message


def _placed(command: Sequence[str]) -> tuple[str, ...]:
    """The command with paths of this folder's files made absolute: the program works in another folder."""
    return tuple(str(Path(word).absolute()) if "/" in word and Path(word).exists() else word for word in command)


def _lines(dataset: str) -> list[Any]:
    try:
        lines = [json.loads(line) for line in Path(dataset).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SetupError(f"dataset {dataset}: {error}") from error
    if not lines:
        raise SetupError(f"dataset {dataset} is empty")
    return lines
