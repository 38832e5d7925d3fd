"""`mlx_parallm_train --mode reward`: a run on a data set (datasets/run.py) that trains a head.

A worker that has loaded a version is asked for the reward `model` of some held-out texts, or, where the head acts, what
it would do.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import structlog
from redis.exceptions import RedisError

from shared.adapters import GateCheck, version_id
from shared.errors import ParallmError, ServiceUnavailableError, SetupError
from shared.redis.connection.faults import reason
from shared.rewards.model_kinds import RewardModelOptions, softmax
from shared.scoring.pool import RewardSample
from shared.scoring.served import UNANSWERED
from trainer.learn import gate
from trainer.learn.options import HeadSettings
from trainer.learners.handle import HostHandle
from trainer.learners.head_examples import ActionSpread, HeadExample, HeadExamples, HeadText, read_examples, spread_of
from trainer.learners.heads import HeadLearner
from trainer.learners.kinds import HeadOptions, Made, made_with
from trainer.learners.lines import Data, hold_out
from trainer.runs.data import ASK_AGAIN_S, DataRun, options_of

log = structlog.get_logger()

PARITY_TEXTS = 4


class HeadRun(DataRun[HeadExample]):
    """It learns with a LoRA or alone."""

    _examples: HeadExamples  # as they were read

    def _read(self, longest: int) -> Data[HeadExample]:
        settings = self.settings
        assert settings.dataset is not None, "checked with the settings"
        self._examples = examples = read_examples(settings.dataset, self._ring.codec, longest)
        if settings.held_out_dataset is None:
            return Data(*hold_out(examples.items, settings.seed), examples.too_long, examples.form)
        held_out = read_examples(settings.held_out_dataset, self._ring.codec, longest, examples.labels)
        if held_out.form != examples.form:
            raise SetupError(f"--held-out-dataset has {held_out.form}, --dataset has {examples.form}")
        numbers, held_out_numbers = (len(each.items[0].action) for each in (examples, held_out))
        if numbers != held_out_numbers:
            raise SetupError(f"--held-out-dataset has actions of {held_out_numbers} numbers, --dataset of {numbers}")
        return Data(examples.items, held_out.items, examples.too_long, examples.form)

    def _made_with(self) -> Made:
        settings, form = self.settings, self._examples.form
        start: float | ActionSpread = 0.0
        if form == "scores":
            start = float(np.mean([each.target for each in self._data.learned]))
        if form == "vectors":
            start = spread_of(self._data.learned)
        head = HeadSettings(**{name: getattr(settings, name) for name in HeadSettings.model_fields})
        options = options_of(settings)
        if settings.head_only:
            options = replace(options, shape=None)
        return made_with("head", HeadOptions(form, self._examples.labels, start, head.model_dump(), options))

    async def _parity(self, version: int) -> list[GateCheck]:
        texts = [example.texts[0] for example in self._data.held_out[:PARITY_TEXTS]]
        said, failed = await self._answered(version_id(self.settings.adapter, version), texts)
        if failed:
            return [GateCheck("reload_parity", False, failed)]
        mine = await cast(HostHandle[HeadLearner], self.learner).call(HeadLearner.read, texts)
        gap = np.abs(np.array([self._compared(each) for each in mine]) - np.array(said))
        return [gate.at_most("reload_parity", float(np.mean(gap)), self.settings.max_parity)]

    @property
    def _head(self) -> HeadLearner:
        return cast(HeadLearner, self.learner.learner)

    def _compared(self, outputs: Sequence[float]) -> list[float]:
        """The part of a head's outputs that is compared with a worker's."""
        spec = self._head.spec
        if spec.kind == "gaussian":
            return self._head.in_deviations(outputs)
        if spec.kind == "categorical":
            return softmax(outputs)
        return softmax(outputs)[:1] if spec.labels else list(outputs)

    async def _answered(self, model: str, texts: Sequence[HeadText]) -> tuple[list[list[float]], str]:
        """Outputs of workers for these texts, once one answers or the run is to stop; and the error, else ""."""
        ask = self._policy if self._head.spec.kind in ("categorical", "gaussian") else self._rewards
        while True:
            said: list[list[float]] = []
            try:
                said, failed = await ask(model, texts)
            except (ServiceUnavailableError, RedisError, OSError) as error:  # the ring or the way to it is away
                failed = f"{UNANSWERED} {model!r}: {reason(error)}"
            self._unanswered = failed if failed.startswith(UNANSWERED) else ""
            if not self._unanswered or self.stopping:
                return said, failed
            log.warning("gate.waits", adapter=model, why=self._unanswered)
            await asyncio.sleep(ASK_AGAIN_S)

    async def _rewards(self, model: str, texts: Sequence[HeadText]) -> tuple[list[list[float]], str]:
        label = self._examples.labels[0] if self._examples.labels else ""
        options = RewardModelOptions(model, self._head.name, label)
        samples = [RewardSample(text.answer, None, text.prompt) for text in texts]
        rewards = await self._way.judges.score("model", options, samples)
        failed = next((reward.error for reward in rewards if reward.value is None), "")
        return [[reward.value or 0.0] for reward in rewards], failed

    async def _policy(self, model: str, texts: Sequence[HeadText]) -> tuple[list[list[float]], str]:
        try:
            outputs = await self._way.judges.outputs(model, self._head.name, [text.ids for text in texts])
        except ServiceUnavailableError:
            raise
        except ParallmError as error:
            return [], error.message
        return [self._compared(each) for each in outputs], ""
