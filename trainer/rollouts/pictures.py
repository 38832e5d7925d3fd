"""Images in the parts of messages, as `data:` URLs: read in processes apart, and shown to the learner."""

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shared.errors import EngineError, InvalidRequestError, SetupError
from shared.image_files.reader import ImageReader
from shared.images.chat import ChatImages, SizedImage
from shared.images.refs import Detail, ImageRef, Picture, image_key
from shared.jobs import Message
from trainer.rollouts.sight import Sight

KNOWN = 65_536  # images whose sizes are remembered


class ShownChat(NamedTuple):
    """A chat with its images apart."""

    messages: list[Message]  # as the template takes them
    images: ChatImages
    files: dict[bytes, bytes]  # of the images, by hash


class ChatPictures:
    """Reads the images of one run's chats."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._reader = ImageReader()
        self._sizes: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    async def of(self, messages: Sequence[Message]) -> ShownChat:
        """Read the images of a chat and show them to the learner; SetupError for one that is none."""
        chat = await self.read(messages)
        for ref in chat.images.refs:
            if not self._sight.knows(ref.key):
                self._sight.show(await self.picture(ref, chat.files[ref.sha256]))
        return chat

    async def read(self, messages: Sequence[Message]) -> ShownChat:
        """The chat with its images apart; SetupError for one that is none."""
        sized: list[SizedImage] = []
        files: dict[bytes, bytes] = {}
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        for url, detail in filter(None, map(image_of, parts)):
            data = _bytes_of(url)
            sized.append(await self._sized(data, detail))
            files[sized[-1].sha256] = data
        return ShownChat(plain(messages), ChatImages.of(self._sight.vision, sized), files)

    async def picture(self, ref: ImageRef, data: bytes, tenant: str = "") -> Picture:
        """The tiles of an image that has been read."""
        width, height, tiles = await self._reader.tiles(data, self._sight.vision, ref.detail, tenant)
        return Picture(ref.key, tiles, width, height)

    async def of_refs(
        self, refs: Iterable[ImageRef], files: Mapping[bytes, bytes], tenant: str
    ) -> dict[bytes, Picture]:
        """The tiles of images that a tenant's client has read, by key; EngineError where it reads them otherwise."""
        wanted = {ref.key: ref for ref in refs}
        for ref in wanted.values():
            if ref.key != image_key(ref.sha256, ref.detail, self._sight.vision) or ref.sha256 not in files:
                raise EngineError("the images were prepared for another processor than this one's")
        return {key: await self.picture(ref, files[ref.sha256], tenant) for key, ref in wanted.items()}

    def close(self) -> None:
        """Kill the processes that decode images."""
        self._reader.close()

    async def _sized(self, data: bytes, detail: Detail) -> SizedImage:
        sha256 = hashlib.sha256(data).digest()
        if sha256 not in self._sizes:
            try:
                self._sizes[sha256] = await self._reader.size(data)
            except InvalidRequestError as error:
                raise SetupError(f"an image of a prompt: {error.message}") from error
            if len(self._sizes) > KNOWN:
                self._sizes.popitem(last=False)
        return SizedImage(sha256, *self._sizes[sha256], detail)


def has_images(messages: Sequence[Message]) -> bool:
    """True if a chat has parts that are images."""
    contents = [message.get("content") for message in messages]
    return any(image_of(part) for content in contents if isinstance(content, list) for part in content)


def plain(messages: Sequence[Message]) -> list[Message]:
    """The chat in the form of templates, with a mark in the place of each image."""
    return [
        {**message, "content": [{"type": "image"} if image_of(part) else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def image_of(part: Any) -> tuple[str, Detail] | None:
    """URL and detail of a part that is an image; None of another one."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    source = part.get("image_url")
    if isinstance(source, dict):
        return str(source.get("url", "")), "low" if source.get("detail") == "low" else "high"
    return str(source), "high"


def _bytes_of(url: str) -> bytes:
    head, comma, text = url.partition(";base64,")
    if not comma or not head.startswith("data:"):
        raise SetupError(f"an image of a prompt is a `data:` URL with base64, not {url[:40]!r}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise SetupError("an image of a prompt: its base64 text is damaged") from None
