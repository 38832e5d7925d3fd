"""A teacher of a policy's own samples: on-policy distillation, and a model that is its own teacher.

Each token that the policy has drawn gets the teacher's log-probability, right after it was sampled, through the ring's
queue. What is learned from it is the reverse KL's gradient, token by token: with x_t drawn by mu, the advantage of
token t is log pi_teacher(x_t) - log mu(x_t). On-policy distillation (GKD, Agarwal et al., arXiv 2306.13649, and
MiniLLM, Gu et al., arXiv 2306.08543; by advantages: Thinking Machines Lab, "On-policy distillation", 2025).

A task may have a `hint`: what is right, a correction, or what the user said next. The teacher reads it after the last
user's message and the policy does not. So the policy may be its own teacher: what it would say if it had been told
(self-distillation: Shenfeld et al., arXiv 2601.19897; Zhao et al., arXiv 2601.18734).
"""

import msgspec

from shared.errors import ParallmError
from shared.trajectories import Trajectory
from trainer.rollouts.conversation import ChatEncoder
from trainer.rollouts.environments import Observation, hinted
from trainer.rollouts.groups import Scorer, TeacherRequest

SELF = "self"


class Teaching:
    """Has samples scored by a teacher."""

    def __init__(self, scorer: Scorer, conversation: ChatEncoder, teacher: str) -> None:
        """`teacher`: `self` is the policy that has sampled."""
        self._scorer, self._conversation, self._teacher = scorer, conversation, teacher

    async def of(self, id: str, adapter: str, observation: Observation, sample: Trajectory) -> Trajectory:
        """The sample with the teacher's log-probabilities; with an error where it has none."""
        if sample.error or not sample.completion_ids:
            return sample
        if self._teacher == SELF and not observation.hint:
            said = "the task has no hint, without which a model says what it has said: it cannot be its own teacher"
            return msgspec.structs.replace(sample, error=said)
        told = (await self._conversation.opening(hinted(observation))).ids if observation.hint else sample.prompt_ids
        teacher = adapter if self._teacher == SELF else self._teacher
        request = TeacherRequest(f"{id}-{sample.sample_index}-taught", told, sample.completion_ids, teacher)
        try:
            logprobs = await self._scorer.score(request)
        except ParallmError as error:
            return msgspec.structs.replace(sample, error=f"the teacher {teacher or 'base'} gave no score: {error}")
        return msgspec.structs.replace(sample, teacher_logprobs=logprobs)
