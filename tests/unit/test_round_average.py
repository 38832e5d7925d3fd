"""The average of what several runs have changed, and the momentum over averages."""

import numpy as np
import pytest

from trainer.rounds.average import Average, averaged, usable
from trainer.state import Arrays


def of(*values: float) -> Arrays:
    return {"a": np.array(values, np.float32)}


def test_changes_weigh_as_many_samples_as_they_were_learned_from() -> None:
    last = Average(of(1.0, 2.0), {})
    found = averaged(last, [(of(4.0, 0.0), 30), (of(0.0, -4.0), 10)], rate=1.0, momentum=0.0)
    assert found.weights["a"].tolist() == [4.0, 1.0] and found.momentum == {}
    even = averaged(last, [(of(4.0, 0.0), 0), (of(0.0, -4.0), 0)], rate=1.0, momentum=0.0)
    assert even.weights["a"].tolist() == [3.0, 0.0]


def test_momentum_is_nesterovs_as_torch_has_it() -> None:
    place, torch_weight, torch_buffer = Average(of(0.0), {}), 0.0, 0.0
    for change in (1.0, -0.5, 0.25):
        place = averaged(place, [(of(change), 1)], rate=0.7, momentum=0.9)
        torch_buffer = 0.9 * torch_buffer - change  # torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)
        torch_weight -= 0.7 * (-change + 0.9 * torch_buffer)
        assert place.weights["a"][0] == pytest.approx(torch_weight, rel=1e-6)
    assert place.weights["a"].dtype == place.momentum["a"].dtype == np.float32


def test_what_is_of_another_adapter_or_not_finite_is_unusable() -> None:
    like = of(1.0, 2.0)
    assert usable(of(0.0, 1.0), like)
    assert not usable(of(0.0), like) and not usable({"b": like["a"]}, like) and not usable(of(np.nan, 0.0), like)
