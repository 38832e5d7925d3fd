"""The vectors of a row's images, and how a piece of its prompt gets them in the place of its ids.

In a row's context the ids of images are negative (`shared/images/refs.py`), and the n-th of them stands for the n-th
vector of the row's images. Where a piece begins says which is its first one, so a prompt may be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_model.vision.positions import Grid, Spots


class EncodedImage(NamedTuple):
    """Vectors that a vision tower computed for an image."""

    vectors_TH: mx.array  # DeepStack: [T, (1 + N) H]
    grid: Grid | None = None  # of them, where positions go by it


class ImageFeatures:
    """Image vectors of one row, by position of its prompt."""

    def __init__(self, prompt: Sequence[int], images: Sequence[EncodedImage]) -> None:
        """`images`: with as many vectors as the prompt has ids for them; EngineError if these are mixed."""
        self._places = [place for place, each in enumerate(prompt) if each < 0]
        self._images = [image.vectors_TH for image in images]
        grids = [image.grid for image in images if image.grid is not None]
        self.spots = Spots(len(prompt), self._places, grids) if grids else None

    @property
    def vectors_TH(self) -> mx.array:
        """Vectors of all images, [T, H]."""
        return self._images[0] if len(self._images) == 1 else mx.concatenate(self._images)

    @property
    def width(self) -> int:
        """Width H of the vectors, in numbers."""
        return self._images[0].shape[-1]

    def index(self, start: int, length: int) -> list[int]:
        """By position from `start` on: the index of its vector, 0 where there is none."""
        index = [0] * length
        first = bisect_left(self._places, start)
        for at in range(first, bisect_left(self._places, start + length)):
            index[self._places[at] - start] = at
        return index


def with_images(
    embedded_BLH: mx.array,
    ids_BL: Sequence[Sequence[int]],
    starts_B: Sequence[int],
    features_B: Sequence[ImageFeatures | None],
) -> tuple[mx.array, list[mx.array]]:
    """Embeddings [B, L, H] with the images' vectors at negative ids; of DeepStack what layers add, too."""
    rows: list[mx.array] = []
    width = max(features.width for features in features_B if features is not None)
    size = embedded_BLH.shape[-1]
    for embedded_LH, ids, start, features in zip(embedded_BLH, ids_BL, starts_B, features_B, strict=True):
        plain_LW = mx.pad(embedded_LH, [(0, 0), (0, width - size)]) if width > size else embedded_LH
        if features is None or min(ids) >= 0:
            rows.append(plain_LW)
            continue
        vectors_LW = features.vectors_TH[mx.array(features.index(start, len(ids)))].astype(embedded_LH.dtype)
        rows.append(mx.where(mx.array([[each < 0] for each in ids]), vectors_LW, plain_LW))
    seen_BLH, *deep = mx.split(mx.stack(rows), width // size, axis=-1)
    return seen_BLH, deep


def embeddings(model: Any) -> Callable[[mx.array], mx.array]:
    """The module of an mlx-lm model that turns ids into vectors."""
    inner = getattr(model, "language_model", model)
    return cast(Callable[[mx.array], mx.array], inner.model.embed_tokens)
