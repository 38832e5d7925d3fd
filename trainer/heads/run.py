"""`mlx_parallm_train --mode reward`: a run on a data set (datasets/run.py) that trains a head.

A worker that has loaded a version is asked for the reward `model` of some held-out texts.
"""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
from redis.exceptions import RedisError

from shared.adapters import GateCheck, version_id
from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.connection.faults import reason
from shared.rewards.model_kinds import RewardModelOptions, softmax
from shared.scoring.pool import RewardSample
from shared.scoring.served import UNANSWERED
from shared.trajectories import Reward
from trainer import gate
from trainer.datasets.lines import Data, split
from trainer.datasets.run import ASK_AGAIN_S, DataRun, options_of
from trainer.heads.examples import Example, Examples, read_examples
from trainer.heads.learner import HeadLearner
from trainer.learn.options import HeadSettings

log = structlog.get_logger()

PARITY_TEXTS = 4


class HeadRun(DataRun[Example]):
    """It learns with a LoRA or alone."""

    _learner: HeadLearner
    _examples: Examples  # as they were read

    def _read(self, longest: int) -> Data[Example]:
        settings = self._settings
        assert settings.dataset is not None, "checked with the settings"
        self._examples = examples = read_examples(settings.dataset, self._ring.codec, longest)
        if settings.held_out_dataset is None:
            return Data(*split(examples.items, settings.seed), examples.too_long, examples.form)
        held_out = read_examples(settings.held_out_dataset, self._ring.codec, longest, examples.labels)
        if held_out.form != examples.form:
            raise SetupError(f"--held-out-dataset has {held_out.form}, --dataset has {examples.form}")
        return Data(examples.items, held_out.items, examples.too_long, examples.form)

    def _new_learner(self, model: Any) -> HeadLearner:
        settings, form = self._settings, self._examples.form
        start = float(np.mean([each.target for each in self._data.learned])) if form == "scores" else 0.0
        head = HeadSettings(**{name: getattr(settings, name) for name in HeadSettings.model_fields})
        options = options_of(settings)
        if settings.head_only:
            options = replace(options, shape=None)
        return HeadLearner(model, form, self._examples.labels, start, head, options)

    async def _parity(self, version: int) -> list[GateCheck]:
        texts = [example.texts[0] for example in self._data.held_out[:PARITY_TEXTS]]
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
                away = f"{UNANSWERED} {options.model!r}: {reason(error)}"
                rewards = [Reward("model", None, error=away)] * len(samples)
            failed = next((reward.error for reward in rewards if reward.value is None), "")
            self._unanswered = failed if failed.startswith(UNANSWERED) else ""
            if not self._unanswered or self.stopping:
                return rewards
            log.warning("gate.waits", adapter=options.model, why=self._unanswered)
            await asyncio.sleep(ASK_AGAIN_S)
