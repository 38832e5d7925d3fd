"""An api process's settings for what it keeps between two requests: responses, conversations, answers, sessions."""

from pydantic import Field

from shared.process.options.images import ImageSettings


class ResponseSettings(ImageSettings):
    """Part of ApiSettings, with images, which are kept until workers have seen them."""

    response_ttl_s: int = Field(
        default=604_800,
        ge=0,
        description="a stored response, or a conversation, that nobody has used for so long goes; 0: none are stored",
    )
    response_store_mb: int = Field(
        default=64, ge=1, description="stored responses and conversations of one tenant or key; the oldest go"
    )
    feedback_ttl_days: float = Field(
        default=0,
        ge=0,
        le=365,
        description="answers are kept for so long, with their prompts, to be judged by /v1/feedback; 0: none are kept",
    )
    feedback_store_mb: int = Field(
        default=256, ge=1, description="answers of one tenant that are kept for feedback; the oldest go"
    )
    session_ttl_s: int = Field(
        default=3600, ge=1, description="a policy's state under a `session_id` that nobody has used for so long goes"
    )
    session_store_mb: int = Field(
        default=64, ge=1, description="states under session ids of one tenant or key; those used longest ago go"
    )
    background_timeout_s: float = Field(default=3600, gt=0, description="deadline of a response with `background`")

    @property
    def feedback_ttl_s(self) -> int:
        """The days of feedback in seconds."""
        return int(86_400 * self.feedback_ttl_days)
