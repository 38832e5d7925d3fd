"""How a host divides its machine's memory among models, and its command line."""

import pytest

from shared.errors import SetupError
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from worker.host.memory import limit_of

NEEDS = {"small": 2, "middle": 4, "large": 8}


@pytest.mark.parametrize(
    ("room", "most", "limits"),
    [
        (20, 0, {"small": 4, "middle": 6, "large": 10}),  # all fit, and share what they leave
        (20, 1, {"small": 14, "middle": 16, "large": 20}),
        (20, 2, {"small": 6, "middle": 8, "large": 12}),  # of 8 that the two largest ones leave
        (10, 0, NEEDS),  # not all fit: each gets its need
    ],
)
def test_limits_of_models_that_fit_together_fit_together(room: int, most: int, limits: dict[str, int]) -> None:
    assert {name: limit_of(name, NEEDS, room, most) for name in NEEDS} == limits


def test_a_model_given_again_makes_the_process_a_host() -> None:
    settings = load(WorkerSettings, ["--model", "a", "--model=b", "--model", "c"])
    assert (settings.model, settings.models, settings.is_host) == ("a", ["b", "c"], True)
    assert not load(WorkerSettings, ["--model", "a"]).is_host
    assert load(WorkerSettings, ["--from-catalogue"]).given_models == ()
    assert load(WorkerSettings, ["--from-catalogue", "--model", "a"]).given_models == ("a",)
    with pytest.raises(SetupError, match="several models cannot have --served-model-name"):
        load(WorkerSettings, ["--model", "a", "--model", "b", "--served-model-name", "x"])
