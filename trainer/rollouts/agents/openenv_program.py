"""Plays an OpenEnv environment for `trainer.rollouts.agents.environment:Agent`, as a program that serves.

Run by a Python that has `openenv` (or `openenv-core`) and `httpx`: `python openenv_program.py '{"url":
"http://127.0.0.1:8001", "action": "message"}'`. Each episode is a session of that server. What it observes is a turn of
the user: the field `observation` of it where the options name one, else all of it as JSON. The policy's answer is the
action's field `action`, or with `"action": ""` the whole action, written as JSON. Rewards of all steps are added up.
Further options: `system` is put before the chat, `reset` are arguments of each reset, and `"seeded": true` adds the
task's number as its seed. An episode waits while the server has all the sessions that it allows. Imports nothing of
ParaLLM.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosedOK

try:
    from openenv.core.generic_client import GenericEnvClient
except ImportError:
    from openenv_core.generic_client import GenericEnvClient

PATIENCE_S = 15  # for a free session; the trainer asks thrice for a first question before it gives up


def shown(observation: Any, name: str) -> str:
    if name:
        observation = observation[name]
    return observation if isinstance(observation, str) else json.dumps(observation)


@contextlib.asynccontextmanager
async def session(url: str, arguments: dict[str, Any]) -> AsyncIterator[Any]:
    """A session of the server, and what its reset came to. RuntimeError when none has become free."""
    until = time.monotonic() + PATIENCE_S
    while True:
        async with GenericEnvClient(base_url=url) as env:
            try:
                begun = await env.reset(**arguments)
            except (ConnectionClosedOK, RuntimeError) as error:  # a refused session is closed, mostly before we ask
                if isinstance(error, RuntimeError) and "CAPACITY" not in str(error):
                    raise
                if time.monotonic() > until:
                    raise RuntimeError("the server has no free session: raise its max_concurrent_envs") from error
            else:
                yield env, begun
                return
        await asyncio.sleep(0.5)


async def play(options: dict[str, Any], http: Any, episode: dict[str, Any]) -> dict[str, Any]:
    """Play one episode, and return its line."""
    arguments = dict(options.get("reset") or {})
    if options.get("seeded"):
        arguments["seed"] = episode["task"]
    messages = [{"role": "system", "content": options["system"]}] if options.get("system") else []
    total = 0.0
    try:
        async with session(options["url"], arguments) as (env, result):
            while True:
                messages.append({"role": "user", "content": shown(result.observation, options.get("observation", ""))})
                answer = await http.post(
                    f"{episode['base_url']}/chat/completions",
                    headers={"Authorization": f"Bearer {episode['api_key']}"},
                    json={"model": "policy", "messages": messages},
                )
                if answer.status_code == 400:  # it has had all its turns
                    break
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                result = await env.step({options["action"]: text} if options.get("action") else json.loads(text))
                total += result.reward or 0.0
                if result.done:
                    break
        return {"reward": total}
    except json.JSONDecodeError:
        return {"reward": total}  # what the policy wrote is no action
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


async def main() -> None:
    options, playing = json.loads(sys.argv[1]), set()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # what packages print goes elsewhere
    os.dup2(2, 1)

    async def answered(episode: dict[str, Any]) -> None:
        line = {"episode": episode["episode"]} | await play(options, http, episode)
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    async with httpx.AsyncClient(timeout=None) as http:
        async for line in reader:
            task = asyncio.create_task(answered(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)


if __name__ == "__main__":
    asyncio.run(main())
