"""From an adapter directory to a checked file in mlx-lm's layout.

mlx-lm: `<module>.lora_a` [in, r], `<module>.lora_b` [r, out], of DoRA also `<module>.m` [out]; of a mixture of
experts `lora_a` [experts, r, in] and `lora_b` [experts, out, r] (mlx_lm/tuner/{lora,dora}.py). PEFT:
`base_model.model.<module>.` with `lora_A.weight` [r, in], `lora_B.weight` [out, r], `lora_magnitude_vector` [out], and
`lora_embedding_A`, `lora_embedding_B` without `.weight` (peft/utils/save_and_load.py): the transposes.

Either may hold heads, too (heads.py). A network stands alone: what it is stands in
`adapter_config.json` under `network`.

Invariant: what `prepare` returns has been checked whole, and nobody else writes to that file. Every refusal is an
AdapterRejectedError that names the key and the reason.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from shared.adapter_files.config import MAX_CONFIG_BYTES, AdapterConfig, mlx_config, network_config, read_config
from shared.adapter_files.heads import PREFIX, checked_heads, parted
from shared.adapter_files.reach import check_lora, check_rows
from shared.adapter_files.tensors import Tensor, read_tensors, write_tensors
from shared.adapters import AdapterManifest, ModuleShapes, PreparedAdapter
from shared.errors import AdapterRejectedError
from shared.heads import HeadSpec
from shared.networks.shapes import plan
from shared.networks.spec import NetworkSpec

CONFIG_FILE = "adapter_config.json"
MLX_FILE = "adapters.safetensors"
PEFT_FILE = "adapter_model.safetensors"
DEFAULT_MAX_BYTES = 2**30

_Part = Literal["lora_a", "lora_b", "m"]
_Modules = dict[str, dict[_Part, Tensor]]

_MLX_KEY = re.compile(r"(?P<module>[A-Za-z0-9_.-]{1,256})\.(?P<part>lora_a|lora_b|m)")
_PEFT_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>[A-Za-z0-9_.-]{1,256}?)"
    r"\.(?P<part>lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
_PARTS: dict[str, _Part] = {
    "lora_a": "lora_a",
    "lora_b": "lora_b",
    "m": "m",
    "lora_A": "lora_a",
    "lora_B": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m",
}
# DoRA's m has one value per output of a linear layer, and per token of an embedding.
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|tok_embeddings|word_embeddings|embeddings?|wte)")


class _Shape(NamedTuple):
    inputs: int
    outputs: int
    rank: int


class _Base(NamedTuple):
    """Facts about the base model that an adapter is checked against."""

    shapes: ModuleShapes
    hidden_size: int | None
    dtype: str


def prepare(
    config: bytes,
    tensors: Path,
    workdir: Path,
    *,
    shapes: ModuleShapes | None = None,
    hidden_size: int | None = 0,
    dtype: str = "",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> PreparedAdapter:
    """Check an adapter's two files, and convert PEFT's layout into a new file in `workdir`.

    `tensors` must be a file that nobody else writes to. `shapes` and `hidden_size` are the base model's
    (`ModelCard.modules`, `head_inputs`); empty, None, of the size 0: not known, and then checked by the worker that
    loads the adapter. `dtype`: in which the base computes (`ModelCard.dtype`); "": float32.
    """
    return _prepare(read_config(config), tensors, workdir, _Base(shapes or {}, hidden_size, dtype), max_bytes)


def prepare_directory(
    directory: Path,
    workdir: Path,
    *,
    shapes: ModuleShapes | None = None,
    hidden_size: int | None = 0,
    dtype: str = "",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> PreparedAdapter:
    """Like `prepare`, of a copy of an mlx-lm or PEFT adapter directory; the directory may change meanwhile."""
    source = directory / CONFIG_FILE
    if not source.is_file():
        raise AdapterRejectedError(f"{directory.name} holds no {CONFIG_FILE}")
    with source.open("rb") as file:
        parsed = read_config(file.read(MAX_CONFIG_BYTES + 1))
    tensors = directory / (PEFT_FILE if parsed.format == "peft" else MLX_FILE)
    if not tensors.is_file():
        raise AdapterRejectedError(f"{directory.name} holds no {tensors.name}; only safetensors are taken")
    copy = workdir / tensors.name
    if tensors.stat().st_size > max_bytes:
        raise AdapterRejectedError(f"{tensors.name} is larger than the {max_bytes} bytes that this server takes")
    shutil.copyfile(tensors, copy)
    return _prepare(parsed, copy, workdir, _Base(shapes or {}, hidden_size, dtype), max_bytes)


@contextmanager
def prepared(
    directory: Path,
    *,
    shapes: ModuleShapes | None = None,
    hidden_size: int | None = 0,
    dtype: str = "",
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[PreparedAdapter]:
    """`prepare_directory` in a temporary folder that lives as long as the block."""
    with TemporaryDirectory(prefix="parallm-adapter-") as workdir:
        folder = Path(workdir)
        yield prepare_directory(
            directory, folder, shapes=shapes, hidden_size=hidden_size, dtype=dtype, max_bytes=max_bytes
        )


def is_embedding(module: str) -> bool:
    """True if the module path is that of an embedding."""
    return _EMBEDDING.fullmatch(module) is not None


def inherit_config(adapter: AdapterManifest | PreparedAdapter) -> bytes:
    """The `adapter_config.json` of a version, for its tensors in mlx-lm's layout."""
    if adapter.network is not None:
        return network_config(adapter.network)
    return mlx_config(adapter.kind, adapter.rank, adapter.scale, adapter.modules, adapter.heads)


