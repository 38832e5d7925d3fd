"""Gemma 3 (arXiv 2503.19786): a SigLIP tower whose image is always of one size and comes to one number of vectors.

An image has 4,096 patches, which all see one another, so it is encoded in pieces of a layer (as Qwen's, qwen.py).

Ids of an image see what comes before them, as text does. So it is in mlx-vlm 0.7.10, whose `generate` hands the mask
that it has made to a language side that takes no notice of it. In transformers they see all of their image
(`create_masks_for_vision_model`); for that no prompt could be cut within an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from shared.errors import SetupError
from shared.images.refs import VisionSpec


class GemmaTower:
    """From a picture to vectors; belongs to the engine's thread."""

    def __init__(self, model: Any, vision: VisionSpec) -> None:
        """`model`: mlx-vlm's, of which only the tower and the projector are kept."""
        self.vision = vision
        self._tower, self._projector = model.vision_tower, model.multi_modal_projector
        # The language side multiplies all that it is fed with by the root of its width, and vectors of images are not
        # meant: transformers scales the embeddings of ids alone (`Gemma3TextScaledWordEmbedding`).
        self._scale = float(model.config.text_config.hidden_size) ** -0.5

    @property
    def parts(self) -> tuple[Any, ...]:
        return self._tower, self._projector

    def grid(self, width: int, height: int) -> None:
        """Positions do not go by it."""

    def layers(self, picture: bytes, width: int, height: int) -> Iterator[mx.array]:
        """Encode RGB bytes [height, width, 3] step by step; the last array holds the vectors [T, H]."""
        vision, tower = self.vision, self._tower.vision_model
        pixels_1HWC = mx.array(np.frombuffer(picture, np.uint8).reshape(1, height, width, 3))
        scaled_1HWC = (pixels_1HWC.astype(mx.float32) * (1 / 255) - mx.array(vision.mean)) / mx.array(vision.std)
        seen_1PD = tower.embeddings(scaled_1HWC)
        for layer in tower.encoder.layers:
            seen_1PD = layer(seen_1PD)
            yield seen_1PD
        yield self._projector(tower.post_layernorm(seen_1PD))[0] * self._scale


def spec(model: Any, images: dict[str, Any], prompts: dict[str, Any]) -> VisionSpec:
    """From mlx-vlm's config and the processors'; SetupError where they do not agree, or images are to be cut."""
    tower, projector, size = model.config.vision_config, model.multi_modal_projector, images.get("size") or {}
    side, tokens = int(tower.image_size), (projector.patches_per_image // projector.kernel_size) ** 2
    asked = {int(size.get(name, side)) for name in ("width", "height")}
    if asked != {side}:
        raise SetupError(f"images of {max(asked)} pixels do not fit a tower of {side}")
    stated = int(prompts.get("image_seq_length") or tokens)
    if stated != tokens:
        raise SetupError(f"processor_config.json says {stated} tokens an image, and the tower makes {tokens}")
    if images.get("do_pan_and_scan"):
        raise SetupError("pan and scan (do_pan_and_scan in preprocessor_config.json) is not supported")
    red, green, blue = images.get("image_mean") or (0.5, 0.5, 0.5)
    std_red, std_green, std_blue = images.get("image_std") or (0.5, 0.5, 0.5)
    return VisionSpec(
        family="gemma3",
        image_token="<start_of_image>",
        image_token_id=int(model.config.image_token_index),
        tile=side,
        longest_edge=0,
        tile_tokens=tokens,
        mean=(red, green, blue),
        std=(std_red, std_green, std_blue),
        resample=int(images.get("resample", 2)),
    )
