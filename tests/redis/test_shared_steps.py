"""Train steps that several processes compute: what they make is what one makes, whoever dies or is wrong on the way."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.errors import ConflictError, ServiceUnavailableError, SetupError
from tests.redis.shared_trainers import MADE, PROBES, Trainers, largest_gap, made_groups, same, steps, trainers
from tests.waiting import HANG_S, wait_until
from trainer.learn.advantages import ValueSums
from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import Work
from trainer.learn.options import LossOptions, ValueOptions
from trainer.learners.policy import PolicyLearner, Trained
from trainer.learners.shared_exchange import Computed, gradient_bytes, gradient_of
from trainer.learners.shared_member import RunMember
from trainer.learners.shared_step import PartComputation
from trainer.state import Arrays

SEVERAL = replace(
    MADE,
    optimize=replace(
        MADE.optimize, minibatches=2, epochs=2, loss=LossOptions("grpo", kl_coefficient=0.1, entropy_bonus=0.01)
    ),
)


VALUED = replace(
    SEVERAL,
    optimize=replace(
        SEVERAL.optimize,
        loss=LossOptions("ppo", 0.2, 0.2, kl_coefficient=0.1, entropy_bonus=0.01),
        value=ValueOptions(hidden=4, rate=10.0, discount=0.9, decay=0.8, scale="std"),
    ),
)


@pytest.mark.parametrize(
    "options", [MADE, SEVERAL, VALUED], ids=["one update", "four updates, KL, entropy", "a value head"]
)
async def test_two_and_three_processes_make_what_one_makes(redis_url: str, options: Any) -> None:
    outcomes = []
    for count in (0, 1, 2):
        async with trainers(redis_url, options) as ring:
            alone = await ring.alone()
            groups = [await made_groups(alone, seed) for seed in range(3)]
            learner = alone
            if count:
                learner = await ring.leader(trainers=1 + count)
                for _ in range(count):
                    await ring.member()
            outcomes.append(await steps(learner, groups))
            if count:
                assert len(learner.speeds) == 1 + count, "all have computed"  # type: ignore[attr-defined]
    for shared in outcomes[1:]:
        for mine, theirs in zip(outcomes[0], shared, strict=True):
            assert theirs.report.loss == pytest.approx(mine.report.loss, abs=1e-6)
            assert theirs.report.grad_norm == pytest.approx(mine.report.grad_norm, rel=1e-5)
            assert (theirs.report.tokens, theirs.report.sequences) == (mine.report.tokens, mine.report.sequences)
            assert theirs.report.entropy == pytest.approx(mine.report.entropy, abs=1e-5)
            assert theirs.report.kl == pytest.approx(mine.report.kl, abs=1e-6)
            if mine.report.value_loss is not None:
                assert theirs.report.value_loss == pytest.approx(mine.report.value_loss, rel=1e-5)
                assert theirs.report.explained == pytest.approx(mine.report.explained, abs=1e-5)
            assert largest_gap(mine.weights, theirs.weights) < 1e-6


async def test_a_member_learns_from_images_that_the_leader_has_seen(redis_url: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    from tests.engine.vision_models import image_spec, picture, write_vision_model

    folder = str(write_vision_model(tmp_path / "eyes"))
    outcomes = []
    for count in (0, 1):
        async with trainers(redis_url, model=folder) as ring:
            learner: Any = await (ring.leader(trainers=2) if count else ring.alone())
            assert ring.sight is not None
            steps_of, rng = [], np.random.default_rng(0)
            for step in range(2):
                groups = []
                for at in range(4):
                    spec, sent = image_spec("s", ring.sight.vision, "What? <image> Say.", [picture(at % 3 + step)])
                    for each in sent:
                        ring.sight.show(each)
                    said = [tuple(rng.integers(0, 99, 5).tolist()) for _ in range(2)]
                    samples = [
                        Sample(ids, (-4.0,) * 5, (True,) * 5, (0,) * 5, 1 - 2.0 * i) for i, ids in enumerate(said)
                    ]
                    images = {"images": spec.images, "image_token": spec.image_token}
                    groups.append(SampleGroup(f"g{at}", spec.prompt_ids, tuple(samples), **images))  # type: ignore[arg-type]
                steps_of.append(groups)
            if count:
                member = await ring.member()
            outcomes.append(await steps(learner, steps_of))
            if count:
                assert member.name in learner.speeds, "it has computed"
                assert member.sight is not None and ring.sight.knows(spec.images[0].key)
                assert any(member.sight.knows(image.key) for groups in steps_of for g in groups for image in g.images)
    for mine, theirs in zip(*outcomes, strict=True):
        assert theirs.report.loss == pytest.approx(mine.report.loss, abs=1e-6)
        assert theirs.report.grad_norm == pytest.approx(mine.report.grad_norm, rel=1e-5)
        assert largest_gap(mine.weights, theirs.weights) < 1e-6


async def outcome(redis_url: str, spoil: Any = None) -> tuple[list[Trained], list[BaseException | None]]:
    """Three steps of a leader and two members, the first of which is spoilt; how the members' lives ended."""
    async with trainers(redis_url, VALUED) as ring:
        learner = await ring.leader(trainers=3)
        groups = [await made_groups(learner, seed) for seed in range(3)]
        # By name, as parts go: the first has no samples of the first update, and some of the two that follow.
        first, second = sorted([await ring.member(), await ring.member()], key=lambda each: each.name)
        if spoil is not None:
            spoil(first, ring)
        done = await steps(learner, groups)
        tasks = [ring.tasks[member.name] for member in (first, second)]
        ends = [task.exception() if task.done() and not task.cancelled() else None for task in tasks]
    return done, ends


