"""From results to result lines: trajectories, rewards, and what they add to the job's counts."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.errors import ParallmError
from shared.frames import FinishReason
from shared.jobs import JobSpec, JobUsage
from shared.owners import working_for
from shared.redis.jobs.ledger import Outcome, SampleRecord
from shared.rewards.kinds import CheckedReward
from shared.scoring.pool import RewardSample
from shared.scoring.score import SampleScorer
from shared.scoring.shares import Share
from shared.seeds import seed_in_job
from shared.sequences import SequenceResult
from shared.telemetry.metrics import Tally
from shared.text.codec import TextCodec
from shared.trajectories import Reward, Trajectory, drawing_of
from worker.jobs.expansion import PreparedPrompt

OUTCOMES: dict[FinishReason, Outcome] = {
    "stop": "succeeded",
    "length": "succeeded",
    "error": "failed",
    "cancelled": "cancelled",
    "abort": "cancelled",
    "deadline": "expired",
}


class FinishedSample(NamedTuple):
    """A sample that is to be scored and recorded."""

    trajectory: Trajectory
    prompt: PreparedPrompt
    entry: bytes = b""  # of the stream of finished sequences, which it leaves when it is recorded


def finished_trajectory(
    spec: JobSpec, ordinal: int, prompt: PreparedPrompt, result: SequenceResult, codec: TextCodec
) -> Trajectory:
    """The trajectory of a sequence that a worker has finished."""
    scoring = spec.kind == "score"
    own = prompt.source.request
    drawn_with = spec.sampling if own is None else own.sampling
    completion = prompt.score_ids if scoring else result.completion_ids
    given = prompt.source.completion
    if scoring and isinstance(given, str):
        text = given
    else:
        text = codec.decode(completion) if result.text is None else result.text
    finish = result.finish
    # What the runner cancels when the job's deadline passes has run out of time like the rest.
    late = finish.reason == "cancelled" and 0 < spec.deadline_ms <= result.timings.finished_ms
    return Trajectory(
        prompt_index=prompt.index,
        sample_index=ordinal % spec.n,
        prompt_ids=prompt.prompt_ids,
        completion_ids=completion,
        text=text,
        logprobs=result.score_logprobs if scoring else result.logprobs,
        finish_reason="deadline" if late else finish.reason,
        spans=result.spans,
        top_logprobs=result.top_logprobs,
        stop_match=finish.stop_match,
        error=finish.failure,
        seed=seed_in_job(spec.sampling.seed or 0, prompt.index, ordinal % spec.n) if own is None else own.sampling.seed,
        prompt_logprobs=() if own is None else result.prompt_logprobs,
        prompt_top_logprobs=() if own is None else result.prompt_top_logprobs,
        embedding=result.embedding,
        cached_tokens=finish.cached_tokens,
        worker=result.worker,
        attempt=result.attempt,
        timings=result.timings,
        metadata=prompt.source.metadata,
        logprobs_mode="raw_logprobs" if scoring else drawn_with.logprobs_mode,
        drawn=None if scoring else drawing_of(drawn_with),
        images=prompt.images,
        image_token=prompt.image_token,
        routes=result.routes,
    )


def impossible_trajectories(spec: JobSpec, prompt: PreparedPrompt, error: ParallmError) -> list[Trajectory]:
    """The failed samples of a prompt that no model can take."""
    return [
        Trajectory(
            prompt_index=prompt.index,
            sample_index=sample,
            prompt_ids=prompt.prompt_ids,
            completion_ids=(),
            text="",
            logprobs=(),
            finish_reason="error",
            error=f"{error.code or error.type}: {error.message}",
            seed=seed_in_job(spec.sampling.seed or 0, prompt.index, sample),
            metadata=prompt.source.metadata,
        )
        for sample in range(spec.n)
    ]


def given_trajectory(prompt: PreparedPrompt, codec: TextCodec | None) -> Trajectory:
    """The trajectory of a completion that is only to be rewarded: no model has seen it."""
    completion = prompt.source.completion
    if isinstance(completion, str):
        ids: tuple[int, ...] = ()
        text = completion
    else:
        ids = tuple(completion or ())
        text = codec.decode(ids) if codec is not None else ""
    return Trajectory(
        prompt_index=prompt.index,
        sample_index=0,
        prompt_ids=(),
        completion_ids=ids,
        text=text,
        logprobs=(),
        finish_reason="stop",
        metadata=prompt.source.metadata,
    )


async def rewarded(
    spec: JobSpec,
    finished: Sequence[FinishedSample],
    reward: CheckedReward | None,
    scorer: SampleScorer,
    share: Share | None = None,
) -> list[SampleRecord]:
    """Score what was completed, and make everything ready to be recorded; without a reward it is not scored."""
    rewards: dict[int, Reward] = {}
    if reward is not None:
        complete = [i for i, each in enumerate(finished) if OUTCOMES[each.trajectory.finish_reason] == "succeeded"]
        texts = [(finished[i].trajectory.text, finished[i].prompt.source) for i in complete]
        samples = [RewardSample(text, source.reference, source.prompt, spec.model) for text, source in texts]
        with working_for(spec.tenant):
            rewards = dict(zip(complete, await scorer.score(reward, samples, share=share), strict=True))
    return [record(spec, each.trajectory, rewards.get(i)) for i, each in enumerate(finished)]


def count_rewards(tally: Tally, records: Sequence[SampleRecord]) -> None:
    """Count the rewards of samples that have been recorded."""
    for reward in (record.reward for record in records if record.reward is not None):
        if reward.value is not None:
            tally.histogram("mlx_parallm_reward", reward.name).observe(reward.value)
        else:
            tally.counter("mlx_parallm_reward_errors_total", reward.name).add()


def record(spec: JobSpec, trajectory: Trajectory, reward: Reward | None = None) -> SampleRecord:
    """A sample as the ledger takes it."""
    if reward is not None:
        trajectory = msgspec.structs.replace(trajectory, reward=reward)
    return SampleRecord(
        ordinal=trajectory.prompt_index * spec.n + trajectory.sample_index,
        line=msgspec.json.encode(trajectory),
        outcome=OUTCOMES[trajectory.finish_reason],
        usage=JobUsage(len(trajectory.prompt_ids), len(trajectory.completion_ids)),
        reward=reward,
    )
