"""Heads in an adapter's file: `heads.NAME.weight` [outputs, inputs] and `heads.NAME.bias` [outputs].

With a hidden layer also `heads.NAME.hidden.weight` [hidden, inputs] and `heads.NAME.hidden.bias` [hidden]; then
`weight` is [outputs, hidden]. Biases may be left out. What a head is stands in `adapter_config.json` under `heads`.
"""

from collections.abc import Mapping

import msgspec

from shared.adapter_files.reach import check_rows
from shared.adapter_files.tensors import Tensor
from shared.errors import AdapterRejectedError
from shared.heads import HeadSpec

PREFIX = "heads."
PARTS = ("weight", "bias", "hidden.weight", "hidden.bias")


def parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The tensors that belong to no head, and those of heads by name and part."""
    others: dict[str, Tensor] = {}
    heads: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            others[key] = tensor
            continue
        name, _, part = key.removeprefix(PREFIX).partition(".")
        if part not in PARTS:
            raise AdapterRejectedError(f"{key[:200]}: no tensor of a head; those are {', '.join(PARTS)}")
        heads.setdefault(name, {})[part] = tensor
    return others, heads


def checked_heads(
    config: Mapping[str, HeadSpec], tensors: Mapping[str, Mapping[str, Tensor]], hidden_size: int | None = 0
) -> dict[str, HeadSpec]:
    """The heads with the sizes of their tensors; AdapterRejectedError names the key and the reason.

    `hidden_size`: the base model's; 0: not known, and then checked by the worker that loads the head; None: it shows no
    hidden states.
    """
    if config and hidden_size is None:
        raise AdapterRejectedError(f"heads.{min(config)}: the base shows no hidden states that a head could read")
    if missing := sorted(config.keys() - tensors.keys()):
        raise AdapterRejectedError(
            f"heads.{missing[0]}: adapter_config.json names it, and the file has no tensors of it"
        )
    if unnamed := sorted(tensors.keys() - config.keys()):
        raise AdapterRejectedError(f"heads.{unnamed[0][:80]}: adapter_config.json says nothing of it under 'heads'")
    return {name: _checked(f"heads.{name}", spec, tensors[name], hidden_size or 0) for name, spec in config.items()}


def _checked(where: str, spec: HeadSpec, parts: Mapping[str, Tensor], hidden_size: int) -> HeadSpec:
    layered = "hidden.weight" in parts
    for part in ("hidden.weight", "weight"):
        if part in parts and len(parts[part].shape) != 2:
            raise AdapterRejectedError(f"{where}.{part}: shape {list(parts[part].shape)}; two dimensions are expected")
    if "weight" not in parts:
        raise AdapterRejectedError(f"{where}: weight is missing")
    if layered != bool(spec.activation):
        problem = (
            "has a hidden layer, and no 'activation' (gelu, relu, silu or tanh)"
            if layered
            else f"has activation '{spec.activation}', and no hidden.weight"
        )
        raise AdapterRejectedError(f"{where}: {problem}")
    hidden = parts["hidden.weight"].shape[0] if layered else 0
    inputs = parts["hidden.weight" if layered else "weight"].shape[1]
    expected = {
        "weight": (spec.outputs, hidden or inputs),
        "bias": (spec.outputs,),
        "hidden.weight": (hidden, hidden_size or inputs),
        "hidden.bias": (hidden,),
    }
    if not layered:
        expected = {"weight": (spec.outputs, hidden_size or inputs), "bias": (spec.outputs,)}
    for part, tensor in parts.items():
        if tensor.shape != expected.get(part):
            wanted = list(expected[part]) if part in expected else "no such tensor: there is no hidden layer"
            raise AdapterRejectedError(f"{where}.{part}: shape {list(tensor.shape)}, expected {wanted}")
        index = tensor.first_not_finite()
        if index is not None:
            raise AdapterRejectedError(f"{where}.{part}: value {index} is not finite")
        check_rows(f"{where}.{part}", tensor)
    for field, given, size in (("inputs", spec.inputs, inputs), ("hidden", spec.hidden, hidden)):
        if given not in (0, size):
            raise AdapterRejectedError(f"{where}: adapter_config.json says {field} {given}, its tensors have {size}")
    try:
        return msgspec.structs.replace(spec, inputs=inputs, hidden=hidden)
    except ValueError as error:  # too wide
        raise AdapterRejectedError(f"{where}: {error}") from error
