"""Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631): what their tower sees, and its layers one at a time.

An image is one picture in its own proportions, up to 16,384 vectors, and in some layers, or all, its patches see one
another. So it is not encoded at once: the layers are those of mlx-vlm, between which whoever asks may do other things.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from shared.errors import SetupError
from shared.images.refs import VisionSpec
from worker.engine.vision.positions import Grid

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # where preprocessor_config.json says nothing, as transformers has it
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class QwenTower:
    """From a picture to vectors; belongs to the engine's thread."""

    def __init__(self, model: Any, vision: VisionSpec) -> None:
        """`model`: mlx-vlm's, of which only the tower is kept."""
        self.vision = vision
        self._tower = model.vision_tower
        self._deep = tuple(getattr(self._tower, "deepstack_visual_indexes", ()))

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its modules."""
        return (self._tower,)

    def grid(self, width: int, height: int) -> Grid:
        """Of a picture's vectors."""
        return Grid(height // self.vision.tile, width // self.vision.tile)

    def layers(self, picture: bytes, width: int, height: int) -> Iterator[list[mx.array]]:
        """What the layers make of RGB bytes [height, width, 3]; the last of it is the vectors [T, H] alone.

        With DeepStack these are [T, (1 + N) H]: behind each one what is added to it in each of N layers.
        """
        tower, side = self._tower, int(self._tower.spatial_merge_size)
        patches = tower.patch_embed(self._patches(picture, width, height))
        grid_13 = mx.array([[1, height // tower.patch_embed.patch_size, width // tower.patch_embed.patch_size]])
        turns = tower.rot_pos_emb(grid_13).reshape(len(patches), -1)
        if hasattr(tower, "pos_embed"):
            patches = patches + tower.fast_pos_embed_interpolate(grid_13)
        whole = windows = mx.array([0, len(patches)])
        order = None
        if hasattr(tower, "get_window_index"):
            order, ends = tower.get_window_index(grid_13)
            windows = mx.array([0, *(end for before, end in pairwise(ends.tolist()) if end > before)])
            patches, turns = _ordered(patches, order, side), _ordered(turns, order, side)
        yield [patches]
        deep: list[mx.array] = []
        for at, block in enumerate(tower.blocks):
            is_whole = order is None or at in tower.fullatt_block_indexes
            patches = block(patches, cu_seqlens=whole if is_whole else windows, rotary_pos_emb=turns)
            if at in self._deep:
                deep.append(tower.deepstack_merger_list[self._deep.index(at)](patches))
            yield [patches, *deep]
        vectors_TH = tower.merger(patches)
        yield [vectors_TH[mx.argsort(order)] if order is not None else mx.concatenate([vectors_TH, *deep], axis=-1)]

    def _patches(self, picture: bytes, width: int, height: int) -> mx.array:
        """[P, C x frames x side x side] as the tower takes them: those of one vector lie together; frames are alike."""
        vision, tower = self.vision, self._tower
        side, merged = int(tower.patch_embed.patch_size), int(tower.spatial_merge_size)
        pixels_HWC = mx.array(np.frombuffer(picture, np.uint8).reshape(height, width, 3))
        scaled_HWC = (pixels_HWC.astype(mx.float32) * (1 / 255) - mx.array(vision.mean)) / mx.array(vision.std)
        rows, columns = self.grid(width, height)
        cut = scaled_HWC.reshape(rows, merged, side, columns, merged, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        frames_PCFSS = mx.repeat(cut.reshape(-1, 3, 1, side, side), tower.patch_embed.temporal_patch_size, axis=2)
        return frames_PCFSS.reshape(len(frames_PCFSS), -1).astype(tower.patch_embed.proj.weight.dtype)


def _ordered(patches_PD: mx.array, order_T: mx.array, side: int) -> mx.array:
    """The patches of each vector together, vectors in this order."""
    return patches_PD.reshape(len(order_T), side * side, -1)[order_T].reshape(len(patches_PD), -1)


def spec(model: Any, images: dict[str, Any]) -> VisionSpec:
    """From mlx-vlm's config and the image processor's; SetupError where they do not agree."""
    tower, size = model.vision_config, images.get("size") or {}
    tile = int(tower.patch_size) * int(tower.spatial_merge_size)
    asked = int(images.get("patch_size") or tower.patch_size) * int(
        images.get("merge_size") or tower.spatial_merge_size
    )
    if asked != tile:
        raise SetupError(f"preprocessor_config.json says {asked} pixels a vector, and the tower takes {tile}")
    fewest = int(images.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    most = int(images.get("max_pixels") or size.get("longest_edge") or 1280 * 28 * 28)
    if not tile * tile <= most >= fewest:
        raise SetupError(f"images of {fewest} to {most} pixels cannot be cut into squares of {tile}")
    clip = model.model_type == "qwen2_5_vl"
    mean, std = images.get("image_mean"), images.get("image_std")
    return VisionSpec(
        family="qwen",
        image_token="<|image_pad|>",
        image_token_id=int(model.image_token_id),
        tile=tile,
        longest_edge=0,
        tile_tokens=1,
        mean=tuple(mean or (CLIP_MEAN if clip else (0.5, 0.5, 0.5))),
        std=tuple(std or (CLIP_STD if clip else (0.5, 0.5, 0.5))),
        resample=int(images.get("resample", 3)),
        fewest_pixels=fewest,
        most_pixels=most,
    )
