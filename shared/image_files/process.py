"""`python -m shared.image_files.process BYTES`: reads image files for its parent, and may be killed.

Questions and answers are msgpack. It may take so many bytes of memory; a file that needs more is refused.
"""

import contextlib
import os
import resource
import sys

import msgspec

from shared.errors import InvalidRequestError
from shared.image_files.pixels import checked, thumbnail, tiles
from shared.images.refs import Detail, VisionSpec
from shared.process.call_pipe import CallPipe


class ImageQuestion(msgspec.Struct, array_like=True):
    """A file; asked for are its tiles, or a thumbnail, or neither: its size."""

    data: bytes
    vision: VisionSpec | None = None
    detail: Detail = "high"
    thumbnail: int = 0  # pixels on its longer side


class ImageAnswer(msgspec.Struct, array_like=True):
    """The size, tiles or thumbnail of a file, or the reason why it was refused."""

    width: int = 0  # of the image; of its last tile
    height: int = 0
    tiles: list[bytes] = []
    complaint: str = ""
    thumbnail: bytes = b""  # PNG


_question = msgspec.msgpack.Decoder(ImageQuestion)


def main() -> None:
    """Answer questions until the pipe is closed."""
    memory = int(sys.argv[1])
    with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit: the caller's clock is left
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.nice(5)  # tokens go first
    pipe = CallPipe()
    with contextlib.suppress(OSError):
        while (message := pipe.read()) is not None:
            pipe.write(msgspec.msgpack.encode(answered(_question.decode(message))))


def answered(question: ImageQuestion) -> ImageAnswer:
    """The answer to one question."""
    try:
        if question.vision is not None:
            return ImageAnswer(*tiles(question.data, question.vision, question.detail))
        if question.thumbnail:
            return ImageAnswer(thumbnail=thumbnail(question.data, question.thumbnail))
        return ImageAnswer(*checked(question.data))
    except InvalidRequestError as error:
        return ImageAnswer(complaint=error.message)
    except MemoryError:
        return ImageAnswer(complaint="the image takes more memory to decode than one image may have")


if __name__ == "__main__":
    main()
