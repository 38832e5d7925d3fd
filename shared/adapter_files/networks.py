"""A network's weights in its file: every tensor that its layers have, under `LAYER.PART`, and no other.

What the network is stands in `adapter_config.json` under `network`. Biases may be left out.
"""

from collections.abc import Mapping

from shared.adapter_files.reach import check_rows
from shared.adapter_files.tensors import Tensor
from shared.errors import AdapterRejectedError
from shared.networks.shapes import plan
from shared.networks.spec import NetworkSpec


def check_weights(network: NetworkSpec, tensors: Mapping[str, Tensor]) -> None:
    """AdapterRejectedError names the key and the reason."""
    planned = plan(network)
    if missing := sorted(planned.tensors.keys() - planned.optional - tensors.keys()):
        raise AdapterRejectedError(f"{missing[0]} is missing, shape {list(planned.tensors[missing[0]])}")
    if unknown := sorted(tensors.keys() - planned.tensors.keys()):
        raise AdapterRejectedError(f"{unknown[0][:80]}: the network has no such tensor")
    for name, tensor in tensors.items():
        if tensor.shape != planned.tensors[name]:
            raise AdapterRejectedError(f"{name}: shape {list(tensor.shape)}, expected {list(planned.tensors[name])}")
        if (index := tensor.first_not_finite()) is not None:
            raise AdapterRejectedError(f"{name}: value {index} is not finite")
        check_rows(name, tensor)
