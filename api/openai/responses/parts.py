"""The parts of a message in the `input` of POST /v1/responses: text, images, and files of text."""

import base64
import binascii
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import unquote_to_bytes

from pydantic import BeforeValidator, Tag, WithJsonSchema, model_validator

from api.http.fields import HistoryModel, Off, complaint
from api.openai.tools import by_type, known_type


class TextPart(HistoryModel):
    """A part of a message that is text."""

    off: ClassVar[Off] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text"]
    text: str


class ImagePart(HistoryModel):
    """An image in a user's message, or one that a tool has brought: a URL, or a file of /v1/files."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @model_validator(mode="after")
    def _one(self) -> "ImagePart":
        if (self.image_url is None) == (self.file_id is None):
            raise complaint("image_url", "an image has either 'image_url' or 'file_id'")
        return self

    def part(self) -> dict[str, Any]:
        """As a chat has it, where `high` is the most."""
        detail = "high" if self.detail == "original" else self.detail
        if self.file_id is not None:
            return {"type": "file", "file": {"file_id": self.file_id, "detail": detail}}
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": detail}}


class FilePart(HistoryModel):
    """A file whose content is text; the model sees its name and the text. Other documents cannot be read here."""

    type: Literal["input_file"]
    file_data: str | None = None
    filename: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "FilePart":
        if self.file_data is None:
            reason = "a file comes with its text in 'file_data': this server reads none by 'file_id' or 'file_url'"
            raise complaint("file_data", reason, unsupported=True)
        try:
            _ = self.text
        except (binascii.Error, UnicodeDecodeError, ValueError):
            reason = "only files of UTF-8 text are read, as a 'data:' URL or in base64: no PDF, no office document"
            raise complaint("file_data", reason, unsupported=True) from None
        return self

    @cached_property
    def text(self) -> str:
        """Text that the model sees in place of the file."""
        head, comma, data = (self.file_data or "").partition(",")
        if not comma:
            raw = base64.b64decode(head, validate=True)
        elif head.startswith("data:"):
            raw = base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
        else:
            raise ValueError("neither a data: URL nor base64")
        return f"{self.filename or 'file'}:\n{raw.decode()}"


Part = TextPart | ImagePart | FilePart


def _parts(value: Any) -> Any:
    if value is None:  # as in chats: agents send back an answer, or a result, that has none
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


# A text, or parts of a message.
Content = Annotated[
    list[
        Annotated[
            Annotated[
                Annotated[TextPart, Tag("<input_text>")]
                | Annotated[TextPart, Tag("<output_text>")]
                | Annotated[TextPart, Tag("<text>")]
                | Annotated[ImagePart, Tag("<input_image>")]
                | Annotated[FilePart, Tag("<input_file>")],
                by_type("text"),
            ],
            known_type("input_text", "output_text", "text", "input_image", "input_file"),
        ]
    ],
    BeforeValidator(_parts),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


def content_of(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    """A message's content as a chat has it: one text, unless there are images in between."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return text_of(parts)
    return [part.part() if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in parts]


def text_of(parts: Sequence[Part]) -> str:
    """All of it that is text."""
    return "".join(part.text for part in parts if not isinstance(part, ImagePart))
