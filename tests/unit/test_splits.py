"""Shares and verdicts of splits: from counts alone, at any scale of rewards."""

import random

import pytest

from shared.splits import Belief, RewardSums, Split, beliefs, best_chances, shares, winner

EVEN = Split((3, 4), (0.5, 0.5), 3)


def earned(*rewards: float) -> RewardSums:
    mean = sum(rewards) / len(rewards)
    return RewardSums(len(rewards), mean, sum((each - mean) ** 2 for each in rewards))


def ups(count: int, of: int) -> RewardSums:
    return earned(*[1.0] * count, *[0.0] * (of - count))


def test_shares_begin_as_they_are_written_and_move_to_what_earns_more() -> None:
    careful = Split((3, 4), (0.9, 0.1), 3, floor=0.01)
    assert shares(careful, {}) == pytest.approx((0.892, 0.108))
    assert shares(careful, {3: ups(5, 5)}) == shares(careful, {}), "equal rewards tell nothing"
    better = shares(careful, {3: ups(20, 50), 4: ups(40, 50)})
    assert better[1] > 0.95 and sum(better) == pytest.approx(1)
    worse = shares(careful, {3: ups(40, 50), 4: ups(20, 50)})
    assert worse[1] == pytest.approx(0.01, abs=1e-3), "the floor"
    assert shares(Split((3, 4), (0.9, 0.1), 3, auto=False), {3: ups(1, 50), 4: ups(50, 50)}) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("scale", "shift"), [(1e-6, 0.0), (1.0, -5.0), (1e6, 0.0), (1e3, 1e6), (1e-10, 0.0), (1.0, 1e9), (1e-90, 0.0)]
)
def test_the_scale_of_rewards_changes_nothing(scale: float, shift: float) -> None:
    draw = random.Random(1)
    good, bad = [draw.gauss(1, 1) for _ in range(30)], [draw.gauss(0.5, 1) for _ in range(30)]
    plain = shares(EVEN, {3: earned(*good), 4: earned(*bad)})
    told = shares(EVEN, {3: earned(*(scale * x + shift for x in good)), 4: earned(*(scale * x + shift for x in bad))})
    assert told == pytest.approx(plain, abs=1e-4) and plain[0] > 0.6


@pytest.mark.parametrize("tiny", [0.0, 5e-324, 1e-300])
def test_no_counts_make_shares_that_cannot_be_computed(tiny: float) -> None:
    """Weights and chances that arithmetic takes for 0."""
    lopsided = Split((3, 4), (tiny, 1.0), 4)
    for count in (1, 50, 20_000):
        for rewards in (
            {3: RewardSums(count, 1e9), 4: RewardSums(count, -1e9)},
            {3: RewardSums(count, -1e9), 4: RewardSums(1, 1e9)},
        ):
            told = shares(lopsided, rewards)
            assert sum(told) == pytest.approx(1) and min(told) >= lopsided.floor
    known = beliefs(EVEN, {3: ups(10, 30), 4: ups(14, 30)})
    assert known is not None and sum(best_chances(known)) == pytest.approx(1)
    assert best_chances([Belief(0.0, 1e-9), Belief(9.0, 1e-9)])[0] >= 0
    assert best_chances([Belief(12.0, 1.0), Belief(0.0, 1.0)])[1] > 0, "small and not lost in 1 - x"


def test_a_version_that_nobody_has_judged_is_tried_and_one_outlier_decides_nothing() -> None:
    three = Split((3, 4, 5), (1 / 3, 1 / 3, 1 / 3), 3)
    told = shares(three, {3: ups(30, 60), 4: ups(2, 60)})
    assert told[2] > 0.2 and told[1] < 0.02 and sum(told) == pytest.approx(1)
    absurd = {3: ups(60, 100), 4: earned(*[0.0] * 60, *[1.0] * 39, 1e6)}
    assert shares(EVEN, absurd)[1] < 0.95 and winner(EVEN, absurd)[0] == 3


def test_chances_of_several_agree_with_those_of_two() -> None:
    known = beliefs(EVEN, {3: ups(10, 30), 4: ups(14, 30)})
    assert known is not None
    far = [*known, type(known[0])(-100.0, 0.1)]
    assert best_chances(far)[:2] == pytest.approx(best_chances(known), abs=1e-6)


