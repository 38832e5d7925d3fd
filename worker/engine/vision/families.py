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

from shared.errors import SetupError
from shared.images.refs import Family, VisionSpec
from worker.engine.vision import language, qwen
from worker.engine.vision.qwen import QwenTower

log = logging.getLogger(__name__)

FAMILIES: dict[str, Family] = {  # by the model_type of a config
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "pixtral": "pixtral",
    "mistral3": "pixtral",  # whose patches are merged behind the tower
    "qwen2_5_vl": "qwen",
    "qwen3_vl": "qwen",
    "qwen3_vl_moe": "qwen",
}


class Tower:
    """From tiles to vectors; belongs to the engine's thread."""

    def __init__(self, model: Any, vision: VisionSpec) -> None:
        """`model`: mlx-vlm's, of which only the tower and the projector are kept."""
        self.vision = vision
        self._tower, self._projector = _eyes(model)
        self._layer = getattr(model, "vision_feature_layer", -1)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its modules."""
        return self._tower, self._projector

    def encode(self, tiles: Sequence[bytes], width: int, height: int) -> mx.array:
        """Vectors [N, T, H] of N tiles, each RGB bytes [height, width, 3]."""
        vision = self.vision
        pixels_NSSC = mx.array(np.frombuffer(b"".join(tiles), np.uint8).reshape(-1, height, width, 3))
        scaled_NSSC = (pixels_NSSC.astype(mx.float32) * (1 / 255) - mx.array(vision.mean)) / mx.array(vision.std)
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


class Seeing(NamedTuple):
    """A model that was loaded with its tower."""

    model: Any  # mlx-lm's, of the language side
    tower: Tower | QwenTower | None  # None: the folder has none


def is_vision(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that we load with its tower."""
    kind = config.get("model_type")
    if kind == "mistral3":  # Mistral 3.1 and 3.2; of Ministral 3 and Mistral 4, only mlx-lm's text is in the batch
        return bool((config.get("text_config") or {}).get("model_type") == "mistral")
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
    """Load a model of a known family; SetupError where mlx-vlm is not installed, or files are missing."""
    try:
        from mlx_vlm.utils import load_model
    except ImportError as error:
        raise SetupError("a model with vision needs mlx-vlm: pip install 'mlx-parallm[vision]'") from error
    whole = load_model(path, lazy=True)
    kind = config["model_type"]
    if FAMILIES[kind] != "qwen":
        return Seeing(_language(whole.language_model), Tower(whole, _vision(path, whole.config, config)))
    if whole.vision_tower is None:
        log.warning("engine.images_refused family=%s: the folder has no weights of a tower", kind)
        return Seeing(language.qwen(whole.language_model, kind, 0), None)
    tower = QwenTower(whole, _vision(path, whole.config, config))
    return Seeing(language.qwen(whole.language_model, kind, tower.deep), tower)


def _language(theirs: Any) -> Any:
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


def _vision(path: Path, model: Any, config: dict[str, Any]) -> VisionSpec:
    """From the files beside the weights."""
    images, prompts = _json(path / "preprocessor_config.json"), _json(path / "processor_config.json")
    images = prompts.get("image_processor") or images
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


def chat_template(path: Path) -> str:
    """The template that a folder keeps beside its image processor, where the tokenizer does not know it; "": none."""
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
