"""Plays environments of verifiers (0.4: tasksets, also of Prime's hub) for `trainer.rollouts.agents.environment:Agent`.

Run by a Python that has verifiers and the environment's package: `python verifiers_program.py '{"taskset": {"id":
"textarena", "game": "Wordle-v0"}}'`. The argument is the environment's configuration as verifiers reads it (its
`[env]` block). Each agent of it runs on this machine unless the configuration names another runtime, with verifiers'
own harness, and asks the policy. The reward is the mean of the traces' rewards; theirs by name are the components.
Imports nothing of ParaLLM.
"""

import asyncio
import json
import os
import sys
import traceback
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

HERE = {"type": "subprocess"}  # verifiers' default is a sandbox of Prime's
HARNESS = {"id": "null"}  # a chat without tools of its own; verifiers' default may run commands


class Tasks:
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


async def play(env: Any, tasks: Tasks, episode: dict[str, Any]) -> dict[str, Any]:
    """One episode; its line."""
    key = f"PARALLM_KEY_{episode['episode']}"
    os.environ[key] = episode["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=episode["base_url"], api_key_var=key)
        (slot,) = env.slots(tasks.task(episode["task"]))
        done = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        if not done.ok:
            errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
            raise RuntimeError("; ".join(str(error)[:500] for error in errors) or "the episode failed")
        rewards = [trace.reward for trace in done.traces]
        named = {name: r.value for trace in done.traces for name, r in trace.rewards.items() if r is not None}
        return {"reward": sum(rewards) / len(rewards), "components": named}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del os.environ[key]


async def main() -> None:
    env = load_environment(configured(json.loads(sys.argv[1])))
    tasks, playing = Tasks(env.taskset), set()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # what packages print goes elsewhere
    os.dup2(2, 1)

    async def answered(episode: dict[str, Any]) -> None:
        line = {"episode": episode["episode"]} | await play(env, tasks, episode)
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    async with env.serving():
        async for line in reader:
            task = asyncio.create_task(answered(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)


if __name__ == "__main__":
    asyncio.run(main())
