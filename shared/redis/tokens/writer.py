"""Token frames: what a worker writes per decode step (reader.py and feed.py read it).

Per decode step and api process one frame: XADD to the api's frame stream (bounded; makes it lossless) and PUBLISH on
its channel (the live path). Log chunks and commits travel in the same pipeline, before the frames, so that whoever
hears of an end finds it committed. Every token has a position: a write may be repeated, readers drop what they have.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from shared.frames import Frame, TokenEvent, encode_events, encode_frame, fence
from shared.redis import keys
from shared.redis.connection.client import Script, is_no_script
from shared.redis.connection.faults import reason
from shared.redis.recordings import Recorded, recording_keys
from shared.redis.training.trajectory_intake import collecting_arguments, collecting_keys
from shared.sequences import Claim, SequenceResult, encode

log = structlog.get_logger()

FRAMES_KEPT = 4096  # per api process; at 100 decode steps a second 40 s
EXPIRE_EVERY_S = 10.0
RETRY_S = 0.1

_LOG, _COMMIT = Script("log"), Script("commit")


@dataclass(frozen=True)
class Commit:
    """The end of a claimed sequence: its result, and the events that its log lacks (the finish among them)."""

    claim: Claim
    result: SequenceResult
    last: list[TokenEvent]
    dead_letter: str = ""  # the reason, when it was given up
    said: Sequence[TokenEvent] = ()  # all its events, should the log have lost some


class FrameWriter:
    """The write side of one worker."""

    def __init__(self, redis: "Redis", model: str, worker_id: str, *, replay_share: float = 0.0) -> None:
        """`replay_share`: share of the sequences that are left to another worker to check."""
        self._replay_share = replay_share
        self._redis = redis
        self._model = model
        self._sequence, self._log = keys.sequence(model, ""), keys.sequence_log(model, "")  # with an id after it
        self._worker_id = worker_id
        self._expired_at: dict[str, float] = {}
        self._knows_scripts = False
        self.gaps: set[str] = set()  # sequences whose logs have lost something: they are to be logged anew

    async def write(
        self, frames: Mapping[str, list[TokenEvent]], chunks: Mapping[str, list[TokenEvent]], commits: Sequence[Commit]
    ) -> list[bool]:
        """Write one decode step in one round trip; returns for each commit whether it was accepted as ours.

        Repeats until Redis takes it: every part is safe to repeat.
        """
        packed = {api: self._pack(events) for api, events in frames.items()}
        while True:
            try:
                answers = await self._try_write(packed, chunks, commits)
            except (RedisError, OSError) as error:
                log.warning("frames.write_repeated", error=reason(error))
                await asyncio.sleep(RETRY_S)
                continue
            if any(is_no_script(answer) for answer in answers):  # a restarted server; what it took, it takes twice
                self._knows_scripts = False
                continue
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            if failed:
                raise failed[0]
            first = 1 if chunks else 0
            if chunks:
                self.gaps.update(seq for i, seq in enumerate(chunks) if i in answers[0])  # type: ignore[operator]
            owned = answers[first : first + len(commits)]
            if 2 not in owned:
                return [answer == 1 for answer in owned]
            commits = [replace(c, last=list(c.said)) if o == 2 else c for c, o in zip(commits, owned, strict=True)]

    async def fence(self, owners: Mapping[str, Mapping[str, int]]) -> None:
        """Shut earlier owners of sequences out of the frame streams: {api: {sequence: our attempt}}.

        To be called before the tokens of a sequence taken over are read, so that all that its reader may have seen
        stands in front of the fence. MULTI keeps stream and channel in the same order.
        """
        frames = {api: self._pack([fence(seq, attempt) for seq, attempt in o.items()]) for api, o in owners.items()}
        async with self._redis.pipeline(transaction=True) as pipe:
            for api, data in frames.items():
                pipe.execute_command("XADD", keys.frames(api), "MAXLEN", "~", FRAMES_KEPT, "*", "d", data)
                pipe.execute_command("EXPIRE", keys.frames(api), keys.API_TTL_S)
                pipe.execute_command("PUBLISH", keys.frame_channel(api), data)
            await pipe.execute()

    async def _try_write(
        self, packed: Mapping[str, bytes], chunks: Mapping[str, list[TokenEvent]], commits: Sequence[Commit]
    ) -> list[object]:
        if not self._knows_scripts:
            await _LOG.load(self._redis)
            await _COMMIT.load(self._redis)
            self._knows_scripts = True
        pipe = self._redis.pipeline(transaction=False)
        if chunks:
            self._add_chunks(pipe, chunks)
        for commit in commits:
            self._add_commit(pipe, commit)
        now = time.monotonic()
        fading = [api for api in packed if now - self._expired_at.get(api, -EXPIRE_EVERY_S) >= EXPIRE_EVERY_S]
        for api, data in packed.items():
            pipe.execute_command("XADD", keys.frames(api), "MAXLEN", "~", FRAMES_KEPT, "*", "d", data)
            if api in fading:
                pipe.execute_command("EXPIRE", keys.frames(api), keys.API_TTL_S)
            pipe.execute_command("PUBLISH", keys.frame_channel(api), data)
        answers: list[object] = await pipe.execute(raise_on_error=False)
        self._expired_at.update(dict.fromkeys(fading, now))
        return answers

    def _pack(self, events: list[TokenEvent]) -> bytes:
        return encode_frame(Frame(self._worker_id, time.time_ns() // 1_000_000, events))

    def _add_chunks(self, pipe: "Pipeline", chunks: Mapping[str, list[TokenEvent]]) -> None:
        names: list[str | bytes] = []
        args: list[str | bytes | int | float] = [keys.JOB_TTL_S, self._worker_id]
        for seq, events in chunks.items():
            names += [self._sequence + seq, self._log + seq]
            args += [events[0].attempt, events[0].position, events[-1].end, encode_events(events)]
        _LOG.add(pipe, names, args)

    def _add_commit(self, pipe: "Pipeline", commit: Commit) -> None:
        claim, spec, finish = commit.claim, commit.claim.spec, commit.result.finish
        unread = bool(spec.job) and not spec.api
        recorded = Recorded.of(spec, self._replay_share)
        _COMMIT.add(
            pipe,
            [
                claim.stream,
                self._sequence + spec.id,
                self._log + spec.id,
                keys.finished(self._model, spec.job),
                keys.dead_letters(self._model),
                *collecting_keys(self._model),
                *recording_keys(self._model, spec.id),
            ],
            [
                keys.GROUP,
                self._worker_id,
                claim.entry,
                claim.attempt,
                "cancelled" if finish.reason == "cancelled" else "done",
                encode(commit.result) if spec.job or spec.collect or any(recorded) else b"",
                encode_events(commit.last) if commit.last else b"",
                keys.SEQUENCE_TTL_S,
                keys.JOB_TTL_S,
                "1" if spec.job else "",
                "1" if unread else "",
                commit.dead_letter,
                spec.id,
                *collecting_arguments(spec),
                commit.last[0].position if commit.last else 0,
                *recorded.arguments,
            ],
        )
