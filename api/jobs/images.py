"""The images of a job's prompts: read when the job is submitted, kept by the job, and named by their hash."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from api.generation.named_images import NamedImage, read_images
from api.http.content import MessagePart
from api.http.errors import from_validation
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, ParallmError
from shared.jobs import JobInput, JobKind, Message
from shared.redis.jobs.images import JobImages
from shared.sequences import ModelCard

Taking = Callable[[JobInput, str, str], Awaitable[JobInput]]  # `JobPictures.taken`


class JobPictures(NamedTuple):
    """Replaces the images in a job's inputs while they are read."""

    ring: Ring
    card: ModelCard
    kind: JobKind
    images: JobImages

    async def taken(self, given: JobInput, where: str, param: str) -> JobInput:
        """The input with its images kept, and `{"type": "image"}` in their places.

        InvalidRequestError blames `param`, and says where the image stands.
        """
        try:
            if self.kind == "score":
                raise InvalidRequestError("images do not go with jobs of kind 'score'")
            messages = list(map(_Shown.of, _messages(given)))
            named = [
                NamedImage(f"messages[{at}].content[{number}]", *_source(part), part.detail)
                for at, message in enumerate(messages)
                for number, part in message.images(at)
            ]
            found = await read_images(self.ring, self.card, named, self.images.keep)
        except ValidationError as error:
            raise _blamed(from_validation(error.errors()), where, param) from error
        except ParallmError as error:
            raise _blamed(error, where, param) from error
        shown = [message.for_template() for message in messages]
        return msgspec.structs.replace(given, prompt=shown, images=() if found is None else found.images)


def has_parts(given: JobInput) -> bool:
    """True if a prompt has parts that are no text."""
    contents = [message.get("content") for message in _messages(given)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)


def _messages(given: JobInput) -> Iterator[Message]:
    prompt = given.prompt
    return (each for each in prompt if isinstance(each, dict)) if not isinstance(prompt, str) else iter(())


class _Shown(NamedTuple):
    """A message, and its parts where its content is some."""

    message: Message
    parts: list[MessagePart] | None

    @classmethod
    def of(cls, message: Message) -> "_Shown":
        content = message.get("content")
        if not isinstance(content, list):
            return cls(message, None)
        return cls(message, [MessagePart.model_validate(part) for part in content])

    def images(self, at: int) -> Iterator[tuple[int, MessagePart]]:
        """Those of message number `at`, each with its place."""
        for number, part in enumerate(self.parts or ()):
            if part.type == "text":
                continue
            if self.message.get("role") != "user":
                raise InvalidRequestError(
                    "only a message of role 'user' has images", param=f"messages[{at}].content[{number}]"
                )
            yield number, part

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: text as one string where there is nothing else."""
        if self.parts is None:
            return self.message
        if all(part.type == "text" for part in self.parts):
            return {**self.message, "content": "".join(part.text for part in self.parts)}
        shown = [{"type": "text", "text": p.text} if p.type == "text" else {"type": "image"} for p in self.parts]
        return {**self.message, "content": shown}


def _source(part: MessagePart) -> tuple[str | None, str | None]:
    """URL of the image, or the id of its file."""
    if part.file is not None:
        return None, part.file.file_id
    return None if part.image_url is None else part.image_url.url, None


def _blamed(error: ParallmError, where: str, param: str) -> ParallmError:
    place = f"{where}, {error.param}" if error.param else where
    error.message, error.param = f"{place}: {error.message}", param
    return error
