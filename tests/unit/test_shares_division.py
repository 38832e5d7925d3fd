"""Who computes which samples: all of them once, by the speeds, and a prompt is seldom computed twice."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.peers import divide, longest_first


def groups_of(count: int, size: int, seed: int = 0) -> list[SampleGroup]:
    draw = np.random.default_rng(seed)

    def sample() -> Sample:
        ids = tuple(int(i) for i in draw.integers(0, 9, draw.integers(1, 30)))
        return Sample(ids, (0.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), float(draw.normal()))

    lengths = draw.integers(1, 20, count)
    return [SampleGroup(f"{n}", (1,) * int(lengths[n]), tuple(sample() for _ in range(size))) for n in range(count)]


def samples_of(groups: Sequence[SampleGroup]) -> Counter[tuple[str, float]]:
    return Counter((group.id, sample.advantage) for group in groups for sample in group.samples)


@pytest.mark.parametrize("count", [0, 1, 3, 40])
@pytest.mark.parametrize("speeds", [[1.0], [1.0, 1.0], [3.0, 1.0, 0.5]])
def test_every_sample_is_in_one_part(count: int, speeds: list[float]) -> None:
    groups = groups_of(count, 8)
    parts = divide(groups, speeds)
    assert len(parts) == len(speeds)
    assert samples_of([group for part in parts for group in part]) == samples_of(groups)
    assert all(group.samples for part in parts for group in part)


def test_parts_are_in_the_proportion_of_the_speeds_and_few_groups_are_divided() -> None:
    groups = groups_of(16, 8)
    parts = divide(groups, [1.0, 2.0, 1.0])
    sizes = [sum(group.tokens for group in part) for part in parts]
    np.testing.assert_allclose(np.array(sizes) / sum(sizes), [0.25, 0.5, 0.25], atol=0.02)
    assert 16 <= sum(len(part) for part in parts) <= 18, "two borders"
    assert sorted(group.id for part in divide(groups_of(1, 8), [1.0, 1.0]) for group in part) == ["0", "0"]


def test_what_cannot_be_divided_is_the_first_ones() -> None:
    (group,) = groups_of(1, 1)
    assert divide([group], [1.0, 1.0]) == [[group], []]


def test_a_long_prompt_is_not_computed_twice_for_a_better_balance() -> None:
    groups = [SampleGroup(str(at), (1,) * 500, group.samples) for at, group in enumerate(groups_of(3, 4))]
    assert [[group.id for group in part] for part in divide(groups, [1.0, 1.0])] in (
        [["0"], ["1", "2"]],
        [["0", "1"], ["2"]],
    )


def test_items_go_to_whoever_has_least_the_longest_first() -> None:
    assert longest_first([5, 1, 9, 4], 2) == [[1, 2], [0, 3]]
    assert longest_first([3], 3) == [[0], [], []]
