"""One group from start to end: reset the environment, then sample and step until it is done."""

import asyncio
from dataclasses import dataclass, replace

import msgspec

from shared.errors import ParallmError, SetupError
from shared.jobs import SamplingOverrides
from shared.rewards.kinds import wrong_with
from shared.seeds import derived_seed
from shared.trajectories import Reward, Trajectory
from trainer.rollouts.conversation import ChatEncoder, joined
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.environments import (
    Environment,
    Observation,
    Outcome,
    Question,
    is_observation,
    is_outcome,
    wrong_with_question,
)
from trainer.rollouts.groups import RolloutGroup, RolloutRequest, RolloutSource
from trainer.rollouts.own_code import OwnCodeError
from trainer.rollouts.own_process import blamed
from trainer.rollouts.teaching import Teaching

MOST_QUESTIONS = 16  # to other policies, after one reply


class _RingError(Exception):
    """Nothing can be generated at all; no fault of the environment's, whose errors cost a sample."""

    def __init__(self, cause: ParallmError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True)
class EpisodeOptions:
    """Options that all groups of a run share."""

    run: str  # the run's name; first part of every id
    group_size: int = 8
    sampling: SamplingOverrides = SamplingOverrides()  # noqa: RUF009 - frozen
    max_turns: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Episodes:
    """Plays groups against an environment."""

    source: RolloutSource
    environment: Environment
    conversation: ChatEncoder
    options: EpisodeOptions
    curriculum: Curriculum | None = None  # None: group k is of task k
    teaching: Teaching | None = None  # of what the policy has said

    async def play(self, index: int, adapter: str) -> RolloutGroup:
        """The finished group `index`; a sample whose reward failed carries the error and no value."""
        options, task = self.options, index
        metadata = {"environment": self.environment.name, "index": index}
        if self.curriculum is not None:
            metadata["task"] = task = self.curriculum.drawn(index).task
        observation = is_observation(self.environment.name, await self.environment.reset(task))
        opening = await self.conversation.opening(observation)
        request = RolloutRequest(
            id=f"{options.run}-{index}",
            prompt_ids=opening.ids,
            n=options.group_size,
            sampling=self._seeded(index),
            adapter=adapter,
            metadata=metadata,
            has_next_turn=options.max_turns > 1,
            images=opening.images,
            image_token=opening.image_token,
            files=opening.files,
        )
        sampled = await self.source.generate(request)
        finished = await asyncio.gather(*(self._finish(request, observation, t) for t in sampled))
        if self.teaching is not None:
            taught = (self.teaching.of(request.id, adapter, observation, t) for t in finished)
            finished = await asyncio.gather(*taught)
        return RolloutGroup(request.id, index, tuple(finished))

    async def _finish(self, request: RolloutRequest, observation: Observation, whole: Trajectory) -> Trajectory:
        """Step the environment through one sample until it is done; the sample with its reward."""
        name, total, components = self.environment.name, 0.0, dict[str, float]()
        last = whole
        for turn in range(1, self.options.max_turns + 1):
            if last.error or last.finish_reason in ("cancelled", "deadline", "error"):
                return whole
            action = self.conversation.action(observation, last.completion_ids)
            try:
                outcome = await self._judged(observation, action)
                asked = 0
                while outcome.question is not None:
                    asked += 1
                    total += outcome.reward or 0.0
                    components.update(outcome.components)
                    info = observation.info if outcome.info is None else outcome.info
                    observation = replace(observation, info=info)
                    reply = await self._asked(request, whole, outcome.question, (turn, asked))
                    outcome = await self._judged(observation, reply)
            except SetupError:
                raise
            except _RingError as error:
                raise error.cause from error
            except Exception as error:  # of the user's code, at what a model wrote: it costs this sample alone
                return msgspec.structs.replace(whole, reward=Reward(name, None, error=_described(error)))
            if outcome.reward is None:
                return whole
            total += outcome.reward
            components.update(outcome.components)
            if outcome.done or last.finish_reason == "length" or turn == self.options.max_turns:
                break
            between = self.conversation.following(observation, last.completion_ids, outcome.messages)
            observation = self.conversation.advance(observation, action, outcome)
            last = await self._next_turn(request, whole, between, turn)
            whole = joined(whole, between, last)
        return msgspec.structs.replace(whole, reward=Reward(name, total, components))

    async def _judged(self, observation: Observation, action: str) -> Outcome:
        outcome = is_outcome(self.environment.name, await self.environment.step(observation, action))
        if outcome.reward is not None and (wrong := wrong_with(outcome.reward)):
            raise ValueError(wrong)
        return outcome

    async def _asked(
        self, request: RolloutRequest, whole: Trajectory, question: Question, place: tuple[int, int]
    ) -> str:
        """Answer of another policy; ValueError when it does not end, or the question is refused."""
        if place[1] > MOST_QUESTIONS:
            raise ValueError(f"the environment has asked {MOST_QUESTIONS} questions after one reply, the most")
        if wrong := wrong_with_question(question):
            raise ValueError(f"the environment's question: {wrong}")
        seed = derived_seed(request.sampling.seed or 0, whole.sample_index, "asked", *place)
        sampling = SamplingOverrides(max_tokens=question.max_tokens, temperature=question.temperature, seed=seed)
        opening = await self.conversation.opening(Observation(question.messages))
        asked = RolloutRequest(
            id=f"{request.id}-{whole.sample_index}-{place[0]}-asked-{place[1]}",
            prompt_ids=opening.ids,
            n=1,
            sampling=sampling,
            adapter=question.policy,
            metadata=request.metadata,
            images=opening.images,
            image_token=opening.image_token,
            files=opening.files,
        )
        try:
            (said,) = await self.source.generate(asked)
        except ParallmError as error:
            raise _RingError(error) from error
        if said.error or said.finish_reason not in ("stop", "length"):
            raise ValueError(f"the policy {question.policy!r} did not answer: {said.error or said.finish_reason}")
        return self.conversation.text(said.completion_ids)

    async def _next_turn(self, request: RolloutRequest, whole: Trajectory, between: list[int], turn: int) -> Trajectory:
        seed = derived_seed(request.sampling.seed or 0, whole.sample_index, turn)
        (trajectory,) = await self.source.generate(
            RolloutRequest(
                id=f"{request.id}-{whole.sample_index}-{turn}",
                prompt_ids=(*whole.prompt_ids, *whole.completion_ids, *between),
                n=1,
                sampling=msgspec.structs.replace(request.sampling, seed=seed),
                adapter=request.adapter,
                metadata=request.metadata,
                has_next_turn=turn + 1 < self.options.max_turns,
                images=request.images,
                image_token=request.image_token,
                files=request.files,
            )
        )
        return trajectory

    def _seeded(self, index: int) -> SamplingOverrides:
        seed = derived_seed(self.options.seed, "group", index)
        return msgspec.structs.replace(self.options.sampling, seed=seed)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, OwnCodeError) else blamed(error)
