"""Playing the environment over a ring: what is observed goes to /v1/rl/act, whose workers choose what is done.

Log-probabilities and values are those that workers computed, of the version that the answer names. What recurrent
layers remember of a copy travels with each request, and is zeros where an episode begins. Shape suffixes: T steps,
N copies, I numbers observed, C sequences of L steps after one another.
"""

import base64
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import ServiceUnavailableError
from shared.networks.spec import LOGITS, NetworkSpec
from trainer.learn.ppo_losses import Floats, Rollout, State
from trainer.ring.http_client import HttpApi
from trainer.runs.numeric_environments import NumericEnvironment


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]
    data: str


class _Answer(msgspec.Struct):
    policy_version: str
    actions: list[Any]
    action_log_probs: list[float]
    value_estimates: list[float]
    new_hidden_states: dict[str, _Tensor] | None = None


@dataclass(frozen=True)
class Acted:
    """Actions of a version for some rows, with log-probabilities, values and the state after them."""

    version: int
    actions: npt.NDArray[Any]
    logp: Floats
    values: Floats
    state: State  # after it

    def part(self, rows: slice) -> "Acted":
        """The slice of all arrays for these rows."""
        state = {name: each[rows] for name, each in self.state.items()}
        return Acted(self.version, self.actions[rows], self.logp[rows], self.values[rows], state)


class Actor:
    """Asks a ring what to do."""

    def __init__(self, api: HttpApi, name: str, network: NetworkSpec) -> None:
        self._api, self._name, self._network = api, name, network
        self._dtype = np.int32 if LOGITS in network.outputs else np.float32

    def begun(self, copies: int) -> State:
        """Recurrent state at the beginning of episodes: zeros."""
        return {name: np.zeros((copies, *each.shape), np.float32) for name, each in self._network.state.items()}  # type: ignore[arg-type]

    async def act(
        self, observed: Floats, state: State, *, seed: int = 0, version: int = 0, deterministic: bool = False
    ) -> Acted:
        """An action for each row, by a version or (0) the latest; the same seed draws the same."""
        body = {
            "model": f"{self._name}@{version}" if version else self._name,
            "observations": {next(iter(self._network.inputs)): _sent(observed)},
            "seed": seed,
            "deterministic": deterministic,
        }
        if state:
            body |= {"hidden_states": {name: _sent(each) for name, each in state.items()}, "encoding_format": "base64"}
        said = await self._api.call("POST", "/v1/rl/act", _Answer, body)
        after = {name: _received(each) for name, each in (said.new_hidden_states or {}).items()}
        told = [len(said.actions), len(said.action_log_probs), len(said.value_estimates), *map(len, after.values())]
        if any(rows != len(observed) for rows in told) or after.keys() != state.keys():
            raise ServiceUnavailableError(f"{self._name} has not acted on all of {len(observed)} rows")
        return Acted(
            int(said.policy_version.rpartition("@")[2]),
            np.array(said.actions, self._dtype),
            np.array(said.action_log_probs, np.float32),
            np.array(said.value_estimates, np.float32),
            after,
        )


class Player:
    """Copies of the environment that are played on from rollout to rollout."""

    def __init__(
        self, actor: Actor, environment: NumericEnvironment, discount: float, seed: list[int], length: int = 1
    ) -> None:
        """`length`: steps of a sequence."""
        self._actor, self._environment, self._discount, self._length = actor, environment, discount, length
        self._state = actor.begun(environment.copies)
        self._draw = np.random.default_rng(seed)
        self._return_N = np.zeros(environment.copies)

    async def play(self, steps: int) -> Rollout:
        """Play this many steps. The last observation of a time-out goes with the next step, for its value."""
        observed: list[Floats] = []
        acted: list[Acted] = []
        rewards: list[Floats] = []
        ended: list[npt.NDArray[np.bool_]] = []
        returns: list[float] = []
        states: list[State] = []
        environment, copies = self._environment, len(self._return_N)
        cut_off, last = np.zeros(0, np.int64), environment.observations[:0]
        remembered = self._actor.begun(0)
        for at in range(steps + 1):
            now = environment.observations
            state = {name: np.concatenate([each, remembered[name]]) for name, each in self._state.items()}
            said = await self._actor.act(np.concatenate([now, last]), state, seed=int(self._draw.integers(2**62)))
            if len(cut_off):
                rewards[-1][cut_off] += self._discount * said.values[copies:]
            said = said.part(slice(copies))
            if at == steps:
                break
            if at % self._length == 0:
                states.append(self._state)
            stepped = await environment.act(said.actions)
            self._return_N += stepped.rewards
            over = stepped.failed | stepped.timed_out
            returns += self._return_N[over].tolist()
            self._return_N[over] = 0
            cut_off = np.flatnonzero(stepped.timed_out)
            last, remembered = stepped.observations[cut_off], {name: each[cut_off] for name, each in said.state.items()}
            self._state = {name: np.where(over[:, None], 0, each) for name, each in said.state.items()}
            observed.append(now)
            acted.append(said)
            rewards.append(stepped.rewards)
            ended.append(over)
        return Rollout(
            np.stack(observed),
            np.stack([each.actions for each in acted]),
            np.stack([each.logp for each in acted]),
            np.stack([each.values for each in acted]),
            np.stack(rewards),
            np.stack(ended),
            tuple(states),
            tuple(each.version for each in acted),
            said.values,
            tuple(returns),
        )


async def evaluate(actor: Actor, environment: NumericEnvironment, version: int) -> float:
    """Mean return of one episode in each copy, of a version that does what it holds for best."""
    copies = environment.copies
    playing, returns, state = np.ones(copies, bool), np.zeros(copies), actor.begun(copies)
    while playing.any():  # each is cut off after some steps
        rows = np.flatnonzero(playing)
        before = {name: each[rows] for name, each in state.items()}
        said = await actor.act(environment.observations[rows], before, version=version, deterministic=True)
        for name, each in said.state.items():
            state[name][rows] = each
        actions = np.zeros((copies, *said.actions.shape[1:]), said.actions.dtype)
        actions[rows] = said.actions
        stepped = await environment.act(actions)
        returns[rows] += stepped.rewards[rows]
        playing &= ~(stepped.failed | stepped.timed_out)
    return float(returns.mean())


def _sent(value: Floats) -> dict[str, Any]:
    data = np.ascontiguousarray(value, "<f4")
    return {"data": base64.b64encode(data.tobytes()).decode(), "shape": list(data.shape)}


def _received(tensor: _Tensor) -> Floats:
    return np.frombuffer(base64.b64decode(tensor.data), "<f4").reshape(tensor.shape).astype(np.float32)
