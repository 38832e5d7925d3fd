"""`mlx_parallm_train --mode distill`: a run that tunes a policy on a teacher's scores in place of the data's answers.

Data, split, versions and gate are those of `--mode sft`. The scores are asked for once, before anything is learned.
With `--dataset sessions:POLICY` the data are what users' sessions teach (hindsight.py).
"""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import structlog

from mlx_model.loader import LoadedModel
from shared.adapters import GateCheck, version_id
from shared.errors import ServiceUnavailableError, SetupError
from trainer.learn import gate
from trainer.learn.batches import SampleGroup
from trainer.learn.options import sessions_policy
from trainer.learners.distilling import ScoredRow
from trainer.learners.handle import HostHandle
from trainer.learners.kinds import Made, made_with
from trainer.learners.lines import Data, hold_out
from trainer.learners.tuning import RowLearner
from trainer.learners.tuning_examples import TuningExamples, read_examples
from trainer.ring.http_client import HttpApi
from trainer.runs.data import ASK_AGAIN_S, options_of
from trainer.runs.distillation.examination import (
    AFTER,
    BASE,
    BEFORE,
    Examination,
    Examined,
    write_examined,
)
from trainer.runs.distillation.hindsight import LearnedFrom, hindsight, rehearsed
from trainer.runs.distillation.teacher import FILE, read_kept, scored
from trainer.runs.tuning import RowRun
from trainer.versions.checkpoint import read_whole, write_whole

ROUNDING = 1e-9  # of means of rewards
FOUND = "learned_from.json"  # in the run's folder

log = structlog.get_logger()