@pytest.fixture(scope="module")
def kept() -> list[list[Trained]]:
    return []


@pytest.fixture
async def undisturbed(redis_url: str, kept: list[list[Trained]]) -> list[Trained]:
    """Made by the first test that asks for it."""
    if not kept:
        kept.append((await outcome(redis_url))[0])
    return kept[0]


def breaks(member: RunMember, ring: Trainers) -> None:
    def failing(part: PartComputation, update: int, weights: Arrays, known: ValueSums | None) -> Work[Computed]:
        if update == 2:
            raise RuntimeError("out of memory")
        return original(part, update, weights, known)

    original, member.gradient = member.gradient, failing  # type: ignore[method-assign]


def lies(member: RunMember, ring: Trainers) -> None:
    def wrong(part: PartComputation, update: int, weights: Arrays, known: ValueSums | None) -> Work[Computed]:
        computed = yield from original(part, update, weights, known)
        return replace(computed, gradient={name: value * np.nan for name, value in computed.gradient.items()})

    original, member.gradient = member.gradient, wrong  # type: ignore[method-assign]


def lies_of_values(member: RunMember, ring: Trainers) -> None:
    def wrong(part: PartComputation, update: int, weights: Arrays, known: ValueSums | None) -> Work[Computed]:
        computed = yield from original(part, update, weights, known)
        return replace(computed, known=computed.known and replace(computed.known, returns=np.nan))

    original, member.gradient = member.gradient, wrong  # type: ignore[method-assign]


def dies(member: RunMember, ring: Trainers) -> None:
    """As kill -9 leaves it, once it has begun: nothing is said, and the heartbeats have ended."""

    async def silent(*_: object) -> None: ...

    async def dying(*_: object) -> None:
        member.shared_run.members.beat = silent  # type: ignore[method-assign]
        await member.shared_run.members.gone(member.name)
        await asyncio.get_running_loop().create_future()

    member.compute = dying  # type: ignore[method-assign]


def answers_late(member: RunMember, ring: Trainers) -> None:
    """Frozen in the midst of its part until the others have made a step: its answer comes, and is nobody's."""

    async def late(body: bytes) -> None:
        members = member.shared_run.members
        beat, members.beat = members.beat, silent  # type: ignore[method-assign]
        await members.gone(member.name)
        while not any(word for word in await ring.run_of(member).words(member.after, 0.05)):
            pass
        members.beat = beat  # type: ignore[method-assign]
        await original(body)

    async def silent(*_: object) -> None: ...

    original, member.shared_run.answer = member.shared_run.answer, late  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [breaks, lies, lies_of_values, dies, answers_late])
