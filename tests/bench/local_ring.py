"""An engine thread without Redis, for measurements: streams without end, rollouts and adapter versions in one process.

The trainer's seams are the product's (`RolloutSource`, `AdapterSink`, `ComputeHost`); what travels through Redis there
is handed over here.
"""

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_model.config import EngineConfig, SlotConfig
from shared.adapter_files.formats import prepared
from shared.adapters import AdapterManifest, GateCheck
from shared.errors import UnknownAdapterError
from shared.frames import TokenEvent, VersionSpan
from shared.seeds import derived_seed
from shared.sequences import SamplingParams, SequenceSpec
from shared.training import AlertKind
from shared.trajectories import Trajectory
from trainer.ring.ring import Candidate, Stored
from trainer.rollouts.groups import RolloutRequest
from worker.engine.messages import RowRequest, StepOutput
from worker.engine.orders import Cancel, Point, Provide, Submit
from worker.engine.thread import EngineThread

STREAM = "stream-"


class LocalRing:
    """One engine thread and those who wait for its sequences."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.engine = EngineThread(config, self._on_step, self._on_death, SlotConfig(slots=4, max_rank=rank))
        self.loaded = self.engine.start()
        while self.engine.stats().warms_up:
            time.sleep(0.01)
        self.death: BaseException | None = None
        self.tokens = self.stream_tokens = 0
        self.steps_at: list[float] = []  # when a step brought tokens to streams
        self._waiting: dict[str, tuple[list[TokenEvent], Callable[[list[TokenEvent]], None]]] = {}
        self._streaming = 0
        self._started = 0
        self._stream_shape = (0, 0)
        self._changed = threading.Condition()

    def stream(self, rows: int, prompt: int, tokens: int, adapter: str = "") -> None:
        """Keep this many streams decoding from now on; each one that ends is followed by another."""
        self._streaming, self._stream_shape, self._adapter = rows, (prompt, tokens), adapter
        # The first ones end at different times, as streams do.
        self._start([tokens * (at + 1) // rows for at in range(rows)])

    def end_streams(self) -> None:
        """Let them go."""
        self._streaming = 0
        for at in range(self._started):
            self.engine.send(Cancel(f"{STREAM}{at}"))
        while self.engine.stats().rows:
            assert self.death is None, self.death
            time.sleep(0.01)

    def generate(self, specs: list[SequenceSpec], done: Callable[[str, list[TokenEvent]], None]) -> None:
        """Decode; `done` is called in the engine's thread with all events of each."""
        for spec in specs:
            self._waiting[spec.id] = ([], lambda events, seq=spec.id: done(seq, events))
        self.engine.send(Submit([RowRequest(spec) for spec in specs]))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a short function in the engine's thread and wait for it."""

        def work() -> Any:
            return function()
            yield

        return self.engine.run_between_steps(work).result(600)

    def _start(self, lengths: Sequence[int]) -> None:
        prompt, _ = self._stream_shape
        requests = []
        for length in lengths:
            draw = np.random.default_rng(self._started)
            ids = tuple(int(i) for i in draw.integers(3, min(4000, self.loaded.card.vocab_size), prompt))
            sampling = SamplingParams(max(1, length), self._started, ignore_eos=True)
            spec = SequenceSpec(
                f"{STREAM}{self._started}", "m", ids, sampling, adapter=self._adapter, adapter_policy="follow"
            )
            requests.append(RowRequest(spec))
            self._started += 1
        self.engine.send(Submit(requests))

    def _on_step(self, output: StepOutput) -> None:
        ended = streamed = 0
        for event in output.events:
            self.tokens += len(event.tokens)
            if event.seq.startswith(STREAM):
                streamed += len(event.tokens)
                ended += event.finish is not None
                continue
            events, done = self._waiting[event.seq]
            events.append(event)
            if event.finish is not None:
                del self._waiting[event.seq]
                done(events)
        self.stream_tokens += streamed
        if streamed:
            self.steps_at.append(time.perf_counter())
        if ended and self._streaming:
            self._start([self._stream_shape[1]] * ended)

    def _on_death(self, error: BaseException) -> None:
        self.death = error