class DistillRun(RowRun[ScoredRow]):
    """A run that learns from a teacher's scores."""

    measures_first = True
    _rows: list[ScoredRow]
    _too_long = 0
    _found: LearnedFrom | None = None  # of sessions that were asked for now
    _before: Examined | None = None
    _good: float | None = None  # mean reward of the suite that no version may fall below by more than the margin

    async def _gather(self, loaded: LoadedModel) -> None:
        settings = self.settings
        assert settings.dataset is not None, "checked with the settings"
        kept = settings.folder / FILE
        longest = loaded.card.context_length - 1  # the teacher generates one token after each row
        if self._has_gathered(kept):
            rows = await asyncio.to_thread(read_kept, kept, settings.teacher, settings.teacher_top_k)
            await asyncio.to_thread(self._check_data, rows, longest)
            self._asked = False
        elif (policy := sessions_policy(settings.dataset)) is not None:
            async with HttpApi.of(settings) as api:
                codec, again = self._ring.codec, []
                teacher, top_k = settings.teacher, settings.teacher_top_k
                if settings.rehearsal is not None:
                    variables = settings.chat_template_kwargs
                    again = await rehearsed(settings.rehearsal, codec, variables, settings.max_tokens)
                rows, self._found = await hindsight(
                    api, policy, teacher, self._ring.model or teacher, top_k, codec, loaded.card.tokenizer_sha256,
                    longest=longest, seed=settings.seed, since_ms=settings.lessons_since_ms,
                    at_least=settings.min_lessons, rehearsal=again, drafts=settings.drafts,
                )  # fmt: skip
            rows = [row.within(loaded.card.vocab_size) for row in rows]
            self._asked = True
        else:
            examples = await asyncio.to_thread(self._examples, settings.dataset, longest)
            items = examples.items
            if settings.held_out_dataset is not None:
                items += (await asyncio.to_thread(self._examples, settings.held_out_dataset, longest)).items
            self._too_long = examples.too_long
            async with HttpApi.of(settings) as api:
                rows = await scored(api, settings.teacher, settings.teacher_top_k, items, loaded.card.tokenizer_sha256)
            own = len(examples.items)
            rows = [row.within(loaded.card.vocab_size) for row in rows]
            rows = [*rows[:own], *(msgspec.structs.replace(row, held_out=True) for row in rows[own:])]
            self._asked = True
        self._rows = rows

    async def _keep_gathered(self) -> None:
        if self._found is not None:
            await self._disk.run(write_whole, self.settings.folder / FOUND, msgspec.json.encode(self._found))
        if self._asked:
            lines = b"".join(msgspec.json.encode(row) + b"\n" for row in self._rows)
            await self._disk.run(write_whole, self.settings.folder / FILE, lines)

    def _check_data(self, rows: Sequence[ScoredRow], longest: int) -> None:
        """SetupError when the scores are of other rows than those of the data, as far as these are still there."""
        files = (self.settings.dataset, self.settings.held_out_dataset)
        for path, held_out in zip(files, (False, True), strict=True):
            if path is None or not path.exists():
                continue
            scored = [row.group("") for row in rows if row.held_out == held_out]
            if scored != list(self._examples(path, longest).items):
                raise SetupError(
                    f"{self.settings.folder} holds a teacher's scores of other rows than those of {path}: "
                    "give another --run, or --resume no"
                )

    def _examples(self, path: Path, longest: int) -> TuningExamples:
        return read_examples(path, "sft", self._ring.codec, longest, self.settings.chat_template_kwargs)

    def _read(self, longest: int) -> Data[ScoredRow]:
        learned = [row for row in self._rows if not row.held_out]
        held_out = [row for row in self._rows if row.held_out]
        if not held_out or not learned:
            learned, held_out = hold_out(self._rows, self.settings.seed)
        return Data(learned, held_out, self._too_long, "distill")

    def _made_with(self) -> Made:
        return made_with("distill", options_of(self.settings))

    def _group(self, item: ScoredRow) -> SampleGroup:
        return item.group("")

    # -- what versions answer

    async def start(self, loaded: LoadedModel) -> None:
        await super().start(loaded)
        if not self._examines:
            return
        run = f"{self.settings.run_name}-{secrets.token_hex(3)}"
        self._examination = Examination(self.settings, self._ring, self._way.judges, run)
        start = self.settings.start_from
        self._before = await self._examined_once(BEFORE, start)
        rewards = [self._before.suite_reward]
        if start and self._before.suite:  # many nights may not lose together what one may not
            rewards.append((await self._examined_once(BASE, "")).suite_reward)
        self._good = max((each for each in rewards if each is not None), default=None)

    async def _examined_once(self, name: str, adapter: str) -> Examined:
        """Replies of the version, from the run's file of this name if it has been asked."""
        file = self.settings.folder / name
        examined = read_whole(file, Examined)
        if examined is None:
            examined = await self._examined(adapter)
            await self._disk.run(write_examined, file, examined)
        return examined

    @property
    def _examines(self) -> bool:
        """True if replies before and after are compared: for a suite, and of a candidate, which a person judges."""
        return self.settings.suite is not None or self.settings.candidate

    async def _examined(self, adapter: str) -> Examined:
        prompts = list(dict.fromkeys(row.prompt_ids for row in self._data.held_out))
        while True:
            try:
                return await self._examination.of(adapter, prompts)
            except ServiceUnavailableError as error:
                if self.stopping:
                    raise
                log.warning("examination.waits", version=adapter or "base", why=str(error))
                await asyncio.sleep(ASK_AGAIN_S)

    async def _parity(self, version: int) -> list[GateCheck]:
        checks = await super()._parity(version)
        if self._before is None or not gate.passed(checks):
            return checks
        learner = cast(HostHandle[RowLearner[ScoredRow]], self.learner)
        texts = [answer.ids for answer in self._before.suite] or [
            (*row.prompt_ids, *row.completion_ids) for row in self._data.held_out
        ]
        kl = await learner.call(RowLearner.base_kl, texts)
        checks.append(gate.at_most("base_kl", kl, self.settings.max_base_kl))
        after = await self._examined(version_id(self.settings.adapter, version))
        if after.suite_reward is not None:
            margin = self.settings.reward_margin + ROUNDING
            floor = gate.reward_floor(after.suite_reward, self._good, margin)
            checks.append(GateCheck("suite", floor.passed, floor.detail))
        await self._disk.run(write_examined, self.settings.folder / AFTER.format(version), after)
        return checks
