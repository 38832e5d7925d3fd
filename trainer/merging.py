"""An adapter merged into its base: a model folder that needs no adapter any more.

`python -m trainer.merging` is what `mlx_parallm adapters merge` starts, since a client's commands load no MLX.

The base is read through mlx-lm, tensor by tensor as the new files are written, so memory holds about one of those files
(5 GB) and the adapter. What is neither weights nor `config.json` is copied byte for byte: token ids stay what they are.
Heads of the version read the same hidden states of the merged model, and go into its subfolder `heads`.
"""

import argparse
import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx_lm.utils
import msgspec
from mlx.utils import tree_flatten, tree_map

from mlx_model.heads.classifier import is_classifier
from mlx_model.loader import base_sha256, model_folder
from mlx_model.lora.layers import SiteWeights
from mlx_model.lora.reader import read_adapter
from mlx_model.sites import Site, find_sites, module_shapes
from shared.adapter_files.config import mlx_config
from shared.adapter_files.formats import CONFIG_FILE, MLX_FILE, prepared
from shared.adapter_files.heads import PREFIX
from shared.adapter_files.tensors import read_tensors, write_tensors
from shared.adapters import AdapterManifest, PreparedAdapter
from shared.errors import ParallmError, SetupError
from shared.process.whole_folder import check_free, room, whole_folder

HEADS = "heads"  # a subfolder
RECORD = "merged.json"
_MAX_BYTES = 2**40  # the adapter's file is the user's own
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"})
_WRITTEN_ANEW = frozenset({"config.json", "hf_quant_config.json", RECORD})
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Merging:
    """The adapter to merge, its base, and the folder to write."""

    base: str  # a folder or a hub name
    adapter: Path  # a folder, of mlx-lm's or PEFT's layout
    target: Path
    name: str  # of the adapter, for people
    base_sha256: str = ""  # that the adapter was made for; "": not known
    dequantize: bool = False
    trust_remote_code: bool = False


class _Record(msgspec.Struct, frozen=True):
    """`merged.json`: where the weights come from."""

    base: str
    base_sha256: str
    adapter: str
    adapter_sha256: str
    dequantized: bool
    heads: tuple[str, ...]