class LocalSource:
    """Samples for the trainer, from the same batch that the streams run in."""

    def __init__(self, ring: LocalRing, eos: bool = False) -> None:
        self._ring = ring
        self._eos = eos

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        loop = asyncio.get_running_loop()
        futures: dict[str, asyncio.Future[list[TokenEvent]]] = {}
        specs = []
        for sample in range(request.n):
            s = request.sampling
            sampling = SamplingParams(
                s.max_tokens or 16,
                derived_seed(s.seed or 0, sample),
                temperature=1.0 if s.temperature is None else s.temperature,
                ignore_eos=not self._eos,
            )
            seq = f"roll-{request.id}-{sample}"
            futures[seq] = loop.create_future()
            policy: Any = "pin" if "@" in request.adapter else "follow"
            specs.append(
                SequenceSpec(
                    seq, "m", request.prompt_ids, sampling, "batch", group=request.id,
                    adapter=request.adapter, adapter_policy=policy,
                )
            )  # fmt: skip

        def done(seq: str, events: list[TokenEvent]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: futures[seq].done() or futures[seq].set_result(events))

        self._ring.generate(specs, done)
        try:
            results = await asyncio.gather(*futures.values())
        except asyncio.CancelledError:
            for seq in futures:
                self._ring.engine.send(Cancel(seq))
            raise
        return [_trajectory(request, sample, events) for sample, events in enumerate(results)]


def _trajectory(request: RolloutRequest, sample: int, events: list[TokenEvent]) -> Trajectory:
    ids = tuple(token for event in events for token in event.tokens)
    spans: list[VersionSpan] = []
    for event in events:
        if spans and spans[-1].version == event.version:
            spans[-1] = VersionSpan(event.version, spans[-1].start, event.end)
        elif event.tokens:
            spans.append(VersionSpan(event.version, event.position, event.end))
    finish = events[-1].finish
    assert finish is not None
    return Trajectory(
        prompt_index=0,
        sample_index=sample,
        prompt_ids=request.prompt_ids,
        completion_ids=ids,
        text="",
        logprobs=tuple(value for event in events for value in event.logprobs),
        finish_reason=finish.reason,
        spans=tuple(spans),
        error=finish.error_message or "",
        metadata=request.metadata,
    )


class LocalSink:
    """Versions on disk, handed straight to the engine, which loads them between decode steps."""

    def __init__(self, ring: LocalRing, folder: Path, name: str) -> None:
        self._ring, self._folder, self._name = ring, folder, name
        self.version = 0
        self.latest = 0
        self.rejected = 0
        self._promoted = asyncio.Condition()

    async def published(self, version: int) -> None:
        """Returns once this version is the latest."""
        async with self._promoted:
            await self._promoted.wait_for(lambda: self.latest >= version)

    async def stage(self, candidate: Candidate) -> int:
        self.version += 1
        card = self._ring.loaded.card
        with prepared(candidate.directory, shapes=card.modules) as adapter:
            path = self._folder / f"{self._name}-{self.version}.safetensors"
            shutil.copyfile(adapter.path, path)
            manifest = AdapterManifest(
                self._name, self.version, adapter.kind, adapter.rank, adapter.scale, adapter.modules, card.base_sha256,
                candidate.parent, adapter.sha256, adapter.size, adapter.size, 0,
            )  # fmt: skip
        self._ring.engine.send(Provide(str(path), manifest))
        return self.version

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        self._ring.engine.send(Point(self._name, version))
        async with self._promoted:
            self.latest = version
            self._promoted.notify_all()

    async def latest_version(self) -> int:
        return self.latest

    async def fetch(self, version: int) -> Stored:
        raise UnknownAdapterError(f"{self._name}@{version} is nobody else's")

    async def served_base(self) -> str:
        return self._ring.loaded.card.base_sha256

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        self.rejected += 1

    async def roll_back(self, version: int, reason: str) -> None:
        self._ring.engine.send(Point(self._name, version))
        self.latest = version

    async def set_best(self, version: int, value: float) -> None:
        return

    async def alert(self, kind: AlertKind, message: str) -> None:
        print(f"alert {kind}: {message}")
