"""Nights: which run is due, what a run proposes and is refused for, and what its report says of it."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from shared.night import in_markdown
from tests.engine.test_distilling import score
from tests.engine.test_tuning_learner import examples
from tests.engine.test_tuning_runs import killed_at_writes
from tests.engine.test_tuning_runs import settings as tuning_settings
from tests.training.in_process import MemorySink
from tests.training.run import in_process_ring
from trainer.learn.batches import SampleGroup
from trainer.night.__main__ import night_settings
from trainer.night.morning import FILE, Begun, report_of
from trainer.night.school import BEGUN, School, begin, night_of, run_settings
from trainer.ring.http_client import HttpApi
from trainer.ring.join import Way
from trainer.runs.distillation.distilling import DistillRun
from trainer.runs.distillation.examination import BASE, BEFORE, Examined, Reply, write_examined
from trainer.settings import TrainSettings
from trainer.versions.run_folder import note_interruption

NOON = datetime.datetime(2026, 3, 2, 12)


def night(folder: Path, **changes: Any) -> TrainSettings:
    suite = folder / "suite.jsonl"
    suite.write_text('{"prompt": [{"role": "user", "content": "hello"}], "reference": "no such reply"}\n')
    asked = {"mode": "distill", "teacher": "t", "connect_to": "localhost:1", "candidate": True, "max_tokens": 4}
    asked |= {"suite": suite, "max_base_kl": 5.0, "adapter": "policy", "run": "night-2026-03-01"}
    asked |= {"steps": 1, "evaluate_every": 1, "prompts_per_step": 2}
    return tuning_settings(folder, **(asked | changes))


async def distilled(run: TrainSettings, sink: MemorySink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn from rows that a model scores which is no better than the policy."""
    async with in_process_ring(run, sink) as (host, loaded, ring):

        async def scored(api: HttpApi, teacher: str, top_k: int, rows: Sequence[SampleGroup], digest: str) -> list[Any]:
            return score(loaded.model, examples("sft", 12, seed=3), teacher)

        monkeypatch.setattr("trainer.runs.distillation.distilling.scored", scored)
        school = DistillRun(run, host, Way(None, None), ring)  # type: ignore[arg-type]  # it asks no judge
        await school.start(loaded)
        await school.run()


async def test_a_night_leaves_a_candidate_and_a_report_and_what_is_served_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sink = night(tmp_path), MemorySink("policy")
    begun = begin(run.folder, 0)
    assert begin(run.folder, 7) == begun, "a run that goes on keeps what it began with"
    await distilled(run, sink, monkeypatch)
    assert (sink.latest, sorted(sink.versions)) == (1, [1, 2]), "the first version is the base, to roll back to"
    report = report_of(run, begun, None)
    assert (report.outcome, report.version, report.train_step) == ("proposed", 2, run.steps)
    assert {check.name for check in report.checks} >= {"reload_parity", "base_kl", "suite"}
    assert (report.suite_before, report.suite_tasks, report.interrupted) == (0.0, 1, 1)
    assert report.base_kl is not None and report.base_kl > 0
    assert report.samples and "promote policy 2" in in_markdown(report)


