"""The product's worker around a model that only keeps time: a decode step takes so long and gives every row a token.

`WorkerProcess` is the real one: claims, leases, heartbeats, frames, logs, commits, counts. Many share one event loop,
since what is measured is Redis behind them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import worker.process
from mlx_model.config import EngineConfig
from shared.errors import SetupError
from shared.frames import Finish, TokenEvent
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.sequences import ModelCard
from shared.text.codec import TokenizerBundle
from tests.bench.redis_scaling import MODEL
from tests.unit.api_texts import EOS, bundle, codec
from tests.waiting import wait_until
from worker.engine.batch.adapters import AdapterStats
from worker.engine.messages import EngineStats, OnDeath, OnStep, RowRequest, StepOutput
from worker.engine.orders import Cancel, Freeze, Order, Submit
from worker.process import WorkerProcess

CARD = ModelCard(MODEL, 4096, codec().vocab_size, (EOS,), bundle().sha256, "base", 1024, "float32", created=1)
LENGTH, CANCELLED = Finish("length"), Finish("cancelled")


@dataclass(frozen=True)
class Loaded:
    """What the worker wants of a loaded model."""

    card: ModelCard
    tokenizer: TokenizerBundle


@dataclass
class Row:
    """A row of the batch that computes nothing."""

    request: RowRequest
    position: int
    last: int
    cancelled: bool = False


class TimedEngine:
    """Stands where `EngineThread` stands. The logprob of every token is the Unix time of its decode step."""

    step_s = 0.02
    prefill_chunk = 1 << 30  # prompt tokens that are fed before one step
    all: "list[TimedEngine]" = []  # noqa: RUF012  # of this process, for the counts

    def __init__(self, config: EngineConfig, on_step: OnStep, on_death: OnDeath, *rest: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_rows = config.max_rows
        self._card = msgspec.structs.replace(CARD, name=config.model)
        self._on_step = on_step
        self._waiting: deque[RowRequest] = deque()
        self._fed = 0  # prompt tokens of the first that waits
        self._rows: dict[str, Row] = {}
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self.steps = self.tokens = 0
        TimedEngine.all.append(self)

    def start(self) -> Loaded:
        self._loop.call_soon_threadsafe(self._begin)
        return Loaded(self._card, bundle())

    def _begin(self) -> None:
        self._running = asyncio.create_task(self._decode())

    async def _decode(self) -> None:
        due = time.perf_counter()
        while True:
            while not (self._rows or self._waiting):
                self._wake.clear()
                await self._wake.wait()
                due = time.perf_counter()
            # A step that is late delays those behind it, as it would in a real engine.
            due = max(due + self.step_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            self._feed()
            events = [self._token(row, time.time()) for row in list(self._rows.values())]
            self.steps += 1
            self.tokens += len(events)
            self._on_step(StepOutput(events, len(self._rows)))

    def _feed(self) -> None:
        """Rows for those whose whole prompts have been fed, one behind another."""
        left = self.prefill_chunk
        while left and self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting[0]
            fed = min(left, len(request.spec.prompt_ids) - self._fed)
            left, self._fed = left - fed, self._fed + fed
            if self._fed == len(request.spec.prompt_ids):
                self._waiting.popleft()
                self._fed = 0
                start = request.prior[-1].end if request.prior else 0
                self._rows[request.spec.id] = Row(request, start, request.spec.sampling.max_tokens - 1)

    def _token(self, row: Row, now: float) -> TokenEvent:
        spec, position, attempt = row.request.spec, row.position, row.request.attempt
        if row.cancelled:
            del self._rows[spec.id]
            return TokenEvent(spec.id, attempt, position, [], [], finish=CANCELLED)
        row.position += 1
        finish = LENGTH if position >= row.last else None
        if finish is not None:
            del self._rows[spec.id]
        return TokenEvent(spec.id, attempt, position, [2 + position % 200], [now], finish=finish)

    def send(self, order: Order) -> None:
        """Orders about memory and adapters have nothing to act on here; it never freezes."""
        match order:
            case Submit(requests):
                self._waiting.extend(requests)
                self._wake.set()
            case Cancel(seq) if (row := self._rows.get(seq)) is not None:
                row.cancelled = True
            case Freeze():
                raise SetupError("nobody pauses here")

    def stats(self) -> EngineStats:
        return EngineStats(
            rows=len(self._rows), waiting=len(self._waiting), kv_limit_bytes=2**40, steps=self.steps, tokens=self.tokens
        )

    def adapter_stats(self) -> AdapterStats:
        return AdapterStats()

    @property
    def alive(self) -> bool:
        return True

    def silent_s(self) -> float:
        return 0.0

    def stop(self, timeout: float = 10.0) -> bool:
        if self._running is not None:
            self._loop.call_soon_threadsafe(self._running.cancel)
        return True


async def work(
    url: str,
    served: Mapping[str, str],
    rows: int,
    step_s: float,
    folder: Path,
    ready: Callable[[], None],
    lease_ms: int = 3000,
) -> None:
    """Run workers, each with its model, until cancelled; `ready` is called once all are in the ring."""
    TimedEngine.step_s = step_s
    worker.process.EngineThread = TimedEngine  # type: ignore[misc,assignment]
    settings = load(
        WorkerSettings,
        [
            "--redis", url, "--model", MODEL, "--max-batch-size", str(rows), "--drain-grace-s", "0",
            "--lease-ms", str(lease_ms),
        ],
    )  # fmt: skip
    processes = [
        WorkerProcess(
            settings.model_copy(update={"worker_id": name, "model": model, "adapter_cache_dir": folder / name})
        )
        for name, model in served.items()
    ]
    tasks = [asyncio.create_task(process.run()) for process in processes]
    await wait_until(lambda: all(process._state == "ready" for process in processes))
    ready()
    try:
        await asyncio.shield(asyncio.gather(*tasks))
    finally:
        for process in processes:
            process.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
