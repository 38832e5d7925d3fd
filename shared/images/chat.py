"""The images of one chat: what a sequence names, and the text that stands for them in its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.errors import InvalidRequestError
from shared.images.layout import Layout, layout
from shared.images.refs import Detail, ImageRef, VisionSpec, image_key


class SizedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that has been checked: all that a prompt's text and keys of KV need of it, whatever the model."""

    sha256: bytes
    width: int  # pixels
    height: int
    detail: Detail = "high"


@dataclass(frozen=True)
class ChatImages:
    """The images of a chat in their order in the messages."""

    vision: VisionSpec
    images: tuple[SizedImage, ...]
    refs: tuple[ImageRef, ...]
    layouts: tuple[Layout, ...]

    @classmethod
    def of(cls, vision: VisionSpec, images: Sequence[SizedImage]) -> "ChatImages":
        """Compute keys, token counts and layouts of the images for a model."""
        layouts = tuple(layout(vision, image.width, image.height, image.detail) for image in images)
        refs = tuple(
            ImageRef(image.sha256, image_key(image.sha256, image.detail, vision), size.tokens, image.detail)
            for image, size in zip(images, layouts, strict=True)
        )
        return cls(vision, tuple(images), refs, layouts)

    def first(self, count: int) -> "ChatImages":
        """Those of the beginning of the chat."""
        return ChatImages(self.vision, self.images[:count], self.refs[:count], self.layouts[:count])

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
            raise InvalidRequestError("images and text of the messages cannot be distinguished", param="messages")
