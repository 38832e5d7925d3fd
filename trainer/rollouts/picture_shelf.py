"""The images of a data set: their files in memory, and tiles made of them again whenever the learner wants them.

Examples are read in a thread and learned from in the MLX thread, while the processes that decode files belong to the
event loop. Both threads wait for them here; the loop waits for neither.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from shared.errors import EngineError, InvalidRequestError, SetupError
from shared.images.refs import ImageRef, Picture
from shared.jobs import Message
from trainer.rollouts.pictures import ChatPictures, ShownChat
from trainer.rollouts.sight import Sight

T = TypeVar("T")

PATIENCE_S = 120.0  # for one chat or one image; a file takes 20 s at most


class PictureShelf:
    """Images of one run, read on any thread; made in the event loop."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self._pictures = ChatPictures(sight)
        self._loop = asyncio.get_running_loop()
        self._refs: dict[bytes, ImageRef] = {}  # by key
        self._files: dict[bytes, bytes] = {}  # by hash
        sight.bring = self._bring

    def chat(self, messages: Sequence[Message]) -> ShownChat:
        """A chat with its images apart, which stay here; SetupError for one that is none. In another thread."""
        try:
            chat = self._wait(self._pictures.read(messages))
        except TimeoutError as error:
            raise SetupError(f"images that are not read within {PATIENCE_S:g} s") from error
        self._files.update(chat.files)
        self._refs.update((ref.key, ref) for ref in chat.images.refs)
        return chat

    def files(self, images: Sequence[ImageRef]) -> dict[bytes, bytes]:
        """Bytes of image files, by SHA-256."""
        return {image.sha256: self._files[image.sha256] for image in images}

    def close(self) -> None:
        """Kill the processes that decode images."""
        self._pictures.close()

    def _bring(self, key: bytes) -> Picture:
        ref = self._refs[key]
        try:
            return self._wait(self._pictures.picture(ref, self._files[ref.sha256]))
        except (TimeoutError, InvalidRequestError) as error:
            raise EngineError(f"an image of the data set was read before, and is not now: {error}") from error

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)
