"""Environments of others, each played by a program in a Python that has their packages (`python`; default: ours).

--task trainer.rollouts.agents.others:Verifiers
--task-options '{"python": "envs/bin/python", "env": {"taskset": {"id": "textarena", "game": "Wordle-v0"}}}'
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.rollouts.agents.environment import Agent


class Verifiers(Agent):
    """An environment of verifiers: a taskset of its 0.4, or a package of Prime's hub that was made for its 0.1."""

    def __init__(self, env: Mapping[str, Any], *, python: str = "", **options: Any) -> None:
        """`env`: its configuration, verifiers' block `[env]`; for 0.1 `id` of the package, and `args`."""
        super().__init__(_program("verifiers", python, json.dumps(dict(env))), serves=True, **options)


class OpenEnv(Agent):
    """Sessions of an OpenEnv server; what its options are says `openenv_program.py`."""

    def __init__(self, url: str, *, python: str = "", openenv: Mapping[str, Any] | None = None, **options: Any) -> None:
        server = {"url": url, "action": "message", **(openenv or {})}
        super().__init__(_program("openenv", python, json.dumps(server)), serves=True, **options)


class McpTools(Agent):
    """Questions of a data set, answered with the tools of an MCP server."""

    def __init__(self, server: Sequence[str], dataset: str, *, python: str = "", **options: Any) -> None:
        """`server`: the words that start it; it talks over its standard streams."""
        super().__init__(_program("mcp", python, *server), dataset=dataset, reward="output", **options)


def _program(name: str, python: str, *words: str) -> list[str]:
    return [python or sys.executable, str(Path(__file__).with_name(f"{name}_program.py")), *words]
