"""Every measurement of tests/bench in its smallest form: that it runs to its end, not what it measures.

All share one ring. Ranks and simulators, which have processes of their own when something is measured, run in this one.
Nothing is compiled here: on a CPU a compiler runs for a second for each kernel, and tests/engine compares what is.
"""

import asyncio
import importlib
import inspect
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

import worker.process
from api.serve.embedded_redis import EmbeddedRedis
from tests.bench.__main__ import MEASUREMENTS
from tests.bench.models import random_qwen3
from tests.e2e.rings import MODEL, Ring, ring
from worker.engine.batch import row_model

pytestmark = pytest.mark.long
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 4096,
}  # fmt: skip
QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": True}
SHAPES = {"SHAPES": {"small": TINY, "medium": TINY}}
FLAT = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
FLAT_SHAPES = {"tests.bench.group_step.SHAPES": {"small": FLAT}}
TALK = {"PROMPT": 128, "ANSWER": 2, "QUESTION": 4, "SHAPE": {**FLAT, "vocab_size": 4096}}
SEEING = {
    "text": {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64},
    "seen": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "patch_size": 16},
    "scale": 2, "tile": 128,
}  # fmt: skip
SMALL_GROUPS = ["--prompts-per-step", "2", "--group-size", "2", "--max-tokens", "2", "--probe-prompts", "1"]


class Smallest(NamedTuple):
    """How small a measurement can be."""

    flags: str = ""
    constants: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it. Of the module, or with the name of another
    run: Callable[[ModuleType, Path], Any] = lambda module, folder: module.main()


def group(module: ModuleType, folder: Path) -> None:
    module._as_rank("small", 0, 1, 8, 0, str(folder))


def group_step(module: ModuleType, folder: Path) -> None:
    asked(lambda: module.rank("small", 1), "2 0 0", "0 8 0")


def pipeline(module: ModuleType, folder: Path) -> None:
    module.write_model(folder)
    asked(lambda: module.rank(folder), "prompt", "2", "2 whole")


