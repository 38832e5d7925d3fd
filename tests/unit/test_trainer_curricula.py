"""Which tasks are drawn: by what they have earned, by how hard they are, and the same again after a resume."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from shared.errors import SetupError
from tests.unit.test_trainer_collect import Player, fresh, settle
from trainer.rollouts.collector import Collector
from trainer.rollouts.curriculum import Curriculum
from trainer.rollouts.curriculum_settings import CurriculumOptions
from trainer.rollouts.difficulty import DifficultyField
from trainer.rollouts.environments import DatasetEnvironment, Observation, Outcome, Scored, read_jsonl
from trainer.rollouts.groups import RolloutGroup
from trainer.rollouts.pacing import Pace
from trainer.rollouts.task_places import WantedDifficulty, kinds_of, places_of
from trainer.rollouts.task_pool import TaskPool
from trainer.runs.inbox import ENDLESS, open_curriculum
from trainer.settings import TrainSettings
from trainer.state import CurriculumBooks, RunState

BY_REWARD = CurriculumOptions("reward", floor=0.0)


def drawn(curriculum: Curriculum, indices: range) -> list[int]:
    for index in indices:
        curriculum.draw(index)
    return [curriculum.drawn(index).task for index in indices]


def test_solved_and_hopeless_tasks_weigh_little_and_unseen_ones_most() -> None:
    pool = TaskPool(4, target=0.5)
    for task, share in enumerate((0.0, 0.5, 1.0)):
        pool.count(task, index=task, share=share, samples=16)
    hopeless, between, solved, unseen = pool.weights()
    assert unseen == between == 1
    assert hopeless == pytest.approx(solved) and 0 < solved < 0.15
    shares = pool.shares()
    assert (shares.solved, shares.hopeless, shares.unseen) == (0.25, 0.25, 0.25)


def test_the_target_says_where_weights_are_highest() -> None:
    pool = TaskPool(9, target=0.7)
    for task in range(9):
        pool.count(task, index=task, share=(task + 1) / 10, samples=1000)
    assert int(pool.weights().argmax()) == 6
    assert pool.weights().max() == pytest.approx(1, abs=1e-3)


def test_what_a_task_earned_last_counts_most_and_a_late_group_of_earlier_changes_nothing() -> None:
    pool = TaskPool(1, target=0.5)
    for index in range(4):
        pool.count(0, index, share=0.0, samples=8)
    for index in range(4, 8):
        pool.count(0, index, share=1.0, samples=8)
    pool.count(0, index=3, share=0.0, samples=8)
    assert pool.shares().solved == 0 and pool.weights()[0] < 0.5
    pool.count(0, index=8, share=1.0, samples=8)
    assert pool.shares().solved == 1


def test_unseen_tasks_of_a_hopeless_kind_weigh_little() -> None:
    pool = TaskPool(100, target=0.5, kinds=np.repeat([0, 1], 50))
    for task in (0, 1, 2, 3):
        pool.count(task, task, share=0.0, samples=8)
    weights = pool.weights()
    assert weights[49] < 0.2 and weights[50] == 1
    for index in range(10, 50):
        pool.count(index % 50, index, share=0.5, samples=64)
    assert pool.weights()[9] > 0.8, "a kind that is learned is drawn again"


def test_large_groups_leave_nothing_below_zero() -> None:
    pool = TaskPool(2, target=0.5, kinds=np.array([0, 0]))
    for index in range(50):
        pool.count(index % 2, index, share=0.0, samples=4096)
    assert (pool.weights() > 0).all() and (pool.weights() < 1e-3).all()


def test_tasks_that_teach_are_drawn_and_a_floor_forgets_none() -> None:
    curriculum = Curriculum(CurriculumOptions("reward", floor=0.2), 10)
    for start in range(0, 400, 10):
        tasks = drawn(curriculum, range(start, start + 10))
        rewards = [[1.0, 0.0] * 4 if task < 2 else [float(task % 2)] * 8 for task in tasks]
        curriculum.learned(range(start, start + 10), rewards)
    counts = Counter(
        task for start in range(400, 1400) for task in _drawn_and_forgotten(curriculum, range(start, start + 1))
    )
    assert counts[0] + counts[1] > 500, "of 1,000; 200 if drawn evenly"
    assert all(counts[task] >= 10 for task in range(10))


def _drawn_and_forgotten(curriculum: Curriculum, indices: range) -> list[int]:
    tasks = drawn(curriculum, indices)
    curriculum.dropped(indices)
    return tasks


def test_no_task_is_drawn_twice_while_others_are_free_and_a_small_set_never_ends() -> None:
    assert sorted(drawn(Curriculum(BY_REWARD, 8), range(8))) == list(range(8))
    assert len(drawn(Curriculum(BY_REWARD, 3), range(50))) == 50


def test_draws_follow_the_seed_and_the_index_alone() -> None:
    first, again, other = (Curriculum(CurriculumOptions("reward", seed=seed), 1000) for seed in (1, 1, 2))
    assert drawn(first, range(64)) == drawn(again, range(64)) != drawn(other, range(64))


def test_a_resumed_curriculum_draws_as_one_that_was_never_stopped() -> None:
    options, places = CurriculumOptions("difficulty"), places_of(range(40))
    whole = Curriculum(options, 40, places, "tasks")
    tasks = drawn(whole, range(32))
    whole.learned(range(16), [[1.0, float(task % 3 == 0)] for task in tasks[:16]])
    whole.dropped([16, 17])
    state = RunState("run", curriculum=whole.books(range(18, 32)))
    saved = msgspec.json.decode(msgspec.json.encode(state), type=RunState).curriculum
    assert saved is not None
    resumed = Curriculum(options, 40, places, "tasks")
    assert resumed.restore(saved)
    for curriculum in (whole, resumed):
        assert [curriculum.drawn(index).task for index in range(18, 32)] == tasks[18:]
        curriculum.learned(range(18, 32), [[0.5] * 2] * 14)
    assert drawn(whole, range(32, 64)) == drawn(resumed, range(32, 64))
    assert resumed.figures() == whole.figures()


def test_books_of_other_tasks_are_left() -> None:
    curriculum = Curriculum(BY_REWARD, 4, identity="these")
    assert not curriculum.restore(CurriculumBooks("others", {}, b"no books at all"))


def test_rewards_on_another_scale_are_brought_to_it() -> None:
    options = CurriculumOptions("reward", hopeless=-1, solved=3)
    assert [options.share(reward) for reward in (-2, -1, 1, 3, 5)] == [0, 0, 0.5, 1, 1]


def test_a_group_without_rewards_and_one_that_could_not_be_played_count_as_hopeless() -> None:
    curriculum = Curriculum(BY_REWARD, 3)
    drawn(curriculum, range(3))
    curriculum.learned([0, 1], [[], [0.5]])
    curriculum.failed(2)
    assert curriculum.figures().tasks_hopeless == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["reward", "difficulty"])
def test_while_nothing_can_be_scored_nothing_is_learned_about_tasks(name: Any) -> None:
    places = places_of(range(20))
    curriculum = Curriculum(CurriculumOptions(name, floor=0.0, pace=0.5), 20, places)
    drawn(curriculum, range(4))
    curriculum.learned(range(4), [[1.0, 1.0]] * 4)
    before = curriculum.figures()
    for step in range(2, 8):  # the reward's model is away
        indices = range(2 * step, 2 * step + 2)
        drawn(curriculum, indices)
        curriculum.learned(indices, [[], []])
    after = curriculum.figures()
    assert (after.tasks_hopeless, after.tasks_unseen) == (0, before.tasks_unseen)
    assert after.wanted_difficulty == before.wanted_difficulty and curriculum.books(range(100)).drawn == {}
    drawn(curriculum, range(90, 92))
    curriculum.learned([90, 91], [[], [1.0]])
    wanted = curriculum.figures().wanted_difficulty
    assert before.wanted_difficulty is None or (wanted is not None and wanted >= before.wanted_difficulty)


def test_difficulty_rises_with_rewards_and_falls_without() -> None:
    wanted = WantedDifficulty(places_of([1, 2, 3, 4, 5]), target=0.5, pace=0.1)
    assert wanted.place == pytest.approx(0.1) and int(wanted.weights().argmax()) == 0
    for _ in range(20):
        wanted.follow([int(wanted.weights().argmax())], [1.0])
    assert wanted.place == pytest.approx(0.9), "the hardest, and no farther"
    wanted.follow([0], [1.0])
    wanted.follow([4], [0.0])
    assert 0.8 < wanted.place < 0.9, "what easy tasks earn late says nothing about hard ones"


def test_places_compare_tasks_and_few_levels_are_kinds() -> None:
    assert places_of([3, 1, 1, 100]).tolist() == [0.625, 0.25, 0.25, 0.875]
    assert kinds_of(places_of([3, 1, 1, 100])).tolist() == [1, 0, 0, 2]
    many = kinds_of(places_of(range(1000)))
    assert many.min() == 0 and many.max() == 15


async def test_a_train_step_counts_what_it_consumed_and_nothing_else() -> None:
    curriculum = Curriculum(BY_REWARD, 50)
    player = Player()
    player.open = True
    async with Collector(player, Pace(2, max_lag=0), lambda: "policy", curriculum=curriculum) as collector:
        batch = await collector.next_batch(0, fresh)
        collector.give_back(batch)
        assert curriculum.figures().tasks_unseen == 1, "handed out is not learned"
        batch = await collector.next_batch(0, lambda g: 1 if g.index == 0 else 0)
        assert [g.index for g in batch] == [1, 2]
        collector.learned(batch)
        figures = curriculum.figures()
        assert len(figures.tasks) == 2 and figures.tasks_unseen == pytest.approx(0.96), "a stale one tells nothing"
        collector.pace_on(1)
        collector.discard(await collector.next_batch(1, fresh))
        assert curriculum.figures() == figures
        await collector.next_batch(1, fresh)
        books = collector.curriculum_books()
        assert books is not None and sorted(books.drawn) == collector.pending()


async def test_a_task_past_its_deadline_is_hopeless_not_unseen() -> None:
    curriculum = Curriculum(BY_REWARD, 2)
    player = Player()
    player.finish(1, 2, 3)
    pace = Pace(2, max_lag=0, group_deadline_s=0.01)
    async with Collector(player, pace, lambda: "policy", curriculum=curriculum) as collector:
        await collector.next_batch(0, fresh)
        assert collector.take_dropped() == [0]
        assert curriculum.figures().tasks_hopeless == 0.5


async def test_only_tasks_that_were_drawn_evenly_judge_a_version() -> None:
    player = Player()
    player.open = True
    evenly = Curriculum(CurriculumOptions("reward", floor=0.5), 100)
    async with Collector(player, Pace(64, max_lag=0), lambda: "policy", curriculum=evenly) as collector:
        batch = await collector.next_batch(0, fresh)
        assert {g.judges for g in batch} == {True, False}
        assert all(g.judges == evenly.drawn(g.index).evenly for g in batch)
    async with Collector(player, Pace(2, max_lag=0), lambda: "policy") as collector:
        assert all(g.judges for g in await collector.next_batch(0, fresh))


async def test_pending_groups_keep_their_tasks_after_a_resume() -> None:
    before = Curriculum(BY_REWARD, 1000, identity="tasks")
    player = Player()
    async with Collector(player, Pace(4, max_lag=0), lambda: "policy", curriculum=before) as collector:
        collector.pace_on(0)
        await settle()
        books = collector.curriculum_books()
        pending = collector.pending()
    assert books is not None and len(books.drawn) == len(pending) == 4
    after = Curriculum(BY_REWARD, 1000, identity="tasks")
    assert after.restore(books)
    player.open = True
    async with Collector(player, Pace(4, max_lag=0), lambda: "p", cursor=4, pending=pending, curriculum=after) as again:
        batch: list[RolloutGroup] = await again.next_batch(0, fresh)
        assert {g.index: after.drawn(g.index) for g in batch} == books.drawn


def test_a_hundred_thousand_tasks_take_little_room_in_a_checkpoint() -> None:
    curriculum = Curriculum(BY_REWARD, 100_000)
    indices = range(1000)
    drawn(curriculum, indices)
    curriculum.learned(indices, [[1.0]] * 1000)
    assert len(msgspec.json.encode(curriculum.books([]))) < 50_000


@pytest.mark.parametrize(
    ("line", "levels", "complaint"),
    [
        ({"prompt": "1"}, (), "there is no `difficulty`"),
        ({"prompt": "1", "difficulty": "hard"}, (), "'hard', not a number: name the levels"),
        ({"prompt": "1", "difficulty": True}, (), "True, not a number"),
        ({"prompt": "1", "difficulty": 10**400}, (), "1000.*, not a number"),
        ({"prompt": "1", "difficulty": "odd"}, ("easy", "hard"), "'odd', none of --curriculum-levels easy, hard"),
    ],
)
def test_a_line_without_a_difficulty_is_refused_by_number(
    tmp_path: Path, line: dict[str, Any], levels: tuple[str, ...], complaint: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    good = {"prompt": "0", "difficulty": "easy" if levels else 1}
    path.write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(SetupError, match=f"tasks.jsonl, line 2: .*{complaint}"):
        read_jsonl(path, difficulty=DifficultyField("difficulty", levels))
    assert len(read_jsonl(path)) == 2, "nobody else needs it"


async def never(completion: str, reference: Any, prompt: object) -> Scored:
    raise AssertionError("nothing is scored here")


async def test_levels_of_a_data_set_are_read_from_its_lines_or_their_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "a", "metadata": {"difficulty": "hard"}}, {"prompt": "b", "difficulty": "easy"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = TrainSettings(task="jsonl", dataset=path, curriculum="difficulty", curriculum_levels=("easy", "hard"))
    settings.check()
    environment = DatasetEnvironment("jsonl", read_jsonl(path, difficulty=settings.difficulty_field()), never)
    curriculum = await open_curriculum(settings, environment, RunState("run"))
    assert curriculum is not None
    tasks = Counter(task for n in range(100) for task in _drawn_and_forgotten(curriculum, range(n, n + 1)))
    (easiest, _), _ = tasks.most_common()
    assert (await environment.reset(easiest)).prompt == "b"


class Numbered:
    """Tasks without end, of a difficulty."""

    name = "numbered"

    def __init__(self, difficulty: Any = 1.5) -> None:
        self.asked: list[int] = []
        self.difficulty = difficulty

    async def reset(self, index: int) -> Observation:
        self.asked.append(index)
        return Observation("?", difficulty=self.difficulty)

    async def step(self, observation: Observation, action: str) -> Outcome:
        raise AssertionError("nothing is played here")


class Harder(Numbered):
    """Its later tasks are."""

    async def reset(self, index: int) -> Observation:
        return Observation("?", difficulty=float(index))


async def test_an_environment_without_end_gives_so_many_tasks_as_are_told() -> None:
    task = "package.module:Class"
    for count, tasks in ((0, ENDLESS), (7, 7)):
        environment = Numbered()
        settings = TrainSettings(task=task, curriculum="difficulty", task_count=count)
        settings.check()
        assert await open_curriculum(settings, environment, RunState("run")) is not None
        assert environment.asked == list(range(tasks))
    assert await open_curriculum(TrainSettings(task=task), Numbered(), RunState("run")) is None


async def test_books_of_tasks_that_are_as_hard_as_others_now_are_left() -> None:
    settings, books = TrainSettings(task="m:C", curriculum="difficulty", task_count=4), RunState("run")
    before = await open_curriculum(settings, Numbered(), books)
    assert before is not None
    drawn(before, range(4))
    before.learned(list(range(4)), [[1.0]] * 4)
    books.curriculum = before.books([])
    again = await open_curriculum(settings, Numbered(), books)
    harder = await open_curriculum(settings, Harder(), books)
    assert again is not None and again.books([]) == books.curriculum
    assert harder is not None and harder.books([]) != books.curriculum


async def test_an_environment_without_difficulties_is_refused_by_name() -> None:
    settings = TrainSettings(task="package.module:Class", curriculum="difficulty")
    with pytest.raises(SetupError, match=r"task 0 of 'numbered' has no difficulty; .*Observation\(difficulty="):
        await open_curriculum(settings, Numbered(None), RunState("run"))
    for given in ("hard", float("nan"), True):
        with pytest.raises(SetupError, match=f"'numbered': `reset` gave the difficulty {given!r}, not a number"):
            await open_curriculum(settings, Numbered(given), RunState("run"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"curriculum_floor": 0.2}, "--curriculum-floor has no use without --curriculum reward or difficulty"),
        ({"curriculum_field": "level"}, "--curriculum-field has no use without --curriculum"),
        ({"curriculum": "reward", "curriculum_pace": 0.2}, "--curriculum-pace has no use without --curriculum diff"),
        ({"curriculum": "reward", "curriculum_levels": ("a", "b")}, "goes with a --curriculum-field"),
        ({"curriculum": "difficulty"}, "the sums of --task arithmetic have no difficulty"),
        ({"curriculum": "reward", "curriculum_solved": 0.0}, "--curriculum-hopeless 0 has to be below"),
        ({"curriculum": "reward", "source": "live"}, "with --source live others do"),
        ({"curriculum": "reward", "atropos_url": "http://a:1"}, "with --atropos-url others do"),
        ({"task": "m:C", "curriculum": "difficulty", "curriculum_field": "x"}, "are of data sets"),
        (
            {"task": "jsonl", "curriculum": "difficulty", "curriculum_levels": ("a", "a")},
            "--curriculum-levels names a level twice",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SetupError, match=complaint):
        TrainSettings(**changes).check()


@pytest.mark.parametrize("name", ["curriculum_hopeless", "curriculum_solved"])
def test_bounds_are_numbers(name: str) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match=name):
            TrainSettings(curriculum="reward", **{name: value})


def test_nothing_that_compares_versions_is_worth_a_caution() -> None:
    blind = TrainSettings(curriculum="reward", curriculum_floor=0)
    assert any("nothing compares" in said for said in blind.cautions())
    assert not blind.model_copy(update={"evaluate_every": 5}).cautions()