def test_the_verdict_needs_confidence_against_the_latest_version() -> None:
    assert winner(EVEN, {3: ups(10, 50), 4: ups(40, 50)})[0] == 4
    assert winner(EVEN, {3: ups(24, 50), 4: ups(25, 50)})[0] == 3, "no difference: all stays"
    assert winner(EVEN, {3: ups(40, 50), 4: ups(10, 50)})[0] == 3
    assert winner(EVEN, {3: ups(5, 5), 4: ups(5, 5)})[0] == 3
    assert winner(Split((3, 4), (0.5, 0.5), 4), {3: ups(40, 50), 4: ups(10, 50)})[0] == 3, "back to the older one"
    twins = Split((3, 4, 5), (0.4, 0.3, 0.3), 3)
    assert winner(twins, {3: ups(10, 60), 4: ups(50, 60), 5: ups(49, 60)})[0] == 4, "two good ones do not block another"


def test_shares_of_the_same_counts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0

    def counted(known: list[Belief]) -> list[float]:
        nonlocal computed
        computed += 1
        return best_chances(known)

    monkeypatch.setattr("shared.splits.best_chances", counted)
    many = Split(tuple(range(3, 11)), (0.125,) * 8, 3)
    counts = {version: ups(version, 37) for version in many.versions}
    assert [shares(many, dict(counts)) for _ in range(8)] == [shares(many, counts)] * 8 and computed == 1
    assert shares(many, counts | {3: ups(30, 37)}) != shares(many, counts) and computed == 2


def test_a_winner_is_found_behind_a_mean_that_is_higher_by_luck() -> None:
    three = Split((1, 2, 3), (0.4, 0.3, 0.3), 1)
    assert winner(three, {1: ups(50, 100), 2: ups(239, 299), 3: ups(1, 1)})[0] == 2
    assert winner(three, {1: ups(30, 100), 2: ups(252, 298), 3: ups(2, 2)})[0] == 2, "two rewards promote nobody"
    assert winner(three, {1: ups(50, 100), 2: ups(130, 200), 3: ups(10, 10)})[0] == 3


def test_a_verdict_moves_nothing_on_a_few_rewards_of_one_version() -> None:
    best, why = winner(EVEN, {3: ups(0, 9), 4: ups(391, 391)})
    assert best == 3 and "10 rewards of each" in why
    assert winner(EVEN, {3: ups(391, 391), 4: ups(0, 9)})[0] == 3
    assert winner(EVEN, {3: ups(0, 10), 4: ups(390, 390)})[0] == 4


def test_confidence_is_shared_by_the_versions_that_are_compared() -> None:
    told = {3: ups(100, 200), 4: ups(117, 200)}
    assert winner(EVEN, told)[0] == 4
    many = Split((3, 4, 5, 6, 7), (0.2,) * 5, 3)
    assert winner(many, told | {version: ups(100, 200) for version in (5, 6, 7)})[0] == 3


@pytest.mark.parametrize("floor", [0.0, 0.01, 0.12])
def test_a_version_keeps_a_share_until_a_verdict_may_compare_it(floor: float) -> None:
    even = Split((3, 4), (0.5, 0.5), 3, floor=floor)
    assert shares(even, {3: ups(0, 9), 4: ups(300, 300)})[0] >= 0.15
    assert shares(even, {3: ups(0, 10), 4: ups(300, 300)})[0] == pytest.approx(floor, abs=1e-3)
    for weights in ((0.125,) * 8, (0.15,) * 4 + (0.1,) * 4, (0.93,) + (0.01,) * 7):
        many = Split(tuple(range(3, 11)), weights, 3, floor=floor)
        told = shares(many, {3: ups(0, 2), 4: ups(300, 300)})
        assert sum(told) == pytest.approx(1) and min(told) >= floor


def test_a_bad_versions_share_is_below_a_fiftieth_within_200_requests() -> None:
    for seed in range(20):
        draw, acc, low = random.Random(seed), {3: [1.0] * 0, 4: [1.0] * 0}, False
        for _ in range(200):
            told = shares(EVEN, {version: earned(*rewards) for version, rewards in acc.items() if rewards})
            low = low or told[1] < 0.02
            version = 3 if draw.random() < told[0] else 4
            acc[version].append(float(draw.random() < (0.8 if version == 3 else 0.3)))
        assert low, seed
