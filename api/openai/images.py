"""The images of a chat, as the parts of its messages name them."""

from collections.abc import Iterator, Sequence

from api.generation.named_images import Keep, NamedImage, read_images
from api.openai.bodies import ChatMessage
from api.ring.ring import Ring
from shared.images.chat import ChatImages
from shared.sequences import ModelCard


async def images_of(
    ring: Ring, card: ModelCard, messages: Sequence[ChatMessage], keep: Keep | None = None
) -> ChatImages | None:
    """Read, check and keep the images of a chat, as `read_images` does."""
    return await read_images(ring, card, list(named_images(messages)), keep)


def named_images(messages: Sequence[ChatMessage]) -> Iterator[NamedImage]:
    """The images of messages, in order."""
    for at, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{at}].content[{number}]"
            if part.file is not None:
                yield NamedImage(where, None, part.file.file_id, part.detail)
            elif part.image_url is not None:
                yield NamedImage(where, part.image_url.url, None, part.detail)
