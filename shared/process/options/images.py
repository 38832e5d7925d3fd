"""An api process's settings for images in prompts: what is taken, from where, and how much of it is kept."""

from pydantic import BaseModel, Field


class ImageSettings(BaseModel):
    """Part of ApiSettings."""

    allowed_image_hosts: list[str] = Field(
        default=[], description="hosts that images may be fetched from by https; none: `https:` image URLs are refused"
    )
    max_image_bytes: int = Field(default=10_485_760, ge=1024, description="one image file")
    max_images: int = Field(default=16, ge=1, le=64, description="images in one request")
    max_image_request_bytes: int = Field(
        default=16_777_216, ge=1024, description="body of a chat or response with its `data:` URLs of images; what "
        "else there is in it counts as in any request"
    )  # fmt: skip
    image_store_mb: int = Field(
        default=256, ge=1, description="images of one tenant that wait for workers; those used longest ago go"
    )
    image_fetch_s: float = Field(default=10, gt=0, description="for the fetch of one image")