def asked(rank: Callable[[], None], *lines: str) -> None:
    """A rank answers what comes on its standard input, until that ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        patch.setattr(row_model, "decode_step_of", row_model.decode_step_of)  # what a rank sets for good is undone
        rank()


def trainers(module: ModuleType, folder: Path) -> None:
    """The steps of a leader that shares them with nobody; then the exchange alone."""
    model, flags = random_qwen3(folder / "model", TINY), list(sys.argv)
    with EmbeddedRedis(folder) as redis:
        sys.argv += ["--lead", redis.url, str(model), "1"]
        module.main()
    sys.argv = [*flags, "--exchange-alone"]
    module.main()


def learning(module: ModuleType, folder: Path) -> int:
    """Of what the tiny model learns: nothing, but as many steps as are asked for."""
    few = "--steps 1 --evaluate-every 1"
    sys.argv += ["--out", str(folder), "--sft", few, "--grpo", f"{few} --evaluate-prompts 3 {' '.join(SMALL_GROUPS)}"]
    code = int(module.main())
    assert json.loads((folder / "learning.json").read_text()) and (folder / "learning.png").exists()
    return code


def transfers(module: ModuleType, folder: Path) -> None:
    """One of the two ways."""
    model = random_qwen3(folder / "model", module.QWEN3_SMALL)  # it shall not be at its end when it is to leave
    with module.ring(folder) as served:
        print(module.moved(served, model, folder, 64, "once", transfer=True))


def scale(module: ModuleType, folder: Path) -> int:
    before = signal.getsignal(signal.SIGTERM)
    try:
        return int(module.main())
    finally:
        signal.signal(signal.SIGTERM, before)


def sides(*_: object) -> list[Any]:
    """Of traces: the side that all others are compared with."""
    return [importlib.import_module("tests.bench.traces").Side("off", [], {})]


def opening() -> dict[str, Any]:
    """Of agent_turns: two turns of one session, without tools, as the model of the shared ring has a short context."""
    said = [{"role": "user", "content": "Mend it. " * 9}, {"role": "assistant", "content": "How?"}]
    turns = [("/v1/responses", {"input": [*said[: 2 * at], said[0]]}) for at in range(2)]
    return {"codex": [turns, turns[:1]]}


def level() -> Any:
    """Of scale: one that has all kinds of work."""
    return importlib.import_module("tests.bench.redis_scaling").Level(1, 1, 2, 0.01, 8, 8, 1.0)


SMALLEST = {
    "adapter_flight": Smallest("", {"SIZE": 1_000_000, "ROUNDS": 1, "SECONDS": 0.1}),
    "adapter_publish": Smallest("", {"ROUNDS": 1, "STREAMS": 1, "WORKERS": 1}),
    "adapters": Smallest("--shape small --rows 2 --rank 2", {"ROUNDS": 1, "STEPS": 2, "PROMPT": 4, **SHAPES}),
    "admission": Smallest("--seconds 0.3 --workloads short", {"LIMITS": (8,), "SETTLED_S": 0.1, "STEP_S": 0.005}),
    "agent_turns": Smallest(
        "--kind dense --agent codex",
        {"SETTLED_S": 0.0, "SESSIONS": 1, "sessions": opening},
    ),
    "api_cost": Smallest("--streams 1 --steps 4 --rate 0 --cases 1"),
    "cart_pole": Smallest("--seeds 0 --steps 1 --rollout-steps 1 --evaluate-prompts 2", {"AIM": 0.0}),
    "classes": Smallest(
        "--models tiny --batches short --rounds 1 --requests 10",
        {"BATCHES": {"short": (8, 8)}, "BATCH_TOKENS": 60_000},
    ),
    "curricula": Smallest(
        "--curricula reward --seeds 0 --tasks 4 --steps 2 --every 1 --prompts 8 --group 4 --options {}"
    ),
    "decode_steps": Smallest(
        "--layers 1 --rows 2 --prompt 4 --rounds 1 --steps 2 --dtype float32",
        {"FAMILIES": {"qwen3": lambda layers: {**TINY, **QWEN3, "num_hidden_layers": layers}}},
    ),
    "disk": Smallest("--rounds 1 --kind dense", {**TALK, "STREAMS": 2, "PROMPTS": 2, "IDLE_S": 0.0, "QUIET": 2}),
    "draft_model": Smallest("--rows 2 --tokens 4 --context 8 --rounds 1", SHAPES),
    "engine": Smallest("--rows 2 --rounds 1 --model models/tiny", {"TOKENS": 4, "PROMPT": 4}),
    "epochs": Smallest("--rows 2 --prompts 2 --samples 2 --tokens 2 --block-size 8 --rounds 1"),
    "federation": Smallest(
        "--steps 1 --evaluate-every 1 --evaluated 4 --sync-every 1 --prompts 8 --group-size 4 --start 0.5"
    ),
    "federation_steps": Smallest("--steps 1 --batch 2 --seeds 1 --sync-every 1"),
    "frames": Smallest("--rows 2 --seconds 0.05 --processes 1"),
    "group": Smallest(
        "", {**FLAT_SHAPES, "ROWS": (2,), "WARM": 1, "STEPS": 2, "ROUNDS": 1, "ADAPTERS": 1, "TOKENS": 16}, group
    ),
    "group_step": Smallest("", {**FLAT_SHAPES, "ROWS": (2,), "WARM": 1, "STEPS": 4}, group_step),
    "heads": Smallest("--steps 1", {"BATCH": 2, "HELD_OUT": 2, "TEXTS": 2, "VALUE_FLAGS": SMALL_GROUPS}),
    "hosted": Smallest(
        "--streams 2 --rollout-rows 4 --prompt 4 --stream-tokens 8 --groups 1 --samples 2 --completion 4 --rank 2 "
        "--rounds 1 --stretch-s 0.1 --loop-s 0.1 --share 0.9 --peak-tflops 1",
        SHAPES,
    ),
    "hosted_learners": Smallest(
        "--learners 1 --rows 1 --length 8 --streams 1 --tokens 16 --rounds 1",
        {"NAME": MODEL, "ALONE_S": 0.1, "SHAPES": {"small": {**TINY, "vocab_size": 400}}},
    ),
    "images": Smallest(
        "--rows 2 --tokens 4 --rounds 1", {"SHAPES": {"small": SEEING}, "MANY": 4, "TEXTS": 2, "TEXT_TOKENS": 2}
    ),
    "invariance": Smallest("--rows 2 --prompt 16 --tokens 4 --rounds 1", {**SHAPES, "COMPANY": (1,)}),
    "kv_bits": Smallest("--rows 2 --context 16 --rounds 1", {**SHAPES, "STEPS": 2, "COUNTED_AT": 64}),
    "learners": Smallest("--learners 2 --rows 1 --length 8 --rank 2 --passes 1 --rounds 1", SHAPES),
    "memory": Smallest("--requests 160"),
    "overload": Smallest("--seconds 1 --streams 2", {"BEST_S": 0.5, "ROWS": 2, "TOKENS": 2}),
    "pipeline": Smallest("", {"SHAPE": FLAT, "ROWS": (2,), "PROMPT": 64, "PIECE": 32, "TOKENS": 8}, pipeline),
    "prefix": Smallest(
        "--rounds 1", {**SHAPES, "PREFIX": 200, "QUESTION": 4, "GROUP_PROMPT": 8, "GROUP": 2, "DIFFERENT": 2}
    ),
    "placement": Smallest("bursts --minutes 1 --seeds 1"),
    "redis_scaling": Smallest(
        "--workers 1 --apis 1 --rows 2 --step-ms 5 --tokens 8 --prompt 4 --seconds 0.2 --processes 1",
        {"WARM_UP_S": 0.1},
    ),
    "scale": Smallest(
        "--seconds 0.2 --processes 1",
        {"LEVELS": {"smallest": level()}, "tests.bench.redis_scaling.WARM_UP_S": 0.1},
        scale,
    ),
    "routing": Smallest("--prompts 1 --samples 2"),
    "served": Smallest("--models tiny --streams 1 --rounds 1 --prompt 4 --tokens 32 --no-peer"),
    "shared_prompts": Smallest(
        "--shape small --rows 2 --context 16 --job 1 16 2 20 --system 2 2 64 8 4 --rounds 1 --steps 1",
        {**SHAPES, "SAMPLES": 4, "PROMPT": 256, "ANSWER": 64, "COPIES": 3},
    ),
    "group_training": Smallest(
        "--shape small --samples 2 --prompt 16 --completion 4 --rounds 1",
        {**SHAPES, "tests.bench.utilisation.ROUNDS": 1},
    ),
    "speculation": Smallest("--rows 2 --chances 1 --tokens 8 --context 8 --rounds 1", SHAPES),
    "splits": Smallest("--seeds 1"),
    "false_alarms": Smallest("--tokens 1", {"ROUND": 2}),
    "forced_calls": Smallest("--calls 2"),
    "learning": Smallest("--model models/tiny --seeds 0 --held-out 1", run=learning),
    "court": Smallest("--cost 0.001 --rounds 1 --burst 2 --tokens 4", {"PAUSE_S": 0.0}),
    "replay": Smallest("--sequences 2 --tokens 4"),
    "model_switches": Smallest("--models 1 --switches 1 --pause-s 0 --tokens 0"),
    "nights": Smallest(
        "--nights 1 --sessions 8 --steps 2 --prompts-per-step 4 --rehearse 4 --measured-tasks 2 --suite-tasks 2"
    ),
    "slow_readers": Smallest("--readers 2 --tokens 200 --rounds 1", {"TOKENS": 64}),
    "start": Smallest("--starts 1 --warm-s 0"),
    "structured": Smallest("--rounds 1 --model models/tiny", {"ROWS": 2}),
    "traces": Smallest("--rounds 1 --requests 8 --streams 1", {"TOKENS": 4, "CALLS": 10, "sides": sides}),
    "trainers": Smallest("--steps 1 --groups 1 --group-size 2 --length 8 --prompt 4", SHAPES, trainers),
    "transfers": Smallest("", {"OUTPUT_TOKENS": 3500}, transfers),
    "turns": Smallest("--rounds 1 --kind dense", TALK),
}


RINGS = (
    "adapter_publish", "agent_turns", "cart_pole", "court", "forced_calls",
    "hosted_learners", "learning", "memory", "nights", "overload",
    "replay", "served", "slow_readers", "traces", "transfers",
)  # fmt: skip


class Simulator(threading.Thread):
    """A process of simulated workers or apis, as a thread of this one."""

    pid = os.getpid()

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        own = [Connection(os.dup(each.fileno())) if isinstance(each, Connection) else each for each in args]
        super().__init__(target=target, args=own, daemon=daemon)


@pytest.fixture(scope="module", autouse=True)
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    kept = ("--record-ttl-s", "60", "--feedback-ttl-days", "1")
    with ring(tmp_path_factory.mktemp("ring"), "--learners", "1", *kept) as started:
        yield started


@pytest.fixture
def starts(served: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts a ring for a measurement gives it the one that there is."""
    for name in RINGS:
        monkeypatch.setattr(f"tests.bench.{name}.ring", lambda *_, **__: nullcontext(served))
    monkeypatch.setattr(worker.process, "EngineThread", worker.process.EngineThread)  # which simulators set for good
    in_threads = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Simulator)
    for name in ("redis_scaling", "admission"):
        monkeypatch.setattr(f"tests.bench.{name}.multiprocessing", SimpleNamespace(get_context=lambda _: in_threads))


@pytest.mark.usefixtures("starts")
@pytest.mark.parametrize("name", SMALLEST)
def test_a_measurement_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module, smallest = importlib.import_module(f"tests.bench.{name}"), SMALLEST[name]
    for constant, value in smallest.constants.items():
        monkeypatch.setattr(constant if "." in constant else f"tests.bench.{name}.{constant}", value)
    monkeypatch.setattr(sys, "argv", [name, *smallest.flags.split()])
    ended = smallest.run(module, tmp_path)
    if inspect.iscoroutine(ended):
        ended = asyncio.run(ended)
    assert ended in (None, 0)
    assert capsys.readouterr().out, "it says what it measured"


def test_each_measurement_has_a_smallest_form() -> None:
    measure = {file.stem for file in Path("tests/bench").glob("*.py") if "if __name__" in file.read_text()}
    assert set(SMALLEST) == measure - {"__main__", "peers"} >= set(MEASUREMENTS)
