"""Prompts with images: what stands for each of them, and the tokens around it.

An image chunk stands for all that the model's chat template would write for the image, its marks included; text chunks
hold everything else. So as many tokens as `expected_tokens` says is what a chunk comes to in the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from api.callers.fair_pool import aside
from api.generation.named_images import Keep, Known, NamedImage, read_images
from api.ring.ring import Ring
from shared.errors import ContextLengthExceededError, InvalidRequestError, ParallmError
from shared.images.chat import ChatImages
from shared.images.refs import ImageRef
from shared.sequences import ModelCard
from shared.text.codec import TextCodec

MOST_DATA = 4096  # of a pass
MOST_CHUNKS = 4096  # of a prompt


class ImageChunk(NamedTuple):
    """As a request has it; exactly one of both is there."""

    expected_tokens: int | None
    url: str | None = None
    data: bytes | None = None


Ids = Sequence[int] | npt.NDArray[np.int32]
Piece = Ids | ImageChunk


class SeenPrompt(NamedTuple):
    """Ids with one placeholder for each vector of its images."""

    ids: list[int]
    images: tuple[ImageRef, ...]
    pixels: int  # of all tiles that the model sees


def whole(pieces: list[Piece]) -> list[Piece]:
    """The pieces of a prompt; one without images is one piece."""
    texts = [piece for piece in pieces if not isinstance(piece, ImageChunk)]
    if len(texts) < len(pieces) or len(texts) == 1:
        return pieces
    if texts and all(isinstance(text, np.ndarray) for text in texts):
        return [np.concatenate(texts)]
    return [[token for text in texts for token in text]]


def text_of(pieces: Sequence[Piece]) -> Ids | None:
    """The ids of a prompt that has no images; None of one that has some."""
    (first, *more) = pieces
    return None if more or isinstance(first, ImageChunk) else first


async def seen_prompt(
    ring: Ring,
    card: ModelCard,
    codec: TextCodec,
    pieces: Sequence[Piece],
    where: str,
    keep: Keep | None = None,
    known: Known | None = None,
) -> SeenPrompt:
    """Read, check and keep the images of a prompt; InvalidRequestError names the chunk.

    `where` the prompt stands in the request; `keep`: who takes the bytes, None: the tenant's images, for a worker.
    `known`: as of `read_images`.
    """
    length = sum(len(piece) for piece in pieces if not isinstance(piece, ImageChunk))
    if length > card.context_length:  # before images are read for it
        message = f"the model takes up to {card.context_length} tokens, this prompt has {length} besides its images"
        raise ContextLengthExceededError(message, param=where)
    chunks = {at: piece for at, piece in enumerate(pieces) if isinstance(piece, ImageChunk)}
    named = [NamedImage(f"{where}.chunks[{at}]", chunk.url, None, None, chunk.data) for at, chunk in chunks.items()]
    try:
        images = await read_images(ring, card, named, keep, known)
    except ParallmError as error:
        if error.param == "messages":  # of which there are none here
            error.param = where
        raise
    assert images is not None, "a prompt without images is its ids"
    ids = await aside(_ids, codec, pieces, images, where, keep is not None)
    sides = (layout.tiles * layout.last[0] * layout.last[1] for layout in images.layouts)
    return SeenPrompt(ids, images.refs, sum(sides))


def _ids(codec: TextCodec, pieces: Sequence[Piece], images: ChatImages, where: str, learned: bool) -> list[int]:
    """`learned`: the prompt is a datum's."""
    ids: list[int] = []
    texts, end = iter(images.layouts), 0
    for at, piece in enumerate(pieces):
        if not isinstance(piece, ImageChunk):
            ids += piece.tolist() if isinstance(piece, np.ndarray) else piece
            continue
        own = codec.encode(next(texts).text, False)
        if piece.expected_tokens not in (None, len(own)):
            raise InvalidRequestError(
                f"this image comes to {len(own)} tokens, and 'expected_tokens' is {piece.expected_tokens}",
                param=f"{where}.chunks[{at}]",
            )
        ids += own
        end = len(ids)
    try:
        # What is learned from may have such an id after its images: the model wrote it, as any other token.
        images.check(ids[:end] if learned else ids)
    except InvalidRequestError as error:
        error.param = where
        raise
    if end == len(ids) and ids[-1] == images.vision.image_token_id:
        raise InvalidRequestError("a prompt cannot end with an image", param=where)
    return ids
