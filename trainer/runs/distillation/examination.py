"""Replies of versions, before and after: to tasks of the user's own (`--suite`), and to prompts of held-out sessions.

Both are decoded greedily by a worker through the queue, in the class `batch`. The suite's rewards are a check of the
gate; replies to held-out prompts are for people, who see both side by side.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from shared.errors import ServiceUnavailableError, SetupError
from shared.jobs import SamplingOverrides
from shared.trajectories import Trajectory
from trainer.ring.ring import TrainerRing
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import DatasetEnvironment, Environment, read_jsonl
from trainer.rollouts.episodes import EpisodeOptions, Episodes
from trainer.rollouts.groups import RolloutRequest, problem
from trainer.rollouts.scorers import Judges, open_scorer
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import write_whole

BEFORE, AFTER, BASE = "before.json", "after-{}.json", "base.json"  # in the run's folder
MOST_TASKS = 1_000
AT_ONCE = 64
SHOWN = 5  # replies to held-out prompts
SHOWN_TOKENS = 128  # of each


class Reply(msgspec.Struct, frozen=True):
    """Reply of one version to one prompt."""

    prompt: str
    reply: str
    ids: tuple[int, ...]  # of prompt and reply
    reward: float | None = None  # of a task of the suite


class Examined(msgspec.Struct, frozen=True):
    """Replies of one version, to the suite and to held-out prompts."""

    version: str  # "": the base
    suite: tuple[Reply, ...] = ()
    held_out: tuple[Reply, ...] = ()

    @property
    def suite_reward(self) -> float | None:
        """Mean reward of the suite's tasks; None without any."""
        rewards = [each.reward for each in self.suite if each.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


class Examination:
    """Asks a ring's workers. `run` begins the ids of what is asked."""

    def __init__(self, settings: TrainSettings, ring: TrainerRing, judges: Judges, run: str) -> None:
        self._settings, self._ring, self._judges, self._run = settings, ring, judges, run
        self._conversation = ChatEncoder(ring.codec, settings.chat_template_kwargs)
        self._tasks = [] if settings.suite is None else read_jsonl(settings.suite)
        if len(self._tasks) > MOST_TASKS:
            raise SetupError(f"--suite {settings.suite} has {len(self._tasks)} tasks, at most {MOST_TASKS} are asked")

    async def of(self, adapter: str, held_out: Sequence[tuple[int, ...]]) -> Examined:
        """Replies of `adapter` ("": the base); ServiceUnavailableError, or SetupError where a reward fails."""
        suite, shown = await asyncio.gather(self._suite(adapter), self._held_out(adapter, held_out[:SHOWN]))
        return Examined(adapter, suite, shown)

    async def _suite(self, adapter: str) -> tuple[Reply, ...]:
        if not self._tasks:
            return ()
        settings = self._settings
        async with AsyncExitStack() as stack:
            own = settings.own_code_timeout_s, settings.own_code_processes
            reward = settings.reward_name, settings.reward_options
            scorer = await stack.enter_async_context(open_scorer(*reward, self._judges, *own))
            environment: Environment = DatasetEnvironment("suite", self._tasks, scorer)
            greedy = SamplingOverrides(max_tokens=settings.max_tokens, temperature=0.0)
            options = EpisodeOptions(f"{self._run}-suite-{_name(adapter)}", 1, greedy, 1, settings.seed)
            episodes = Episodes(self._ring.source, environment, self._conversation, options)
            room = asyncio.Semaphore(AT_ONCE)

            async def one(at: int) -> Reply:
                async with room:
                    (sample,) = (await episodes.play(at, adapter)).trajectories
                if wrong := problem(sample):
                    failed = sample.error or sample.reward is None
                    kind = ServiceUnavailableError if failed else SetupError
                    raise kind(f"--suite {settings.suite}: a task has no reward: {wrong[:500]}")
                assert sample.reward is not None
                return self._answer(sample, sample.reward.value)

            return tuple(await asyncio.gather(*map(one, range(len(self._tasks)))))

    async def _held_out(self, adapter: str, prompts: Sequence[tuple[int, ...]]) -> tuple[Reply, ...]:
        most = min(SHOWN_TOKENS, self._settings.max_tokens)
        sampling = SamplingOverrides(max_tokens=most, temperature=0.0, seed=self._settings.seed)
        name = f"{self._run}-shown-{_name(adapter)}"
        requests = [RolloutRequest(f"{name}-{at}", ids, 1, sampling, adapter) for at, ids in enumerate(prompts)]
        samples = await asyncio.gather(*map(self._ring.source.generate, requests))
        return tuple(self._answer(sample) for (sample,) in samples)

    def _answer(self, sample: Trajectory, reward: float | None = None) -> Reply:
        codec = self._ring.codec
        return Reply(codec.decode(sample.prompt_ids), sample.text, (*sample.prompt_ids, *sample.completion_ids), reward)


def write_examined(file: Path, examined: Examined) -> None:
    """Write it in one piece, so that a killed run leaves all or nothing."""
    write_whole(file, msgspec.json.encode(examined))


def _name(adapter: str) -> str:
    return adapter.replace("@", "-") or "base"