@pytest.mark.long
@pytest.mark.parametrize(("check", "changes"), [("base_kl", {"max_base_kl": 1e-12}), ("suite", {})])
async def test_a_candidate_too_far_from_the_base_or_worse_at_the_suite_is_rejected(
    check: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sink = night(tmp_path, **changes), MemorySink("policy")
    begun = begin(run.folder, 0)
    if check == "suite":  # the base had its one task right
        write_examined(run.folder / BEFORE, Examined("", (Reply("hello", "no such reply", (5, 6, 7), 1.0),)))
    await distilled(run, sink, monkeypatch)
    report = report_of(run, begun, None)
    assert (report.outcome, report.version, sink.latest) == ("rejected", 0, 1)
    assert report.why.startswith(f"{check}: ") and set(sink.rejected) == {2}


@pytest.mark.long
async def test_a_night_that_is_killed_at_its_writes_leaves_the_same_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = (night(tmp_path / n, steps=4, evaluate_every=2, checkpoint_every=1) for n in ("whole", "killed"))
    sink = MemorySink("policy")
    await distilled(whole, MemorySink("policy"), monkeypatch)

    async def again() -> None:
        if (killed.folder / "teacher.jsonl").exists():  # sessions are asked for once, too
            (tmp_path / "killed" / "data.jsonl").unlink(missing_ok=True)
        await distilled(killed, sink, monkeypatch)

    assert await killed_at_writes(again, monkeypatch) > 6
    file = "checkpoints/step-000004/adapters.safetensors"
    assert (whole.folder / file).read_bytes() == (killed.folder / file).read_bytes()
    reports = [report_of(run, Begun(1, 0), None) for run in (whole, killed)]
    assert reports[0].outcome == reports[1].outcome == "proposed"
    served = sink.versions[sink.latest]  # a kill may have left one more of them, which is not served
    assert not any(value.any() for name, value in served.items() if name.endswith("lora_b")), "still the base"
    assert reports[0].samples == reports[1].samples and reports[0].base_kl == reports[1].base_kl


@pytest.mark.long
async def test_many_nights_may_not_lose_together_what_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that a night begins with has lost the suite's task, which the base has right."""
    sink = MemorySink("policy")
    await distilled(night(tmp_path), sink, monkeypatch)
    await sink.promote(2, ())
    run = night(tmp_path, run="night-2026-03-02", start_from="policy@2")
    begun = begin(run.folder, 2)
    for file, reward in ((BEFORE, 0.0), (BASE, 1.0)):
        write_examined(run.folder / file, Examined("", (Reply("hello", "no such reply", (5, 6, 7), reward),)))
    await distilled(run, sink, monkeypatch)
    report = report_of(run, begun, None)
    assert (report.outcome, sink.latest) == ("rejected", 2) and report.why.startswith("suite: 0, floor ")


def test_a_night_has_one_run_and_one_that_was_not_ended_goes_first(tmp_path: Path) -> None:
    school = School(TrainSettings(run_dir=tmp_path, learn_when="idle"))
    assert night_of(NOON - datetime.timedelta(seconds=1)) == "night-2026-03-01"
    assert night_of(NOON) == "night-2026-03-02"
    tonight = school.due(NOON)
    assert tonight == tmp_path / "night-2026-03-02"
    begin(tonight, 0)
    next_night = NOON + datetime.timedelta(days=1)
    assert school.due(next_night) == tonight
    (tonight / FILE).write_text("{}")
    assert school.due(NOON) is None
    assert school.due(next_night) == tmp_path / "night-2026-03-03"


def test_a_night_learns_from_turns_after_the_night_whose_candidate_is_served(tmp_path: Path) -> None:
    learned = tmp_path / "night-2026-03-01"
    learned.mkdir()
    report = {"policy": "policy", "run": learned.name, "began_ms": 5, "ended_ms": 9, "outcome": "proposed"}
    (learned / FILE).write_text(json.dumps(report | {"version": 3}))
    assert begin(tmp_path / "a", latest=3).since_ms == 5
    assert begin(tmp_path / "b", latest=1).since_ms == 0, "nobody has promoted it: its turns teach again"
    made = run_settings(TrainSettings(run_dir=tmp_path), tmp_path / "b", Begun(7, 1, 0))
    assert (made.start_from, made.teacher, made.folder) == ("policy@1", "policy@1", tmp_path / "b")
    assert run_settings(TrainSettings(), tmp_path, Begun(7, 0)).teacher == "tiny"
    assert (tmp_path / "b" / BEGUN).is_file()


def test_a_nights_settings_are_the_recipes_where_none_are_given(tmp_path: Path) -> None:
    given = tmp_path / "night.yaml"
    given.write_text("steps: 7\n")
    made = night_settings(["--config", str(given), "--connect-to", "localhost:1", "--model", "models/tiny/"])
    assert (made.steps, made.prompts_per_step, made.teacher, made.candidate) == (7, 8, "", True)
    with pytest.raises(SetupError, match="not by sft"):
        night_settings(["--mode", "sft", "--connect-to", "localhost:1"])
    note_interruption(tmp_path / "nowhere", "no folder, no line")
