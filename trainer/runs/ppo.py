"""One run of PPO over a ring: play, learn, gate, publish, and evaluate what is served.

A train step plays `rollout_steps` in all copies of the environment by the latest version, through `/v1/rl/act`. What
was learned becomes a candidate. It passes when its numbers are finite, when it is not far from what has acted, and when
a worker that has loaded it says of the same rows what the trainer says; then acting moves to it.

Invariants. Old log-probabilities and values are those of the workers. Steps in which another version than the one that
learns has acted are counted as off-policy; their ratio is against the version that acted. A checkpoint is written when
its version is served, so that a resumed run goes on with the weights that it had, in new episodes.
"""

import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import numpy as np
import structlog

from mlx_model.memory import memory_status
from shared.adapter_files.config import network_config
from shared.adapters import GateCheck
from shared.errors import ParallmError, SetupError
from shared.networks.spec import NetworkSpec
from shared.training import TrainerState, TrainerStatus, TrainingPoint
from trainer.learn import gate
from trainer.learn.advantages import advantages, explained
from trainer.learn.compute import ComputeHost
from trainer.learn.ppo_losses import PpoOptions, PpoSteps, steps_of
from trainer.learn.ppo_network import check_learnable, described, first_weights, two_layers
from trainer.learners.handle import HostHandle
from trainer.learners.ppo import PpoLearner, PpoLearnerOptions, PpoStepReport
from trainer.ring.board import RingBoard
from trainer.ring.http_client import HttpApi
from trainer.ring.over_http import HttpBoard, HttpSink
from trainer.rollouts.own.own_messages import Space
from trainer.runs.acting import Actor, Player, evaluate
from trainer.runs.metrics import append, cut, totals_of
from trainer.runs.numeric_environments import Environments, open_environments, our_space
from trainer.runs.run import Run
from trainer.settings import TrainSettings
from trainer.state import Arrays, RunState
from trainer.versions.checkpoint import Checkpoint
from trainer.versions.publish import Publisher
from trainer.versions.run_folder import WAYS, run_mode
from trainer.versions.run_lock import run_lock
from trainer.versions.start import check_latest

log = structlog.get_logger()

_DISCOUNT = 0.99
_EPOCHS = 4
_PROBES = 256  # rows that a worker is asked of a candidate
_PLAYED, _EVALUATED = 1, 2  # what is drawn with a seed


class PpoLine(msgspec.Struct, frozen=True):
    """A line of a PPO run's `metrics.jsonl`."""

    step: int
    environment_steps: int  # of the whole run
    episodes: int  # that ended in this train step
    mean_return: float | None  # of these
    learned: dict[str, float | None]  # None: no finite number
    explained: float  # share of the returns' variance that the workers' values explain
    off_policy: int  # steps in which another version than the one that learns has acted
    version: int  # served from now on
    gate: str  # "" when what was learned is served, else the failed checks
    evaluated: float | None  # its mean return, where that was measured
    act_s: float
    seconds: float  # of the whole run


async def train_network(settings: TrainSettings, host: ComputeHost, begun: "Callable[[PpoRun], None]") -> RunState:
    """Train until all steps are done, the target is reached or the run is stopped; `begun` gets it before that."""
    if settings.redis or not settings.connect_to or settings.connect_to.startswith(("redis:", "rediss:", "unix:")):
        raise SetupError("--mode ppo acts through an api: give --connect-to HOST:PORT of one, and no Redis")
    async with AsyncExitStack() as stack:
        environments = await stack.enter_async_context(open_environments(settings))
        network = network_of(settings, environments.space)
        api = HttpApi.of(settings)
        await stack.enter_async_context(api)
        memory = partial(memory_status, settings.memory_limit_bytes)
        board = await stack.enter_async_context(RingBoard(HttpBoard(api, settings.adapter), memory))
        await stack.enter_async_context(run_lock(settings.folder))
        run = PpoRun(settings, host, api, board, network, environments)
        begun(run)
        board.begin(run.status, run.stop)
        await run.start()
        return await run.run()


def network_of(settings: TrainSettings, space: Space | None = None) -> NetworkSpec:
    """The network that learns; SetupError when it does not fit the environment, by default the one of ours."""
    space = space or our_space(settings.task)
    if settings.memory and settings.network is not None:
        raise SetupError("--memory is of the network that a run has without --network: describe its layers there")
    discrete = space.actions > 0
    observes, actions = space.observes, space.actions or space.numbers
    if settings.network is not None:
        network = described(settings.network)
    else:
        try:
            network = two_layers(observes, actions, discrete=discrete, memory=settings.memory)
        except ValueError as error:
            raise SetupError(f"--task {settings.task}: no network for it: {error}") from error
    check_learnable(network, observes, actions, discrete=discrete)
    if settings.rollout_steps % sequence_length(settings, network):
        raise SetupError(
            f"--rollout-steps {settings.rollout_steps} is no multiple of --bptt-steps {settings.bptt_steps}"
        )
    return network


def sequence_length(settings: TrainSettings, network: NetworkSpec) -> int:
    """Steps that are learned from together: those through which a gradient goes back."""
    return settings.bptt_steps if network.state else 1


