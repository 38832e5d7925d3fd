"""`adapter_config.json` of an adapter directory: mlx-lm's own, or PEFT's.

mlx-lm (mlx_lm/LORA.md, mlx_lm/tuner/utils.py): `fine_tune_type`, `num_layers` and `lora_parameters` {rank, scale,
dropout, keys}; `scale` multiplies B A directly. PEFT (https://huggingface.co/docs/peft/package_reference/lora): `r`,
`lora_alpha`, `target_modules`, `use_dora`, `use_rslora`; the factor is alpha / r, or alpha / sqrt(r) with
rank-stabilised LoRA (arXiv 2312.03732).

`heads` beside them, or alone, describes heads (shared/heads.py); that is ours. So is `network` alone, which describes a
network that is no language model (shared/networks/spec.py).

What would change the model in a way that A, B and m do not express is refused by name, never ignored. What only
mattered to training (dropout, learning rate, ...) is ignored.
"""

import math
import re
from typing import Any, Literal

import msgspec

from shared.adapter_files.reach import SCALE_LARGEST
from shared.adapters import AdapterKind
from shared.errors import AdapterRejectedError
from shared.heads import Heads, HeadSpec, check_fields, check_heads
from shared.networks.shapes import with_shapes
from shared.networks.spec import NetworkSpec

MAX_CONFIG_BYTES = 2**20
MAX_RANK = 1024
MAX_REASON = 400  # characters of why a network is refused, which may cite what stands there

_LAYER = re.compile(r".*?\blayers\.\d+\.(?P<rest>.+)")


class AdapterConfig(msgspec.Struct, frozen=True):
    """An adapter's configuration, as both formats state it."""

    format: Literal["mlx-lm", "peft"]
    kind: AdapterKind
    rank: int
    scale: float
    targets: tuple[str, ...] = ()  # modules that the configuration names; (): it names none
    heads: dict[str, HeadSpec] = {}
    network: NetworkSpec | None = None

    def names(self, module: str) -> bool:
        """True if the configuration selects this module for an adapter."""
        if not self.targets:
            return True
        if self.format == "peft":  # PEFT: the path, or its end after a dot
            return any(module == target or module.endswith(f".{target}") for target in self.targets)
        layer = _LAYER.fullmatch(module)  # mlx-lm: the path, or the part after the layer's number
        return module in self.targets or (layer is not None and layer["rest"] in self.targets)


class _LoraParameters(msgspec.Struct, frozen=True):
    rank: int
    scale: float | None = None
    alpha: float | None = None
    keys: tuple[str, ...] | None = None


class _MlxConfig(msgspec.Struct, frozen=True):
    lora_parameters: _LoraParameters
    fine_tune_type: str = "lora"


class _PeftConfig(msgspec.Struct, frozen=True):
    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str | None = None
    use_dora: bool = False
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True


# PEFT's switches that alter the computation beyond A, B and m: anything but "off" is refused.
_PEFT_REFUSED = {
    "modules_to_save": "whole modules in addition to the adapter",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "scales that differ between modules",
    "fan_in_fan_out": "transposed base weights",
    "lora_bias": "a bias in lora_B",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapters on bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "arrow_config": "Arrow routing",
}
# Ways of starting that leave the base weights as they are; others (PiSSA, OLoRA, CorDA, LoftQ) rewrite them.
_PEFT_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def read_config(data: bytes) -> AdapterConfig:
    """Read either format; AdapterRejectedError names the field that is not taken."""
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterRejectedError(f"adapter_config.json has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are taken")
    try:
        raw = msgspec.json.decode(data, type=dict[str, Any])
        if "network" in raw:
            return _network(raw)
        heads = _heads(raw.pop("heads", {}))
        config = _peft(raw) if "peft_type" in raw or "r" in raw else _mlx(raw, has_heads=bool(heads))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRejectedError(f"adapter_config.json: {error}") from error
    config = msgspec.structs.replace(config, heads=heads)
    if config.kind == "head":
        return config
    if not 1 <= config.rank <= MAX_RANK:
        raise AdapterRejectedError(f"adapter_config.json: rank {config.rank} is not within 1 to {MAX_RANK}")
    if not abs(config.scale) <= SCALE_LARGEST:
        raise AdapterRejectedError(f"adapter_config.json: scale {config.scale} is not finite in float32")
    return config


def network_config(network: NetworkSpec) -> bytes:
    """An `adapter_config.json` of a network."""
    return msgspec.json.encode({"network": network})


