"""A ring in one process, for tests and measurements of the trainer alone: a source that samples, a sink that remembers.

The product has neither: there every token comes through the queue.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, prepared
from shared.adapters import GateCheck
from shared.errors import ConflictError, UnknownAdapterError
from shared.frames import VersionSpan
from shared.seeds import derived_seed
from shared.training import AlertKind
from shared.trajectories import Trajectory
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.compute import ComputeHost, Work
from trainer.learn.logprobs import to_arrays
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.learn.prompt_kv import PromptKeys
from trainer.ring.ring import Candidate, Stored
from trainer.rollouts.groups import RolloutRequest
from trainer.state import Arrays


@dataclass
class MemorySink:
    """Versions in a dictionary."""

    name: str = "policy"
    versions: dict[int, Arrays] = field(default_factory=dict)
    candidates: dict[int, Candidate] = field(default_factory=dict)
    latest: int = 0
    best: int = 0
    rejected: dict[int, tuple[GateCheck, ...]] = field(default_factory=dict)
    rollbacks: list[tuple[int, str]] = field(default_factory=list)
    alerts: list[tuple[AlertKind, str]] = field(default_factory=list)
    reserved: int = 0
    config: bytes = b""
    base: str = ""  # that workers serve

    async def stage(self, candidate: Candidate) -> int:
        self.reserved += 1
        version = self.reserved
        with prepared(candidate.directory):
            self.versions[version] = load_file(candidate.directory / MLX_FILE)
        self.candidates[version] = candidate
        self.config = (candidate.directory / CONFIG_FILE).read_bytes()
        return version

    async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
        assert version in self.versions and version not in self.rejected
        if if_latest not in (None, self.latest):
            raise ConflictError(f"the latest version is {self.latest}, not {if_latest}")
        self.latest = version

    async def latest_version(self) -> int:
        return self.latest

    async def fetch(self, version: int, name: str = "") -> Stored:
        if version not in self.versions or name not in ("", self.name):
            raise UnknownAdapterError(f"there is no adapter {name or self.name}@{version}")
        candidate = self.candidates[max(self.candidates)]
        return Stored(self.versions[version], self.config, candidate.base_sha256)

    async def served_base(self) -> str:
        return self.base

    async def reject(self, version: int, gate: Sequence[GateCheck]) -> None:
        self.rejected[version] = tuple(gate)

    async def roll_back(self, version: int, reason: str) -> None:
        self.latest = version
        self.rollbacks.append((version, reason))

    async def set_best(self, version: int, value: float) -> None:
        self.best = version

    async def alert(self, kind: AlertKind, message: str) -> None:
        self.alerts.append((kind, message))


class InProcessSource:
    """Samples whatever was asked for since the last turn in one batch, in the host's thread."""

    def __init__(self, host: ComputeHost, model: Any, shape: AdapterShape, sink: MemorySink, eos_ids: Sequence[int]):
        self._host = host
        self._model, self._shape = model, shape
        self._sink = sink
        self._eos = frozenset(eos_ids)
        self._policy: Policy | None = None
        self._loaded = -1
        self._waiting: list[tuple[RolloutRequest, asyncio.Future[list[Trajectory]]]] = []
        self._turn: asyncio.Task[None] | None = None
        self.tokens = 0

    async def generate(self, request: RolloutRequest) -> list[Trajectory]:
        future: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._turn is None:
            self._turn = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let the others ask first
            version = self._version(self._waiting[0][0])
            now = [item for item in self._waiting if self._version(item[0]) == version]
            self._waiting = [item for item in self._waiting if self._version(item[0]) != version]
            requests = [request for request, _ in now]
            try:
                answers = await self._host.run(lambda r=requests, v=version: self._sample(r, v))
            except Exception as error:
                for _, future in now:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(now, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        self._turn = None

    def _version(self, request: RolloutRequest) -> int:
        if not request.adapter:
            return 0
        _, _, number = request.adapter.partition("@")
        return int(number) if number else self._sink.latest

    def _sample(self, requests: list[RolloutRequest], version: int) -> Work[list[list[Trajectory]]]:
        if self._policy is None:
            self._policy = Policy(self._model, self._shape)
        if version and version != self._loaded:
            weights = self._sink.versions[version].items()
            if lora := {name: each for name, each in weights if not name.startswith("heads.")}:
                self._policy.load(lora)  # a version may be a head alone, which changes no token
            self._loaded = version
        model = self._policy.model if version else self._policy.base
        rows = [(i, s) for i, request in enumerate(requests) for s in range(request.n)]
        seeds = np.array([derived_seed(requests[i].sampling.seed or 0, s) for i, s in rows], np.uint64)
        greedy = np.array([requests[i].sampling.temperature == 0 for i, _ in rows])
        length = max(request.sampling.max_tokens for request in requests)
        ids, logprobs = yield from self._decode(model, requests, rows, seeds, greedy, length)
        answers: list[list[Trajectory]] = [[] for _ in requests]
        for row, (i, s) in enumerate(rows):
            answers[i].append(self._trajectory(requests[i], s, ids[row], logprobs[row], version))
        return answers

    def _decode(self, model: Any, requests: Any, rows: Any, seeds: Any, greedy: Any, length: int) -> Work[Any]:
        blank = Sample((0,), (0.0,), (True,), (0,), 0.0)
        groups = [SampleGroup("", request.prompt_ids, (blank,) * request.n) for request in requests]
        x = to_arrays(pad(groups))
        caches = [PromptKeys(x.padding_P) for _ in model.layers]
        logits_BV = model(x.prompt_PS, cache=caches)[:, -1][x.prompt_of_B]
        caches = [cache.branch(x.prompt_of_B) for cache in caches]
        greedy_B, ended_B = mx.array(greedy), np.zeros(len(rows), bool)
        tokens: list[Any] = []
        logprobs: list[Any] = []
        for position in range(length):
            logp_BV = logits_BV - mx.logsumexp(logits_BV, axis=-1, keepdims=True)
            u_B1 = mx.array(_uniform(seeds, position))[:, None]
            total_BV = mx.cumsum(mx.exp(logp_BV), axis=-1)
            drawn_B = mx.argmax(total_BV > u_B1 * total_BV[:, -1:], axis=-1)
            token_B = mx.where(greedy_B, mx.argmax(logp_BV, axis=-1), drawn_B)
            chosen_B = mx.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
            mx.eval(token_B, chosen_B)
            tokens.append(np.array(token_B))
            logprobs.append(np.array(chosen_B))
            ended_B |= np.isin(tokens[-1], list(self._eos))
            if ended_B.all() or position + 1 == length:
                break
            logits_BV = model(token_B[:, None], cache=caches)[:, -1]
            yield
        return np.stack(tokens, 1).tolist(), np.stack(logprobs, 1).tolist()

    def _trajectory(
        self, request: RolloutRequest, sample: int, ids: list[int], logprobs: list[float], version: int
    ) -> Trajectory:
        limit = min(len(ids), request.sampling.max_tokens)
        end = next((t + 1 for t in range(limit) if ids[t] in self._eos), limit)
        self.tokens += end
        return Trajectory(
            prompt_index=0,
            sample_index=sample,
            prompt_ids=request.prompt_ids,
            completion_ids=tuple(ids[:end]),
            text="",
            logprobs=tuple(logprobs[:end]),
            finish_reason="stop" if ids[end - 1] in self._eos else "length",
            spans=(VersionSpan(f"{self._sink.name}@{version}" if version else "", 0, end),),
            metadata=request.metadata,
        )


def _uniform(seeds: Any, position: int) -> Any:
    """Uniform in (0, 1) from each row's seed and the position alone (splitmix64)."""
    with np.errstate(over="ignore"):
        z = seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position + 1) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.float32) + 0.5) / np.float32(1 << 24)