def options_of(settings: TrainSettings) -> PpoLearnerOptions:
    """The constants of a train step."""
    options = settings.optimize_options()
    return PpoLearnerOptions(
        PpoOptions(options.loss, settings.value_clip, settings.value_coefficient),
        options.schedule,
        settings.update_epochs or _EPOCHS,
        settings.minibatches,
        settings.max_grad_norm,
        settings.weight_decay,
        options.adam_betas,
        settings.seed,
    )


class PpoRun(Run[PpoLearner]):
    """The run's state and its steps."""

    def __init__(
        self,
        settings: TrainSettings,
        host: ComputeHost,
        api: HttpApi,
        board: RingBoard,
        network: NetworkSpec,
        environments: Environments,
    ) -> None:
        sink = HttpSink(api, settings.adapter, "")
        super().__init__(settings, host, sink, RunState(settings.run_name, mode="ppo"))
        self._board, self._network, self._environments = board, network, environments
        self._discount = _DISCOUNT if settings.discount is None else settings.discount
        config = network_config(network)
        self._publisher = Publisher(sink, settings.folder, settings.adapter, config, "", self._disk)
        self._actor = Actor(api, settings.adapter, network)
        self._last: PpoLine | None = None
        self._began = time.monotonic()

    def status(self, now: TrainerState) -> TrainerStatus:
        """Status of the run, as published to the ring."""
        state, settings, last = self.state, self.settings, self._last
        learned = _finite(last.learned) if last else {}
        return msgspec.structs.replace(
            totals_of(settings, state, now, self.checkpoints, self._started_ms),
            model="", source=settings.task, policy_step=state.swaps, best_reward=state.best_held_out,
            reward=last.mean_return if last else None, loss=learned.get("loss"), kl=learned.get("kl"),
            value_loss=learned.get("value_loss"), explained=last.explained if last else None,
        )  # fmt: skip

    async def start(self) -> None:
        """Resume from a checkpoint, or begin; then the latest version is the learner's."""
        settings = self.settings
        checkpoint = self._load()
        await check_latest(settings, self.state if checkpoint is None else checkpoint.state, self._publisher)
        self._begin_folder_anew()
        first = first_weights(self._network, settings.seed)
        build = lambda: PpoLearner(self._network, first, options_of(settings))  # noqa: E731
        self.learner = await HostHandle.build(self._host, build)
        latest = await self._sink.latest_version()
        if checkpoint is not None:
            self._check_ours(latest, checkpoint.state.version)
            self.state = checkpoint.state
            await self.learner.call(PpoLearner.restore, checkpoint)
        await self._disk.run(cut, settings.folder / "metrics.jsonl", "step", self.state.train_step + 1)
        self._began -= self.state.seconds
        if checkpoint is None or latest != self.state.version:
            self.state.version = latest
            first_published = await self._offer(await self.learner.weights(), [], {}, _unjudged, latest)
            if not first_published.version:
                problem = gate.failures(first_published.checks)
                raise ParallmError(f"the first version of {settings.adapter} was rejected: {problem}")
            await self._accept(first_published.version)
            await self._save()
        seed = [settings.seed, _PLAYED, self.state.train_step]
        environment = await self._environments.begin("played", settings.environment_copies, seed)
        length = sequence_length(settings, self._network)
        self._player = Player(self._actor, environment, self._discount, seed, length)
        log.info("train.begins", task=settings.task, train_step=self.state.train_step)

    def _load(self) -> Checkpoint | None:
        """Checkpoint to resume from; None: the run begins. SetupError when the folder holds another run."""
        settings, checkpoint = self.settings, self._checkpoint()
        if checkpoint is None:
            return None
        if (mode := run_mode(checkpoint.state)) != "ppo":
            raise SetupError(f"{settings.folder} holds a run of --mode {mode or 'rl'}: {WAYS}")
        if msgspec.json.decode(checkpoint.adapter_config) != msgspec.json.decode(self._publisher.config):
            raise SetupError(f"{settings.folder} holds a run of another network: {WAYS}")
        return checkpoint

    async def run(self) -> RunState:
        """Run until all train steps are done, the goal is reached, or the run is stopped."""
        settings, state = self.settings, self.state
        reached = False
        while state.train_step < settings.steps and not self.stopping and not reached:
            reached = await self._train_step()
        log.info("train.ended", steps=state.train_step, version=state.version, evaluated=state.held_out)
        return state

    async def _train_step(self) -> bool:
        """Play, learn, serve; whether the target is reached."""
        settings, state = self.settings, self.state
        began, acting = time.monotonic(), state.version
        rollout = await self._player.play(settings.rollout_steps)
        act_s = time.monotonic() - began
        advantages_TN = advantages(
            rollout.rewards_TN, rollout.values_TN, rollout.ended_TN, rollout.next_N, self._discount,
            settings.gae_lambda,
        )  # fmt: skip
        steps = steps_of(rollout, advantages_TN)
        step = state.train_step
        async with self._care.step(self._stop):
            learned = await self.learner.call(PpoLearner.train, steps, step)
        state.train_step += 1
        state.consumed += rollout.rewards_TN.size
        state.trajectories += len(rollout.returns)
        problem = await self._serve(steps, learned)
        evaluated = None
        due = settings.evaluate_every and state.train_step % settings.evaluate_every == 0
        if due or state.train_step == settings.steps:
            evaluated = await self._evaluate()
        state.seconds = time.monotonic() - self._began
        await self._report(
            PpoLine(
                step=state.train_step,
                environment_steps=state.consumed,
                episodes=len(rollout.returns),
                mean_return=float(np.mean(rollout.returns)) if rollout.returns else None,
                learned=learned._asdict(),
                explained=explained(steps.values_BL.reshape(-1), steps.returns_BL.reshape(-1)),
                off_policy=rollout.rewards_TN.shape[1] * sum(each != acting for each in rollout.versions_T),
                version=state.version,
                gate=problem,
                evaluated=evaluated,
                act_s=round(act_s, 3),
                seconds=round(state.seconds, 3),
            )
        )
        reached = bool(settings.target_return) and evaluated is not None and evaluated >= settings.target_return
        every = settings.checkpoint_every
        if reached or self.stopping or state.train_step == settings.steps or (every and state.train_step % every == 0):
            await self._save()
        return reached

    async def _evaluate(self) -> float:
        """Mean return of the served version, in episodes that nothing is learned from."""
        settings, state = self.settings, self.state
        seed = [settings.seed, _EVALUATED, state.train_step]
        environment = await self._environments.begin("evaluated", settings.evaluate_prompts, seed)
        found = state.held_out = await evaluate(self._actor, environment, state.version)
        await self._note_best(state.version, found)
        return found

    # -- versions

    async def _serve(self, steps: PpoSteps, learned: PpoStepReport) -> str:
        """Publish the learned weights, or revert and return the reason; ParallmError after too many rejections."""
        weights = await self.learner.weights()
        logp, _ = await self.learner.call(PpoLearner.policy, weights, steps)
        apart = (logp - steps.logp_BL).astype(np.float64)
        checks = [
            gate.finite_gradients(learned.left_out),
            gate.at_most("probe_kl", float(np.mean(np.exp(apart) - 1 - apart)), self.settings.max_probe_kl),
        ]
        metrics = {"loss": learned.loss, "entropy": learned.entropy, "kl": learned.kl}
        probes = steps.taken(slice(_PROBES))

        async def judged(version: int) -> list[GateCheck]:
            return [await self._parity(version, weights, probes)]

        published = await self._offer(weights, checks, metrics, judged, self.state.version)
        if published.version:
            self.state.updates += 1
            self.state.last_update_ms = time.time_ns() // 1_000_000
            await self._accept(published.version)
            return ""
        problem = gate.failures(published.checks)
        await self._reject(problem)
        await self._check_patience(problem)
        return problem

    async def _parity(self, version: int, weights: Arrays, probes: PpoSteps) -> GateCheck:
        """Compare the outputs of a worker that has loaded the version with ours, for the first step of sequences."""
        said = await self._actor.act(probes.observed_BLI[:, 0], probes.state, version=version)
        first = probes._replace(
            observed_BLI=probes.observed_BLI[:, :1],
            begins_BL=np.zeros_like(probes.begins_BL[:, :1]),
            actions=said.actions[:, None],
            logp_BL=said.logp[:, None],
        )
        logp, values = await self.learner.call(PpoLearner.policy, weights, first)
        logp, values = logp[:, 0], values[:, 0]
        gap = float(np.mean(np.abs(logp - said.logp)) + np.mean(np.abs(values - said.values) / (1 + np.abs(values))))
        return gate.at_most("reload_parity", gap, self.settings.max_parity)

    async def _save(self, name: str = "", state: RunState | None = None) -> str:
        self.state.saves += 1
        saved = await super()._save(name, state)
        await self._forget_versions(self.state.version, self.state.best_version)
        return saved

    async def _report(self, line: PpoLine) -> None:
        await self._disk.run(append, self.settings.folder / "metrics.jsonl", line)
        self._last, learned = line, _finite(line.learned)
        point = TrainingPoint(
            train_step=line.step, policy_step=self.state.swaps, version=line.version, at_ms=time.time_ns() // 1_000_000,
            source=self.settings.task, reward=line.mean_return, held_out=line.evaluated, loss=learned.get("loss"),
            kl=learned.get("kl"), entropy=learned.get("entropy"), clip_fraction=learned.get("clipped"),
            value_loss=learned.get("value_loss"), explained=line.explained, grad_norm=learned.get("grad_norm"),
            wait_s=line.act_s, gate=line.gate,
        )  # fmt: skip
        await self._board.show("training", point)
        log.info(
            "train.step", step=line.step, environment_steps=line.environment_steps, mean_return=line.mean_return,
            evaluated=line.evaluated, version=line.version, off_policy=line.off_policy,
        )  # fmt: skip


async def _unjudged(version: int) -> list[GateCheck]:
    return []


def _finite(learned: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in learned.items() if value is not None and math.isfinite(value)}
