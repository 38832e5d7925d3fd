"""Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631): what their tower sees, and its layers one at a time.

An image is one picture in its own proportions, up to 16,384 vectors or 65,536 patches, and in some layers, or all, its
patches see one another. So it is not encoded at once, but in pieces of layers, between which the caller may do other
things. The modules are mlx-vlm's, but for attention: there windows of one size go together, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_model.vision.positions import Grid
from shared.errors import SetupError
from shared.images.refs import VisionSpec

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # where preprocessor_config.json says nothing, as transformers has it
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


MOST_PAIRS = 1 << 27  # of patches that see one another, in one piece: with 1,280 numbers each, 0.7 TFLOP
CPU_PAIRS = 1 << 20


class QwenTower:
    """From a picture to vectors; belongs to the engine's thread."""

    def __init__(self, model: Any, vision: VisionSpec) -> None:
        """`model`: mlx-vlm's, of which only the tower is kept."""
        from mlx_vlm.models.base import ensure_fused_sdpa
        from mlx_vlm.models.qwen2_5_vl.vision import apply_rotary_pos_emb_vision

        self.vision = vision
        self._tower = model.vision_tower
        self.most_pairs = CPU_PAIRS if mx.default_device() == mx.Device(mx.cpu) else MOST_PAIRS
        self._turned, self._attended = apply_rotary_pos_emb_vision, ensure_fused_sdpa
        self._deep = tuple(getattr(self._tower, "deepstack_visual_indexes", ()))

    @property
    def deep(self) -> int:
        """Number of layers of the language side that receive further image vectors."""
        return len(self._deep)

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self._tower,)

    def grid(self, width: int, height: int) -> Grid:
        """Rows and columns of a picture's vectors."""
        return Grid(height // self.vision.tile, width // self.vision.tile)

    def layers(self, picture: bytes, width: int, height: int) -> Iterator[mx.array]:
        """Encode RGB bytes [height, width, 3] step by step; the last array holds the vectors [T, H].

        With DeepStack these are [T, (1 + N) H]: after each one what is added to it in each of N layers.
        """
        tower = self._tower
        patches_PD = tower.patch_embed(self._patches(picture, width, height))
        side = tower.patch_embed.patch_size
        grid_13 = mx.array([[1, height // side, width // side]])
        turns_PD = tower.rot_pos_emb(grid_13).reshape(len(patches_PD), -1)
        if hasattr(tower, "pos_embed"):
            patches_PD = patches_PD + tower.fast_pos_embed_interpolate(grid_13)
        whole = [(1, len(patches_PD))]
        order_T, windows = None, whole
        if hasattr(tower, "get_window_index"):
            order_T, windows = self._windows(*tower.get_window_index(grid_13))
            patches_PD, turns_PD = (_ordered(each, order_T) for each in (patches_PD, turns_PD))
        deep: list[mx.array] = []
        for at, block in enumerate(tower.blocks):
            is_whole = order_T is None or at in tower.fullatt_block_indexes
            seen: list[mx.array] = []
            for piece in self._attention(block.attn, block.norm1(patches_PD), turns_PD, whole if is_whole else windows):
                seen.append(piece)
                yield piece
            patches_PD = patches_PD + block.attn.proj(mx.concatenate(seen))
            patches_PD = patches_PD + block.mlp(block.norm2(patches_PD))
            if at in self._deep:
                deep.append(tower.deepstack_merger_list[self._deep.index(at)](patches_PD))
            yield patches_PD
        vectors_TH = tower.merger(patches_PD)
        yield vectors_TH[mx.argsort(order_T)] if order_T is not None else mx.concatenate([vectors_TH, *deep], axis=-1)

    def _attention(
        self, attn: Any, patches_PD: mx.array, turns_PD: mx.array, groups: Sequence[tuple[int, int]]
    ) -> Iterator[mx.array]:
        """Attention among patches, in their order. `groups`: pairs of a number of windows and the patches of each."""
        qkv_3PHD = attn.qkv(patches_PD).reshape(len(patches_PD), 3, attn.num_heads, -1).transpose(1, 0, 2, 3)
        turned = [self._turned(each_PHD[None], turns_PD)[0] for each_PHD in qkv_3PHD[:2]]
        begin = 0
        for windows, size in groups:
            end = begin + windows * size
            queries, keys, values = (
                each_PHD[begin:end].reshape(windows, size, attn.num_heads, -1).transpose(0, 2, 1, 3)
                for each_PHD in (*turned, qkv_3PHD[2])
            )
            step = size if windows > 1 else max(1, self.most_pairs // size)  # windows are small
            for first in range(0, size, step):
                seen_WHLD = self._attended(queries[:, :, first : first + step], keys, values, attn.scale)
                yield seen_WHLD.transpose(0, 2, 1, 3).reshape(-1, patches_PD.shape[-1])
            begin = end

    def _windows(self, order_T: mx.array, ends: mx.array) -> tuple[mx.array, list[tuple[int, int]]]:
        """The order of vectors in which windows of one size follow one another, and how many there are of each size."""
        side = int(self._tower.spatial_merge_size) ** 2
        windows = sorted(np.split(np.array(order_T), np.unique(np.array(ends))[1:-1] // side), key=len)
        sizes = [(len(list(same)), size * side) for size, same in groupby(windows, len)]
        return mx.array(np.concatenate(windows)), sizes

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


def _ordered(patches_PD: mx.array, order_T: mx.array) -> mx.array:
    """The patches of each vector together, vectors in this order."""
    return patches_PD.reshape(len(order_T), -1, patches_PD.shape[-1])[order_T].reshape(patches_PD.shape)


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
