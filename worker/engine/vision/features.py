"""The vectors of a row's images, and how a piece of its prompt gets them in the place of its ids.

In a row's context the ids of images are negative (`shared/images/refs.py`), and the n-th of them stands for the n-th
vector of the row's images. Where a piece begins says which is its first one, so a prompt may be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx


class ImageFeatures:
    """Of one row."""

    def __init__(self, prompt: Sequence[int], images: Sequence[mx.array]) -> None:
        """`images`: the vectors [T, H] of each, as many as the prompt has ids for them."""
        self._places = [place for place, each in enumerate(prompt) if each < 0]
        self._images = list(images)

    @property
    def vectors_TH(self) -> mx.array:
        """All of them."""
        return self._images[0] if len(self._images) == 1 else mx.concatenate(self._images)

    def index(self, start: int, length: int) -> list[int]:
        """Of the positions from `start` on: which vector stands there, 0 where none does."""
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
) -> mx.array:
    """Embeddings [B, L, H] with the images' vectors at negative ids."""
    rows: list[mx.array] = []
    for embedded_LH, ids, start, features in zip(embedded_BLH, ids_BL, starts_B, features_B, strict=True):
        if features is None or min(ids) >= 0:
            rows.append(embedded_LH)
            continue
        vectors_LH = features.vectors_TH[mx.array(features.index(start, len(ids)))].astype(embedded_LH.dtype)
        rows.append(mx.where(mx.array([[each < 0] for each in ids]), vectors_LH, embedded_LH))
    return mx.stack(rows)


def embeddings(model: Any) -> Callable[[mx.array], mx.array]:
    """The module of an mlx-lm model that turns ids into vectors."""
    inner = getattr(model, "language_model", model)
    return cast(Callable[[mx.array], mx.array], inner.model.embed_tokens)
