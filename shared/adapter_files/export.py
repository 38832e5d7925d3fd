"""An adapter of ours as an adapter directory of mlx-lm or of PEFT.

mlx-lm's is what the store keeps, with its configuration beside it. For PEFT all is transposed (formats.py has the
names), and the factor on B A, `scale`, becomes `lora_alpha` = scale * r. Modules keep the paths that mlx-lm has for
them, which are those of Hugging Face's model where mlx-lm does not rename them (Llama, Qwen, Mistral).

A network (shared/networks/) has no format but ours, whose files are called as mlx-lm's. What PEFT has no place for is
refused by name: experts' A and B, DoRA on an embedding, heads, networks.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, PEFT_FILE, inherit_config, is_embedding
from shared.adapter_files.tensors import Tensor, read_tensors, write_tensors
from shared.adapters import AdapterManifest, PreparedAdapter
from shared.errors import AdapterRejectedError

Format = Literal["mlx-lm", "peft"]

_MAX_BYTES = 2**40  # the file is one of our own
_PREFIX = "base_model.model."
_LINEAR = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_EMBEDDING = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}


def export(adapter: PreparedAdapter | AdapterManifest, tensors: Path, folder: Path, form: Format, base: str) -> None:
    """Write the two files of a format into `folder`; AdapterRejectedError when the format has no place for a part.

    `tensors`: the adapter's file in mlx-lm's layout. `base`: what the configuration says of the base model.
    """
    if form == "mlx-lm":
        shutil.copyfile(tensors, folder / MLX_FILE)
        (folder / CONFIG_FILE).write_bytes(msgspec.json.format(inherit_config(adapter)))
        return
    if adapter.network is not None:
        raise AdapterRejectedError("a network has no place in PEFT; export it as mlx-lm")
    if adapter.heads:
        raise AdapterRejectedError(f"heads.{min(adapter.heads)}: PEFT has no such heads; export it as mlx-lm")
    moved = dict(_moved(key, tensor) for key, tensor in read_tensors(tensors, max_bytes=_MAX_BYTES).items())
    write_tensors(folder / PEFT_FILE, moved, {"format": "pt"})
    (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(_peft_config(adapter, base))))


def _moved(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor under PEFT's name, in PEFT's orientation."""
    module, _, part = key.rpartition(".")
    if len(tensor.shape) > 2:
        raise AdapterRejectedError(f"{module}: PEFT has no adapters on stacked experts; export it as mlx-lm")
    names = _EMBEDDING if is_embedding(module) else _LINEAR
    if part not in names:
        raise AdapterRejectedError(f"{module}: DoRA on an embedding differs in PEFT; export it as mlx-lm")
    return f"{_PREFIX}{module}.{names[part]}", Tensor(tensor.dtype, tensor.bits.T)


def _peft_config(adapter: PreparedAdapter | AdapterManifest, base: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_dora": adapter.kind == "dora",
        "use_rslora": False,
        "target_modules": sorted(adapter.modules),
        "modules_to_save": None,
    }
    if any(map(is_embedding, adapter.modules)):  # else PEFT leaves an output layer that is tied to it as it was
        config["ensure_weight_tying"] = True
    return config
