"""Images that requests name, by a URL or as a file: read, checked and kept, whatever endpoint they come to."""

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from api.callers.caller import asker
from api.callers.fair_pool import LARGE_CHARS, aside
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, UnsupportedModelError
from shared.images.chat import ChatImages, SizedImage
from shared.redis.files.file_store import unknown_file
from shared.sequences import ModelCard

_DATA = re.compile(r"data:[\w.+/-]*((?:;[\w.+-]+=[\w.+-]*)*)(;base64)?,", re.ASCII | re.IGNORECASE)
_HEAD_CHARS = 1024  # in which `data:image/png;base64,` has to end
_PIECE = 1 << 18  # read at a time: no thread holds the interpreter for longer; whole groups of four

Keep = Callable[[bytes, bytes], Awaitable[None]]  # takes the SHA-256 and the bytes of an image that has been checked
Known = dict[str, tuple[bytes, tuple[int, int]]]  # SHA-256 and size of images that were fetched and kept, by URL


class NamedImage(NamedTuple):
    """As a request names it; exactly one of URL, file and data is there."""

    where: str  # in the request, for whom it is refused
    url: str | None
    file_id: str | None
    detail: str | None
    data: bytes | None = None


async def read_images(
    ring: Ring, card: ModelCard, named: Sequence[NamedImage], keep: Keep | None = None, known: Known | None = None
) -> ChatImages | None:
    """Read, check and keep the images of a chat; None when it has none. InvalidRequestError names the part to blame.

    `keep`: who takes their bytes; None: the tenant's images, which wait for a worker. `known`: images that are
    not fetched again, and grows by those that are.
    """
    if not named:
        return None
    if card.vision is None:
        raise UnsupportedModelError(f"model '{card.name}' takes no images", param=named[0].where)
    if len(named) > ring.settings.max_images:
        raise InvalidRequestError(
            f"{len(named)} images, and {ring.settings.max_images} is the limit (--max-images)", param="messages"
        )
    images: list[SizedImage] = []
    for image in named:
        try:
            found = None if known is None or image.url is None else known.get(image.url)
            if found is None:
                data = await _data(ring, image)
                found = await ring.images.checked(data)
                await (keep or ring.images.keep)(found[0], data)
                if known is not None and image.url is not None and image.url[:5].lower() != "data:":
                    known[image.url] = found
        except InvalidRequestError as error:
            error.param = image.where
            raise
        sha256, size = found
        images.append(SizedImage(sha256, *size, "low" if image.detail == "low" else "high"))
    return ChatImages.of(card.vision, images)


async def unkept(sha256: bytes, data: bytes) -> None:
    """Stores nothing: the images of a count are not needed afterwards."""


async def _data(ring: Ring, image: NamedImage) -> bytes:
    """The bytes of an image, wherever they are."""
    most = ring.settings.max_image_bytes
    if image.file_id is not None:
        return await _file(ring, image.file_id)
    if image.data is not None:
        if len(image.data) > most:
            raise _too_large(most)
        return image.data
    assert image.url is not None, "an image is one of the three"
    url = image.url
    if url[:5].lower() != "data:":
        return await ring.image_fetch.get(url)
    if len(url) > 2 * most:
        raise _too_large(most)
    data = await aside(_of_url, url) if len(url) > LARGE_CHARS else _of_url(url)
    if len(data) > most:
        raise _too_large(most)
    return data


def _of_url(url: str) -> bytes:
    head = _DATA.match(url[:_HEAD_CHARS])
    if head is None:
        raise InvalidRequestError("the `data:` URL of an image has no bytes: data:image/png;base64,...")
    return b"".join((_of_base64 if head[2] else _of_percents)(url[head.end() :]))


def _of_base64(text: str) -> Iterator[bytes]:
    try:
        letters = text.encode("ascii").translate(None, b" \t\n\r\f\v")
        for start in range(0, len(letters), _PIECE):
            piece = letters[start : start + _PIECE]
            yield base64.b64decode(piece, validate=True)
            if start + _PIECE < len(letters) and piece.endswith(b"="):
                raise ValueError("padding before the end")
    except (binascii.Error, ValueError):
        raise InvalidRequestError("the base64 text of an image is damaged") from None


def _of_percents(text: str) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + _PIECE
        cut = text.rfind("%", end - 2, end)
        end = cut if cut >= 0 and end < len(text) else end  # no `%41` is cut
        try:
            yield unquote_to_bytes(text[start:end])
        except ValueError:  # half of a surrogate pair
            raise InvalidRequestError("the text of an image's `data:` URL is damaged") from None
        start = end


async def _file(ring: Ring, file_id: str) -> bytes:
    file, most = await ring.files.find(file_id), ring.settings.max_image_bytes
    if not asker().sees(file.tenant):
        raise unknown_file(file_id)
    if file.bytes > most:
        raise _too_large(most)
    return b"".join([chunk async for chunk in ring.files.read(file)])


def _too_large(most: int) -> InvalidRequestError:
    return InvalidRequestError(f"the image has more than {most} bytes (--max-image-bytes)")