def merge(asked: Merging) -> tuple[str, ...]:
    """Write the folder; the names of heads that went into its subfolder. SetupError names the obstacle."""
    path = model_folder(asked.base)
    _check_target(asked.target, path)
    digest = base_sha256(path)
    if asked.base_sha256 not in ("", digest):
        raise SetupError(
            f"{asked.name} was made for a base with the fingerprint {asked.base_sha256[:12]}, "
            f"and {asked.base} has {digest[:12]}: it is another model, or other weights of it"
        )
    model, config = _load(path, asked)
    with prepared(asked.adapter, shapes=module_shapes(model), max_bytes=_MAX_BYTES) as adapter:
        if adapter.network is not None:
            raise SetupError(f"{asked.name} is a network and no adapter of a language model: there is nothing to merge")
        if not adapter.modules:
            raise SetupError(f"{asked.name} has heads alone: there is nothing in it that changes the base's weights")
        if asked.dequantize:
            dequantize(model)
            _forget_quantization(config)
        _fuse(model, adapter, asked.name)
        record = _Record(asked.base, digest, asked.name, adapter.sha256, asked.dequantize, tuple(sorted(adapter.heads)))
        with whole_folder(asked.target) as partial:
            _copy_others(path, partial)
            _write_heads(adapter, partial)
            (partial / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
            _write_model(model, config, partial, adapter.modules)
    return record.heads


def _check_target(target: Path, base: Path) -> None:
    check_free(target)
    if target.resolve().is_relative_to(base.resolve()):
        raise SetupError(f"{target} lies in the base's folder: name one elsewhere")


def _load(path: Path, asked: Merging) -> tuple[Any, dict[str, Any]]:
    try:
        if is_classifier(mlx_lm.utils.load_config(path)):
            raise SetupError("it is a classifier or reward model, which has a head of its own; only language models")
        model, config = mlx_lm.utils.load_model(path, lazy=True, trust_remote_code=asked.trust_remote_code)
    except SetupError as error:
        raise SetupError(f"cannot merge into {asked.base}: {error}") from error
    except Exception as error:
        raise SetupError(f"cannot load the model at {path}: {type(error).__name__}: {error}") from error
    return model, config


def _fuse(model: Any, adapter: PreparedAdapter, name: str) -> None:
    manifest = AdapterManifest(
        name, 0, adapter.kind, adapter.rank, adapter.scale, adapter.modules, "", 0, adapter.sha256, adapter.size, 1, 0
    )
    sites = find_sites(model)
    fuse(model, sites, read_adapter(adapter.path, manifest, sites, mx.float32, max_rank=adapter.rank))


def _write_model(model: Any, config: dict[str, Any], folder: Path, merged: Collection[str]) -> None:
    needed = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if needed > shutil.disk_usage(folder).free:
        raise SetupError(f"the merged model takes {needed / 1e9:.2f} GB in {folder.parent}{room(folder)}")
    sees = "vision_tower" in getattr(model, "model", {})
    try:
        _write_weights(model, folder, merged)
    except RuntimeError as error:  # mlx does not report which error of the disk it was
        raise SetupError(f"cannot write the merged model in {folder.parent}: {error}{room(folder)}") from error
    mlx_lm.utils.save_config(config, folder / "config.json", keep_vision_config=sees)


def _write_weights(model: Any, folder: Path, merged: Collection[str]) -> None:
    """As mlx_lm.utils.save_model, but computed one by one: at once, what goes in and what comes out lie in memory."""
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    index: dict[str, Any] = {
        "metadata": {"total_size": total, "total_parameters": mlx_lm.utils.get_total_parameters(model)},
        "weight_map": {},
    }
    files = mlx_lm.utils.make_shards(dict(tree_flatten(model.parameters())))
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))  # what is written is let go of
    for at, tensors in enumerate(files):
        name = f"model-{at + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        for path, tensor in tensors.items():
            mx.eval(tensor)
            if path.rpartition(".")[0] in merged and not mx.isfinite(tensor).all().item():
                raise SetupError(f"{path}: what is merged is too large a number for {tensor.dtype}, the base's type")
        mx.save_safetensors(str(folder / name), tensors, {"format": "mlx"})
        index["weight_map"] |= dict.fromkeys(tensors, name)
        tensors.clear()
    index["weight_map"] = dict(sorted(index["weight_map"].items()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


def _forget_quantization(config: dict[str, Any]) -> None:
    for section in (config, config.get("text_config") or {}):
        section.pop("quantization", None)
        section.pop("quantization_config", None)


def _copy_others(base: Path, folder: Path) -> None:
    """Tokenizer, templates, generation settings, code, licence: all files but weights, and what is written anew."""
    for path in base.iterdir():
        is_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name not in _WRITTEN_ANEW and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES)


def _write_heads(adapter: PreparedAdapter, folder: Path) -> None:
    if not adapter.heads:
        return
    tensors = read_tensors(adapter.path, max_bytes=_MAX_BYTES)
    (folder / HEADS).mkdir()
    of_heads = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    write_tensors(folder / HEADS / MLX_FILE, of_heads, {"format": "mlx"})
    (folder / HEADS / CONFIG_FILE).write_bytes(mlx_config("head", 0, 0.0, (), adapter.heads))


_SECOND_SCALE = "global_scale"  # of NVFP4, besides the scales of groups: mx.quantize would not give it back


def dequantize(model: Any) -> None:
    """Unpack all packed weights; SetupError for a kind of packing that mlx-lm cannot unpack."""
    packed = {path: module for path, module in model.named_modules() if "scales" in module}
    if not packed:
        raise SetupError("the base is not quantised: leave out --dequantize")
    for path, module in packed.items():
        _check_scales(path, module)
    mlx_lm.utils.dequantize_model(model)
    if left := next((path for path, module in model.named_modules() if "scales" in module), ""):
        raise SetupError(f"{left}: mlx-lm cannot dequantise a {type(packed[left]).__name__}")


def fuse(model: Any, sites: Mapping[str, Site], adapter: Mapping[str, SiteWeights]) -> None:
    """Put the merged weights in place of the base's; SetupError when a module cannot take them."""
    paths_of = Counter(id(module) for _, module in model.named_modules())
    for path, weights in adapter.items():
        site = sites[path]
        if paths_of[id(site.module)] > 1:
            raise SetupError(f"{path}: the model uses this module in several places, and the adapter is of one of them")
        if weights.gain is not None and not mx.isfinite(weights.gain).all().item():
            raise SetupError(f"{path}: m / ||W + scale B A|| of this DoRA is not finite")
        _put(site, _merged(site, weights))


def _merged(site: Site, weights: SiteWeights) -> mx.array:
    base = site.dense_weight()
    delta = weights.a.astype(mx.float32) @ weights.b.astype(mx.float32)  # [in, out]; of an embedding [ids, dims]
    if site.kind != "embedding":
        delta = delta.swapaxes(-1, -2)
    merged = base.astype(mx.float32) + delta
    if weights.gain is not None:
        merged = merged * weights.gain[:, None]
    return merged.astype(base.dtype)


def _put(site: Site, weight: mx.array) -> None:
    module = site.module
    if not site.is_quantized:
        module.weight = weight
        return
    _check_scales(site.path, module)
    module.weight, module.scales, *biases = mx.quantize(
        weight, group_size=module.group_size, bits=module.bits, mode=module.mode
    )
    if biases:
        module.biases = biases[0]


def _check_scales(path: str, module: Any) -> None:
    if module.get(_SECOND_SCALE) is not None:
        raise SetupError(f"{path}: NVFP4 with a scale for the whole tensor cannot be merged")


def main() -> int:
    """The process's exit code: 0 merged, 1 refused, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m trainer.merging", description=__doc__)
    parser.add_argument("base", help="a folder or a hub name")
    parser.add_argument("adapter", type=Path, help="a folder")
    parser.add_argument("target", type=Path, help="a folder that is not there yet")
    parser.add_argument("--name", default="the adapter", help="of the adapter, for people")
    parser.add_argument("--base-sha256", default="", help="of the base that the adapter was made for")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        asked = Merging(
            given.base,
            given.adapter,
            given.target,
            given.name,
            given.base_sha256,
            dequantize=given.dequantize,
            trust_remote_code=given.trust_remote_code,
        )
        heads = merge(asked)
    except (ParallmError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing has been written", file=sys.stderr)
        return 130
    print(f"{given.name} merged into {given.base}: {given.target}")
    if heads:
        print(f"its heads ({', '.join(heads)}) are in {given.target / HEADS}, to be uploaded for the merged model")
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
