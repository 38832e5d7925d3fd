"""Models that see: the vision tower and projector from mlx-vlm, the language side from mlx-lm, as all other models'.

mlx-vlm loads the checkpoint, whatever its quantisation. Its language side has the weights of mlx-lm's model of the
same architecture under other names: its layers' modules are put into that model, which the batch can run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx_lm.models import llama

from mlx_model.vision import gemma, language, qwen
from mlx_model.vision.gemma import GemmaTower
from mlx_model.vision.qwen import QwenTower
from shared.errors import SetupError
from shared.images.refs import Family, VisionSpec

log = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {  # by the model_type of a config
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "pixtral": "pixtral",
    "mistral3": "pixtral",  # whose patches are merged after the tower
    "qwen2_5_vl": "qwen",
    "qwen3_vl": "qwen",
    "qwen3_vl_moe": "qwen",
    "lfm2-vl": "lfm2",
    "lfm2_vl": "lfm2",
    "gemma3": "gemma3",
}
LOADED_AS = {"lfm2_vl": "lfm2-vl"}  # by mlx-lm


class Tower:
    """From tiles to vectors; belongs to the engine's thread."""

    def __init__(self, model: Any, vision: VisionSpec) -> None:
        """`model`: mlx-vlm's, of which only the tower and the projector are kept."""
        self.vision = vision
        self._tower, self._projector = _eyes(model)
        self._layer = getattr(model, "vision_feature_layer", -1)
        self._unshuffle = getattr(model, "pixel_unshuffle", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self._tower, self._projector

    def encode(self, tiles: Sequence[bytes], width: int, height: int) -> mx.array:
        """Vectors [N, T, H] of N tiles, each RGB bytes [height, width, 3]."""
        vision = self.vision
        pixels_NSSC = mx.array(np.frombuffer(b"".join(tiles), np.uint8).reshape(-1, height, width, 3))
        scaled_NSSC = (pixels_NSSC.astype(mx.float32) * (1 / 255) - mx.array(vision.mean)) / mx.array(vision.std)
        if vision.family == "lfm2":
            return self._unshuffled(scaled_NSSC)
        if vision.family == "pixtral":
            *_, states = self._tower(scaled_NSSC, output_hidden_states=True)
            seen_NPD = states[self._layer]
        else:
            patches = vision.tile // self._tower.embeddings.patch_size
            whole = mx.ones((len(tiles), patches, patches), mx.bool_)
            seen_NPD, *_ = self._tower(scaled_NSSC, patch_attention_mask=whole, output_hidden_states=True)
        if "patch_merger" in self._projector:
            return self._merged(seen_NPD[0], width, height)[None]
        vectors_NTH: mx.array = self._projector(seen_NPD)
        return vectors_NTH

    def _unshuffled(self, scaled_NHWC: mx.array) -> mx.array:
        """Vectors [N, T, H] of LFM2-VL, each of a square of patches; the tower takes any number of them."""
        assert self._unshuffle is not None, "a model without this step"
        side = self._tower.embeddings.patch_size
        count, rows, columns = len(scaled_NHWC), scaled_NHWC.shape[1] // side, scaled_NHWC.shape[2] // side
        cut_NRCSS3 = scaled_NHWC.reshape(count, rows, side, columns, side, 3).transpose(0, 1, 3, 2, 4, 5)
        patches_NPD = cut_NRCSS3.reshape(count, rows * columns, -1)
        *_, seen_NPD = self._tower(patches_NPD, spatial_shapes=mx.array([[rows, columns]] * count))
        vectors_NRCH = self._projector(self._unshuffle(seen_NPD.reshape(count, rows, columns, -1)))
        vectors_NTH: mx.array = vectors_NRCH.reshape(count, -1, vectors_NRCH.shape[-1])
        return vectors_NTH

    def _merged(self, seen_PD: mx.array, width: int, height: int) -> mx.array:
        """Vectors [T, H] of Mistral 3.1, each of a square of patches; mlx-vlm's own module cuts these one by one."""
        ours = self._projector
        side = ours.patch_merger.spatial_merge_size
        rows, columns = (pixels // self.vision.tile for pixels in (height, width))
        seen_RACBD = ours.norm(seen_PD).reshape(rows, side, columns, side, -1)
        squares_TM = seen_RACBD.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        merged_TD = ours.patch_merger.merging_layer(squares_TM)
        vectors_TH: mx.array = ours.linear_2(ours.gelu(ours.linear_1(merged_TD)))
        return vectors_TH


def _eyes(model: Any) -> tuple[Any, Any]:
    if hasattr(model, "vision_tower"):
        return model.vision_tower, model.multi_modal_projector
    return model.vision_model, model.connector


AnyTower = Tower | QwenTower | GemmaTower


class Seeing(NamedTuple):
    """A model that was loaded with its tower."""

    model: Any  # mlx-lm's, of the language side
    tower: AnyTower | None  # None: only its text is served


def is_vision(config: dict[str, Any]) -> bool:
    """True if config.json describes a model that is loaded with its vision tower."""
    kind = config.get("model_type")
    if kind == "mistral3":  # Mistral 3.1 and 3.2; of Ministral 3 and Mistral 4, only mlx-lm's text is in the batch
        return bool((config.get("text_config") or {}).get("model_type") == "mistral")
    if FAMILIES.get(str(kind)) in ("lfm2", "gemma3") and not config.get("vision_config"):
        return False  # as mlx-lm leaves a model that it has converted
    return kind in FAMILIES


def check_known(config: dict[str, Any]) -> None:
    """SetupError for a model with a vision tower of which mlx-lm cannot even load the language side."""
    kind = config.get("model_type")
    if not config.get("vision_config"):
        return
    try:
        mlx_lm.utils._get_classes(config)
    except ValueError:
        raise SetupError(
            f"vision models of family {kind!r} are not supported; these are: {', '.join(FAMILIES)}"
        ) from None
    log.warning("engine.images_refused family=%s: of these models only the text is served", kind)


def load_seeing(path: Path, config: dict[str, Any]) -> Seeing:
    """Load a model of a known family; where the tower is missing, or mlx-vlm, mlx-lm's of its language side.

    SetupError where files are missing, or mlx-lm has no such model.
    """
    try:
        from mlx_vlm.utils import load_model
    except ImportError:
        return _without_tower(path, config, "a model with vision needs mlx-vlm: pip install 'mlx-parallm[vision]'")
    if not _has_tower(path):
        return _without_tower(path, config, "the folder has no weights of a tower")
    whole = load_model(path, lazy=True)
    vision = _vision(path, whole, config)
    if vision.family == "qwen":
        tower = QwenTower(whole, vision)
        return Seeing(_language(whole.language_model, config, tower.deep), tower)
    eyes = (GemmaTower if vision.family == "gemma3" else Tower)(whole, vision)
    return Seeing(_language(whole.language_model, config, 0), eyes)


def _has_tower(path: Path) -> bool:
    """True if any weight belongs to a vision tower. Only names are read."""
    names = (name for file in path.glob("*.safetensors") for name in mx.load(str(file)))
    return any("vision" in name or "visual" in name for name in names)


def _without_tower(path: Path, config: dict[str, Any], why: str) -> Seeing:
    """The language model alone, if mlx-lm can load it."""
    kind = config["model_type"]
    loaded_as = {"model_type": LOADED_AS.get(kind, kind)}
    try:
        mlx_lm.utils._get_classes(config | loaded_as)
    except ValueError:
        raise SetupError(why) from None
    log.warning("engine.images_refused family=%s: %s", kind, why)
    return Seeing(mlx_lm.utils.load_model(path, lazy=True, model_config=loaded_as)[0], None)


def _language(theirs: Any, config: dict[str, Any], deep: int) -> Any:
    """mlx-lm's model of mlx-vlm's language side; `deep`: of Qwen3-VL, how many layers receive image vectors."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    if family == "qwen":
        return language.qwen(theirs, kind, deep)
    if family == "gemma3":
        return language.gemma3(theirs, config.get("text_config") or {})
    return language.lfm2(theirs) if family == "lfm2" else _llama(theirs)


def _llama(theirs: Any) -> Any:
    """mlx-lm's Llama with the modules of mlx-vlm's."""
    config = asdict(theirs.config)
    if config.get("use_qk_norm"):
        raise SetupError("a language side with normalised queries and keys is not supported")
    if not config.get("rope_theta"):
        raise SetupError("text_config has no rope_theta")
    known = {name: config[name] for name in llama.ModelArgs.__dataclass_fields__ if config.get(name) is not None}
    tied = {"tie_word_embeddings": "lm_head" not in theirs}
    ours = llama.Model(llama.ModelArgs.from_dict({**known, "model_type": "llama", **tied}))
    return language.with_modules(ours, theirs)


def _vision(path: Path, whole: Any, config: dict[str, Any]) -> VisionSpec:
    """Read the files next to the weights; `whole`: mlx-vlm's model."""
    model = whole.config
    images, prompts = _json(path / "preprocessor_config.json"), _json(path / "processor_config.json")
    if FAMILIES[config["model_type"]] == "lfm2":
        both = [each.get("image_processor") or each for each in (images, prompts)]
        return _lfm2(model, {**both[0], **both[1]})
    images = prompts.get("image_processor") or images
    if FAMILIES[config["model_type"]] == "gemma3":
        return gemma.spec(whole, images, prompts)
    if FAMILIES[config["model_type"]] == "qwen":
        return qwen.spec(model, images)
    if not isinstance(getattr(model, "vision_feature_layer", -1), int):
        raise SetupError("a tower of which several layers are read is not supported")
    return (_pixtral if FAMILIES[config["model_type"]] == "pixtral" else _idefics3)(model, images, prompts)


def _idefics3(model: Any, images: dict[str, Any], prompts: dict[str, Any]) -> VisionSpec:
    tower = model.vision_config
    tile = int((images.get("max_image_size") or {}).get("longest_edge") or tower.image_size)
    if tile != tower.image_size:
        raise SetupError(f"tiles of {tile} pixels do not fit a tower of {tower.image_size}")
    tokens = (tile // tower.patch_size) ** 2 // model.scale_factor**2
    asked = int(prompts.get("image_seq_len") or tokens)
    if asked != tokens:
        raise SetupError(f"processor_config.json says {asked} tokens a tile, and the tower makes {tokens}")
    return VisionSpec(
        family="idefics3",
        image_token="<image>",
        image_token_id=int(model.image_token_index),
        tile=tile,
        longest_edge=int((images.get("size") or {}).get("longest_edge") or 4 * tile),
        tile_tokens=tokens,
        splits=bool(images.get("do_image_splitting", True)),
        mean=_three(images.get("image_mean")),
        std=_three(images.get("image_std")),
        resample=int(images.get("resample", 1)),
    )


def _pixtral(model: Any, images: dict[str, Any], prompts: dict[str, Any]) -> VisionSpec:
    tower = model.vision_config
    longest = int((images.get("size") or {}).get("longest_edge") or 1024)
    tile = int(tower.patch_size) * int(getattr(model, "spatial_merge_size", 1))
    if ceil(longest / tile) * tile > tower.image_size:
        raise SetupError(f"images of {longest} pixels in squares of {tile} do not fit a tower of {tower.image_size}")
    return VisionSpec(
        family="pixtral",
        image_token="[IMG]",
        image_token_id=int(model.image_token_index),
        tile=tile,
        longest_edge=longest,
        tile_tokens=1,
        mean=_three(images.get("image_mean") or [0.48145466, 0.4578275, 0.40821073]),
        std=_three(images.get("image_std") or [0.26862954, 0.26130258, 0.27577711]),
        resample=int(images.get("resample", 3)),
    )


def _lfm2(model: Any, images: dict[str, Any]) -> VisionSpec:
    """Tiles are always used, whatever config.json says: some deny them for no reason (shared/images/layout.py)."""
    tile, patch = int(images.get("tile_size", 512)), int(images.get("encoder_patch_size", 16))
    side = patch * int(images.get("downsample_factor", 2))
    taken = int(model.vision_config.patch_size) * int(model.downsample_factor)
    if side != taken or tile % side:
        raise SetupError(f"preprocessor_config.json says {side} pixels a vector of tiles of {tile}, the tower {taken}")
    fewest, most = int(images.get("min_image_tokens", 64)), int(images.get("max_image_tokens", 256))
    return VisionSpec(
        family="lfm2",
        image_token="<image>",
        image_token_id=int(model.image_token_index),
        tile=tile,
        longest_edge=0,
        tile_tokens=(tile // side) ** 2,
        mean=_three(images.get("image_mean")),
        std=_three(images.get("image_std")),
        resample=int(images.get("resample", 3)),
        fewest_pixels=fewest * side * side,
        most_pixels=most * side * side,
        vector_side=side,
        tolerance=float(images.get("max_pixels_tolerance", 2.0)),
    )


def chat_template(path: Path) -> str:
    """The template that a folder keeps with its image processor, where the tokenizer does not know it; "": none."""
    template = _json(path / "chat_template.json").get("chat_template", "")
    return template if isinstance(template, str) else ""


def _three(values: list[float] | None) -> tuple[float, float, float]:
    red, green, blue = values or (0.5, 0.5, 0.5)
    return red, green, blue


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise SetupError(f"{file.name} is not JSON") from error
    return content