async def test_what_a_member_does_not_do_is_done_by_the_leader_to_the_byte(
    redis_url: str, undisturbed: list[Trained], spoil: Any
) -> None:
    done, ends = await outcome(redis_url, spoil)
    assert same(done[0].weights, undisturbed[0].weights)
    for mine, theirs in zip(undisturbed, done, strict=True):  # later steps have other parts: one member less
        assert theirs.report.loss == pytest.approx(mine.report.loss, abs=1e-6)
        assert theirs.report.nonfinite_gradients == 0
        assert largest_gap(mine.weights, theirs.weights) < 1e-5
    assert isinstance(ends[0], ServiceUnavailableError) == (spoil in (breaks, lies, lies_of_values))
    assert ends[1] is None


async def test_a_member_that_lives_and_never_answers_is_given_up(
    redis_url: str, undisturbed: list[Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any update, and soon it gets nothing more to do."""
    monkeypatch.setattr("trainer.learners.shared_step.LEAST_PATIENCE_S", HANG_S)
    answers: list[bytes] = []

    async with trainers(redis_url, VALUED) as ring:
        learner = await ring.leader(trainers=2)
        member = await ring.member()
        answer = member.shared_run.answer

        async def hung(body: bytes) -> None:
            answers.append(body)
            if len(answers) <= 3:  # a look and two updates
                await answer(body)
                return
            monkeypatch.setattr("trainer.learners.shared_step.LEAST_PATIENCE_S", 0.5)
            monkeypatch.setattr("trainer.learners.shared_step.PATIENCE", 2.0)
            learner.lead.expect(0.5)
            await asyncio.get_running_loop().create_future()

        member.shared_run.answer = hung  # type: ignore[method-assign]
        groups = [await made_groups(learner, seed) for seed in range(3)]
        done = await steps(learner, groups)
        assert all(each.report.updated for each in done)
        for mine, theirs in zip(undisturbed, done, strict=True):
            assert theirs.report.loss == pytest.approx(mine.report.loss, abs=1e-6)
            assert largest_gap(mine.weights, theirs.weights) < 1e-5
        assert len(answers) == 4 and await learner.lead.members() == [member.name]
        assert learner.speeds[member.name] < learner.speeds[""] / 2
        learner.speeds |= {member.name: 1.0, "": 1e9}
        await learner.call(PolicyLearner.train, groups[0], 3, 3, PROBES)
        assert learner.speeds[member.name] == pytest.approx(1.05), "who had nothing to do was not late with it"


async def test_data_without_a_finite_gradient_is_no_members_fault(redis_url: str) -> None:
    async with trainers(redis_url) as ring:
        learner = await ring.leader(trainers=2)
        member = await ring.member()
        groups = await made_groups(learner, 0)
        bad = [replace(each, samples=tuple(replace(s, advantage=np.inf) for s in each.samples)) for each in groups]
        before = await learner.weights()
        trained = await learner.call(PolicyLearner.train, bad, 0, 0, PROBES)
        assert trained.report.nonfinite_gradients == 1 and not trained.report.updated
        assert same(await learner.weights(), before)
        await learner.revert()
        assert (await learner.call(PolicyLearner.train, groups, 1, 0, PROBES)).report.updated
        assert not ring.tasks[member.name].done() and len(learner.speeds) == 2


async def test_a_minibatch_in_which_a_member_had_nothing_says_nothing_of_its_speed(redis_url: str) -> None:
    rates: list[str] = []

    class Kept(dict[str, float]):
        def __setitem__(self, name: str, rate: float) -> None:
            rates.append(name)
            super().__setitem__(name, rate)

    async with trainers(redis_url, SEVERAL) as ring:
        learner = await ring.leader(trainers=2)
        member = await ring.member()
        learner.speeds = Kept()
        groups = [replace(each, samples=each.samples[-1:]) for each in await made_groups(learner, 0)]
        assert (await learner.call(PolicyLearner.train, groups, 0, 0, PROBES)).report.updated
    assert rates.count(member.name) == 2, "of four updates it had a sample in two: its minibatch had two, the other one"


async def test_one_that_joins_later_takes_part_and_another_leader_is_followed(redis_url: str) -> None:
    async with trainers(redis_url) as ring:
        learner = await ring.leader()
        groups = [await made_groups(learner, seed) for seed in range(4)]
        alone = await learner.call(PolicyLearner.train, groups[0], 0, 0, PROBES)
        assert learner.speeds == {} and alone.report.updated
        await learner.accept()
        member = await ring.member()
        learner.trainers = 2
        await learner.call(PolicyLearner.train, groups[1], 1, 1, PROBES)
        assert member.name in learner.speeds
        snapshot = await learner.snapshot()
        second = await ring.leader(trainers=2)
        await second.call(PolicyLearner.restore, snapshot)
        await second.call(PolicyLearner.train, groups[2], 2, 2, PROBES)
        assert member.name in second.speeds
        await wait_until(lambda: learner.lead.lost)
        with pytest.raises(ConflictError, match="another process leads"):
            await learner.call(PolicyLearner.train, groups[3], 3, 3, PROBES)


async def test_a_redis_that_is_away_and_words_that_nobody_can_read_cost_no_step(redis_url: str) -> None:
    async with trainers(redis_url) as ring:
        learner = await ring.leader(trainers=2)
        member = await ring.member()
        run = learner.lead.shared_run
        groups = [await made_groups(learner, seed) for seed in range(2)]
        send, away = run.send, [RedisConnectionError("away"), RedisConnectionError("away")]

        async def failing(word: bytes) -> None:
            if away:
                raise away.pop()
            await send(word)

        run.send = failing  # type: ignore[method-assign]
        first = await learner.call(PolicyLearner.train, groups[0], 0, 0, PROBES)
        assert first.report.updated and member.name not in learner.speeds
        await learner.accept()
        await wait_until(lambda: not away)
        await send(b"not a word")
        await run.answer(b"not an answer")
        second = await learner.call(PolicyLearner.train, groups[1], 1, 1, PROBES)
        assert second.report.updated and member.name in learner.speeds
        assert not ring.tasks[member.name].done()


async def test_another_base_or_rank_is_refused_by_name(redis_url: str) -> None:
    async with trainers(redis_url) as ring:
        await ring.leader(lora_rank=4)
        for given, said in (
            ({"lora_rank": 8}, "--lora-rank 8, but the run 'shared' has 4"),
            ({"loss": "grpo"}, "--loss"),
        ):
            member = await ring.member(**given)
            with pytest.raises(SetupError, match=said):
                await ring.tasks[member.name]
        same_rank = await ring.member(lora_rank=4)
        await wait_until(lambda: same_rank.spec is not None)
        other = await ring.member(base="0" * 64)
        with pytest.raises(SetupError, match="trains another base"):
            await ring.tasks[other.name]


async def test_nobody_waits_for_ever_for_a_leader(redis_url: str) -> None:
    async with trainers(redis_url) as ring:
        member = await ring.member(learner_wait_s=0.1)
        with pytest.raises(ServiceUnavailableError, match="no process leads the run 'shared'"):
            await ring.tasks[member.name]


def test_a_rounded_gradient_is_near_and_says_what_is_not_finite() -> None:
    values = np.array([0.0, -1.0, 1 / 3, 3e38, 1e-30, np.inf, -np.inf, np.nan], np.float32)
    found = gradient_of(gradient_bytes({"a": values}, "bfloat16"), {"a": (8,)})["a"]
    np.testing.assert_allclose(found[:5], values[:5], rtol=2**-8)
    assert found[5:7].tolist() == [np.inf, -np.inf] and np.isnan(found[7])
    assert gradient_of(gradient_bytes({"a": values}, "float32"), {"a": (8,)})["a"].tobytes() == values.tobytes()
    with pytest.raises(ValueError, match="another adapter"):
        gradient_of(gradient_bytes({"a": values}, "float32"), {"a": (2, 4)})
