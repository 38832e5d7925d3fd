"""The trainer's two seams over Redis: samples come from the queue, versions go to the adapter store.

Rollouts are sequences of the batch class, gathered under the run's own id in `finished:<run>`, exactly as a job's are.
Ids follow from the request, so asking again after a lost answer changes nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.adapter_format import prepared
from shared.adapters import GateCheck
from shared.errors import EngineError, QueueFullError, UnreadableMessageError
from shared.redis import keys
from shared.redis.adapter_store import AdapterStore
from shared.redis.sequence_queue import SequenceQueue
from shared.redis.training_board import TrainingBoard
from shared.sequences import ModelCard, SamplingParams, SequenceResult, SequenceSpec, decode_result
from shared.text import TextCodec
from shared.trajectories import Trajectory
from trainer.publish import AlertKind, Candidate
from trainer.rollouts import RolloutRequest, derived_seed

log = structlog.get_logger()


class RingSource:
    """Generates through the sequence queue."""

    def __init__(self, redis: Redis, card: ModelCard, codec: TextCodec, run: str) -> None:
        self._redis = redis
        self._card = card
        self._codec = codec
        self._run = f"train-{run}"
        self._queue = SequenceQueue(redis, card.name)
        self._store = AdapterStore(redis)
        self._waiting: dict[str, asyncio.Future[SequenceResult]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # What an earlier start of this run left unread belongs to requests that nobody waits for any more.
        await self._redis.delete(self._stream)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._queue.cancel(list(self._waiting))
            await self._redis.delete(self._stream)

    @property
    def _stream(self) -> str:
        return keys.finished(self._card.name, self._run)

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        """All samples of one prompt, in order; cancelling it cancels the sequences."""
        specs = await self._specs(request)
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault(spec.id, loop.create_future()) for spec in specs]
        try:
            while True:
                try:
                    await self._queue.enqueue(specs)
                    break
                except QueueFullError:
                    await asyncio.sleep(0.1)
            results = await asyncio.gather(*futures)
        except asyncio.CancelledError:
            await asyncio.shield(self._queue.cancel([spec.id for spec in specs]))
            raise
        finally:
            for spec in specs:
                self._waiting.pop(spec.id, None)
        return [self._trajectory(request, specs[i], i, result) for i, result in enumerate(results)]

    async def _specs(self, request: RolloutRequest) -> list[SequenceSpec]:
        adapter = request.adapter
        if adapter and "@" not in adapter and not await self._store.latest(adapter):
            adapter = ""  # nothing is published yet: the policy is the base
        s = request.sampling
        now = time.time_ns() // 1_000_000
        fields = {name: getattr(s, name) for name in _SHARED_FIELDS}
        return [
            SequenceSpec(
                id=f"{self._run}-{request.id}-{sample}",
                model=self._card.name,
                prompt_ids=request.prompt_ids,
                sampling=SamplingParams(seed=derived_seed(s.seed or 0, sample), **fields),
                sequence_class="batch",
                group=f"{self._run}-{request.id}",
                job=self._run,
                adapter=adapter,
                adapter_policy="pin" if "@" in adapter else "follow",
                enqueued_ms=now,
            )
            for sample in range(request.n)
        ]

    async def _read(self) -> None:
        last = "0-0"
        while True:
            try:
                for _, entries in await self._redis.xread({self._stream: last}, count=256, block=1000):
                    for entry, fields in entries:
                        last = entry.decode()
                        waiting = self._waiting.get(fields.get(b"id", b"").decode(errors="replace"))
                        if waiting is not None and not waiting.done():
                            try:
                                waiting.set_result(decode_result(fields.get(b"result", b"")))
                            except UnreadableMessageError as error:  # garbage, or another version's
                                waiting.set_exception(error)
                    await self._redis.xdel(self._stream, *(entry for entry, _ in entries))
            except (RedisError, OSError) as error:
                log.warning("train.redis_trouble", error=str(error))
                await asyncio.sleep(0.2)

    def _trajectory(
        self, request: RolloutRequest, spec: SequenceSpec, sample: int, result: SequenceResult
    ) -> Trajectory:
        finish = result.finish
        text = self._codec.decode(result.completion_ids) if result.text is None else result.text
        return Trajectory(
            prompt_index=0,
            sample_index=sample,
            prompt_ids=request.prompt_ids,
            completion_ids=result.completion_ids,
            text=text,
            logprobs=result.logprobs,
            finish_reason=finish.reason,
            spans=result.spans,
            stop_match=finish.stop_match,
            error=f"{finish.error_code or EngineError.code}: {finish.error_message}"
            if finish.reason == "error"
            else "",
            seed=spec.sampling.seed,
            worker=result.worker,
            attempt=result.attempt,
            timings=result.timings,
            metadata=request.metadata,
        )


_SHARED_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "top_logprobs",
)  # fmt: skip


class StoreSink:
    """Publishes to the adapter store."""

    def __init__(self, redis: Redis, name: str, card: ModelCard) -> None:
        self._name = name
        self._card = card
        self._board = TrainingBoard(redis, name)
        self._store = AdapterStore(redis)

    async def stage(self, candidate: Candidate) -> int:
        """Store the candidate as the next version; the latest stays what it was."""
        with prepared(candidate.directory, shapes=self._card.modules) as adapter:
            manifest = await self._store.publish(
                self._name,
                adapter,
                base_sha256=candidate.base_sha256,
                parent=candidate.parent,
                train_step=candidate.train_step,
                metrics=candidate.metrics,
                gate=candidate.gate,
                source="trainer",
                set_latest=False,
            )
        return manifest.version

    async def promote(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Flip `latest`."""
        await self._store.promote(self._name, version)

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        """Write down which checks failed."""
        await self._store.reject(self._name, version, gate)

    async def roll_back(self, version: int, reason: str) -> None:
        """Make an older version the latest again."""
        await self._store.rollback(self._name, version, reason=reason)

    async def set_best(self, version: int, value: float) -> None:
        """Point `best` at a version."""
        await self._store.set_best(self._name, version, value)

    async def alert(self, kind: AlertKind, message: str) -> None:
        """Log it and tell whoever listens."""
        log.warning("train.alert", adapter=self._name, kind=kind, message=message)
        await self._board.alert(kind, message)
