"""Ends of sequences that no engine gives: cancelled while waiting, too late, given up, unreadable.

Such an end carries what earlier attempts have said, reaches the job or the stream that waits for it, and is committed
by the same rules as any other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis

from shared.errors import EngineError, ParallmError, UnreadableMessageError
from shared.frames import Finish, TokenEvent, encode_events
from shared.redis import keys
from shared.redis.connection.client import Script, ask_all, server_time_ms
from shared.redis.tokens.log import read_tokens
from shared.redis.tokens.writer import Commit, FrameWriter
from shared.redis.training.trajectory_intake import collecting_arguments, collecting_keys
from shared.sequences import Claim, SamplingParams, SequenceSpec, Timings, decode_spec, encode
from shared.trajectories import result_of

log = structlog.get_logger()

_CANCEL = Script("cancel")
_Fields = tuple[bytes | None, bytes | None, bytes | None, bytes | None, bytes | None]


class Settlement:
    """Ends sequences of one model."""

    def __init__(self, redis: "Redis", model: str) -> None:
        self._redis = redis
        self._model = model
        self.given_up = 0

    def unreadable(self, seq: str, job: str) -> SequenceSpec:
        """Takes the place of a spec that this version cannot read, so that its sequence can be ended."""
        return SequenceSpec(seq, self._model, (), SamplingParams(max_tokens=0, seed=0), job=job)

    async def end(self, worker_id: str, claim: Claim, reason: str) -> None:
        """Commit a claim whose client has left, or whose deadline has passed."""
        kind: Literal["deadline", "cancelled"] = "deadline" if reason == "deadline" else "cancelled"
        await self._commit(worker_id, await self._ending(claim, worker_id, Finish(kind)))

    async def give_up(self, worker_id: str, claim: Claim, reason: str, kind: type[ParallmError] = EngineError) -> None:
        """Commit a claim as an error, and leave a dead letter with the reason."""
        finish = Finish("error", None, kind.code or "", f"given up: {reason}")
        ending = await self._ending(claim, worker_id, finish)
        await self._commit(worker_id, replace(ending, dead_letter=reason))
        self.given_up += 1

    async def cancel(self, seq_ids: Sequence[str], gathered: bool = True) -> dict[str, str]:
        hashes = await self._look(seq_ids)
        return {seq: await self._cancel(seq, fields, gathered) for seq, fields in zip(seq_ids, hashes, strict=True)}

    async def _look(self, seq_ids: Sequence[str]) -> list[_Fields]:
        fields = ("state", "spec", "attempt", "api", "job")
        return await ask_all(self._redis, [("HMGET", keys.sequence(self._model, seq), *fields) for seq in seq_ids])

    async def _cancel(self, seq: str, fields: _Fields, gathered: bool) -> str:
        while True:
            state, packed, attempt, api, job = fields
            if state not in (b"queued", b"running"):
                return ""
            try:
                spec = msgspec.structs.replace(decode_spec(packed or b""), api=(api or b"").decode())
            except UnreadableMessageError:
                spec = self.unreadable(seq, (job or b"").decode())
            claim = Claim(spec, "", "", int(attempt or 0))
            ending = await self._ending(claim, "", Finish("cancelled")) if state == b"queued" else None
            answer = await self._try_cancel(claim, ending, gathered)
            if answer == "queued" and ending is not None and spec.api:
                await FrameWriter(self._redis, self._model, "").write({spec.api: ending.last[-1:]}, {}, [])
            if answer.startswith("worker:"):
                worker = answer.removeprefix("worker:")
                await self._redis.publish(keys.control_channel(worker), msgspec.msgpack.encode(("cancel", seq)))
                return worker
            if answer != "read:":
                return answer
            (fields,) = await self._look([seq])  # it has moved on since we looked

    async def _try_cancel(self, claim: Claim, ending: Commit | None, gathered: bool) -> str:
        spec = claim.spec
        answer = await _CANCEL(
            self._redis,
            [
                keys.sequence(self._model, spec.id),
                keys.sequence_log(self._model, spec.id),
                keys.finished(self._model, spec.job),
                *collecting_keys(self._model),
            ],
            [
                keys.GROUP,
                spec.id,
                claim.attempt if ending else "",
                encode(ending.result) if ending and (spec.job or spec.collect) else b"",
                encode_events(ending.last) if ending else b"",
                keys.SEQUENCE_TTL_S,
                keys.JOB_TTL_S,
                "1" if spec.job and gathered else "",
                "1" if spec.job and not spec.api else "",
                *collecting_arguments(spec),
            ],
        )
        return str(answer.decode())

    async def _ending(self, claim: Claim, worker_id: str, finish: Finish) -> Commit:
        """The end of a sequence, after its tokens so far; one that waits (no `entry`) gets an attempt of its own."""
        spec = claim.spec
        attempt = claim.attempt if claim.entry else claim.attempt + 1
        logged: list[TokenEvent] = []
        beyond: list[TokenEvent] = []
        if claim.attempt > 0:
            if spec.api:
                await FrameWriter(self._redis, self._model, worker_id).fence({spec.api: {spec.id: attempt}})
            logged = await read_tokens(self._redis, self._model, spec.id, 0)
            end = logged[-1].end if logged else 0
            beyond = await read_tokens(self._redis, self._model, spec.id, end, spec.api) if spec.api else []
        said = [*logged, *beyond]
        position = said[-1].end if said else 0
        last = TokenEvent(spec.id, attempt, position, [], [], finish=finish)
        timings = Timings(
            spec.enqueued_ms, 0, 0, await server_time_ms(self._redis, keys.sequence(self._model, spec.id))
        )
        result = result_of(spec, claim.attempt, worker_id, [*said, last], timings)
        return Commit(claim, result, [*beyond, last])

    async def _commit(self, worker_id: str, ending: Commit) -> None:
        spec = ending.claim.spec
        frames = {spec.api: ending.last[-1:]} if spec.api else {}
        await FrameWriter(self._redis, self._model, worker_id).write(frames, {}, [ending])
        log.info("queue.settled", sequence=spec.id, finish=ending.result.finish.reason, attempt=ending.claim.attempt)
