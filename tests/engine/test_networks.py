"""What a network computes is what numpy says, however many rows are together and wherever a row stopped."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import AdapterRejectedError
from shared.networks.tensors import Tensors
from tests.unit.networks import ALL, LSTM, MLP, SERIES, computed, inputs_of, spec_of, weights_of
from worker.engine.networks.network import Network, Pieces, read_network


def network_of(described: dict[str, Any], seed: int = 0) -> Network:
    weights = {name: mx.array(each) for name, each in weights_of(described, seed).items()}
    return Network(spec_of(described), weights)


def finished(run: Pieces) -> tuple[Tensors, int]:
    """What it gives, and how often it has let others go first."""
    pauses = 0
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_outputs_and_state_are_those_of_a_reference(name: str, rows: int) -> None:
    described = ALL[name]
    inputs = inputs_of(described, rows, steps=37)
    found, _ = finished(network_of(described).run(inputs))
    wanted = computed(described, weights_of(described), inputs)
    assert found.keys() == wanted.keys()
    for each, values in wanted.items():
        np.testing.assert_allclose(found[each], values, rtol=1e-5, atol=1e-5)


def test_a_state_goes_on_where_it_stopped() -> None:
    network = network_of(SERIES)
    inputs = inputs_of(SERIES, 3, steps=12)
    whole, _ = finished(network.run(inputs))
    state: Tensors = {}
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        part, _ = finished(network.run({name: each[:, begin:end] for name, each in inputs.items()} | state))
        np.testing.assert_allclose(part["each"], whole["each"][:, begin:end], rtol=1e-5, atol=1e-5)
        state = {name: part[name] for name in network.spec.state}
    for name in network.spec.state:
        np.testing.assert_allclose(state[name], whole[name], rtol=1e-5, atol=1e-5)


def test_long_work_lets_others_go_first() -> None:
    _, short = finished(network_of(SERIES).run(inputs_of(SERIES, 1, steps=2)))
    _, long = finished(network_of(SERIES).run(inputs_of(SERIES, 1, steps=100)))
    assert long - short == 2 * (7 - 1), "16 steps of each recurrent layer at once"


def test_a_file_that_is_not_the_description_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file(weights_of(MLP), file)
    assert read_network("n@1", spec_of(MLP), file).nbytes == sum(each.nbytes for each in weights_of(MLP).values())
    with pytest.raises(AdapterRejectedError, match="n@1"):
        read_network("n@1", spec_of(LSTM), file)
