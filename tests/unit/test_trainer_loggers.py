"""The way of a run's figures into other people's packages, with one of our own that blocks, fails and comes back."""

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.errors import SetupError
from shared.process.settings import load
from shared.training import BoardSample
from tests.unit.trainer_samples import group, trajectory
from tests.waiting import HANG_S, wait_until
from trainer.learn.batches import DroppedCounts
from trainer.learn.steps import StepReport
from trainer.loggers import loggers as loggers_module
from trainer.loggers import sender
from trainer.loggers.choice import check_installed
from trainer.loggers.loggers import Loggers
from trainer.loggers.tracked_run import Samples, TrackedRun, by_name, rows
from trainer.runs.metrics import MetricsLog, Timing, step_metrics
from trainer.runs.rl import loggers_of
from trainer.settings import TrainSettings
from trainer.state import RunState


class Board:
    """A package: what runs have told it, and what it does meanwhile."""

    def __init__(self) -> None:
        self.opened: list[TrackedRun] = []
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.samples: list[Samples] = []
        self.endings: list[str] = []
        self.failures: list[Exception] = []  # of the next calls
        self.go = threading.Event()  # a call waits for it
        self.go.set()
        self.entered = threading.Event()

    def open_run(self, run: TrackedRun) -> "Board":
        self._fail()
        self.opened.append(run)
        run.keep_id(run.known_id or f"run-{len(self.opened)}")
        return self

    def write(self, train_step: int, figures: Mapping[str, float], samples: Samples) -> None:
        self.entered.set()
        self.go.wait(HANG_S)
        self._fail()
        self.rows.append((train_step, figures))
        self.samples.append(samples)

    def end(self, ending: str) -> None:
        self.endings.append(ending)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    board = Board()
    module = ModuleType("trainer.loggers.board")
    vars(module)["open_run"] = board.open_run
    monkeypatch.setitem(sys.modules, "trainer.loggers.board", module)
    monkeypatch.setattr(sender, "FIRST_PAUSE_S", 0.01)
    yield board
    board.go.set()


def train(log: MetricsLog, step: int) -> None:
    state = RunState("run", train_step=step + 1, version=step)
    batch = [group(trajectory(1.0), trajectory(0.0))]
    report = StepReport(updated=True, loss=float(step))
    metrics = step_metrics(state, batch, report, DroppedCounts(), Timing(1, 2, 1), [1], stale=0, held_out=None, gate="")
    log.write(metrics, (BoardSample(1.0, "a prompt", f"reply {step}"),))


async def run(folder: Path, steps: range, *, anew: bool = False, ending: Any = "finished", **more: Any) -> None:
    """A run of some train steps, as the trainer does it."""
    async with Loggers(["board"], project="p", run_name="policy", config={"seed": 0}, **more) as loggers:
        log = MetricsLog(folder / "metrics.jsonl", first_step=steps.start, loggers=loggers)
        loggers.begin(folder, anew=anew)
        for step in steps:
            train(log, step)
        log.close()
        if isinstance(ending, BaseException):
            raise ending
        loggers.ending = ending


async def test_every_train_step_arrives_with_its_figures_and_the_run_is_closed(tmp_path: Path, board: Board) -> None:
    await run(tmp_path, range(3))
    assert [step for step, _ in board.rows] == [0, 1, 2]
    figures = board.rows[2][1]
    assert figures["policy/loss"] == 2.0 and figures["rollout/reward"] == 0.5 and figures["staleness/lag_max"] == 1
    assert "rollout/held_out" not in figures, "not measured"
    assert board.endings == ["finished"]
    assert board.opened[0].config == {"seed": 0}
    assert board.samples == [(), (), ()], "prompts and replies leave this machine only when the settings say so"


async def test_samples_go_along_where_the_settings_say_so(tmp_path: Path, board: Board) -> None:
    await run(tmp_path, range(2), with_samples=True)
    assert rows(1, board.samples[1]) == [[1, 1.0, "a prompt", "reply 1", "", "", ""]]


async def test_a_run_that_starts_again_goes_on_in_the_same_one_unless_it_begins_anew(
    tmp_path: Path, board: Board
) -> None:
    await run(tmp_path, range(2))
    await run(tmp_path, range(2, 3))
    assert [run.known_id for run in board.opened] == ["run-1", "run-1"]
    await run(tmp_path, range(1), anew=True)
    assert board.opened[-1].known_id == "run-3"


