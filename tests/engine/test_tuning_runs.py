"""Runs that tune, in one process without a ring: resumed to the byte, gated, and warm starts of other runs."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from msgspec.structs import replace as replace_fields
from safetensors.numpy import load_file, save_file

from mlx_model.loader import export_tokenizer
from shared.errors import ServiceUnavailableError, SetupError
from shared.text.codec import TextCodec
from shared.training import TrainerStatus
from shared.trajectories import Trajectory
from tests.training.in_process import MemorySink
from tests.training.nobody import NoBoard
from tests.training.run import in_process_ring, train
from trainer.ring.feedback import JudgedAnswer
from trainer.ring.http_client import HttpApi
from trainer.ring.join import Way
from trainer.ring.ring import Candidate
from trainer.rollouts.groups import RolloutRequest
from trainer.runs.metrics import read
from trainer.runs.tuning import TuneRun
from trainer.settings import TrainSettings
from trainer.state import RunState
from trainer.versions.disk import Disk
from trainer.versions.run_folder import run_mode

SMALL: dict[str, Any] = {
    "model": "models/tiny", "mode": "sft", "adapter": "taught", "steps": 4, "prompts_per_step": 4, "lora_rank": 4,
    "learning_rate": 3e-3, "evaluate_every": 2, "lora_targets": ("q_proj", "v_proj"),
}  # fmt: skip


def settings(folder: Path, **changes: Any) -> TrainSettings:
    data = folder / "data.jsonl"
    rows = (
        {"prompt": [{"role": "user", "content": f"Which is larger, {a} or {a + 7}?"}], "answer": (str(a + 7), str(a))}
        for a in range(10, 50)
    )
    for_mode = ("chosen", "rejected") if changes.get("mode") == "dpo" else ("completion",)
    lines = [{"prompt": row["prompt"], **dict(zip(for_mode, row["answer"], strict=False))} for row in rows]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = SMALL | {"dataset": data, "run_dir": folder} | changes
    return TrainSettings.model_construct(**(TrainSettings().model_dump() | given))


async def tuned(run: TrainSettings, sink: MemorySink | None = None) -> tuple[RunState, MemorySink]:
    sink = sink or MemorySink(run.adapter)
    run.check()
    async with in_process_ring(run, sink) as (host, loaded, ring):
        tuning = TuneRun(run, host, Way(None, None), ring)  # type: ignore[arg-type]  (it asks no judge, and joins none)
        await tuning.start(loaded)
        return await tuning.run(), sink


class KilledError(Exception):
    """In place of a kill."""


async def killed_at_writes(run: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run until it comes to its end, killed at its third write, then its fourth, and so on: the last one's number."""
    write, left = Disk.run, 0

    async def write_or_die(self: Disk, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KilledError
        return await write(self, *arguments, **named)

    monkeypatch.setattr(Disk, "run", write_or_die)
    for life in range(3, 99):
        left = life
        with contextlib.suppress(KilledError):
            await run()
            return life
    raise AssertionError("it never ends")


def lines(run: TrainSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sft", "dpo"])
async def test_a_run_in_pieces_gives_the_same_bytes_as_one_run(tmp_path: Path, mode: str) -> None:
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    run = settings(tmp_path / "whole", mode=mode)
    state, sink = await tuned(run)
    for steps in (1, 4):
        pieces = settings(tmp_path / "pieces", mode=mode, steps=steps)
        await tuned(pieces)
        if steps == 1:  # killed in the midst of a line behind the checkpoint
            with (pieces.folder / "metrics.jsonl").open("a") as file:
                file.write('{"step":2,"loss":9.0}\n{"step":3,"lo')
    file = "checkpoints/step-000004/adapters.safetensors"
    assert (run.folder / file).read_bytes() == (pieces.folder / file).read_bytes()
    told, again = lines(run), lines(pieces)
    assert [line["step"] for line in told] == [line["step"] for line in again] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in told] == [line["loss"] for line in again]
    assert (state.version, sink.latest, state.rejected) == (2, 2, 0) and state.tokens > 0
    assert (
        told[-1]["held_out_loss"] < told[0]["held_out_loss"] and told[-1]["held_out_right"] > told[0]["held_out_right"]
    )
    assert (told[-1]["held_out_margin"] is None) if mode == "sft" else (told[-1]["held_out_margin"] > 0)
    assert {check.name for check in sink.candidates[1].gate} >= {"reward_floor", "finite_weights"}


@pytest.mark.long
@pytest.mark.parametrize("max_parity", [0.1, 1e-12])  # each version is served, or each is rejected
async def test_a_run_that_is_killed_at_its_writes_gives_the_same_bytes(
    tmp_path: Path, max_parity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    changes: dict[str, Any] = {"max_parity": max_parity, "checkpoint_every": 1, "evaluate_every": 3, "steps": 6}
    run, killed = (settings(tmp_path / name, **changes) for name in ("whole", "killed"))
    await tuned(run)
    sink = MemorySink("taught")
    life = await killed_at_writes(lambda: tuned(killed, sink), monkeypatch)
    file = "checkpoints/step-000006/adapters.safetensors"
    assert (run.folder / file).read_bytes() == (killed.folder / file).read_bytes() and life > 4
    told, again = ([{**line, "version": 0} for line in lines(each)] for each in (run, killed))
    assert told == again and [line["step"] for line in told] == [0, 1, 2, 3, 4, 5, 6]


async def test_the_board_says_when_the_next_version_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = settings(tmp_path, steps=5), list[tuple[str, int, int, int]]()
    async with in_process_ring(run, MemorySink(run.adapter)) as (host, loaded, ring):
        tuning = TuneRun(run, host, Way(None, None), ring)  # type: ignore[arg-type]
        ring.board.begin(tuning.status, tuning.stop)

        async def noted(_: NoBoard, status: TrainerStatus) -> None:
            seen.append((status.state, status.train_step, status.version, status.next_version_at))

        monkeypatch.setattr(NoBoard, "write", noted)
        await ring.board.show("starting")
        await tuning.start(loaded)
        await tuning.run()
        last = tuning.status("ended")
    assert seen[0] == ("starting", 0, 0, 2), "the first one comes after step 2"
    assert seen[1:] == [("training", step, step // 2 + step // 5, min(5, step // 2 * 2 + 2)) for step in range(6)]
    assert (last.steps, last.eta_s, last.mode, last.held_out) == (5, 0, "sft", None) and last.held_out_right


async def test_a_new_run_does_not_displace_a_version_of_another_run(tmp_path: Path) -> None:
    sink = MemorySink("taught", versions={1: {}}, latest=1, reserved=1)
    with pytest.raises(SetupError, match=r"taught@1 is served .* \(--start-from taught@1\).*--replace-latest"):
        await tuned(settings(tmp_path), sink)
    state, _ = await tuned(settings(tmp_path, replace_latest=True), sink)
    assert sink.latest == state.version == 3


@pytest.mark.long
@pytest.mark.parametrize("how", ["silent", "abort", "refused"])
async def test_a_worker_that_does_not_answer_says_nothing_of_a_version(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.runs.data.LAST_WAIT_S", 0.1)
    monkeypatch.setattr("trainer.runs.tuning.ASK_AGAIN_S", 0.01)
    run, sink, asked = settings(tmp_path, steps=3), MemorySink("taught"), 0

    async def kept_from_it(request: RolloutRequest) -> list[Trajectory]:
        nonlocal asked
        asked += 1
        if asked > 2 or how == "silent":
            tuning.stop()
        if how == "silent":
            await asyncio.Event().wait()
        if how == "refused":
            raise ServiceUnavailableError("the job expired")
        return [replace_fields(sample, finish_reason="abort") for sample in await generate(request)]

    async with in_process_ring(run, sink) as (host, loaded, ring):
        generate, ring.source.generate = ring.source.generate, kept_from_it  # type: ignore[method-assign]
        tuning = TuneRun(run, host, Way(None, None), ring)  # type: ignore[arg-type]
        await tuning.start(loaded)
        stopped = await tuning.run()
    assert (stopped.train_step, stopped.version, stopped.rejected) == (2, 0, 0)
    state, _ = await tuned(run, sink)
    assert (state.train_step, state.rejected, state.swaps) == (3, 0, 2), "offered again, and then the last one"
    assert [line["step"] for line in lines(run)] == [0, 1, 2, 3]


class SpoilingSink(MemorySink):
    """Its workers get other weights than the trainer has."""

    async def stage(self, candidate: Candidate) -> int:
        version = await super().stage(candidate)
        self.versions[version] = {name: 3 * weight for name, weight in self.versions[version].items()}
        return version


async def test_a_version_that_a_worker_does_not_confirm_is_not_served(tmp_path: Path) -> None:
    run = settings(tmp_path, max_parity=1e-3, max_rejections=5)
    state, sink = await tuned(run, SpoilingSink(run.adapter))
    assert (state.version, sink.latest, state.rejected) == (0, 0, 2)
    assert "reload_parity" in {check.name for check in sink.rejected[1] if not check.passed}
    assert lines(run)[-1]["held_out_right"] == pytest.approx(lines(run)[2]["held_out_right"], abs=0.2)


@pytest.mark.long
async def test_other_runs_begin_with_a_version_and_go_on_from_their_own(tmp_path: Path) -> None:
    first = settings(tmp_path)
    _, sink = await tuned(first)
    taught = sink.versions[2]
    preferred = settings(tmp_path, mode="dpo", run="preferred", start_from="taught@2", steps=2, dpo_beta=0.2)
    await tuned(preferred, sink)
    begins, *_, ends = lines(preferred)
    assert begins["held_out_margin"] == 0 and ends["held_out_margin"] > 0, "held against the version, not the base"
    sink.versions.pop(2)  # what a run began with may be deleted
    longer = settings(tmp_path, mode="dpo", run="preferred", start_from="taught@2", steps=4, dpo_beta=0.2)
    await tuned(longer, sink)
    folder = str(first.folder / "versions/2")
    whole = settings(tmp_path, mode="dpo", run="whole", start_from=folder, steps=4, dpo_beta=0.2)
    await tuned(whole)
    assert [line["loss"] for line in lines(longer)] == [line["loss"] for line in lines(whole)]
    with pytest.raises(SetupError, match="this run began with taught@2; give another --run"):
        await tuned(settings(tmp_path, mode="dpo", run="preferred", start_from="taught@1", steps=5))
    rewarded = settings(
        tmp_path, mode="rl", run="rewarded", dataset=None, start_from=folder, steps=1, group_size=2, max_tokens=4,
        probe_prompts=1, parity_every=0, distances_every=0, evaluate_every=0,
    )  # fmt: skip
    state, mine = await train(rewarded)
    assert state.started_from and all((mine.versions[1][name] == value).all() for name, value in taught.items())
    strict = {"run": "held", "max_base_kl": 1e-4, "learning_rate": 1e-9, "kl_coefficient": 0.1, "max_lag": 0} | {
        "group_size": 4,
        "prompts_per_step": 8,
    }
    for steps in (1, 2):  # the second time resumed
        held, _ = await train(rewarded.model_copy(update=strict | {"steps": steps}), MemorySink("taught"))
        assert (held.rejected, held.policy_step) == (0, steps), "far from the base, at what the run began with"
    assert all(line.kl < 1e-6 for line in read(rewarded.run_dir / "held" / "metrics.jsonl"))


async def test_a_run_that_begins_anew_loses_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    for _ in range(2):
        run = settings(tmp_path, steps=2, resume="no")
        state, _ = await tuned(run)
    assert state.train_step == 2 and [line["step"] for line in lines(run)] == [0, 1, 2]
    assert (tmp_path / "taught.1" / "checkpoints" / "step-000002" / "state.json").exists()


async def test_a_run_of_another_mode_is_not_gone_on_with(tmp_path: Path) -> None:
    await tuned(settings(tmp_path, steps=1))
    small = {"group_size": 2, "max_tokens": 4, "probe_prompts": 1, "parity_every": 0, "evaluate_every": 0, "steps": 1}
    rewards = settings(tmp_path, mode="rl", dataset=None, max_lag=0, **small)
    for again in (tuned(settings(tmp_path, mode="dpo", steps=2)), train(rewards.model_copy(update={"steps": 2}))):
        with pytest.raises(SetupError, match=r"a run of --mode sft: .*--start-from"):
            await again
    await train(rewards.model_copy(update={"run": "earlier"}))
    saved = tmp_path / "earlier/checkpoints/step-000001"
    state = json.loads((saved / "state.json").read_bytes())
    assert (state["mode"], state["trajectories"] > 0) == ("rl", True)
    for mode in ("rl", ""):  # "": of a version that did not write it down
        assert run_mode(RunState("earlier", trajectories=state["trajectories"], mode=mode)) == "rl"


async def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    run = settings(tmp_path, steps=1)
    await tuned(run)
    async with in_process_ring(run, MemorySink("taught")) as (host, loaded, ring):
        tuning = TuneRun(run, host, Way(None, None), replace(ring, base_sha256="other"))  # type: ignore[arg-type]
        with pytest.raises(SetupError, match="a run of another base model than models/tiny"):
            await tuning.start(loaded)


async def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    for named, words in (
        ("taught", "NAME@VERSION"),
        ("taught@x", "NAME@VERSION"),
        ("taught@" + "9" * 5000, "NAME@VERSION"),
        ("taught@7", "there is no adapter taught@7"),
        (str(folder), "holds no adapter_config.json"),
    ):
        with pytest.raises(SetupError, match=words):
            await tuned(settings(tmp_path, start_from=named))
    first = settings(tmp_path, steps=1)
    await tuned(first)
    with pytest.raises(SetupError, match="lora_rank 4 there, 8 here"):
        await tuned(settings(tmp_path, run="b", lora_rank=8, start_from=str(first.folder / "versions/1")))
    kept = first.folder / "versions/1/adapters.safetensors"
    good = load_file(kept)
    save_file({name: np.repeat(value, 2, axis=int(name[-1] == "b")) for name, value in good.items()}, kept)
    with pytest.raises(SetupError, match=r"shapes: .*lora_a"):  # of a wider model, with layers of the same names
        await tuned(settings(tmp_path, run="c", start_from=str(kept.parent)))
    save_file({name: value * float("nan") for name, value in good.items()}, kept)
    with pytest.raises(SetupError, match="value 0 is not finite"):
        await tuned(settings(tmp_path, run="c", start_from=str(kept.parent)))


@pytest.mark.parametrize("mode", ["sft", "rl"])
async def test_a_start_that_is_not_there_sets_no_run_aside(tmp_path: Path, mode: str) -> None:
    await tuned(settings(tmp_path, steps=1))
    dataset = {"dataset": None} if mode == "rl" else {}
    again = settings(tmp_path, mode=mode, resume="no", start_from="taught@7", **dataset)
    with pytest.raises(SetupError, match="there is no adapter taught@7"):
        await (train(again) if mode == "rl" else tuned(again))
    assert not (tmp_path / "taught.1").exists() and (again.folder / "checkpoints/step-000001").exists()
    own = settings(tmp_path, resume="no", start_from=str(again.folder / "versions/1"), steps=1)
    state, _ = await tuned(own)  # out of the folder that is then set aside
    assert state.started_from and (tmp_path / "taught.1/versions/1").exists()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
async def test_a_start_of_half_precision_is_learned_on_in_full(tmp_path: Path, dtype: mx.Dtype) -> None:
    first = settings(tmp_path, steps=1)
    await tuned(first)
    kept = first.folder / "versions/1/adapters.safetensors"
    mx.save_safetensors(str(kept), {name: mx.array(value).astype(dtype) for name, value in load_file(kept).items()})
    run = settings(tmp_path, run="on", start_from=str(kept.parent), steps=1)
    state, _ = await tuned(run)
    learned = load_file(run.folder / "checkpoints/step-000001/adapters.safetensors")
    assert state.version == 1 and {value.dtype for value in learned.values()} == {np.dtype("float32")}


async def test_preferences_are_asked_for_once_and_a_resumed_run_goes_on_with_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def judged(api: HttpApi, policy: str) -> dict[str, JudgedAnswer]:
        """What the api lists, another ten pairs at each time."""
        asked.append(policy)
        answers = {}
        for at in range(10 * len(asked)):
            for name, other, text in ((f"b{at}", f"w{at}", "yes"), (f"w{at}", f"b{at}", "no")):
                said = {"preferred_over": other} if text == "yes" else {"preferred_under": other}
                ids = (tiny.encode(f"{at}?"), tiny.encode(text, add_special_tokens=False))
                answers[name] = JudgedAnswer(name, 10**13, policy, tuple(ids[0]), tuple(ids[1]), text, **said)
        return answers

    monkeypatch.setattr("trainer.ring.feedback.judged_answers", judged)
    tiny = TextCodec(export_tokenizer(mlx_lm.utils.load_tokenizer(Path("models/tiny"))))
    asking: dict[str, Any] = {"mode": "dpo", "dataset": Path("feedback:taught"), "connect_to": "127.0.0.1:1"}
    run = settings(tmp_path, **asking, steps=1)
    await tuned(run)
    kept = (run.folder / "feedback.jsonl").read_bytes()
    assert (kept.count(b"\n"), asked) == (10, ["taught"])
    state, _ = await tuned(settings(tmp_path, **asking, steps=2))
    assert (state.train_step, asked, (run.folder / "feedback.jsonl").read_bytes() == kept) == (2, ["taught"], True)
    with pytest.raises(SetupError, match="holds a run on preferences of taught"):
        await tuned(settings(tmp_path, **asking | {"dataset": Path("feedback:other")}, steps=2))
    await tuned(settings(tmp_path, **asking, steps=1, resume="no"))
    assert (run.folder / "feedback.jsonl").read_bytes().count(b"\n") == 20
    assert (tmp_path / "taught.1" / "feedback.jsonl").read_bytes() == kept, "the earlier run keeps its own"
    (run.folder / "feedback.jsonl").unlink()
    with pytest.raises(SetupError, match="holds a run on another data set"):
        await tuned(settings(tmp_path, **asking, steps=2))
    assert asked == ["taught", "taught"]
