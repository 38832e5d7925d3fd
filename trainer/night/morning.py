"""The morning report is what stands in a run's folder, in one message (shared/night.py)."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from shared.adapters import GateCheck
from shared.night import Compared, NightOutcome, NightReport, in_markdown
from shared.redis.adapters.store import AdapterStore
from shared.redis.training.board import TrainingBoard
from trainer.runs.data import DataLine
from trainer.runs.distillation.distilling import FOUND
from trainer.runs.distillation.examination import AFTER, BEFORE, SHOWN, Examined, Reply
from trainer.runs.distillation.hindsight import LearnedFrom
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.checkpoint import CheckpointStore, read_whole, write_whole
from trainer.versions.publish import GATE
from trainer.versions.run_folder import interruptions

FILE, TEXT = "report.json", "report.md"
MOST_TEXT = 2_000  # characters of a prompt's end, and of a reply


class Begun(msgspec.Struct, frozen=True):
    """State in which a night's run began; written before anything else, so that a killed run goes on with the same."""

    began_ms: int
    began_with: int  # version; 0: the base
    since_ms: int = 0  # of the oldest turn that it learns from


def report_of(settings: TrainSettings, begun: Begun, outcome: NightOutcome | None, why: str = "") -> NightReport:
    """The report of a run's folder. `outcome` None: as the run's state has it."""
    folder = settings.folder
    checkpoint = CheckpointStore(folder / "checkpoints", settings.keep_checkpoints).load()
    state = RunState(settings.run_name) if checkpoint is None else checkpoint.state
    if outcome is None:
        outcome = _outcome(state, settings.steps)
    version = state.version if outcome == "proposed" else 0
    seen = version or max((int(path.stem.partition("-")[2]) for path in folder.glob(AFTER.format("*"))), default=0)
    before, after = (read_whole(folder / name, Examined) or Examined("") for name in (BEFORE, AFTER.format(seen)))
    found = read_whole(folder / FOUND, LearnedFrom) or LearnedFrom()
    checks = _checks(folder, version)
    pairs = _pairs(before.suite, after.suite)
    gains = [b.reward - a.reward for a, b in pairs if a.reward is not None and b.reward is not None]
    measured = [line.held_out_right for line in _lines(folder / "metrics.jsonl") if line.held_out_right is not None]
    return NightReport(
        policy=settings.adapter, run=settings.run_name, began_ms=begun.began_ms,
        ended_ms=time.time_ns() // 1_000_000, outcome=outcome, why=why or _failed(outcome, checks),
        began_with=begun.began_with, version=version, train_step=state.train_step, steps=settings.steps,
        held_out_before=measured[0] if measured else None,
        held_out_after=state.held_out if version else measured[-1] if len(measured) > 1 else None,
        suite_before=before.suite_reward, suite_after=after.suite_reward, suite_tasks=len(before.suite),
        suite_better=sum(gain > 0 for gain in gains), suite_worse=sum(gain < 0 for gain in gains),
        base_kl=_base_kl(checks), checks=checks, interruptions=interruptions(folder),
        samples=_samples(before, after), **msgspec.structs.asdict(found),
    )  # fmt: skip


async def publish(report: NightReport, folder: Path, redis: Redis) -> None:
    """Write the report into the run's folder, and onto the policy's board."""
    latest = await AdapterStore(redis).latest(report.policy)
    if latest < report.version:
        report = msgspec.structs.replace(report, replaces=latest)
    await TrainingBoard(redis, report.policy).put_night(report)
    await asyncio.to_thread(_write, report, folder)


def _write(report: NightReport, folder: Path) -> None:
    write_whole(folder / TEXT, in_markdown(report).encode())
    if report.outcome != "unfinished":  # else the next night goes on
        write_whole(folder / FILE, msgspec.json.format(msgspec.json.encode(report)))


def reports_in(run_dir: Path) -> list[NightReport]:
    """Reports of the nights in a folder, the newest first."""
    found = [read_whole(path, NightReport) for path in run_dir.glob(f"*/{FILE}")]
    return sorted((each for each in found if each is not None), key=lambda each: -each.began_ms)


def _outcome(state: RunState, steps: int) -> NightOutcome:
    if state.train_step < steps or state.offered is not None:
        return "unfinished"
    return "proposed" if state.version else "rejected"


def _failed(outcome: NightOutcome, checks: Sequence[GateCheck]) -> str:
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    return "; ".join(failed) if outcome == "rejected" else ""


def _checks(folder: Path, version: int) -> tuple[GateCheck, ...]:
    """Checks of the candidate, else of the last one that was rejected."""
    kept = folder / "versions" / str(version) / GATE
    files = [kept] if version else sorted((folder / "rejected").glob(f"*/{GATE}"))
    return (read_whole(files[-1], tuple[GateCheck, ...]) or ()) if files else ()


def _base_kl(checks: Sequence[GateCheck]) -> float | None:
    return next((check.value for check in checks if check.name == "base_kl"), None)


def _pairs(before: Sequence[Reply], after: Sequence[Reply]) -> list[tuple[Reply, Reply]]:
    return list(zip(before, after, strict=True)) if len(before) == len(after) else []


def _samples(before: Examined, after: Examined) -> tuple[Compared, ...]:
    """Replies to held-out prompts, those that changed first, and tasks of the suite: the ones that lost most first."""
    tasks = sorted(_pairs(before.suite, after.suite), key=lambda pair: (pair[1].reward or 0) - (pair[0].reward or 0))
    held_out = sorted(_pairs(before.held_out, after.held_out), key=lambda pair: pair[0].reply == pair[1].reply)
    held_out = held_out[: SHOWN - min(2, len(tasks))]
    return tuple(
        Compared(a.prompt[-MOST_TEXT:], a.reply[:MOST_TEXT], b.reply[:MOST_TEXT], a.reward, b.reward)
        for a, b in [*held_out, *tasks][:SHOWN]
    )


def _lines(file: Path) -> list[DataLine]:
    if not file.is_file():
        return []
    return [msgspec.json.decode(line, type=DataLine) for line in file.read_bytes().split(b"\n")[:-1]]
