"""The average of what several runs have changed, and the momentum over averages."""

import numpy as np
import pytest

from trainer.learners.federation import Average, RunChange, averaged, usable
from trainer.state import Arrays, GradientMeans


def of(*values: float) -> Arrays:
    return {"a": np.array(values, np.float32)}


def test_changes_weigh_as_many_samples_as_they_were_learned_from() -> None:
    last = Average(of(1.0, 2.0), {})
    found = averaged(last, [RunChange(of(4.0, 0.0), 30), RunChange(of(0.0, -4.0), 10)], rate=1.0, momentum=0.0)
    assert found.weights["a"].tolist() == [4.0, 1.0] and found.momentum == {}
    even = averaged(last, [RunChange(of(4.0, 0.0), 0), RunChange(of(0.0, -4.0), 0)], rate=1.0, momentum=0.0)
    assert even.weights["a"].tolist() == [3.0, 0.0]


def test_momentum_is_nesterovs_as_torch_has_it() -> None:
    place, torch_weight, torch_buffer = Average(of(0.0), {}), 0.0, 0.0
    for change in (1.0, -0.5, 0.25):
        place = averaged(place, [RunChange(of(change), 1)], rate=0.7, momentum=0.9)
        torch_buffer = 0.9 * torch_buffer - change  # torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)
        torch_weight -= 0.7 * (-change + 0.9 * torch_buffer)
        assert place.weights["a"][0] == pytest.approx(torch_weight, rel=1e-6)
    assert place.weights["a"].dtype == place.momentum["a"].dtype == np.float32


def test_means_of_gradients_weigh_alike_and_are_of_those_that_tell_them() -> None:
    last = Average(of(1.0), {})
    runs = [
        RunChange(of(1.0), 30, GradientMeans(of(2.0), of(8.0))),
        RunChange(of(1.0), 10, GradientMeans(of(-2.0), of(0.0))),
        RunChange(of(1.0), 60),
    ]
    found = averaged(last, runs, rate=1.0, momentum=0.0)
    assert (found.weights, found.means) == (of(2.0), GradientMeans(of(1.0), of(6.0)))
    assert found.means.first["a"].dtype == found.means.second["a"].dtype == np.float32
    assert averaged(last, runs[2:], rate=1.0, momentum=0.0).means == GradientMeans()


def test_what_is_of_another_adapter_or_not_finite_is_unusable() -> None:
    like = of(1.0, 2.0)
    assert usable(RunChange(of(0.0, 1.0), 1), like)
    for delta in (of(0.0), {"b": like["a"]}, of(np.nan, 0.0)):
        assert not usable(RunChange(delta, 1), like)
    assert usable(RunChange(like, 1, GradientMeans(of(-1.0, 0.0), of(1.0, 0.0))), like)
    for first, second in ((of(1.0), like), (like, of(1.0)), (like, {}), (of(np.inf, 0.0), like), (like, of(-1.0, 0.0))):
        assert not usable(RunChange(like, 1, GradientMeans(first, second)), like)
