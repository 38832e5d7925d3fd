"""`python -m trainer.rollouts.own.copies`: copies of an environment of the user's own that a network acts in.

The environment is a class with Gymnasium's interface (https://gymnasium.farama.org/api/env): `observation_space` with a
`shape` of one dimension; `action_space` with `n` (one of n actions), or with a `shape` of one dimension (numbers, held
between its `low` and `high` where it has them); `reset(seed=)` gives an observation and a dict, and `step(action)` an
observation, a reward, whether the episode has ended, whether it was cut off, and a dict. Gymnasium itself is not
needed. Calls come as own_process.py takes them. Shape suffixes: N copies, I numbers observed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import SetupError
from trainer.rollouts.environments import load_object
from trainer.rollouts.own.own_messages import (
    ActCall,
    CodeAnswer,
    CodeCall,
    CodeFailure,
    CopiesCall,
    Played,
    Space,
    Start,
)
from trainer.rollouts.own.own_process import main, unpacked

Floats = npt.NDArray[np.float32]


class Copies:
    """Sets of copies by their names; each call makes a step in all copies of a set."""

    def __init__(self, start: Start) -> None:
        self.name, self._options = start.path, unpacked(start.options)
        self._made = load_object(start.path, "environment")
        self._sets: dict[str, _Set] = {}

    async def do(self, call: CodeCall) -> CodeAnswer:
        """Begin a set, or make a step of it; "lost" where this process was started after the set began."""
        what = call.what
        if isinstance(what, CopiesCall):
            return CodeAnswer(call.number, played=self._begin(what))
        assert isinstance(what, ActCall), "what else there is goes to own_process.py"
        if (found := self._sets.get(what.name)) is None:
            return CodeAnswer(call.number, failed=CodeFailure("its episodes went with its process", "lost"))
        return CodeAnswer(call.number, played=found.step(what.actions))

    def _begin(self, what: CopiesCall) -> Played:
        each = [self._one() for _ in range(what.copies)]
        made = self._sets[what.name] = _Set(self.name, each, _space_of(self.name, each[0]), what.longest)
        return made.begin(what.seed)

    def _one(self) -> Any:
        try:
            return self._made(**self._options)
        except TypeError as error:
            raise SetupError(f"environment {self.name!r}: {error}; its options stand in task_options") from error


class _Set:
    def __init__(self, name: str, each: list[Any], space: Space, longest: int) -> None:
        self._name, self._each, self._space, self._longest = name, each, space, longest
        self._steps = [0] * len(each)
        self._now_NI = np.zeros((len(each), space.observes), np.float32)
        self._bounds: tuple[Floats, Floats] | None = None
        action_space = each[0].action_space
        if space.numbers and getattr(action_space, "low", None) is not None:
            self._bounds = (np.asarray(action_space.low, np.float32), np.asarray(action_space.high, np.float32))
        self._first = int(getattr(action_space, "start", 0))  # of Gymnasium's discrete actions

    def begin(self, seed: Sequence[int]) -> Played:
        seeds = np.random.SeedSequence(list(seed)).generate_state(len(self._each))
        for at, environment in enumerate(self._each):
            self._now_NI[at] = self._reset(environment, seed=int(seeds[at]))
        return Played(self._space, self._now_NI.tobytes())

    def step(self, actions: Sequence[Any]) -> Played:
        rewards: list[float] = []
        failed: list[bool] = []
        timed_out: list[bool] = []
        last_NI = np.zeros_like(self._now_NI)
        for at, (environment, action) in enumerate(zip(self._each, actions, strict=True)):
            given = environment.step(self._action(action))
            if not isinstance(given, tuple) or len(given) != 5:
                raise SetupError(
                    f"environment {self._name!r}: `step` gave {given!r:.80}, not an observation, a reward, whether the "
                    "episode has ended, whether it was cut off, and a dict"
                )
            last_NI[at] = self._observed(given[0], "step")
            rewards.append(self._reward(given[1]))
            self._steps[at] += 1
            failed.append(bool(given[2]))
            timed_out.append(not failed[-1] and (bool(given[3]) or self._steps[at] >= self._longest))
            if failed[-1] or timed_out[-1]:
                self._steps[at] = 0
                self._now_NI[at] = self._reset(environment)
            else:
                self._now_NI[at] = last_NI[at]
        return Played(self._space, self._now_NI.tobytes(), last_NI.tobytes(), rewards, failed, timed_out)

    def _action(self, action: Any) -> Any:
        if not self._space.numbers:
            return self._first + int(action)
        numbers = np.array(action, np.float32)
        return numbers if self._bounds is None else np.clip(numbers, *self._bounds)

    def _reset(self, environment: Any, **seed: int) -> Floats:
        given = environment.reset(**seed)
        if not isinstance(given, tuple) or len(given) != 2:
            raise SetupError(f"environment {self._name!r}: `reset` gave {given!r:.80}, not an observation and a dict")
        return self._observed(given[0], "reset")

    def _observed(self, given: Any, call: str) -> Floats:
        try:
            observed = np.asarray(given, np.float32)
        except (TypeError, ValueError):
            observed = np.zeros(0, np.float32)
        if observed.shape != (self._space.observes,) or not np.isfinite(observed).all():
            raise SetupError(
                f"environment {self._name!r}: `{call}` gave {given!r:.80}, not {self._space.observes} finite numbers"
            )
        return observed

    def _reward(self, given: Any) -> float:
        try:
            reward = float(given)
        except (TypeError, ValueError):
            reward = float("nan")
        if not np.isfinite(np.float32(reward)):
            raise SetupError(f"environment {self._name!r}: `step` gave the reward {given!r:.80}, not a finite number")
        return reward


def _space_of(name: str, environment: Any) -> Space:
    observed = getattr(getattr(environment, "observation_space", None), "shape", None)
    acts = getattr(environment, "action_space", None)
    if not _is_vector(observed):
        raise SetupError(f"environment {name!r} needs an `observation_space` with a `shape` of one dimension")
    assert observed is not None
    if isinstance(count := getattr(acts, "n", None), int | np.integer) and count > 0:
        return Space(int(observed[0]), actions=int(count))
    shape = getattr(acts, "shape", None)
    if not _is_vector(shape):
        raise SetupError(f"environment {name!r} needs an `action_space` with `n`, or with a `shape` of one dimension")
    assert shape is not None
    return Space(int(observed[0]), numbers=int(shape[0]))


def _is_vector(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and len(shape) == 1 and int(shape[0]) > 0


if __name__ == "__main__":
    main(Copies)
