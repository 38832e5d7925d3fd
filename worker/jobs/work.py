"""One job in the hands of one tick: expand, gather, reward, record, end (the story and its invariants: tick.py)."""

import asyncio
import contextlib
import time

import msgspec
import structlog

from shared.errors import QueueFullError, UnknownModelError, UnreadableMessageError
from shared.frames import Finish
from shared.jobs import PIN_S, TERMINAL, JobSpec, JobState, pin_owner
from shared.redis import keys
from shared.redis.dead_letters import Unusable, bury
from shared.redis.job_ledger import JobProgress, SampleRecord
from shared.sequences import ModelCard, SequenceResult, SequenceSpec, decode_result
from shared.text import TextCodec
from shared.tracing import traceparent
from shared.trajectories import Trajectory
from worker.jobs.context import TickContext
from worker.jobs.expansion import is_sample, ordinal_of, prompts_to_expand, sequence_id, sequences
from worker.jobs.outcomes import (
    count_rewards,
    finished_trajectory,
    given_trajectory,
    impossible_trajectories,
    rewarded,
)
from worker.jobs.prompts import PreparedPrompt, prepare, read_input

log = structlog.get_logger()

LOOK_S = 0.5  # a cancelled or late job is noticed this soon
BATCH = 128  # sequences enqueued, or results gathered, at a time
CANCEL_GRACE_S = 5.0  # for workers to hand in what a cancelled job's sequences have so far
REPAIR_AFTER_S = 15.0  # without any progress: enqueue again what is in flight (a Redis crash may lose a second)


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
        self._left_out = False  # rewards that the job's end did not wait for

    @classmethod
    async def on(cls, context: TickContext, spec: JobSpec) -> "JobWork":
        """Fetch what the job's model needs; UnknownModelError when no worker has ever told of it."""
        await context.adapters.pin_all(spec.adapter, pin_owner(spec.id), PIN_S)
        card = await context.registry.card(spec.model)
        if card is None and needs_model(spec):
            raise UnknownModelError(f"no worker has registered the model {spec.model!r}")
        return cls(context, spec, card, await context.codecs.codec(card) if card is not None else None)

    async def advance(self, until: float) -> bool:
        """Expand, gather and record until `until`; False when the job has ended."""
        while True:
            progress = await self._ledger.progress(self._spec.id)
            if progress.state in TERMINAL:
                return False
            if progress.recorded >= self._spec.total and not self._left_out:
                return await self._succeed(progress)
            ending = _ending(self._spec, progress)
            if ending is not None:
                await self._end(ending, progress)
                return False
            if time.monotonic() >= until or self._context.stopping.is_set():
                return True
            room_left = await self._expand(progress)
            if needs_model(self._spec):
                await self._gather(progress, 0 if room_left else min(LOOK_S, until - time.monotonic()))

    # -- expand

    async def _expand(self, progress: JobProgress) -> bool:
        """Enqueue the next prompts; True when it is worth coming back at once."""
        spec = self._spec
        count = prompts_to_expand(spec, self._context.window, progress.expanded, progress.recorded, BATCH)
        if not count:
            return False
        lines = await self._ledger.inputs(spec.id, progress.expanded, count)
        if not needs_model(spec):
            await self._reward_given(progress.expanded, lines)
        else:
            try:
                await self._enqueue(await self._prepare(dict(enumerate(lines, progress.expanded))))
            except QueueFullError:
                return False  # the cursor stays; what is in flight makes room
        await self._ledger.expanded(spec.id, progress.expanded + len(lines))
        return True

    async def _enqueue(self, prompts: list[PreparedPrompt]) -> None:
        now_ms = time.time_ns() // 1_000_000
        impossible = [(line, p) for p in prompts if p.error for line in impossible_trajectories(self._spec, p, p.error)]
        if impossible:
            await self._keep(impossible)
        trace = traceparent()
        groups = [sequences(self._spec, p, now_ms, trace) for p in prompts if not p.error]
        if not groups:
            return
        together: dict[tuple[str, ...], list[SequenceSpec]] = {}
        for workers, group in zip(await self._context.affinity.preferences(groups), groups, strict=True):
            together.setdefault(workers, []).extend(group)
        for workers, specs in together.items():
            await self._queue.enqueue(specs, prefer=workers)

    async def _prepare(self, lines: dict[int, bytes]) -> list[PreparedPrompt]:
        spec, card, codec = self._spec, self._card, self._codec
        assert card is not None and codec is not None
        prepared = await asyncio.to_thread(
            lambda: [prepare(index, line, spec, card, codec) for index, line in lines.items()]
        )
        for prompt in prepared:
            self._context.prompts.put(spec.id, prompt)
        return prepared

    async def _reward_given(self, first: int, lines: list[bytes]) -> None:
        """Score texts that are there already: no sequence, no model."""
        prompts = [PreparedPrompt(index, read_input(line)) for index, line in enumerate(lines, first)]
        finished = [(given_trajectory(prompt, self._codec), prompt) for prompt in prompts]
        await self._keep(finished)

    async def _keep(self, finished: list[tuple[Trajectory, PreparedPrompt]]) -> None:
        """Reward and record samples."""
        records = await self._rewarded(finished)
        if await self._ledger.record(self._spec.id, records):
            count_rewards(self._context.tally, records)

    async def _rewarded(self, finished: list[tuple[Trajectory, PreparedPrompt]]) -> list[SampleRecord]:
        """Samples with their rewards, which a judge may take a while for; without, when the job ends meanwhile."""
        scoring = asyncio.create_task(rewarded(self._spec, self._context.rewards, finished))
        try:
            while not (await asyncio.wait({scoring}, timeout=LOOK_S))[0]:
                if _ending(self._spec, await self._ledger.progress(self._spec.id)):
                    self._left_out = True
                    bare = msgspec.structs.replace(self._spec, reward=None)
                    return await rewarded(bare, self._context.rewards, finished)
            return scoring.result()
        finally:
            scoring.cancel()
            await asyncio.gather(scoring, return_exceptions=True)

    # -- gather

    async def _gather(self, progress: JobProgress, wait_s: float) -> int:
        """Reward and record finished sequences; how many came."""
        block = max(1, int(wait_s * 1000)) if wait_s > 0 else None
        found = await self._context.blocking.xread({self._finished: "0"}, count=BATCH, block=block)
        entries = found[0][1] if found else []
        if not entries:
            await self._repair(progress)
            return 0
        await self._record([result for entry in entries if (result := await self._read(*entry)) is not None])
        await self._context.redis.xdel(self._finished, *(entry for entry, _ in entries))
        return len(entries)

    async def _read(self, entry: bytes, fields: dict[bytes, bytes]) -> SequenceResult | None:
        """A result; what says nothing of a sample of ours becomes a dead letter, and a sample's an error."""
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
            found = Unusable(self._finished, entry.decode(), seq, reason, self._context.runner, packed)
            await bury(self._context.redis, self._spec.model, found)
            if await self._queue.is_alive(seq):
                return None  # its own result is still to come
        return result if is_ours else None

    async def _record(self, results: list[SequenceResult]) -> None:
        assert self._codec is not None
        prompts = await self._prompts_of({ordinal_of(result.id) // self._spec.n for result in results})
        finished = []
        for result in results:
            ordinal = ordinal_of(result.id)
            prompt = prompts[ordinal // self._spec.n]
            finished.append((finished_trajectory(self._spec, ordinal, prompt, result, self._codec), prompt))
        await self._keep(finished)

    async def _prompts_of(self, indices: set[int]) -> dict[int, PreparedPrompt]:
        """Prompts that were expanded, by us a moment ago or by another runner."""
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
        """Enqueue again what is in flight after a long silence; the queue ignores what it still has."""
        now = time.monotonic()
        repaired = self._context.repaired
        silent_s = min(
            (progress.now_ms - progress.progress_ms) / 1000, now - repaired.get(self._spec.id, -REPAIR_AFTER_S)
        )
        if progress.recorded >= progress.expanded * self._spec.n or silent_s < REPAIR_AFTER_S:
            return
        repaired[self._spec.id] = now
        prompts = await self._prompts_of({o // self._spec.n for o in await self._in_flight(progress)})
        with contextlib.suppress(QueueFullError):
            await self._enqueue(list(prompts.values()))

    # -- end

    async def _succeed(self, progress: JobProgress) -> bool:
        while progress.complete_through < self._spec.total:
            await self._ledger.record(self._spec.id, [])  # walks the watermark on
            progress = await self._ledger.progress(self._spec.id)
            if progress.state in TERMINAL:
                return False
        await self._close("succeeded", "")
        return False

    async def _end(self, state: JobState, progress: JobProgress) -> None:
        """Stop what is in flight, keep what it has come to, and end the job."""
        until = time.monotonic() + CANCEL_GRACE_S
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
        reason = "the job's deadline passed" if state == "expired" else ""
        await self._close(state, reason)

    async def _in_flight(self, progress: JobProgress) -> list[int]:
        expanded = progress.expanded * self._spec.n
        return await self._ledger.unrecorded(self._spec.id, progress.complete_through, expanded)

    async def _close(self, state: JobState, error: str) -> None:
        if await self._ledger.finish(self._spec.id, state, error):
            log.info("job.finished", job=self._spec.id, state=state)
        self._context.repaired.pop(self._spec.id, None)
        await self._context.redis.delete(self._finished)
        await self._context.adapters.unpin_all(self._spec.adapter, pin_owner(self._spec.id))


def needs_model(spec: JobSpec) -> bool:
    """Whether the job's samples are sequences; a score job without logprobs rewards texts that are there already."""
    return spec.kind != "score" or spec.score_logprobs


def _ending(spec: JobSpec, progress: JobProgress) -> JobState | None:
    if progress.cancelled:
        return "cancelled"
    if spec.deadline_ms and progress.now_ms >= spec.deadline_ms:
        return "expired"
    return None
