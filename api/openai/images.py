"""The images of a chat: from the parts of its messages to what a sequence names, and the text that stands for them."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from api.openai.bodies import ChatMessage, MessagePart
from api.ring.caller import asker
from api.ring.ring import Ring
from api.ring.room import LARGE_CHARS, aside
from shared.errors import InvalidRequestError, UnsupportedModelError
from shared.images.layout import Layout, layout
from shared.images.refs import Detail, ImageRef, VisionSpec, image_key
from shared.redis.files.file_store import unknown_file
from shared.sequences import ModelCard

_DATA = re.compile(r"data:[\w.+/-]*((?:;[\w.+-]+=[\w.+-]*)*)(;base64)?,", re.ASCII | re.IGNORECASE)
_HEAD_CHARS = 1024  # in which `data:image/png;base64,` has to end
_PIECE = 1 << 18  # read at a time: no thread holds the interpreter for longer; whole groups of four


@dataclass(frozen=True)
class ChatImages:
    """Of one chat, in order."""

    vision: VisionSpec
    refs: tuple[ImageRef, ...]
    layouts: tuple[Layout, ...]

    def expanded(self, text: str) -> str:
        """The prompt's text with what stands for each image at its mark; InvalidRequestError when they do not agree."""
        pieces = text.split(self.vision.image_token)
        if len(pieces) > len(self.refs) + 1:
            raise InvalidRequestError(
                f"the text of the messages has the model's own mark of an image, {self.vision.image_token!r}",
                param="messages",
            )
        if len(pieces) < len(self.refs) + 1:
            raise InvalidRequestError("the model's chat template does not show the images", param="messages")
        shown = (image.text + piece for image, piece in zip(self.layouts, pieces[1:], strict=True))
        return "".join((pieces[0], *shown))

    def check(self, ids: Sequence[int]) -> None:
        """InvalidRequestError when the prompt's ids have not as many placeholders as the images have vectors."""
        if ids.count(self.vision.image_token_id) != sum(image.tokens for image in self.refs):
            raise InvalidRequestError("the images cannot be told from the text of the messages", param="messages")


async def images_of(ring: Ring, card: ModelCard, messages: Sequence[ChatMessage]) -> ChatImages | None:
    """Read, check and keep the images of a chat; None when it has none. InvalidRequestError names the part to blame."""
    parts = list(_parts(messages))
    if not parts:
        return None
    if card.vision is None:
        raise UnsupportedModelError(f"model '{card.name}' takes no images", param=parts[0][0])
    if len(parts) > ring.settings.max_images:
        raise InvalidRequestError(
            f"{len(parts)} images, and {ring.settings.max_images} is the limit (--max-images)", param="messages"
        )
    refs: list[ImageRef] = []
    layouts: list[Layout] = []
    for where, part in parts:
        try:
            image = await ring.images.take(await _data(ring, part))
        except InvalidRequestError as error:
            error.param = where
            raise
        detail: Detail = "low" if part.detail == "low" else "high"
        size = layout(card.vision, *image.size, detail)
        refs.append(ImageRef(image.sha256, image_key(image.sha256, detail, card.vision), size.tokens, detail))
        layouts.append(size)
    return ChatImages(card.vision, tuple(refs), tuple(layouts))


def _parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, MessagePart]]:
    for at, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text":
                yield f"messages[{at}].content[{number}]", part


async def _data(ring: Ring, part: MessagePart) -> bytes:
    """The bytes of an image, wherever they are."""
    if part.file is not None:
        return await _file(ring, part.file.file_id)
    assert part.image_url is not None, "a part is one of both"
    url, most = part.image_url.url, ring.settings.max_image_bytes
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
