"""One job in the hands of one tick: expand, gather, reward, record, end (the story and its invariants: tick.py)."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from shared.errors import QueueFullError, UnknownModelError, UnreadableMessageError
from shared.frames import Finish
from shared.jobs import TERMINAL, InputLine, JobSpec, JobState
from shared.redis import keys
from shared.redis.jobs.ledger import JobProgress, SampleRecord
from shared.redis.jobs.pins import pin, unpin
from shared.redis.queue.dead_letters import Unusable, bury
from shared.sequences import ModelCard, SequenceResult, SequenceSpec, decode_result
from shared.telemetry.tracing import traceparent
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory
from worker.jobs.context import TickContext
from worker.jobs.expansion import (
    PreparedPrompt,
    is_sample,
    ordinal_of,
    prepare,
    prompts_to_expand,
    read_prompt,
    sequence_id,
    sequences,
)
from worker.jobs.outcomes import (
    FinishedSample,
    count_rewards,
    finished_trajectory,
    given_trajectory,
    impossible_trajectories,
    record,
)

log = structlog.get_logger()

LOOK_S = 0.5  # a cancelled or late job is noticed this soon
AGAIN_S = 0.1  # while samples are being scored, new ones are looked for this often
BATCH = 128  # sequences enqueued, or results gathered, at a time
CANCEL_GRACE_S = 5.0  # for workers to hand in what a cancelled job's sequences have so far
REPAIR_AFTER_S = 15.0  # without any progress (a Redis crash may lose a second)


class JobWork:
    """One job in the hands of one tick."""

    def __init__(self, context: TickContext, spec: JobSpec, card: ModelCard | None, codec: TextCodec | None) -> None:
        self._context = context
        self._ledger = context.ledger
        self._spec = spec
        self._card = card
        self._codec = codec
        self._queue = context.queue(spec.model)
        self._finished = keys.finished(spec.model, spec.id)
        self._rewarding = context.rewarding(spec)

    @classmethod
    async def on(cls, context: TickContext, spec: JobSpec) -> "JobWork":
        """With the card and the codec of the job's model; UnknownModelError when no worker has ever registered it."""
        await pin(context.adapters, spec)
        card = await context.registry.card(spec.model)
        if card is None and needs_model(spec):
            raise UnknownModelError(f"no worker has registered the model {spec.model!r}")
        return cls(context, spec, card, await context.codecs.codec(card) if card is not None else None)

    async def advance(self, until: float) -> bool:
        """Expand, gather and record until `until`; False when the job has ended."""
        await self._take_up()
        while True:
            progress = await self._ledger.progress(self._spec.id)
            if progress.state in TERMINAL:  # another runner ended it while this one was frozen, and perhaps expanded it
                await settle(self._context, self._spec, progress)
                return False
            if progress.recorded >= self._spec.total:
                return await self._succeed(progress)
            ending = self._ending(progress)
            if ending is not None:
                await self._end(*ending, progress)
                return False
            if time.monotonic() >= until or self._context.stopping.is_set():
                return True
            room_left = await self._expand(progress)
            await self._gather(progress, 0 if room_left else min(LOOK_S, until - time.monotonic()))

    # -- expand

    async def _expand(self, progress: JobProgress) -> bool:
        """Enqueue the next prompts; True when it is worth coming back at once."""
        spec = self._spec
        count = prompts_to_expand(spec, self._context.window, progress.expanded, progress.recorded, BATCH)
        if not needs_model(spec):
            count = min(count, self._rewarding.room)
        if count <= 0:
            return False
        if not needs_model(spec):
            lines = await self._ledger.inputs(spec.id, progress.expanded, count)
            self._reward_given(dict(enumerate(lines, progress.expanded)))
        else:
            prompts = await self._prompts_of(set(range(progress.expanded, progress.expanded + count)))
            try:
                await self._enqueue([prompt for _, prompt in sorted(prompts.items())])
            except QueueFullError:
                return False  # the cursor stays; what is in flight makes room
        await self._ledger.expanded(spec.id, progress.expanded + count)
        return True

    async def _enqueue(self, prompts: list[PreparedPrompt]) -> None:
        now_ms = time.time_ns() // 1_000_000
        spec = self._spec
        await self.keep(
            [record(spec, t) for p in prompts if p.error for t in impossible_trajectories(spec, p, p.error)]
        )
        trace = traceparent()
        groups = [sequences(spec, p, now_ms, trace) for p in prompts if not p.error]
        if not groups:
            return
        together: dict[tuple[str, ...], list[SequenceSpec]] = {}
        for workers, group in zip(await self._context.affinity.preferences(groups), groups, strict=True):
            together.setdefault(workers, []).extend(group)
        for workers, specs in together.items():
            await self._queue.enqueue(specs, prefer=workers)

    async def _prepare(self, lines: dict[int, InputLine]) -> list[PreparedPrompt]:
        spec, card, codec = self._spec, self._card, self._codec
        assert card is not None and codec is not None
        prepared = await asyncio.to_thread(
            lambda: [prepare(index, line, spec, card, codec) for index, line in lines.items()]
        )
        for prompt in prepared:
            self._context.prompts.put(spec.id, prompt)
        return prepared

    async def _take_up(self) -> None:
        """Score what an earlier runner had begun: without sequences there is no stream that says what has finished."""
        if needs_model(self._spec) or self._rewarding.taken_up:
            return
        self._rewarding.taken_up = True
        begun = await self._in_flight(await self._ledger.progress(self._spec.id))
        lines = await self._ledger.inputs_at(self._spec.id, begun) if begun else []
        self._reward_given(dict(zip(begun, lines, strict=True)))

    def _reward_given(self, lines: dict[int, InputLine]) -> None:
        """Score texts that are there already: no sequence, no model."""
        prompts = [read_prompt(index, line) for index, line in lines.items()]
        self._rewarding.add([FinishedSample(self._given(prompt), prompt) for prompt in prompts])

    def _given(self, prompt: PreparedPrompt) -> Trajectory:
        if prompt.error is not None:
            return impossible_trajectories(self._spec, prompt, prompt.error)[0]
        return given_trajectory(prompt, self._codec)

    async def keep(self, records: list[SampleRecord], entries: Sequence[bytes] = ()) -> None:
        """Record samples; after that their entries leave the stream of finished ones."""
        if records and await self._ledger.record(self._spec.id, records):
            count_rewards(self._context.tally, records)
        if entries:
            await self._context.redis.xdel(self._finished, *entries)

    # -- gather

    async def _gather(self, progress: JobProgress, wait_s: float) -> int:
        """Read what has finished and record what has been scored; returns how many of both."""
        rewarding = self._rewarding
        count = min(BATCH, rewarding.room) if needs_model(self._spec) else 0
        came = await self._read_finished(count, 0 if rewarding.busy else wait_s) if count > 0 else 0
        kept = await self._keep_scored(min(wait_s, AGAIN_S) if rewarding.busy else 0)
        if not (came or kept or rewarding.busy):
            await self._repair(progress)
            if not needs_model(self._spec):
                await asyncio.sleep(min(wait_s, AGAIN_S))  # where there is a stream, its reading has waited
        return came + kept

    async def _keep_scored(self, wait_s: float) -> int:
        """Record what has been scored; how many samples that was."""
        records, entries = await self._rewarding.take(wait_s)
        await self.keep(records, entries)
        self._rewarding.recorded()
        return len(records)

    async def _read_finished(self, count: int, wait_s: float) -> int:
        """Hand finished sequences on to be scored; returns how many."""
        block = max(1, int(wait_s * 1000)) if wait_s > 0 else None
        streams = await self._context.blocking.xread({self._finished: self._rewarding.cursor}, count=count, block=block)
        entries = streams[0][1] if streams else []
        if not entries:
            return 0
        results = [(entry, await self._read(entry, fields)) for entry, fields in entries]
        self._rewarding.add(await self._samples([(entry, result) for entry, result in results if result is not None]))
        self._rewarding.cursor = entries[-1][0].decode()
        await self.keep([], [entry for entry, result in results if result is None])
        return len(entries)

    async def _read(self, entry: bytes, fields: dict[bytes, bytes]) -> SequenceResult | None:
        """A sample's result; an unreadable one becomes an error, and what is no sample of this job a dead letter."""
        packed = fields.get(b"result", b"")
        seq = fields.get(b"id", b"").decode(errors="replace")
        try:
            result = decode_result(packed)
            seq, unreadable = result.id, None
        except UnreadableMessageError as error:
            unreadable = error
            finish = Finish("error", None, error.code or "", error.message)
            result = SequenceResult(seq, finish, worker="", attempt=0, prompt_tokens=0)
        is_ours = is_sample(self._spec, seq)
        if unreadable is not None or not is_ours:
            reason = unreadable.message if unreadable else "no sample of this job"
            unusable = Unusable(self._finished, entry.decode(), seq, reason, self._context.runner, packed)
            await bury(self._context.redis, self._spec.model, unusable)
            if await self._queue.is_alive(seq):
                return None  # its own result is still to come
        return result if is_ours else None

    async def _samples(self, results: list[tuple[bytes, SequenceResult]]) -> list[FinishedSample]:
        assert self._codec is not None
        prompts = await self._prompts_of({ordinal_of(result.id) // self._spec.n for _, result in results})
        samples = []
        for entry, result in results:
            ordinal = ordinal_of(result.id)
            prompt = prompts[ordinal // self._spec.n]
            trajectory = finished_trajectory(self._spec, ordinal, prompt, result, self._codec)
            samples.append(FinishedSample(trajectory, prompt, entry))
        return samples

    async def _prompts_of(self, indices: set[int]) -> dict[int, PreparedPrompt]:
        """Prompts of a job; those that were prepared here are taken from memory."""
        job_id = self._spec.id
        known = {index: self._context.prompts.get(job_id, index) for index in indices}
        prompts = {index: prompt for index, prompt in known.items() if prompt is not None}
        missing = sorted(indices - prompts.keys())
        if missing:
            lines = await self._ledger.inputs_at(job_id, missing)
            for prompt in await self._prepare(dict(zip(missing, lines, strict=True))):
                prompts[prompt.index] = prompt
        return prompts

    async def _repair(self, progress: JobProgress) -> None:
        """After a long silence read again what has finished, and enqueue again what is in flight.

        Of what is finished Redis may have lost that it was recorded, and another shard, or a copy of it, may still know
        that it ended: it runs again. The queue ignores what it still has.
        """
        now = time.monotonic()
        repaired = self._context.repaired
        silent_s = min(
            (progress.now_ms - progress.progress_ms) / 1000, now - repaired.get(self._spec.id, -REPAIR_AFTER_S)
        )
        if progress.recorded >= progress.expanded * self._spec.n or silent_s < REPAIR_AFTER_S:
            return
        repaired[self._spec.id] = now
        self._rewarding.close()
        if not needs_model(self._spec):
            return
        in_flight = await self._in_flight(progress)
        await self._queue.forget_ended([sequence_id(self._spec.id, o) for o in in_flight], self._finished)
        prompts = await self._prompts_of({o // self._spec.n for o in in_flight})
        with contextlib.suppress(QueueFullError):
            await self._enqueue(list(prompts.values()))

    # -- end

    async def _succeed(self, progress: JobProgress) -> bool:
        while progress.complete_through < self._spec.total:
            await self._ledger.record(self._spec.id, [])  # walks the watermark on
            progress = await self._ledger.progress(self._spec.id)
            if progress.state in TERMINAL:
                return False
        await self._close("succeeded", "", progress)
        return False

    def _ending(self, progress: JobProgress) -> tuple[JobState, str] | None:
        """The state and the reason when the job must end before all its samples are there."""
        spec, reward = self._spec, self._spec.reward
        if progress.cancelled:
            return "cancelled", ""
        if spec.deadline_ms and progress.now_ms >= spec.deadline_ms:
            return "expired", "the job's deadline passed"
        if reward is not None and self._rewarding.share.given_up:
            late = self._rewarding.share.late
            return "failed", f"the reward {reward.name!r} timed out on {late} samples in a row: make it simpler"
        return None

    async def _end(self, state: JobState, reason: str, progress: JobProgress) -> None:
        """Cancel what is in flight, record what it has brought, and end the job."""
        until = time.monotonic() + CANCEL_GRACE_S
        self._rewarding.end_bare()
        while self._rewarding.busy:
            await self._keep_scored(LOOK_S)
        while needs_model(self._spec) and progress.recorded < progress.expanded * self._spec.n:
            in_flight = (await self._in_flight(progress))[::-1]  # the queue's end first: a freed row claims its head
            for at in range(0, len(in_flight), BATCH):
                ids = [sequence_id(self._spec.id, ordinal) for ordinal in in_flight[at : at + BATCH]]
                await self._queue.cancel(ids)
            while await self._gather(progress, 0.2):
                pass
            if time.monotonic() > until:
                break
            progress = await self._ledger.progress(self._spec.id)
        await self._close(state, reason, progress)

    async def _in_flight(self, progress: JobProgress) -> list[int]:
        expanded = progress.expanded * self._spec.n
        return await self._ledger.unrecorded(self._spec.id, progress.complete_through, expanded)

    async def _close(self, state: JobState, error: str, progress: JobProgress) -> None:
        if await self._ledger.finish(self._spec.id, state, error):
            log.info("job.finished", job=self._spec.id, state=state)
        await settle(self._context, self._spec, progress)


async def settle(context: TickContext, spec: JobSpec, progress: JobProgress) -> None:
    """Cancel what an ended job has in flight, and remove what was reserved for it; repeatable.

    A worker that was frozen, or has died, may be late to end a sequence: it reports to no job any more.
    """
    if needs_model(spec):
        left = await context.ledger.unrecorded(spec.id, progress.complete_through, progress.expanded * spec.n)
        for at in range(0, len(left), BATCH):
            ids = [sequence_id(spec.id, ordinal) for ordinal in left[at : at + BATCH]]
            await context.queue(spec.model).cancel(ids, gathered=False)
    context.forget(spec.id)
    await context.redis.delete(keys.finished(spec.model, spec.id))
    await unpin(context.adapters, spec)
    await context.ledger.settled(spec.id)


def needs_model(spec: JobSpec) -> bool:
    """True if the job's samples are sequences; a score job without logprobs rewards existing texts."""
    return spec.kind != "score" or spec.score_logprobs
