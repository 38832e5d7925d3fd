"""Named groups of arrays as bytes, for a learner's state on its way through Redis: one safetensors file.

A group whose arrays are those of an earlier one is not written again: after a good train step most of a learner's
weights are the same.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

Group = Mapping[str, npt.NDArray[Any]]
_SAME = "same"  # the name of an array of JSON: which group is which


def pack(groups: Mapping[str, Group]) -> bytes:
    """Groups as a file, safetensors' layout."""
    written: dict[str, Group] = {}
    same: dict[str, str] = {}
    for name, group in groups.items():
        same[name] = next((other for other, known in written.items() if _equal(known, group)), name)
        if same[name] == name:
            written[name] = group
    arrays = {
        f"{at}/{name}": np.asarray(array, order="C") for at, group in written.items() for name, array in group.items()
    }
    return save({**arrays, _SAME: np.frombuffer(json.dumps(same).encode(), np.uint8)})


def unpack(data: bytes, *needed: str) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Inverse of `pack`; ValueError when the bytes are not a packed message, or a needed group is missing."""
    try:
        arrays = load(data)
        same: dict[str, str] = json.loads(arrays.pop(_SAME).tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError("these bytes are no learner's state") from error
    written: dict[str, dict[str, npt.NDArray[Any]]] = {name: {} for name in same.values()}
    for path, array in arrays.items():
        at, _, name = path.partition("/")
        written[at][name] = array
    if missing := sorted(set(needed) - same.keys()):
        raise ValueError(f"of a learner's state there is no {missing[0]}")
    return {name: written[other] for name, other in same.items()}


def _equal(one: Group, other: Group) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
