"""The parts of a chat's message: text and images, as OpenAI's clients write them."""

from typing import Any, Literal

from pydantic import Field, model_validator

from api.http.fields import HistoryModel, complaint


class ImageUrl(HistoryModel):
    """Where an image is: a `data:` URL, or `https:` of a host that the server may fetch from."""

    url: str
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="low: as one small picture")


class FileName(HistoryModel):
    """An image that was uploaded to /v1/files."""

    file_id: str
    detail: Literal["auto", "low", "high"] | None = None


class MessagePart(HistoryModel):
    """A part of a message: text, or an image."""

    type: Literal["text", "image_url", "file"]
    text: str = ""
    image_url: ImageUrl | None = None
    file: FileName | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_url(cls, data: Any) -> Any:
        """Some clients send the URL alone."""
        if isinstance(data, dict) and isinstance(data.get("image_url"), str):
            return {**data, "image_url": {"url": data["image_url"]}}
        return data

    @model_validator(mode="after")
    def _complete(self) -> "MessagePart":
        if self.type not in self.model_fields_set:
            raise complaint(self.type, f"a part of type '{self.type}' needs '{self.type}'")
        if self.type != "text" and (self.text or (self.image_url is not None and self.file is not None)):
            raise complaint("type", "a part is either text or one image")
        return self

    @property
    def detail(self) -> str | None:
        """How closely an image is to be looked at."""
        source = self.image_url or self.file
        return None if source is None else source.detail
