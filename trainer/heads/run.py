"""One run that trains a head: read, learn, hold against what is held out, publish through the gate.

Every `evaluate_every` train steps, and at the end, the weights become a candidate. It passes when its numbers are
finite, when it ranks held-out examples no worse than the last good version by more than `reward_margin`, and when a
worker that has loaded it says of some texts what the trainer says (the reward `model`, through the queue). One that
fails is rejected in the store, and weights and moments go back. Checkpoints are written at the same times, and every
`checkpoint_every` train steps.

Invariants. A worker that does not answer says nothing about the weights: it is asked until it does. What has been
learned is in a checkpoint before it is offered, and what no worker has judged is offered again by the next start.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import structlog
from redis.exceptions import RedisError

from shared.adapters import GateCheck, version_id
from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.rewards.model_kinds import RewardModelOptions, softmax
from shared.scoring.pool import RewardSample
from shared.scoring.served import UNANSWERED
from shared.trajectories import Reward
from trainer import gate
from trainer.heads.examples import Examples, batch_of, read_examples, split
from trainer.heads.learner import HeadLearner, HeadOptions, HeadReport
from trainer.learn.compute import ComputeHost, at_once
from trainer.learn.options import HeadSettings
from trainer.metrics import cut
from trainer.ring.join import Way, way_to_ring
from trainer.ring.ring import Ring
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.checkpoint import Checkpoint, CheckpointStore, differences
from trainer.versions.disk import Disk
from trainer.versions.publish import Publisher
from trainer.versions.run_folder import begin_anew, check_home
from trainer.versions.run_lock import run_lock
from worker.engine.model.loader import LoadedModel

log = structlog.get_logger()

PARITY_TEXTS = 4
AGAIN_S = 2.0  # until a worker that has not answered is asked again
REPORT_S = 10.0  # between two lines of the log


class HeadLine(msgspec.Struct, frozen=True):
    """A line of `metrics.jsonl`."""

    step: int
    loss: float
    grad_norm: float
    held_out: float | None = None  # the share that is right, where it was measured
    version: int = 0  # that is served


async def train_head(
    settings: TrainSettings,
    host: ComputeHost,
    load: Callable[[], Awaitable[LoadedModel]],
    begun: Callable[["HeadRun"], None],
) -> RunState:
    """Train until all steps are done or the run is stopped; `begun` gets the run before its first step."""
    async with AsyncExitStack() as stack:
        way = await stack.enter_async_context(way_to_ring(settings))
        loaded = await load()
        ring = await stack.enter_async_context(way.join(loaded))
        await stack.enter_async_context(run_lock(settings.folder))
        run = HeadRun(settings, host, way, ring)
        begun(run)
        await run.start(loaded)
        return await run.run()


class HeadRun:
    """The run's state and its steps."""

    def __init__(self, settings: TrainSettings, host: ComputeHost, way: Way, ring: Ring) -> None:
        self._settings, self._host, self._way, self._ring = settings, host, way, ring
        self._stop = asyncio.Event()
        self._disk = Disk(settings.folder, ring.sink.alert, self._stop)
        self._checkpoints = CheckpointStore(settings.folder / "checkpoints", settings.keep_checkpoints)
        self._rejections = 0
        self._unanswered = ""  # why no worker has judged the last candidate
        self._saved = 0  # train step of the latest checkpoint
        self._told = 0.0
        self.state = RunState(settings.run_name, ring=ring.id, base_sha256=ring.base_sha256)

    def stop(self) -> None:
        """End after the train step under way."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to."""
        return self._stop.is_set()

    async def start(self, loaded: LoadedModel) -> None:
        """Read the data, make the learner, go on from a checkpoint if there is one."""
        settings = self._settings
        self._examples, self._held_out = await asyncio.to_thread(self._read, loaded.card.context_length)
        start = (
            float(np.mean([each.target for each in self._examples.items])) if self._examples.form == "scores" else 0.0
        )
        form, labels = self._examples.form, self._examples.labels
        self._learner = await self._host.run(
            at_once(lambda: HeadLearner(loaded.model, form, labels, start, _options(settings)))
        )
        config = await self._host.run(at_once(self._learner.config))
        sink = self._ring.sink
        self._publisher = Publisher(sink, settings.folder, settings.adapter, config, self._ring.base_sha256, self._disk)
        if settings.resume == "no":
            self._checkpoints = begin_anew(settings, self._checkpoints)
        elif (checkpoint := self._checkpoints.load(settings.resume)) is not None:
            check_home(settings, checkpoint.state, self._ring)
            if differs := differences(checkpoint.adapter_config, config):
                raise SetupError(f"the checkpoint is of another run: {differs}; give another --run, or --resume no")
            self.state = state = checkpoint.state
            fall_back = None
            if state.unpublished and not state.version:
                fall_back = await self._host.run(at_once(self._learner.weights))
            elif state.unpublished and state.version in self._publisher.kept():
                fall_back = self._publisher.weights_of(state.version)
            await self._host.run(at_once(lambda: self._learner.restore(checkpoint, fall_back)))
            self._saved = self.state.train_step
        self.state.ring, self.state.base_sha256 = self._ring.id, self._ring.base_sha256
        await self._disk.run(cut, settings.folder / "metrics.jsonl", "step", self.state.train_step + 1)
        log.info(
            "train.begins", form=form, examples=len(self._examples.items), held_out=len(self._held_out.items),
            too_long=self._examples.too_long, train_step=self.state.train_step,
        )  # fmt: skip

    async def run(self) -> RunState:
        """To the end."""
        settings, state = self._settings, self.state
        if state.unpublished and state.train_step >= settings.steps:
            await self._publish(HeadReport(0.0, 0.0, is_finite=True))
        while state.train_step < settings.steps and not self.stopping:
            batch = batch_of(self._examples, settings.prompts_per_step, state.train_step, settings.seed)
            step = state.train_step
            report = await self._host.run(lambda batch=batch, step=step: self._learner.train(batch, step))  # type: ignore[misc]
            state.train_step += 1
            state.unpublished += 1
            state.consumed += len(batch)
            due = settings.evaluate_every and state.train_step % settings.evaluate_every == 0
            last = state.train_step == settings.steps or self.stopping
            held_out = await self._publish(report) if due or last else None
            if settings.checkpoint_every and state.train_step - self._saved >= settings.checkpoint_every:
                await self._save()
            await self._tell(report, held_out)
        if state.train_step != self._saved:  # stopped between two candidates
            await self._save()
        log.info("train.ended", steps=state.train_step, version=state.version, held_out=state.held_out)
        return state

    # -- versions

    async def _publish(self, report: HeadReport) -> float:
        """Offer the weights; the share of held-out examples that they have right."""
        settings, state = self._settings, self.state
        if state.train_step != self._saved:
            await self._save()
        right = await self._host.run(lambda: self._learner.right(self._held_out.items))
        weights = await self._host.run(at_once(self._learner.weights))
        checks = [
            gate.finite_weights(weights),
            gate.finite_gradients(0 if report.is_finite else 1),
            gate.reward_floor(right, state.held_out, settings.reward_margin),
        ]
        metrics = {"held_out": right, "loss": report.loss}
        published = await self._publisher.publish(weights, state, checks, metrics, self._parity)
        if not published.version and self._unanswered:
            log.warning("version.not_judged", why=self._unanswered)
            return right
        state.unpublished = 0
        if published.version:
            self._rejections = 0
            await self._host.run(at_once(self._learner.accept))
            state.version, state.held_out = published.version, right
            state.swaps += 1
            if state.best_held_out is None or right > state.best_held_out:
                state.best_version, state.best_held_out = published.version, right
                await self._ring.sink.set_best(published.version, right)
            log.info("version.served", version=version_id(settings.adapter, published.version), held_out=right)
        else:
            self._rejections += 1
            state.rejected += 1
            await self._host.run(at_once(self._learner.revert))
            log.warning("version.rejected", checks=gate.failures(published.checks))
        await self._save()
        if self._rejections >= settings.max_rejections:
            said = f"{self._rejections} candidates in a row failed the gate: {gate.failures(published.checks)}"
            await self._ring.sink.alert("gave_up", f"the run ends: {said}")
            raise ParallmError(said)
        return right

    async def _parity(self, version: int) -> list[GateCheck]:
        """Whether a worker that has loaded the version says what we say."""
        texts = [example.texts[0] for example in self._held_out.items[:PARITY_TEXTS]]
        label = self._examples.labels[0] if self._examples.labels else ""
        options = RewardModelOptions(version_id(self._settings.adapter, version), self._settings.head, label)
        samples = [RewardSample(text.answer, None, text.prompt) for text in texts]
        rewards = await self._answered(options, samples)
        mine = await self._host.run(lambda: self._learner.read(texts))
        if failed := next((reward.error for reward in rewards if reward.value is None), ""):
            return [GateCheck("reload_parity", False, failed)]
        own = [softmax(each)[0] if label else each[0] for each in mine]
        gaps = [abs((reward.value or 0.0) - value) for reward, value in zip(rewards, own, strict=True)]
        return [gate.at_most("reload_parity", float(np.mean(gaps)), self._settings.max_parity)]

    async def _answered(self, options: RewardModelOptions, samples: list[RewardSample]) -> list[Reward]:
        """What workers say of these, once some do, or the run is to stop."""
        while True:
            try:
                rewards = await self._way.judges.score("model", options, samples)
            except (ServiceUnavailableError, RedisError, OSError) as error:  # the ring or the way to it is away
                rewards = [Reward("model", None, error=f"{UNANSWERED} {options.model!r}: {error}")] * len(samples)
            failed = next((reward.error for reward in rewards if reward.value is None), "")
            self._unanswered = failed if failed.startswith(UNANSWERED) else ""
            if not self._unanswered or self.stopping:
                return rewards
            log.warning("gate.waits", adapter=options.model, why=self._unanswered)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), AGAIN_S)

    async def _save(self) -> None:
        snapshot = await self._host.run(at_once(self._learner.snapshot))
        self.state.saves += 1
        self._saved = self.state.train_step
        checkpoint = Checkpoint(snapshot.adapter, snapshot.adapter_config, snapshot.optimizer, self.state)
        name = await self._disk.run(self._checkpoints.save, checkpoint)
        if self.state.version and self.state.version == self.state.best_version:
            await self._disk.run(self._checkpoints.set_best, name)
        await asyncio.to_thread(self._publisher.forget, {self.state.version, self.state.best_version})

    # -- data, figures

    def _read(self, longest: int) -> tuple[Examples, Examples]:
        settings = self._settings
        assert settings.dataset is not None, "checked with the settings"
        examples = read_examples(settings.dataset, self._ring.codec, longest)
        if settings.held_out_dataset is None:
            return split(examples, settings.seed)
        held_out = read_examples(settings.held_out_dataset, self._ring.codec, longest, examples.labels)
        if held_out.form != examples.form:
            raise SetupError(f"--held-out-dataset has {held_out.form}, --dataset has {examples.form}")
        return examples, held_out

    async def _tell(self, report: HeadReport, held_out: float | None) -> None:
        line = HeadLine(self.state.train_step, report.loss, report.grad_norm, held_out, self.state.version)
        await self._disk.run(self._append, msgspec.json.encode(line) + b"\n")
        if held_out is not None or time.monotonic() - self._told > REPORT_S:
            self._told = time.monotonic()
            log.info("train.step", **msgspec.structs.asdict(line))

    def _append(self, line: bytes) -> None:
        with (self._settings.folder / "metrics.jsonl").open("ab") as file:
            file.write(line)


def _options(settings: TrainSettings) -> HeadOptions:
    options = settings.optimize_options()
    return HeadOptions(
        head=HeadSettings(**{name: getattr(settings, name) for name in HeadSettings.model_fields}),
        schedule=options.schedule,
        shape=None if settings.head_only else settings.adapter_shape(),
        microbatch_tokens=settings.microbatch_tokens,
        max_grad_norm=settings.max_grad_norm,
        weight_decay=settings.weight_decay,
        adam_betas=options.adam_betas,
        seed=settings.seed,
        checkpoint_layers=settings.gradient_checkpointing,
    )