async def test_a_package_that_blocks_delays_no_step_and_what_it_misses_is_counted(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "KEPT", 4)
    monkeypatch.setitem(loggers_module.FLUSH_S, "finished", 0.05)
    board.go.clear()
    with capture_logs() as lines:
        await run(tmp_path, range(10))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10
    dropped = [line["train_steps"] for line in lines if line["event"] == "train.logger_dropped"]
    assert dropped == [1, 2, 4], "six train steps: the first, then ever more seldom"
    assert [line["train_steps_lost"] for line in lines if line["event"] == "train.logger_late"] == [4]
    board.go.set()
    await wait_until(lambda: board.endings == ["finished"])
    assert [step for step, _ in board.rows] == [0, 1, 2, 3]


async def test_a_package_that_is_away_for_a_while_loses_nothing(tmp_path: Path, board: Board) -> None:
    board.failures = [ConnectionError("no"), ConnectionError("no")]  # at the start
    async with Loggers(["board"], project="p", run_name="policy") as loggers:
        log = MetricsLog(tmp_path / "metrics.jsonl", loggers=loggers)
        loggers.begin(tmp_path, anew=False)
        train(log, 0)
        await wait_until(lambda: len(board.rows) == 1)
        board.failures = [ConnectionError("no"), ConnectionError("no")]
        train(log, 1)
        await wait_until(lambda: len(board.rows) == 2)
        log.close()
    assert [step for step, _ in board.rows] == [0, 1]


async def test_a_package_that_fails_for_good_ends_no_run_and_tells_no_password(tmp_path: Path, board: Board) -> None:
    board.failures = [OSError("no answer from https://me:hidden@board.example/api")] * 100
    with capture_logs() as lines:
        await run(tmp_path, range(3))
    assert not board.opened
    said = [line for line in lines if line["event"] == "train.logger_failed"]
    assert "board.example" in said[0]["reason"] and "hidden" not in str(lines)
    assert [line["train_steps"] for line in lines if line["event"] == "train.logger_lost"] == [3]


@pytest.mark.parametrize(
    ("ending", "told"),
    [("stopped", "stopped"), (RuntimeError("broken"), "failed"), (asyncio.CancelledError(), "stopped")],
)
async def test_the_end_of_the_run_is_told(tmp_path: Path, board: Board, ending: Any, told: str) -> None:
    try:
        await run(tmp_path, range(1), ending=ending)
    except (RuntimeError, asyncio.CancelledError) as error:
        assert error is ending
    await wait_until(lambda: board.endings == [told])
    assert len(board.rows) == 1


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (["--logger", "wandb", "--logger", "mlflow"], ""),
        (["--logger", "wandb,mlflow"], ""),
        ([], "wandb, mlflow"),
        ([], '["wandb", "mlflow"]'),
    ],
)
def test_loggers_are_named_once_each_or_in_a_list(
    arguments: list[str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("PARALLM_LOGGER", variable)
    assert load(TrainSettings, arguments).logger == ["wandb", "mlflow"]


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(SetupError, match="'wandb', 'mlflow' or 'trackio'"):
        load(TrainSettings, ["--logger", "neptune"])


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # nothing is installed there, but W&B has left its folder
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    with pytest.raises(SetupError, match=r"pip install 'mlx-parallm\[wandb\]'"):
        check_installed(["wandb"])


def test_no_secret_and_no_text_of_users_is_told_to_others() -> None:
    given = {
        "redis": "redis://:secret-text@r/0",
        "connect_key": "secret-text",
        "redis_password": "secret-text",
        "connect_to": "redis://:secret-text@r/0",
        "atropos_url": "http://me:secret-text@a:8001",
        "otlp_endpoint": "http://me:secret-text@c:4318",
        "system_prompt": "secret-text",
        "reward_options": {"key": "secret-text", "format_score": 0.5},
        "task_options": {"nested": {"key": "secret-text"}, "size": 3},
        "model": "https://me:secret-text@hub/model",
    }
    config = loggers_of(TrainSettings(**given)).config  # type: ignore[arg-type]
    assert "secret-text" not in str(config)
    assert config["reward_options.format_score"] == 0.5 and config["task_options.size"] == 3
    assert config["learning_rate"] == 1e-5


def test_the_names_of_the_figures_stand_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/operate/training.md").read_text()
    names = [name for name, _ in by_name(AnyFigures())]
    assert names and not [name for name in names if f"`{name}`" not in text]


class AnyFigures(dict[str, Any]):
    def __missing__(self, key: str) -> float:
        return 0.0
