"""Code as users write it, at its worst."""

import asyncio
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.rollouts.environments import Observation, Outcome

HARD = 13  # the task whose difficulty is no number


class Hazards:
    """Does what the action says."""

    name = "hazards"

    def __init__(self, start: int = 0) -> None:
        self._start = start

    async def reset(self, index: int) -> Observation:
        if index < 0:
            time.sleep(3600)  # noqa: ASYNC251
        prompt = ({"role": "user", "content": f"task {self._start + index}"},)
        difficulty: Any = "hard" if index == HARD else index
        return Observation(prompt, {"index": index, "bytes": b"\x00", "tuple": (1, 2)}, difficulty)

    async def step(self, observation: Observation, action: str) -> Outcome:
        if action == "sleep":
            time.sleep(3600)  # noqa: ASYNC251
        if action == "busy":
            time.sleep(0.3)  # noqa: ASYNC251
        if action == "backtrack":
            re.match(r"(a+)+$", "a" * 60 + "!")
        if action == "exit":
            os._exit(3)
        if action == "quit":
            sys.exit(3)
        if action == "wait":
            await asyncio.sleep(3600)
        if action == "raise":
            raise KeyError(action)
        if action == "lock":
            return Outcome(0.0, done=False, info=threading.Lock())
        if action == "number":
            return 1.0  # type: ignore[return-value]
        if action == "print":
            print("all over the pipe", flush=True)
        await asyncio.sleep(0.01)
        info = observation.info
        return Outcome(float(info["index"]), components={"bytes": float(len(info["bytes"]))}, info=info)


def score(completion: str, reference: Any, *, bonus: float = 0.0) -> tuple[float, dict[str, float]]:
    """Half right, unless it is told to hang."""
    if completion == "hang":
        while True:
            pass
    return 0.5 + bonus, {"length": len(completion), "reference": float(reference is None)}


class Shared:
    """Writes each start of a call to a file; some of its calls end or block the process that they share with others."""

    name = "shared"

    def __init__(self, starts: str) -> None:
        self._starts = starts

    async def reset(self, index: int) -> Observation:
        return Observation("task")

    async def step(self, observation: Observation, action: str) -> Outcome:
        with Path(self._starts).open("a") as starts:  # noqa: ASYNC230
            starts.write(f"{action}\n")
        if action == "block":
            time.sleep(3600)  # noqa: ASYNC251
        if action == "end":  # in a thread: no call has the event loop as it happens
            threading.Timer(0.05, os._exit, [3]).start()
        await asyncio.sleep(0.5)
        return Outcome(1.0)


class Drift:
    """An environment that a network acts in: a point on a line is to stay near 0. `worst` is what it does at 0.5."""

    observation_space = SimpleNamespace(shape=(2,))
    action_space = SimpleNamespace(shape=(1,), low=[-1.0], high=[1.0])

    def __init__(self, worst: str = "") -> None:
        self._worst, self._draw, self._at = worst, random.Random(0), 0.0

    def reset(self, seed: int | None = None) -> tuple[list[float], dict[str, Any]]:
        if seed is not None:
            self._draw = random.Random(seed)
        self._at = self._draw.uniform(-0.1, 0.1)
        return [self._at, 1.0], {}

    def step(self, action: Any) -> Any:
        assert -1 <= action[0] <= 1 and action.shape == (1,) and str(action.dtype) == "float32"
        self._at += 0.5 * float(action[0])
        if self._worst == "raise" and self._at > 0.5:
            raise KeyError("somewhere")
        if self._worst == "sleep" and self._at > 0.5:
            time.sleep(3600)
        if self._worst == "quit" and self._at > 0.5:
            sys.exit("enough")
        if self._worst == "three" and self._at > 0.5:
            return [self._at, 1.0], 0.0, False
        reward = float("nan") if self._worst == "reward" and self._at > 0.5 else -(self._at**2)
        wide = self._worst == "wide" and self._at > 0.5
        return [self._at, 1.0, *([2.0] if wide else [])], reward, abs(self._at) > 1, False, {}


class Shapeless(Drift):
    """Its observations have two dimensions."""

    observation_space = SimpleNamespace(shape=(2, 2))
