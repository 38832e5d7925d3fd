"""Checks of a staged version that need a worker which has loaded it, and its reward on held-out tasks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.adapters import GateCheck, version_id
from shared.seeds import derived_seed
from trainer.learn import gate
from trainer.learners.handle import Handle
from trainer.learners.policy import PolicyLearner
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import RolloutRequest
from trainer.rollouts.held_out import Evaluated, evaluated
from trainer.runs.parts import Parts
from trainer.settings import TrainSettings

_PARITY_SAMPLES = 4


@dataclass(frozen=True)
class Examiner:
    """Scores and samples versions on workers."""

    settings: TrainSettings
    parts: Parts
    learner: Handle[PolicyLearner]
    probes: Sequence[tuple[int, ...]]
    run: str  # begins the ids of what it asks

    async def check(self, version: int, step: int, good: float | None) -> tuple[list[GateCheck], Evaluated | None]:
        """The checks that are due at train step `step`, counted from 1, and the held-out evaluation if it was due.

        `good`: the last good version's held-out reward.
        """
        settings = self.settings
        checks: list[GateCheck] = []
        adapter = version_id(settings.adapter, version)
        if settings.parity_every and (step == 1 or step % settings.parity_every == 0):
            samples = await self.parts.ring.source.generate(
                RolloutRequest(
                    id=f"{self.run}-parity-{version}",
                    prompt_ids=self.probes[step % len(self.probes)],
                    n=_PARITY_SAMPLES,
                    sampling=msgspec.structs.replace(settings.sampling(), seed=derived_seed(settings.seed, version)),
                    adapter=adapter,
                )
            )
            difference = await self.learner.call(PolicyLearner.parity, samples)
            checks.append(gate.at_most("reload_parity", difference, settings.max_parity))
        if not settings.evaluate_every or step % settings.evaluate_every:
            return checks, None
        found = await self.evaluate(adapter, step - 1)
        return [*checks, gate.reward_floor(found.reward, good, settings.reward_margin)], found

    async def evaluate(self, adapter: str, step: int) -> Evaluated:
        """Mean rewards on held-out tasks, decoded greedily with `adapter` (a name, name@k, or "" for the base)."""
        settings = self.settings
        greedy = msgspec.structs.replace(settings.sampling(), temperature=0.0)
        which = adapter.replace("@", "-") or "base"
        options = EpisodeOptions(f"{self.run}-held-out-{step}-{which}", 1, greedy, settings.max_turns, settings.seed)
        environment = self.parts.held_out or self.parts.environment
        episodes = Episodes(self.parts.ring.source, environment, self.parts.conversation, options)
        played = (episodes.play(index, adapter) for index in range(settings.evaluate_prompts))
        return evaluated(await asyncio.gather(*played))