def mlx_config(
    kind: AdapterKind, rank: int, scale: float, modules: tuple[str, ...], heads: Heads | None = None
) -> bytes:
    """An `adapter_config.json` with which `mlx_lm` loads a LoRA of ours (`--adapter-path`); it passes over heads."""
    described = {"heads": heads} if heads else {}
    if kind == "head":
        return msgspec.json.encode(described)
    keys = {layer["rest"] if (layer := _LAYER.fullmatch(module)) else module for module in modules}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(keys)}
    # -1: all layers. A layer that the file does not name keeps lora_b = 0, which is the base.
    return msgspec.json.encode({"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, **described})


def _heads(raw: Any) -> dict[str, HeadSpec]:
    heads: dict[str, HeadSpec] = {}
    for name, described in msgspec.convert(raw, dict[str, Any]).items():
        try:
            heads[name] = msgspec.convert(described, HeadSpec)
            check_fields(described)
        except ValueError as error:
            raise AdapterRejectedError(f"adapter_config.json: heads.{name[:80]}: {error}") from error
    try:
        check_heads(heads)
    except ValueError as error:
        raise AdapterRejectedError(f"adapter_config.json: heads: {error}") from error
    return heads


def _network(raw: dict[str, Any]) -> AdapterConfig:
    if others := sorted(raw.keys() - {"network"}):
        raise AdapterRejectedError(f"adapter_config.json: {others[0][:80]!r} with 'network', which stands alone")
    try:
        network = with_shapes(msgspec.convert(raw["network"], NetworkSpec))
    except ValueError as error:
        raise AdapterRejectedError(f"adapter_config.json: network: {str(error)[:MAX_REASON]}") from error
    return AdapterConfig("mlx-lm", "network", 0, 0.0, network=network)


def _mlx(raw: dict[str, Any], *, has_heads: bool) -> AdapterConfig:
    if "lora_parameters" not in raw and has_heads:
        return AdapterConfig("mlx-lm", "head", 0, 0.0)
    if "lora_parameters" not in raw:
        raise AdapterRejectedError(
            "adapter_config.json: neither mlx-lm's lora_parameters nor PEFT's peft_type is there, and no heads"
        )
    config = msgspec.convert(raw, _MlxConfig)
    lora = config.lora_parameters
    if config.fine_tune_type not in ("lora", "dora"):
        raise AdapterRejectedError(f"adapter_config.json: fine_tune_type {config.fine_tune_type!r}; use lora or dora")
    if lora.scale is None:
        hint = "; mlx-lm's format has no alpha: scale = alpha / rank" if lora.alpha is not None else ""
        raise AdapterRejectedError(f"adapter_config.json: lora_parameters.scale is missing{hint}")
    kind: AdapterKind = "dora" if config.fine_tune_type == "dora" else "lora"
    return AdapterConfig("mlx-lm", kind, lora.rank, lora.scale, lora.keys or ())


def _peft(raw: dict[str, Any]) -> AdapterConfig:
    config = msgspec.convert(raw, _PeftConfig)
    if config.peft_type.upper() != "LORA":
        raise AdapterRejectedError(f"adapter_config.json: peft_type {config.peft_type!r}; only LORA is taken")
    if config.bias != "none":
        raise AdapterRejectedError(f'adapter_config.json: bias {config.bias!r}; only "none" is taken')
    for field, meaning in _PEFT_REFUSED.items():
        if raw.get(field):
            raise AdapterRejectedError(f"adapter_config.json: {field} ({meaning}) is not taken")
    if config.init_lora_weights not in _PEFT_STARTS:
        raise AdapterRejectedError(
            f"adapter_config.json: init_lora_weights {config.init_lora_weights!r} changes the base weights; "
            "save the adapter converted to plain LoRA"
        )
    if not math.isfinite(config.lora_alpha):
        raise AdapterRejectedError(f"adapter_config.json: lora_alpha {config.lora_alpha} is not finite")
    if config.r < 1:
        raise AdapterRejectedError(f"adapter_config.json: r {config.r} is not within 1 to {MAX_RANK}")
    targets = config.target_modules
    return AdapterConfig(
        format="peft",
        kind="dora" if config.use_dora else "lora",
        rank=config.r,
        scale=config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r),
        # A string is a regular expression or "all-linear": nothing that we would run on a stranger's word.
        targets=targets if isinstance(targets, tuple) else (),
    )
