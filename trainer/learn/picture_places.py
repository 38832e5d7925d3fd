"""Where images stand in the rows of a forward pass: their vectors in the place of ids, and positions on three axes.

A family whose vectors have a grid (Qwen-VL) places its ids by it, as the worker does, and adds to its first layers what
its tower says of them (DeepStack). Nothing of this learns: vectors and positions are constants of a batch.

Shape suffixes: P prompts, S prompt positions (padded left), B rows, L their positions, T completion positions (both
padded right), W numbers of a vector (H, or with DeepStack more).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_model.vision.features import EncodedImage, embeddings
from mlx_model.vision.language import row_positions_of
from mlx_model.vision.positions import Grid, Spots


class PicturePlaces(NamedTuple):
    """Where image vectors take the place of tokens in some rows, shape [B, L]."""

    at_BL: mx.array  # the number of a vector; -1: a token
    positions_3BL: mx.array | None = None  # None: those of text

    def until(self, end: int) -> "PicturePlaces":
        """The first ones of each row."""
        positions = self.positions_3BL
        return PicturePlaces(self.at_BL[:, :end], None if positions is None else positions[:, :, :end])


class Shown(NamedTuple):
    """The images of a batch."""

    vectors_NW: mx.array  # of all images, one after another
    prompts: PicturePlaces  # [P, S]
    rows: PicturePlaces  # [B, L]
    behind_3BT: mx.array | None  # positions of completions, where those are not of text


class Laid(NamedTuple):
    """A batch as it is laid out, in plain numbers."""

    prompt_PS: npt.NDArray[np.int32]
    padding_P: npt.NDArray[np.int32]
    prompt_of_B: npt.NDArray[np.int32]
    rows_BL: npt.NDArray[np.int32]  # prompts, and completions after them
    start_B: npt.NDArray[np.int32]  # where these begin
    length: int  # T


def shown(laid: Laid, image_token: int, images: Sequence[EncodedImage]) -> Shown:
    """Places of images in prompts, and in rows that begin with them; `images` lists those of one prompt after
    another.
    """
    width = laid.prompt_PS.shape[1]
    there_PS = (laid.prompt_PS == image_token) & (np.arange(width)[None] >= laid.padding_P[:, None])
    at_PS = np.where(there_PS, np.cumsum(there_PS).reshape(there_PS.shape) - 1, -1)
    at_BL = np.full(laid.rows_BL.shape, -1, np.int64)
    for row, (prompt, start) in enumerate(zip(laid.prompt_of_B, laid.start_B, strict=True)):
        at_BL[row, :start] = at_PS[prompt, width - start :]
    vectors_NW = mx.concatenate([image.vectors_TH for image in images])
    grids = [image.grid for image in images if image.grid is not None]
    prompts, rows = PicturePlaces(mx.array(at_PS)), PicturePlaces(mx.array(at_BL))
    if not grids:
        return Shown(vectors_NW, prompts, rows, None)
    spots_P = _spots(there_PS, laid.padding_P, grids)
    spots_B = [spots_P[prompt] for prompt in laid.prompt_of_B]
    positions_3PS = np.zeros((3, *there_PS.shape), np.int32)
    for prompt, (spots, padding) in enumerate(zip(spots_P, laid.padding_P, strict=True)):
        positions_3PS[:, prompt, padding:] = spots.piece(0, width - padding)
    positions_3BL = np.stack([spots.piece(0, laid.rows_BL.shape[1]) for spots in spots_B], axis=1)
    starts = zip(spots_B, laid.start_B, strict=True)
    behind_3BT = np.stack([spots.piece(start, laid.length) for spots, start in starts], axis=1)
    prompts, rows = (
        PicturePlaces(prompts.at_BL, mx.array(positions_3PS)),
        PicturePlaces(rows.at_BL, mx.array(positions_3BL)),
    )
    return Shown(vectors_NW, prompts, rows, mx.array(behind_3BT))


def shown_in_rows(
    rows_BL: npt.NDArray[np.int32], images_B: Sequence[Sequence[EncodedImage]], image_token: int
) -> Shown | None:
    """Places of images in whole rows, padded on the right; `images_B` lists those of each row. None: there are no
    images.

    A row has as many placeholders as its images have vectors, which come first: a later one, which a model may write
    as it writes any token, is a token.
    """
    images = [image for each in images_B for image in each]
    if not images:
        return None
    wanted_B = np.array([sum(len(image.vectors_TH) for image in each) for each in images_B])
    there_BL = rows_BL == image_token
    there_BL &= np.cumsum(there_BL, axis=1) <= wanted_B[:, None]
    at_BL = np.where(there_BL, np.cumsum(there_BL).reshape(there_BL.shape) - 1, -1)
    grids = [image.grid for image in images if image.grid is not None]
    places = PicturePlaces(mx.array(at_BL))
    if grids:
        spots_B = _spots(there_BL, np.zeros(len(rows_BL), np.int32), grids)
        positions_3BL = np.stack([spots.piece(0, rows_BL.shape[1]) for spots in spots_B], axis=1)
        places = PicturePlaces(places.at_BL, mx.array(positions_3BL))
    return Shown(mx.concatenate([image.vectors_TH for image in images]), places, places, None)


def _spots(there_PS: npt.NDArray[np.bool_], padding_P: npt.NDArray[np.int32], grids: Sequence[Grid]) -> list[Spots]:
    """Places of images in each prompt; each prompt takes as many of the remaining images as it has room for."""
    left, spots = list(grids), []
    for there_S, padding in zip(there_PS, padding_P, strict=True):
        places = np.flatnonzero(there_S[padding:]).tolist()
        own, vectors = [], 0
        while vectors < len(places):
            own.append(left.pop(0))
            vectors += own[-1].rows * own[-1].columns
        spots.append(Spots(len(there_S) - int(padding), places, own))
    return spots


@contextmanager
def looking(
    model: Any, ids_BL: mx.array, seen: Shown | None, places: PicturePlaces | None
) -> Iterator[dict[str, mx.array]]:
    """Extra arguments of a model's body for one forward: embeddings [B, L, H] with image vectors in them."""
    if seen is None or places is None:
        yield {}
        return
    embedded_BLH = embeddings(model)(ids_BL)
    is_image_BL1 = places.at_BL[..., None] >= 0
    vectors_BLW = seen.vectors_NW.astype(embedded_BLH.dtype)[mx.maximum(places.at_BL, 0)]
    vectors_BLH, *deep = mx.split(vectors_BLW, vectors_BLW.shape[-1] // embedded_BLH.shape[-1], axis=-1)
    added = [mx.where(is_image_BL1, each_BLH, 0) for each_BLH in deep]
    with _spread(model, places.positions_3BL, added):
        yield {"input_embeddings": mx.where(is_image_BL1, vectors_BLH, embedded_BLH)}


def behind(model: Any, seen: Shown | None, length: int) -> AbstractContextManager[None]:
    """Places in a forward of the first `length` ids of completions, after the keys and values of their prompts."""
    positions = None if seen is None or seen.behind_3BT is None else seen.behind_3BT[:, :, :length]
    return _spread(model, positions, [])


def _spread(model: Any, positions_3BL: mx.array | None, deep: Sequence[mx.array]) -> AbstractContextManager[None]:
    row_positions = row_positions_of(model)
    if row_positions is None or positions_3BL is None:
        return nullcontext()
    return row_positions.spread(positions_3BL, deep)


def held(layer: Any) -> Callable[[], AbstractContextManager[None]]:
    """The row positions that a layer computes with now, for when it computes the same again in the backward pass."""
    row_positions = row_positions_of(layer)
    return nullcontext if row_positions is None else row_positions.held()
