"""Plays environments of verifiers for `trainer.rollouts.agents.environment:Agent`, as a program that serves.

Run by a Python that has verifiers and the environment's package: `python verifiers_program.py '{"taskset": {"id":
"textarena", "game": "Wordle-v0"}}'`.

- *0.4*: the argument is the environment's configuration as verifiers reads it (its `[env]` block). Each agent of it
  runs on this machine unless the configuration names another runtime, with verifiers' harness `null`. The reward is the
  mean of the traces' rewards; theirs by name are the components.
- *0.1*, and packages of Prime's hub made for it, with a function `load_environment`: the argument is `{"id": "PACKAGE",
  "args": {...}}`. The reward is the rubric's, its functions by name are the components.

Either asks the policy and no other model, unless it is told to. Imports nothing of ParaLLM.
"""

import asyncio
import contextlib
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError:
    import verifiers as classic

    vf = None

HERE = {"type": "subprocess"}  # verifiers' default is a sandbox of Prime's
HARNESS = {"id": "null"}  # a chat without tools of its own; verifiers' default may run commands
Play = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # an episode's line to that of its end


class NumberedTasks:
    """Tasks of a taskset by number, without end where it has an end."""

    def __init__(self, taskset: Any) -> None:
        self._more = iter(taskset)
        self._known: list[Any] = []
        self._ended = False

    def task(self, number: int) -> Any:
        while not self._ended and len(self._known) <= number:
            try:
                self._known.append(next(self._more))
            except StopIteration:
                self._ended = True
        if not self._known:
            raise ValueError("the taskset is empty")
        return self._known[number % len(self._known)]


def configured(given: dict[str, Any]) -> Any:
    """The environment's configuration, with agents of this machine."""
    config = resolve_env_config(dict(given))
    for name in agent_config_fields(config):
        own = given.get(name) or {}
        given = given | {name: {"runtime": HERE, "harness": HARNESS} | own}
    return resolve_env_config(given)


@contextlib.asynccontextmanager
async def taskset(given: dict[str, Any]) -> AsyncIterator[Play]:
    """Plays episodes of an environment of verifiers 0.4."""
    env = load_environment(configured(given))
    tasks = NumberedTasks(env.taskset)

    async def play(episode: dict[str, Any]) -> dict[str, Any]:
        key = f"PARALLM_KEY_{episode['episode']}"
        os.environ[key] = episode["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=episode["base_url"], api_key_var=key)
            (slot,) = env.slots(tasks.task(episode["task"]))
            done = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        finally:
            del os.environ[key]
        if not done.ok:
            errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
            raise RuntimeError("; ".join(str(error)[:500] for error in errors) or "the episode failed")
        rewards = [trace.reward for trace in done.traces]
        named = {name: r.value for trace in done.traces for name, r in trace.rewards.items() if r is not None}
        return {"reward": sum(rewards) / len(rewards), "components": named}

    async with env.serving():
        yield play


@contextlib.asynccontextmanager
async def of_the_hub(given: dict[str, Any]) -> AsyncIterator[Play]:
    """A package with `load_environment`, for 0.1."""
    from openai import AsyncOpenAI, Timeout

    env = classic.load_environment(given["id"], **(given.get("args") or {}))
    rows = env.get_dataset()

    async def play(episode: dict[str, Any]) -> dict[str, Any]:
        row = dict(rows[episode["task"] % len(rows)])
        place = {"base_url": episode["base_url"], "api_key": episode["api_key"]}
        async with AsyncOpenAI(**place, max_retries=0, timeout=Timeout(None, connect=60)) as client:
            state = await env.rollout(row, client, "policy", {})
        if (error := state.get("error")) is not None:
            raise RuntimeError(f"the rollout failed: {error!r}, {error.__cause__!r}")
        await env.rubric.score_rollout(state)
        return {"reward": state["reward"], "components": state.get("metrics") or {}}

    yield play


async def main() -> None:
    """Play the episodes whose lines come in, side by side."""
    playing: set[asyncio.Task[None]] = set()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # what packages print goes elsewhere
    os.dup2(2, 1)

    async def answered(play: Play, episode: dict[str, Any]) -> None:
        try:
            end = await play(episode)
        except Exception as error:
            traceback.print_exc()
            end = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"episode": episode["episode"]} | end) + "\n")
        answers.flush()

    opened = of_the_hub if vf is None else taskset
    async with opened(json.loads(sys.argv[1])) as play:
        async for line in reader:
            task = asyncio.create_task(answered(play, json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)


if __name__ == "__main__":
    asyncio.run(main())
