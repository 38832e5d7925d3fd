"""A worker without a model: it claims, and says what a script tells it to, step by step."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.frames import Finish, TokenEvent, TokenLogprob
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus
from shared.redis.queue.sequence_queue import ClaimPlan, SequenceQueue
from shared.redis.tokens.writer import Commit, FrameWriter
from shared.sequences import Claim, ModelCard, SequenceSpec, Timings
from shared.text.codec import TokenizerBundle
from shared.trajectories import result_of
from tests.unit.api_texts import EOS, bundle, codec
from tests.waiting import wait_until

MODEL = "scripted"
CARD = ModelCard(MODEL, 256, codec().vocab_size, (EOS,), bundle().sha256, "base", 64, "float32", created=1)


STOP = Finish("stop")


@dataclass
class Answer:
    """What one sequence gets. With `hold_at`, it stops before that token until `ScriptedWorker.go` is set.

    `versions`: the adapter version that computes the tokens from a position on. `at_once`: all tokens in one event.
    """

    text: str = "hello"
    finish: Finish = STOP  # comes with an end-of-sequence token
    hold_at: int | None = None
    versions: dict[int, str] = field(default_factory=dict)
    at_once: bool = False
    competitors: int = 1
    embedding: bytes = b""  # of what is embedded, or read by a head or a network

    def version(self, position: int) -> str:
        """The adapter version of the token at `position`."""
        return next((self.versions[at] for at in sorted(self.versions, reverse=True) if at <= position), "")

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole answer."""
        by_eos = self.finish.reason == "stop" and self.finish.stop_match is None
        return [*codec().encode(self.text), *([EOS] if by_eos else [])]


@dataclass
class ScriptedWorker:
    """One worker process's place in the ring, played by a task."""

    redis: Redis
    script: Callable[[SequenceSpec], Answer]
    id: str = "w1"
    card: ModelCard = field(default_factory=lambda: CARD)  # a test may give the module another one
    tokenizer: TokenizerBundle = field(default_factory=lambda: bundle())  # of one token a byte; its template may differ
    specs: list[SequenceSpec] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    routes: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    kv_limit_bytes: int = 2**40
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._queue = SequenceQueue(self.redis, self.card.name)
        self._writer = FrameWriter(self.redis, self.card.name, self.id)
        self._rows: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """Register the model and say that a worker is ready."""
        registry = WorkerRegistry(self.redis)
        await registry.register_model(self.card, self.tokenizer)
        await registry.heartbeat(
            WorkerStatus(self.id, self.card.name, "host", 1, "ready", 0, 8, 0, 0, self.kv_limit_bytes, 0.0, 0, 1, 2**40)
        )

    async def run(self) -> None:
        """Claim and answer until cancelled."""
        async with asyncio.TaskGroup() as rows:
            rows.create_task(self._hear())
            rows.create_task(self._live_on())
            while True:
                free = 0 if self.paused else 8
                with contextlib.suppress(RedisError):  # a Redis that refuses, or is away for longer than a call waits
                    for claim in await self._queue.claim(self.id, ClaimPlan(free, free, 0, free, 10**6, False)):
                        self.specs.append(claim.spec)
                        rows.create_task(self._answer(claim))
                await asyncio.sleep(0.005)

    async def _live_on(self) -> None:
        """Outlive a test that takes long on a busy machine."""
        while True:
            await asyncio.sleep(1)
            with contextlib.suppress(RedisError):
                await self.redis.expire(keys.worker(self.card.name, self.id), keys.WORKER_TTL_S)

    async def _hear(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                await self._hear_orders()
            await asyncio.sleep(0.05)

    async def _hear_orders(self) -> None:
        async with self.redis.pubsub() as control:
            await control.subscribe(keys.control_channel(self.id))
            async for message in control.listen():
                if message["type"] != "message":
                    continue
                order, seq, *rest = msgspec.msgpack.decode(message["data"])
                if order == "cancel":
                    self.cancelled.append(seq)
                elif order == "route":
                    self.routes[seq] = rest[0]

    async def _answer(self, claim: Claim) -> None:
        spec, answer = claim.spec, self.script(claim.spec)
        events: list[TokenEvent] = []
        tokens = [] if spec.kind != "generate" else answer.tokens
        if answer.at_once and tokens:
            events.append(self._event(claim, 0, tokens, answer.finish, answer))
            tokens = []
        for position, token in enumerate(tokens):
            if position == answer.hold_at:
                await self._hold(spec.id)
                if spec.id in self.cancelled:
                    answer = Answer(finish=Finish("cancelled"))
                    break
            last = position == len(tokens) - 1
            events.append(self._event(claim, position, [token], answer.finish if last else None, answer))
            if not last:
                await self._write(spec, [events[-1]], [])
        if not events or events[-1].finish is None:
            events.append(self._event(claim, len(events), [], answer.finish, answer))
        result = result_of(spec, claim.attempt, self.id, events, Timings())
        await self._write(spec, [events[-1]], [Commit(claim, result, [events[-1]])])

    async def _hold(self, seq: str) -> None:
        await wait_until(lambda: self.go.is_set() or seq in self.cancelled)

    def _event(
        self, claim: Claim, position: int, tokens: list[int], finish: Finish | None, answer: Answer
    ) -> TokenEvent:
        sampling = claim.spec.sampling
        event = TokenEvent(claim.spec.id, claim.attempt, position, tokens, [-0.25] * len(tokens), finish=finish)
        event.version = answer.version(position)
        if sampling.top_logprobs is not None:
            named = tuple(TokenLogprob(token, -0.5) for token in sampling.logprob_token_ids)
            event.top_logprobs = [named or (TokenLogprob(token, -0.25),) * answer.competitors for token in tokens]
        if claim.spec.kind in ("embed", "head", "network"):
            event.embedding = answer.embedding
        if position == 0 and sampling.prompt_logprobs is not None:
            event.prompt_logprobs = [None, *[-1.0] * (len(claim.spec.prompt_ids) - 1)]
        return event

    async def _write(self, spec: SequenceSpec, events: list[TokenEvent], commits: list[Commit]) -> None:
        api = self.routes.get(spec.id, spec.api)
        chunks = {} if commits else {spec.id: events}
        while True:
            try:
                await self._writer.write({api: events}, chunks, commits)
                return
            except (RedisConnectionError, RedisTimeoutError):  # it is away for longer than a call waits; said again
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def working(
    redis_url: str, script: Callable[[SequenceSpec], Answer], card: ModelCard | None = None
) -> AsyncIterator[ScriptedWorker]:
    """A scripted worker in the ring."""
    redis = connect(redis_url)
    worker = ScriptedWorker(redis, script, card=card or CARD)
    await worker.join()
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        while not task.done():  # redis-py may lose a cancellation
            task.cancel()
            await asyncio.wait({task}, timeout=0.2)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"the scripted worker had ended: {error!r}")
        await redis.aclose()