def _prepare(config: AdapterConfig, tensors: Path, workdir: Path, base: _Base, max_bytes: int) -> PreparedAdapter:
    read, path = read_tensors(tensors, max_bytes=max_bytes), tensors
    if config.network is not None:
        _check_network(config.network, read)
        return _described(path, config, (), {})
    adapting, of_heads = parted(read)
    heads = checked_heads(config.heads, of_heads, base.hidden_size)
    modules = _by_module(config, adapting)
    _check(config, modules, base)
    if config.format == "peft":
        path = workdir / f"converted.{MLX_FILE}"
        flat = {f"{module}.{part}": tensor for module, parts in modules.items() for part, tensor in parts.items()}
        flat |= {f"{PREFIX}{name}.{part}": each for name, parts in of_heads.items() for part, each in parts.items()}
        write_tensors(path, flat, {"format": "mlx"})
    return _described(path, config, tuple(sorted(modules)), heads)


def _described(
    path: Path, config: AdapterConfig, modules: tuple[str, ...], heads: dict[str, HeadSpec]
) -> PreparedAdapter:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    return PreparedAdapter(path, config.kind, config.rank, config.scale, modules, digest, size, heads, config.network)


def _by_module(config: AdapterConfig, tensors: Mapping[str, Tensor]) -> _Modules:
    """Tensors by module and part, in mlx-lm's orientation."""
    pattern = _PEFT_KEY if config.format == "peft" else _MLX_KEY
    modules: _Modules = {}
    for key, tensor in tensors.items():
        match = pattern.fullmatch(key)
        if match is None:
            raise AdapterRejectedError(f"{key[:200]}: no key of a {config.format} adapter")
        part = _PARTS[match["part"]]
        parts = modules.setdefault(match["module"], {})
        if part in parts:
            raise AdapterRejectedError(f"{key}: a second {part} for module {match['module']}")
        parts[part] = tensor if config.format == "mlx-lm" else _transposed(key, part, tensor)
    if config.kind == "head" and modules:
        raise AdapterRejectedError(f"{min(modules)}: adapter_config.json describes heads alone, and no LoRA")
    if config.kind != "head" and not modules:
        raise AdapterRejectedError("the file holds no tensor of a LoRA")
    return modules


def _transposed(key: str, part: _Part, tensor: Tensor) -> Tensor:
    if part == "m":
        return Tensor(tensor.dtype, tensor.bits.reshape(-1))  # PEFT has also written [1, out]
    if len(tensor.shape) != 2:
        raise AdapterRejectedError(f"{key}: shape {list(tensor.shape)}; two dimensions are expected")
    return Tensor(tensor.dtype, tensor.bits.T)


def _check(config: AdapterConfig, modules: _Modules, base: _Base) -> None:
    for module, parts in modules.items():
        if not config.names(module):
            raise AdapterRejectedError(f"{module}: not among the modules that adapter_config.json names")
        shape = _check_parts(config, module, parts)
        if shape.rank != config.rank:
            raise AdapterRejectedError(
                f"{module}: its tensors have rank {shape.rank}, adapter_config.json says {config.rank}"
            )
        if base.shapes:
            _check_base(module, shape, base.shapes)
        for part, tensor in parts.items():
            index = tensor.first_not_finite()
            if index is not None:
                raise AdapterRejectedError(f"{module}.{part}: value {index} is not finite")
        check_lora(module, parts["lora_a"], parts["lora_b"], parts.get("m"), config.scale, base.dtype)


def _check_parts(config: AdapterConfig, module: str, parts: Mapping[_Part, Tensor]) -> _Shape:
    """Inputs, outputs and rank of one module's tensors, which must fit each other."""
    for needed in ("lora_a", "lora_b"):
        if needed not in parts:
            raise AdapterRejectedError(f"{module}: {needed} is missing")
    if (config.kind == "dora") != ("m" in parts):
        problem = (
            "m is missing, though this is DoRA" if config.kind == "dora" else "m belongs to DoRA, and this is LoRA"
        )
        raise AdapterRejectedError(f"{module}: {problem}")
    a, b = parts["lora_a"].shape, parts["lora_b"].shape
    if len(a) == len(b) == 2 and a[1] == b[0]:
        shape = _Shape(inputs=a[0], outputs=b[1], rank=a[1])
    elif len(a) == len(b) == 3 and a[0] == b[0] and a[1] == b[2] and config.kind == "lora":
        shape = _Shape(inputs=a[2], outputs=b[1], rank=a[1])
    else:
        raise AdapterRejectedError(f"{module}: lora_a {list(a)} and lora_b {list(b)} do not fit each other")
    if "m" in parts:
        expected = shape.inputs if is_embedding(module) else shape.outputs
        if parts["m"].shape != (expected,):
            raise AdapterRejectedError(f"{module}: m has shape {list(parts['m'].shape)}, expected [{expected}]")
    return shape


def _check_base(module: str, shape: _Shape, shapes: ModuleShapes) -> None:
    known = shapes.get(module)
    if known is None:
        raise AdapterRejectedError(f"{module}: the base model has no such module to adapt")
    if known != (shape.inputs, shape.outputs):
        raise AdapterRejectedError(
            f"{module}: adapts {shape.inputs} inputs and {shape.outputs} outputs, "
            f"the base model's has {known[0]} and {known[1]}"
        )


def _check_network(network: NetworkSpec, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not the network's: every tensor that its layers have, under `LAYER.PART`, and no other.

    Biases may be left out.
    """
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
