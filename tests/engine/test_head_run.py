"""A run that trains a head, on bad days: no worker answers, the store refuses, the run is stopped while it waits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from shared.adapters import GateCheck
from shared.errors import ConflictError, ServiceUnavailableError, SetupError
from shared.rewards.model_kinds import ModelOptions
from shared.scoring.pool import RewardSample
from shared.scoring.served import UNANSWERED
from shared.text.codec import TextCodec, answered
from shared.trajectories import Reward
from tests.training.in_process import InProcessSource, MemorySink
from tests.training.nobody import NoBoard, NoOrders
from trainer.learn.compute import ThreadHost, at_once
from trainer.learners.head_examples import HeadText
from trainer.learners.heads import HeadLearner
from trainer.ring.board import RingBoard
from trainer.ring.join import Way
from trainer.ring.mailbox import RingMailbox
from trainer.ring.ring import TrainerRing
from trainer.runs.heads import HeadRun
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import CheckpointStore

STEPS = 3
PAIRS = [{"prompt": f"{at}+3=", "chosen": f"9{at % 7}", "rejected": f"1{at % 5}"} for at in range(40)]


class Workers:
    """Say what the learner says, after having been asked so often in vain."""

    def __init__(
        self,
        in_vain: int = 0,
        asked: Callable[[HeadRun], None] = lambda run: None,
        error: float = 0.0,
        away: Exception | None = None,
    ) -> None:
        self.left, self._asked, self._error, self._away = in_vain, asked, error, away
        self.run: HeadRun | None = None
        self.codec: TextCodec | None = None

    async def score(self, name: str, options: ModelOptions, samples: Sequence[RewardSample], **_: Any) -> list[Reward]:
        run = self.run
        assert run is not None
        self._asked(run)
        self.left -= 1
        if self.left >= 0:
            if self._away is not None:
                raise self._away
            return [Reward(name, None, error=f"{UNANSWERED} 'tiny' within 120 s")] * len(samples)
        assert self.codec is not None
        ids = [tuple(answered(self.codec, sample.prompt, sample.completion)) for sample in samples]
        said = await run.learner.call(HeadLearner.read, [HeadText(None, "", each) for each in ids])
        return [Reward(name, value + self._error) for (value,) in said]

    async def outputs(self, name: str, head: str, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        run = self.run
        assert run is not None and (name, head) == ("judge@1", "policy")
        self.left -= 1
        if self.left >= 0 and self._away is not None:
            raise self._away
        said = await run.learner.call(HeadLearner.read, [HeadText(None, "", tuple(each)) for each in texts])
        return [[value + self._error for value in each] for each in said]

    async def check(self, reward: Any) -> None:
        """They can be asked."""


async def train(
    folder: Path,
    workers: Workers,
    sink: MemorySink,
    *,
    base: str = "",
    ring_id: str = "",
    lines: Sequence[dict[str, Any]] = PAIRS,
    **changes: Any,
) -> HeadRun:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"mode": "reward", "model": "models/tiny", "dataset": data, "run_dir": folder, "adapter": "judge"}
    given |= {"steps": STEPS, "prompts_per_step": 8, "head_only": True, **changes}
    settings = TrainSettings.model_construct(**(TrainSettings().model_dump() | given))
    async with ThreadHost() as host, RingMailbox(NoOrders()) as mailbox:
        loaded = await host.run(at_once(lambda: load_model(EngineConfig("models/tiny"))))
        source = InProcessSource(host, loaded.model, settings.adapter_shape(), sink, loaded.card.eos_token_ids)
        workers.codec = codec = TextCodec(loaded.tokenizer)
        served = base or loaded.card.base_sha256
        ring = TrainerRing(served, codec, source, sink, RingBoard(NoBoard()), mailbox, id=ring_id)
        workers.run = run = HeadRun(settings, host, Way(workers, lambda _: pytest.fail("joined")), ring)
        await run.start(loaded)
        await run.run()
    return run


@pytest.mark.parametrize("action", [lambda at: ("left", "right")[at % 2], lambda at: [float(at % 2), 900 + at]])
@pytest.mark.parametrize("error", [0.0, 0.5])
async def test_a_head_that_acts_is_served_once_a_worker_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[int], Any], error: float
) -> None:
    monkeypatch.setattr("trainer.runs.heads.ASK_AGAIN_S", 0.0)
    lines = [{"observation": f"{at % 2}", "action": action(at)} for at in range(40)]
    workers, sink = Workers(in_vain=2, away=ServiceUnavailableError("503: no worker"), error=error), MemorySink("judge")
    run = await train(tmp_path, workers, sink, lines=lines)
    discrete = isinstance(action(0), str)  # one more for all logits changes no chance
    assert (sink.latest, workers.left) == (1 if not error or discrete else 0, -1)
    line = json.loads((tmp_path / "judge" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["held_out_loss"] is not None and run.learner.learner.spec.kind == (
        "categorical" if discrete else "gaussian"
    )


async def test_a_head_goes_on_from_a_version_of_its_own(tmp_path: Path) -> None:
    """With other data, and with a LoRA that begins where there was none."""
    lines = [{"observation": f"{at % 2}", "action": [float(at % 2), 900 + at]} for at in range(40)]
    first = await train(tmp_path, Workers(), MemorySink("judge"), lines=lines)
    start = str(tmp_path / "judge" / "versions" / "1")
    others = [{"observation": line["observation"], "action": [7.0, 3.0 + at]} for at, line in enumerate(lines)]
    fields = {"run": "more", "start_from": start, "head_only": False, "head_learning_rate": 1e-9}
    more = await train(tmp_path, Workers(), MemorySink("judge"), lines=others, **fields)
    assert more.state.started_from == start
    before, after = first.learner.learner.weights(), more.learner.learner.weights()
    np.testing.assert_allclose(after["heads.policy.bias"], before["heads.policy.bias"], rtol=1e-4, atol=1e-4)
    assert any(name.endswith("lora_b") for name in after) and not any(name.endswith("lora_b") for name in before)


def learned(sink: MemorySink) -> float:
    weights = sink.versions[sink.latest]
    return float(abs(weights["heads.reward.weight"]).max())


@pytest.mark.parametrize(
    "away", [None, ServiceUnavailableError("503: no worker serves 'tiny'"), ConnectionError("gone")]
)
async def test_a_worker_that_does_not_answer_is_asked_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: Exception | None
) -> None:
    monkeypatch.setattr("trainer.runs.heads.ASK_AGAIN_S", 0.0)
    workers, sink = Workers(in_vain=3, away=away), MemorySink("judge")
    run = await train(tmp_path, workers, sink)
    assert (sink.latest, run.state.version, sink.rejected) == (1, 1, {}) and learned(sink) > 0
    assert (workers.left, run.state.unpublished) == (-1, 0)


async def test_what_no_worker_had_judged_when_the_run_was_stopped_is_offered_by_the_next_start(tmp_path: Path) -> None:
    sink = MemorySink("judge")
    run = await train(tmp_path, Workers(in_vain=1, asked=HeadRun.stop), sink)
    assert (sink.latest, run.state.train_step, run.state.unpublished) == (0, STEPS, STEPS)
    again = await train(tmp_path, Workers(), sink)
    assert (again.state.train_step, sink.latest, again.state.unpublished) == (STEPS, 2, 0) and learned(sink) > 0


async def test_a_store_that_refuses_costs_nothing_that_was_learned(tmp_path: Path) -> None:
    class Contested(MemorySink):
        async def promote(self, version: int, gate: Sequence[GateCheck], if_latest: int | None = None) -> None:
            self.latest = 7  # somebody's upload
            raise ConflictError(f"a newer version than judge@{version} has been the latest")

    with pytest.raises(ConflictError):
        await train(tmp_path, Workers(), Contested("judge"))
    checkpoint = CheckpointStore(tmp_path / "judge" / "checkpoints").load()
    assert checkpoint is not None and checkpoint.state.train_step == STEPS
    sink = MemorySink("judge")
    await train(tmp_path, Workers(), sink)
    assert sink.latest == 1 and learned(sink) > 0


async def test_a_run_that_begins_anew_leaves_the_earlier_one_and_its_best_alone(tmp_path: Path) -> None:
    await train(tmp_path, Workers(), MemorySink("judge"))
    sink = MemorySink("judge")
    again = await train(tmp_path, Workers(), sink, resume="no", steps=STEPS - 1)
    assert again.state.train_step == STEPS - 1 and sink.latest == 1
    checkpoints = CheckpointStore(tmp_path / "judge" / "checkpoints")
    assert checkpoints.names() == ["step-000002"] == [checkpoints.pointer("best")]
    assert CheckpointStore(tmp_path / "judge.1" / "checkpoints").names() == ["step-000003"]
    assert len((tmp_path / "judge" / "metrics.jsonl").read_text().splitlines()) == STEPS - 1


@pytest.mark.parametrize("home", [{"base": "another"}, {"ring_id": "another"}])
async def test_a_run_of_another_base_or_ring_is_not_gone_on_with(tmp_path: Path, home: dict[str, Any]) -> None:
    await train(tmp_path, Workers(), MemorySink("judge"), ring_id="mine")
    with pytest.raises(SetupError, match=r"another (base model|ring)"):
        await train(tmp_path, Workers(), MemorySink("judge"), **{"ring_id": "mine", **home})
    if "ring_id" in home:
        moved = await train(tmp_path, Workers(), MemorySink("judge"), move_run=True, **home)
        assert moved.state.ring == "another"


async def test_a_run_that_was_killed_tells_each_step_once(tmp_path: Path) -> None:
    await train(tmp_path, Workers(), MemorySink("judge"))
    figures = tmp_path / "judge" / "metrics.jsonl"
    with figures.open("ab") as file:
        file.write(b'{"step":4,"loss":0.5,"grad_norm":1.0}\n{"step":5,"lo')  # of steps behind the last checkpoint
    await train(tmp_path, Workers(), MemorySink("judge"), steps=STEPS + 2)
    assert [json.loads(line)["step"] for line in figures.read_text().splitlines()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("line", [b'{"train_step":1,"loss":0.5}\n', b"\0\0\0\n"])
async def test_figures_that_are_no_head_s_keep_no_run_from_its_start(tmp_path: Path, line: bytes) -> None:
    figures = tmp_path / "judge" / "metrics.jsonl"
    figures.parent.mkdir()
    figures.write_bytes(line)  # a policy's of this name, killed before its first checkpoint; or a machine's crash
    await train(tmp_path, Workers(), MemorySink("judge"))
    assert [json.loads(line)["step"] for line in figures.read_bytes().splitlines()] == [1, 2, 3]


async def test_a_resumed_run_that_has_no_version_yet_falls_back_to_where_it_began(tmp_path: Path) -> None:
    def die(run: HeadRun) -> None:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await train(tmp_path, Workers(asked=die), MemorySink("judge"))
    run = await train(tmp_path, Workers(error=1000.0), MemorySink("judge"))
    assert run.state.rejected == 1 and not run.learner.learner.weights()["heads.reward.weight"].any()


async def test_what_is_learned_between_two_candidates_is_in_checkpoints(tmp_path: Path) -> None:
    await train(tmp_path, Workers(), MemorySink("judge"), steps=5, checkpoint_every=2)
    names = CheckpointStore(tmp_path / "judge" / "checkpoints").names()
    assert names == ["step-000002", "step-000004", "step-000005"]


async def test_a_resumed_run_falls_back_to_the_last_good_version_not_to_its_checkpoint(tmp_path: Path) -> None:
    def die(run: HeadRun) -> None:
        raise RuntimeError("killed")

    sink = MemorySink("judge")
    await train(tmp_path, Workers(), sink)
    with pytest.raises(RuntimeError, match="killed"):
        await train(tmp_path, Workers(asked=die), sink, steps=STEPS + 2)
    run = await train(tmp_path, Workers(error=1000.0), sink, steps=STEPS + 2)
    assert (sink.latest, run.state.rejected, run.state.train_step) == (1, 1, STEPS + 2)
    name = "heads.reward.weight"
    assert (run.learner.learner.weights()[name] == sink.versions[1][name]).all()


async def test_a_run_ends_where_somebody_else_has_moved_the_latest_version(tmp_path: Path) -> None:
    """Whoever rolls back by hand is not overruled by the next version, nor by a start of the run."""
    asked, sink = 0, MemorySink("judge")

    def roll_back(run: HeadRun) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            sink.latest = 1

    with pytest.raises(ConflictError, match="version 1 has become the latest meanwhile, it was 2"):
        await train(tmp_path, Workers(asked=roll_back), sink, steps=6, evaluate_every=2)
    assert sink.latest == 1 and 3 in sink.rejected
    sink.latest = 7
    with pytest.raises(ConflictError, match="judge@7 is the latest, and not of this run"):
        await train(tmp_path, Workers(), sink, steps=6, evaluate_every=2)
    sink.latest = 2
    run = await train(tmp_path, Workers(), sink, steps=6, evaluate_every=2)
    assert sink.latest == run.state.version > 3 and run.state.train_step == 6


async def test_a_run_under_a_name_that_others_have_served_replaces_their_version_only_where_it_may(
    tmp_path: Path,
) -> None:
    sink = MemorySink("judge")
    await train(tmp_path, Workers(), sink)
    with pytest.raises(SetupError, match="judge@1 is served"):
        await train(tmp_path, Workers(), sink, run="another")
    await train(tmp_path, Workers(), sink, run="another", replace_latest=True)
    assert sink.latest == 2
