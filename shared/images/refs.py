"""How a sequence names its images, and what stands for them in the keys of KV.

A prompt has one placeholder id for each vector that an image comes to, and the same id for every image: KV that was
found by those ids alone would be another image's. So whatever finds KV (prefix cache, files, other workers, groups of
one prompt) goes by `kv_ids`, in which each placeholder is replaced by 62 bits that follow from the image's key and the
placeholder's place in it. They are negative, so no token has them.

Invariant. Equal keys mean equal vectors: a key is a digest of the bytes, of the detail that was asked for, and of all
that the model does with an image before its weights (`VisionSpec`); the weights are in the keys of KV already.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

KEY_BYTES = 16
MOST_IMAGES = 64  # of one sequence; an api may take fewer

Detail = Literal["high", "low"]
Family = Literal["idefics3", "pixtral", "qwen", "lfm2", "gemma3"]


class VisionSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model's images are preprocessed before its vision tower sees them."""

    family: Family
    image_token: str  # in the text of a prompt; the chat template writes one for each image
    image_token_id: int
    tile: int  # pixels on each side of what the tower sees at one time; pixtral, qwen: of what becomes one vector
    longest_edge: int  # to which an image is brought before it is cut into tiles; pixtral: that it may have; else 0
    tile_tokens: int  # vectors of one tile
    splits: bool = True  # into tiles; else an image is one
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of pixels in 0..1
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = 1  # Pillow's number of a filter; 1: Lanczos
    fewest_pixels: int = 0  # qwen, lfm2: of an image as it is seen in one piece
    most_pixels: int = 0
    vector_side: int = 0  # lfm2: pixels on each side of what becomes one vector
    tolerance: float = 0.0  # lfm2: how many times `most_pixels` an image has that is cut into tiles


class ImageRef(msgspec.Struct, frozen=True, array_like=True):
    """An image of a sequence: whose bytes stand in Redis under their hash."""

    sha256: bytes
    key: bytes  # `image_key`
    tokens: int  # placeholders of it in the prompt
    detail: Detail = "high"


@dataclass(frozen=True)
class Picture:
    """An image as the tower sees it."""

    key: bytes  # as its `ImageRef` says
    tiles: list[bytes]  # RGB bytes of each
    width: int  # of the last tile, in pixels; those before it are squares of `VisionSpec.tile`
    height: int


def image_key(sha256: bytes, detail: Detail, vision: VisionSpec) -> bytes:
    """Key of an image's vectors: BLAKE2b of its SHA-256, the detail and the model's `VisionSpec`."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (sha256, detail.encode(), msgspec.msgpack.encode(vision)):
        digest.update(b"%d:" % len(part) + part)
    return digest.digest()


def kv_ids(prompt_ids: Sequence[int], placeholder: int, images: Sequence[ImageRef]) -> list[int]:
    """The prompt with what stands for its images; a placeholder that belongs to none stays."""
    marks = _marks(images)
    return [next(marks, each) if each == placeholder else each for each in prompt_ids]


def _marks(images: Sequence[ImageRef]) -> Iterator[int]:
    for image in images:
        bits = array("Q")
        bits.frombytes(hashlib.shake_128(image.key).digest(8 * image.tokens))
        for word in bits:
            yield -1 - (word >> 2)
