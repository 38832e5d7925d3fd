"""A model without a network: a registered card with a byte tokenizer, and a worker that answers from a script."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache

import msgspec
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.frames import Finish, TokenEvent, VersionSpan
from shared.jobs import JobInput, JobSpec
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.writer import Commit, FrameWriter
from shared.scoring.pool import RewardPool
from shared.sequences import Claim, ModelCard, SequenceResult, SequenceSpec
from shared.text.codec import TextCodec, TokenizerBundle
from tests.waiting import HANG_S
from worker.jobs.context import TickContext

MODEL = "fake"
REAP_EVERY_S = 0.5
CHAT = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
Answer = Callable[[SequenceSpec], str | None]  # None: stay busy with it


@cache
def bundle() -> TokenizerBundle:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerBundle(tokenizer.to_str(), CHAT, (0,), {})


@cache
def codec() -> TextCodec:
    return TextCodec(bundle())


async def register(redis: Redis, context_length: int = 512) -> None:
    card = ModelCard(MODEL, context_length, 256, (0,), bundle().sha256, "base", 1024, "float32")
    await WorkerRegistry(redis).register_model(card, bundle())


def spec(kind: str = "generate", **fields: object) -> JobSpec:
    return msgspec.convert({"id": "", "kind": kind, "model": MODEL, "total_prompts": 0, **fields}, JobSpec)


def lines(inputs: Iterable[JobInput]) -> list[bytes]:
    return [msgspec.json.encode(item) for item in inputs]


def prompts(count: int) -> list[bytes]:
    return lines(JobInput(f"prompt {i}", reference=str(i)) for i in range(count))


def echo(sequence: SequenceSpec) -> str:
    """The number at the end of the prompt."""
    return codec().decode(sequence.prompt_ids).rpartition(" ")[2]


class FakeWorker:
    """Claims, reaps, answers and commits as a worker does; what it holds when it is cancelled ends as cancelled."""

    def __init__(self, redis: Redis, answer: Answer = echo, rows: int = 64, *, forgets: bool = False) -> None:
        """`forgets`: Redis does, so that what this worker ends may not be its own any more."""
        self._forgets = forgets
        self._redis = redis
        self._answer = answer
        self._rows = rows
        self._queue = SequenceQueue(redis, MODEL)
        self._writer = FrameWriter(redis, MODEL, "w1")
        self.busy: dict[str, Claim] = {}
        self.seen: list[str] = []
        self.most_waiting = 0

    async def run(self) -> None:
        reap_at = time.monotonic() + REAP_EVERY_S
        while True:
            self.most_waiting = max(self.most_waiting, (await self._queue.depth())["batch"].waiting)
            rows = self._rows - len(self.busy)
            claims = await self._queue.claim("w1", ClaimPlan(rows, 0, rows, rows, 10**9, not self.busy))
            if time.monotonic() > reap_at:  # else a claim whose reply is lost with its connection stays with nobody
                claims += await self._queue.reap("w1", rows - len(claims))
                reap_at = time.monotonic() + REAP_EVERY_S
            for claim in claims:
                self.seen.append(claim.spec.id)
                self.busy[claim.spec.id] = claim
            answers = {seq: self._answer(claim.spec) for seq, claim in self.busy.items()}
            await self._commit({seq: (text, "stop") for seq, text in answers.items() if text is not None})
            await self._obey_cancels()
            await self._queue.renew("w1", list(self.busy.values()))  # also none: else it renews what it has ended
            if not claims:
                await asyncio.sleep(0.005)

    async def _obey_cancels(self) -> None:
        cancelled = {}
        for seq in self.busy:
            if await self._redis.execute_command("HGET", f"parallm:{{{MODEL}}}:seq:{seq}", "cancel"):
                cancelled[seq] = ("part", "cancelled")
        await self._commit(cancelled)

    async def _commit(self, ends: dict[str, tuple[str, str]]) -> None:
        commits = []
        for seq, (text, reason) in ends.items():
            claim = self.busy.pop(seq)
            ids = tuple(codec().encode(text))
            finish = msgspec.convert([reason], Finish)
            result = SequenceResult(
                seq,
                finish,
                "w1",
                claim.attempt,
                len(claim.spec.prompt_ids),
                completion_ids=() if claim.spec.kind == "score" else ids,
                logprobs=tuple(-0.5 for _ in ids),
                spans=(VersionSpan("", 0, len(ids)),),
                score_logprobs=tuple(-0.25 for _ in claim.spec.score_ids),
            )
            commits.append(Commit(claim, result, [TokenEvent(seq, claim.attempt, 0, [], [], finish=finish)]))
        if commits:
            own = await self._writer.write({}, {}, commits)
            assert self._forgets or all(own)


@contextlib.asynccontextmanager
async def working(worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def context(redis: Redis, blocking: Redis, runner: str = "r1", window: int = 64):  # type: ignore[no-untyped-def]
    """A runner's context inside the test process."""
    pool = RewardPool(1, timeout_s=HANG_S)
    try:
        made = TickContext(runner, redis, blocking, pool, window=window)
        yield made
    finally:
        made.close()
        pool.close()
