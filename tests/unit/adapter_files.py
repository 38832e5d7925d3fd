"""Small adapters on disk, in both formats, and the ways in which they can be wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float32]

IN, OUT, RANK = 12, 20, 4
Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"
SHAPES = {Q: (IN, OUT), V: (IN, OUT), "model.layers.0.mlp.up_proj": (IN, 40)}


def lora(modules: tuple[str, ...] = (Q, V), *, rank: int = RANK, dora: bool = False, seed: int = 0) -> dict[str, Array]:
    """mlx-lm's tensors."""
    draw = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for module in modules:
        tensors[f"{module}.lora_a"] = draw.standard_normal((IN, rank)).astype(np.float32)
        tensors[f"{module}.lora_b"] = draw.standard_normal((rank, OUT)).astype(np.float32)
        if dora:
            tensors[f"{module}.m"] = draw.random(OUT, dtype=np.float32) + 1
    return tensors


def mlx_config(**changes: Any) -> dict[str, Any]:
    """A configuration as mlx-lm's trainer writes it."""
    return {
        "model": "somewhere/model",
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": 20.0, "dropout": 0.0},
        "learning_rate": 1e-5,
        **changes,
    }


def peft_config(**changes: Any) -> dict[str, Any]:
    """A configuration as PEFT writes it."""
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": "somewhere/model",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layer_replication": None,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": RANK,
        "rank_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **changes,
    }


def peft_tensors(tensors: dict[str, Array]) -> dict[str, Array]:
    """mlx-lm's tensors as PEFT would have saved them."""
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
    found: dict[str, Array] = {}
    for key, tensor in tensors.items():
        module, _, part = key.rpartition(".")
        found[f"base_model.model.{module}.{names[part]}"] = np.ascontiguousarray(tensor.T)
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """An adapter directory of the configuration's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "adapter_model.safetensors" if "peft_type" in config else "adapters.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt" if "peft_type" in config else "mlx"})
    return folder
