"""`mlx_parallm_train --mode sft` and `--mode dpo`: runs on a data set (datasets/run.py) that tune a policy.

With `--dataset feedback:POLICY` the data set is what users have said (trainer/ring/feedback.py) before the run began.

A worker that has loaded a version is asked for samples behind held-out prompts, whose log-probabilities must be ours.
"""

import asyncio
import secrets
import time
from abc import abstractmethod
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

import structlog

from mlx_model.loader import LoadedModel
from shared.adapters import GateCheck, version_id
from shared.errors import ServiceUnavailableError
from shared.jobs import SamplingOverrides
from shared.seeds import derived_seed
from shared.trajectories import Trajectory
from trainer.learn import gate
from trainer.learn.batches import SampleGroup
from trainer.learn.options import feedback_policy
from trainer.learners.handle import HostHandle
from trainer.learners.kinds import Made, TuneOptions, made_with
from trainer.learners.lines import Data, hold_out
from trainer.learners.tuning import RowLearner
from trainer.learners.tuning_examples import Tuning, TuningExamples, read_examples
from trainer.ring import feedback
from trainer.ring.http_client import HttpApi
from trainer.rollouts.groups import RolloutRequest
from trainer.rollouts.picture_shelf import PictureShelf
from trainer.rollouts.sight import Sight, sight_of
from trainer.runs.data import ASK_AGAIN_S, DataRun, options_of
from trainer.versions.checkpoint import write_whole

PARITY_PROMPTS = 4
PARITY_TOKENS = 16
_CUT_OFF = ("abort", "cancelled", "deadline")  # by a pause, a person or the clock: no word about the weights

log = structlog.get_logger()

T = TypeVar("T")


class RowRun(DataRun[T]):
    """A run whose versions are held against what a worker samples behind held-out prompts."""

    _shelf: PictureShelf | None = None  # of a model that sees

    @abstractmethod
    def _group(self, item: T) -> SampleGroup:
        """The rows of an item."""

    async def _parity(self, version: int) -> list[GateCheck]:
        while True:
            samples = await self._samples(version)
            if failed := next((sample.error for sample in samples if sample.error), ""):
                return [GateCheck("reload_parity", False, failed)]
            if not self._unanswered:
                learner = cast(HostHandle[RowLearner[T]], self.learner)
                gap = await learner.call(RowLearner.parity, samples)
                return [gate.at_most("reload_parity", gap, self.settings.max_parity)]
            log.warning("gate.waits", version=version, why=self._unanswered)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _samples(self, version: int) -> list[Trajectory]:
        """Continuations of held-out prompts by a worker; when it fails, `_unanswered` gives the reason."""
        settings, run = self.settings, secrets.token_hex(3)
        samples: list[Trajectory] = []
        self._unanswered = ""
        for at, item in enumerate(map(self._group, self._data.held_out[:PARITY_PROMPTS])):
            seed = derived_seed(settings.seed, version, at)
            tokens = min(PARITY_TOKENS, len(item.samples[0].completion_ids))  # the prompt may fill the context
            request = RolloutRequest(
                id=f"{settings.run_name}-{run}-parity-{version}-{at}",
                prompt_ids=item.prompt_ids,
                n=1,
                sampling=SamplingOverrides(max_tokens=tokens, seed=seed),
                adapter=version_id(settings.adapter, version),
                images=item.images,
                image_token=item.image_token,
                files={} if self._shelf is None else self._shelf.files(item.images),
            )
            try:
                samples += await self._ring.source.generate(request)
            except ServiceUnavailableError as error:  # over HTTP a job has a deadline
                self._unanswered = str(error)
                break
        cut_off = next((each.finish_reason for each in samples if each.finish_reason in _CUT_OFF), "")
        self._unanswered = self._unanswered or (cut_off and f"a sample ended with {cut_off!r}")
        return samples


class TuneRun(RowRun[SampleGroup]):
    """By cross entropy or by preferences."""

    measures_first = True
    _preferences: bytes | None = None  # asked of the ring, and not in the run's folder yet

    @property
    def _tuning(self) -> Tuning:
        return "dpo" if self.settings.mode == "dpo" else "sft"

    def _read(self, longest: int) -> Data[SampleGroup]:
        settings, source = self.settings, self.settings.dataset
        assert source is not None, "checked with the settings"
        read = partial(
            read_examples, tuning=self._tuning, codec=self._ring.codec, longest=longest,
            variables=settings.chat_template_kwargs, shelf=self._shelf,
        )  # fmt: skip
        examples: TuningExamples
        if self._preferences is not None:
            with TemporaryDirectory() as folder:
                source = Path(folder) / feedback.FILE
                source.write_bytes(self._preferences)
                examples = read(source)
        else:
            examples = read(source if feedback_policy(source) is None else settings.folder / feedback.FILE)
        if settings.held_out_dataset is None:
            return Data(*hold_out(examples.items, settings.seed), examples.too_long, self._tuning)
        return Data(examples.items, read(settings.held_out_dataset).items, examples.too_long, self._tuning)

    def _made_with(self) -> Made:
        settings = self.settings
        return made_with("tune", TuneOptions(self._tuning, settings.dpo_beta, options_of(settings)))

    @property
    def _sight(self) -> Sight | None:
        return None if self._shelf is None else self._shelf.sight

    def _group(self, item: SampleGroup) -> SampleGroup:
        return item

    def close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()

    async def _gather(self, loaded: LoadedModel) -> None:
        settings = self.settings
        sight = sight_of(loaded)
        if sight is not None and not settings.over_http:  # a job's images would have to go with each of its prompts
            self._shelf = PictureShelf(sight)
        policy = feedback_policy(settings.dataset)
        if policy is None:
            return
        kept = settings.folder / feedback.FILE
        if self._has_gathered(kept):
            await asyncio.to_thread(feedback.check_kept, kept, policy)
            return
        async with HttpApi.of(settings) as api:
            self._preferences = await feedback.preferences(
                api, policy, self._ring.codec, settings.feedback_max_age_days, int(1000 * time.time())
            )

    async def _keep_gathered(self) -> None:
        if self._preferences is None:
            return
        await self._disk.run(write_whole, self.settings.folder / feedback.FILE, self._preferences)
