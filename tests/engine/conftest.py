"""Models, and an engine that a test turns by hand in its own thread."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.frames import Finish, TokenEvent
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.kv_models import Model, small
from tests.engine.small_models import LLAMA, QWEN3, write_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest
from worker.engine.turns import TurnFacts


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> LoadedModel:
    return load_model(EngineConfig(str(llama_folder)))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_model(tmp_path_factory.mktemp("models") / "qwen3", QWEN3)
    return load_model(EngineConfig(str(folder)))


@pytest.fixture(scope="module")
def model_of(llama: LoadedModel) -> Model:
    """Models of each kind of KV, by name."""
    return cache(lambda name: small(name, llama))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The garbage collector is off: what is freed, nothing refers to."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    loaded: LoadedModel = request.getfixturevalue(request.param)
    return loaded


class Bench:
    """An engine and all events that it has made."""

    facts: Callable[[Engine], TurnFacts | None] = staticmethod(lambda engine: None)  # of a rank's next turn

    def __init__(self, loaded: LoadedModel, **config: object) -> None:
        defaults = EngineConfig("unused", max_rows=8, prefill_rows=4, prefill_chunk=64)
        self.loaded = loaded
        self.engine = Engine(loaded, replace(defaults, **config))
        self.events: dict[str, list[TokenEvent]] = {}

    def submit(self, *specs: SequenceSpec, prior: tuple[TokenEvent, ...] = (), attempt: int = 1) -> None:
        self.engine.submit([RowRequest(spec, attempt, prior) for spec in specs])

    def turn(self) -> list[TokenEvent]:
        output = self.engine.turn(self.facts(self.engine))
        for event in output.events:
            events = self.events.setdefault(event.seq, [])
            assert not events or events[-1].finish is None, "an event after the finish"
            assert not events or events[-1].end == event.position, "a gap between positions"
            events.append(event)
        return output.events

    def run(self, turns: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(turns):
            if not self.engine.busy:
                return
            self.turn()
        raise AssertionError("the engine is still busy")

    def until(self, condition: Callable[[], bool], turns: int = 2000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError("the condition never came")

    def tokens(self, seq: str) -> list[int]:
        return [token for event in self.events.get(seq, []) for token in event.tokens]

    def logprobs(self, seq: str) -> list[float]:
        return [logprob for event in self.events[seq] for logprob in event.logprobs]

    def text(self, seq: str) -> str:
        return "".join(event.text or "" for event in self.events[seq])

    def finish(self, seq: str) -> Finish:
        finish = self.events[seq][-1].finish
        assert finish is not None
        return finish


class SpiedModel:
    """Stands in for the model: notes the size (rows x positions) of every forward, and fails when told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.layers = inner.layers
        self.fed: list[int] = []
        self.fails: Callable[[mx.array], bool] = lambda tokens_BL: False
        self.error = "out of memory"

    @classmethod
    def inside(cls, bench: Bench) -> Self:
        model = bench.engine.model
        model.model = spy = cls(model.model)
        return spy

    def __call__(self, tokens_BL: mx.array, cache: list[Any]) -> mx.array:
        self.fed.append(tokens_BL.size)
        if self.fails(tokens_BL):
            raise RuntimeError(self.error)
        logits: mx.array = self.inner(tokens_BL, cache=cache)
        return logits


@pytest.fixture
def bench(llama: LoadedModel) -> Bench:
    return Bench(llama)


def spec(seq: str, prompt: list[int], *, group: str = "", deadline_ms: int = 0, **sampling: object) -> SequenceSpec:
    """A sequence; greedy, 8 tokens and without end-of-sequence unless said otherwise."""
    params = {"max_tokens": 8, "seed": 0, "temperature": 0.0, "ignore_eos": True} | sampling
    return SequenceSpec(
        seq,
        "m",
        tuple(prompt),
        SamplingParams(**params),
        group=group,
        deadline_ms=deadline_ms,  # type: ignore[arg-type]
    )


def prompt_of(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """Random ids."""
    ids: list[int] = mx.random.randint(0, vocab, (length,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return ids
