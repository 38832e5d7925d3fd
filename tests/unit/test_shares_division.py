"""Who computes which samples: all of them once, by the speeds, and a prompt is seldom computed twice."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.peers.division import divide


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


def test_parts_are_in_the_proportion_of_the_speeds_and_many_groups_stay_whole() -> None:
    groups = groups_of(64, 8)
    parts = divide(groups, [1.0, 2.0, 1.0])
    sizes = [sum(group.tokens for group in part) for part in parts]
    np.testing.assert_allclose(np.array(sizes) / sum(sizes), [0.25, 0.5, 0.25], atol=0.02)
    assert sum(len(part) for part in parts) == 64
    assert sorted(group.id for part in divide(groups_of(1, 8), [1.0, 1.0]) for group in part) == ["0", "0"]
