"""A ring over Redis: samples come from the queue, versions go to the adapter store.

Rollouts are sequences of the batch class, gathered under the run's own id in `finished:<run>`, exactly as a job's are.
Ids follow from the request, so asking again after a lost answer changes nothing.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import structlog
from redis.asyncio import Redis

from shared.adapter_files.formats import MLX_FILE, inherit_config, prepared
from shared.adapter_files.tensors import read_tensors
from shared.adapters import GateCheck
from shared.errors import ServiceUnavailableError
from shared.owners import ADMINS
from shared.redis.adapters.store import AdapterStore
from shared.redis.kept.image_store import ImageStore
from shared.redis.kept.kept_things import Terms
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.training.board import TrainingBoard
from shared.seeds import derived_seed
from shared.sequences import ModelCard, SamplingParams, SequenceSpec
from shared.text.codec import TextCodec
from shared.training import AlertKind
from shared.trajectories import Trajectory, trajectory_of
from trainer.ring.ring import Candidate, Stored
from trainer.rollouts.groups import RolloutRequest, TeacherRequest

log = structlog.get_logger()

IMAGES = Terms(86_400, 1 << 30)  # of all runs together: those of groups under way; those used longest ago go


class RingSource:
    """Generates through the sequence queue."""

    def __init__(self, redis: Redis, card: ModelCard, codec: TextCodec, calls: SequenceCalls) -> None:
        self._card = card
        self._codec = codec
        self._calls = calls
        self._store = AdapterStore(redis)
        self._images = ImageStore(redis, IMAGES)

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        """All samples of one prompt, in order; cancelling it cancels the sequences."""
        for sha256, data in request.files.items():
            await self._images.put(ADMINS, sha256, data)
        specs = await self._specs(request)
        results = await self._calls.call(specs)
        texts = [self._codec.decode(r.completion_ids) if r.text is None else r.text for r in results]
        rows = zip(specs, results, texts, range(request.n), strict=True)
        return [trajectory_of(spec, result, text, i, request.metadata) for spec, result, text, i in rows]

    async def _specs(self, request: RolloutRequest) -> list[SequenceSpec]:
        adapter = request.adapter
        if adapter and "@" not in adapter and not await self._store.latest(adapter):
            adapter = ""  # nothing is published yet: the policy is the base
        sampling = msgspec.structs.asdict(request.sampling)
        seed = sampling.pop("seed") or 0
        now = time.time_ns() // 1_000_000
        return [
            SequenceSpec(
                id=f"{self._calls.owner}-{request.id}-{sample}",
                model=self._card.name,
                prompt_ids=request.prompt_ids,
                sampling=SamplingParams(seed=derived_seed(seed, sample), **sampling),
                sequence_class="batch",
                group=f"{self._calls.owner}-{request.id}",
                job=self._calls.owner,
                adapter=adapter,
                adapter_policy="pin" if "@" in adapter else "follow",
                enqueued_ms=now,
                tenant=ADMINS,
                has_next_turn=request.has_next_turn,
                images=request.images,
                image_token=request.image_token,
            )
            for sample in range(request.n)
        ]


class RingScorer:
    """Has completions scored by the workers of one model."""

    def __init__(self, redis: Redis, card: ModelCard, calls: SequenceCalls) -> None:
        self._card, self._calls = card, calls
        self._store = AdapterStore(redis)

    async def score(self, request: TeacherRequest) -> tuple[float, ...]:
        """The teacher's log-probabilities. ServiceUnavailableError when the sequence ended without them."""
        adapter = "" if request.teacher == self._card.name else request.teacher
        if adapter and "@" not in adapter and not await self._store.latest(adapter):
            adapter = ""  # nothing is published yet: the policy is the base
        spec = SequenceSpec(
            id=f"{self._calls.owner}-{request.id}",
            model=self._card.name,
            prompt_ids=request.prompt_ids,
            score_ids=request.completion_ids,
            kind="score",
            sampling=SamplingParams(max_tokens=1, seed=0),
            sequence_class="batch",
            job=self._calls.owner,
            adapter=adapter,
            adapter_policy="pin" if "@" in adapter else "follow",
            enqueued_ms=time.time_ns() // 1_000_000,
            tenant=ADMINS,
        )
        (result,) = await self._calls.call([spec])
        if len(result.score_logprobs) != len(request.completion_ids):
            raise ServiceUnavailableError(result.finish.failure or f"it ended with {result.finish.reason!r}")
        return result.score_logprobs


class StoreSink:
    """Publishes to the adapter store; with `keep_n`, older versions go, or a long run would fill Redis."""

    def __init__(self, redis: Redis, name: str, card: ModelCard, keep_n: int = 0) -> None:
        self._name = name
        self._card = card
        self._board = TrainingBoard(redis, name)
        self._store = AdapterStore(redis, keep_n=keep_n)
        self._registry = WorkerRegistry(redis)

    async def stage(self, candidate: Candidate) -> int:
        """Store the candidate as the next version; the latest stays what it was."""
        shapes, hidden, dtype = self._card.modules, self._card.head_inputs, self._card.dtype
        with prepared(candidate.directory, shapes=shapes, hidden_size=hidden, dtype=dtype) as adapter:
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

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        """Write the checks down and flip `latest`."""
        await self._store.promote(self._name, version, gate=gate, if_latest=if_latest)

    async def latest_version(self) -> int:
        return await self._store.latest(self._name)

    async def fetch(self, version: int, name: str = "") -> Stored:
        manifest = await self._store.manifest(name or self._name, version)
        with TemporaryDirectory(prefix="parallm-adapter-") as folder:
            file = Path(folder, MLX_FILE)
            chunks = [chunk async for chunk in self._store.fetch(manifest)]
            await asyncio.to_thread(file.write_bytes, b"".join(chunks))
            tensors = await asyncio.to_thread(read_tensors, file, max_bytes=manifest.size)
            weights = {name: np.array(tensor.floats()) for name, tensor in tensors.items()}
        return Stored(weights, inherit_config(manifest), manifest.base_sha256)

    async def served_base(self) -> str:
        """SHA-256 of the base under the model name that this run's samples ask for; "": no worker serves it."""
        card = await self._registry.card(self._card.name)
        return card.base_sha256 if card is not None else ""

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
        """Log the event and publish it as an alert."""
        log.warning("train.alert", adapter=self._name, kind=kind, message=message)
        await self._board.alert(kind, message)
