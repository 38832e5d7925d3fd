"""An api process's settings for what it keeps between two requests to /v1/responses and /v1/conversations."""

from pydantic import BaseModel, Field


class ResponseSettings(BaseModel):
    """Part of ApiSettings."""

    response_ttl_s: int = Field(
        default=604_800,
        ge=0,
        description="a stored response, or a conversation, that nobody has used for so long goes; 0: none are stored",
    )
    response_store_mb: int = Field(
        default=64, ge=1, description="stored responses and conversations of one tenant or key; the oldest go"
    )
    background_timeout_s: float = Field(default=3600, gt=0, description="deadline of a response with `background`")
