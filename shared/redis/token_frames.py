"""Token frames: the worker's write side, and what was written read back from any position.

Per decode step and api process one frame: XADD to the api's frame stream (bounded; makes it lossless) and PUBLISH on
its channel (the live path), with log chunks and commits in the same pipeline. Every token has a position, so a write
may be repeated: readers drop what they have.

A sequence's log holds its tokens in chunks; what lies beyond the last chunk is in the frame stream of the api that
streams it. `read_tokens` joins the two: resume, takeover and gap repair all read through it.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from shared.frames import Frame, TokenEvent, decode_events, decode_frame, encode_events, encode_frame
from shared.redis import keys
from shared.redis.client import Script, is_no_script
from shared.sequences import Claim, SequenceResult, encode

log = structlog.get_logger()

FRAMES_KEPT = 4096  # per api process; at 100 decode steps a second 40 s
EXPIRE_EVERY_S = 10.0
RETRY_S = 0.1

_COMMIT = Script("commit")


@dataclass(frozen=True)
class Commit:
    """The end of a claimed sequence: its result, and the events that its log lacks (the finish among them)."""

    claim: Claim
    result: SequenceResult
    last: list[TokenEvent]
    dead_letter: str = ""  # the reason, when it was given up


class FrameWriter:
    """The write side of one worker."""

    def __init__(self, redis: "Redis", model: str, worker_id: str) -> None:
        self._redis = redis
        self._model = model
        self._worker_id = worker_id
        self._expired_at: dict[str, float] = {}

    async def write(
        self,
        frames: Mapping[str, list[TokenEvent]],
        chunks: Mapping[str, list[TokenEvent]],
        commits: list[Commit],
    ) -> list[bool]:
        """Write one decode step in one round trip; says for each commit whether the end was ours.

        Repeats until Redis takes it: every part is safe to repeat.
        """
        packed = {api: self._pack(events) for api, events in frames.items()}
        while True:
            pipe = self._redis.pipeline(transaction=False)
            for api, data in packed.items():
                self._add_frame(pipe, api, data)
            for seq, events in chunks.items():
                key = keys.sequence_log(self._model, seq)
                pipe.xadd(key, {"d": encode_events(events)})
                pipe.expire(key, keys.SEQUENCE_TTL_S)
            for commit in commits:
                self._add_commit(pipe, commit)
            try:
                answers = await pipe.execute(raise_on_error=False)
            except (RedisError, OSError) as error:
                log.warning("frames.write_repeated", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            ends = answers[len(answers) - len(commits) :] if commits else []
            if any(is_no_script(answer) for answer in ends):
                await _COMMIT.load(self._redis)
                packed, chunks = {}, {}  # these arrived
                continue
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            if failed:
                raise failed[0]
            return [bool(answer) for answer in ends]

    def _pack(self, events: list[TokenEvent]) -> bytes:
        return encode_frame(Frame(self._worker_id, time.time_ns() // 1_000_000, events))

    def _add_frame(self, pipe: "Pipeline", api: str, data: bytes) -> None:
        stream = keys.frames(api)
        pipe.xadd(stream, {"d": data}, maxlen=FRAMES_KEPT, approximate=True)
        now = time.monotonic()
        if now - self._expired_at.get(api, -EXPIRE_EVERY_S) >= EXPIRE_EVERY_S:
            self._expired_at[api] = now
            pipe.expire(stream, keys.API_TTL_S)
        pipe.publish(keys.frame_channel(api), data)

    def _add_commit(self, pipe: "Pipeline", commit: Commit) -> None:
        claim, spec = commit.claim, commit.claim.spec
        unread = bool(spec.job) and not spec.api
        _COMMIT.add(
            pipe,
            [
                claim.stream,
                keys.sequence(self._model, spec.id),
                keys.sequence_log(self._model, spec.id),
                keys.finished(self._model, spec.job),
                keys.dead_letters(self._model),
            ],
            [
                keys.GROUP,
                self._worker_id,
                claim.entry,
                claim.attempt,
                encode(commit.result) if spec.job else b"",
                encode_events(commit.last),
                keys.SEQUENCE_TTL_S,
                keys.JOB_TTL_S,
                "1" if spec.job else "",
                "1" if unread else "",
                commit.dead_letter,
                spec.id,
            ],
        )


async def read_tokens(redis: "Redis", model: str, seq: str, start: int, api: str = "") -> list[TokenEvent]:
    """Consecutive events of a sequence from position `start`, up to the first gap or the finish.

    What the log says stands; the frame stream of `api` adds what the log does not have yet.
    """
    logged: list[TokenEvent] = []
    for _, fields in await redis.xrange(keys.sequence_log(model, seq)):
        logged += _decoded_log(fields[b"d"], seq)
    spliced = splice(logged, start)
    if not api or (spliced and spliced[-1].finish is not None):
        return spliced
    live: list[TokenEvent] = []
    for _, fields in await redis.xrange(keys.frames(api)):
        frame = _decoded_frame(fields[b"d"])
        live += [event for event in frame if event.seq == seq]
    return splice([*logged, *live], start)


def splice(events: list[TokenEvent], start: int) -> list[TokenEvent]:
    """One gap-free run of events from position `start`, out of pieces that overlap and repeat.

    The first piece that has a position wins: what a reader may have seen does not change.
    """
    out: list[TokenEvent] = []
    position = start
    pending = list(events)
    while pending:
        later: list[TokenEvent] = []
        advanced = False
        for event in pending:
            piece = cut(event, position)
            if piece is None:
                if event.position > position:
                    later.append(event)
                continue
            out.append(piece)
            position = piece.end
            advanced = True
            if piece.finish is not None:
                return out
        if not advanced:
            break
        pending = later
    return out


def cut(event: TokenEvent, position: int) -> TokenEvent | None:
    """The part of an event from `position` on; None when it has nothing new there or begins later.

    A part of an event keeps its text only when nothing was cut off.
    """
    if event.position > position or event.end < position:
        return None
    if event.end == position and event.finish is None and (event.tokens or event.position < position):
        return None
    skip = position - event.position
    if skip == 0:
        return event
    return TokenEvent(
        event.seq,
        event.attempt,
        position,
        event.tokens[skip:],
        event.logprobs[skip:],
        None if event.top_logprobs is None else event.top_logprobs[skip:],
        None if event.text is None else "",
        event.version,
        event.finish,
        None,
        event.score_logprobs,
        None,
    )


def _decoded_frame(data: bytes) -> list[TokenEvent]:
    try:
        return decode_frame(data).events
    except msgspec.DecodeError as error:
        log.warning("frames.unreadable", error=str(error))
        return []


def _decoded_log(data: bytes, seq: str) -> list[TokenEvent]:
    try:
        return decode_events(data)
    except msgspec.DecodeError as error:
        log.warning("frames.unreadable_log", sequence=seq, error=str(error))
        return []
