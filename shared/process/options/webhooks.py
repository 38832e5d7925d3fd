"""An api process's settings for webhooks. Off until a host is named: no request makes this server call anybody."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field


def _host(given: str) -> str:
    name, _, port = given.lower().partition(":")
    if not name or "/" in given or "@" in given or (port and not port.isdigit()) or name in ("*", "*."):
        raise ValueError(f"{given!r} is no HOST, HOST:PORT or *.DOMAIN")
    return given.lower()


class WebhookSettings(BaseModel):
    """Part of ApiSettings."""

    webhook_hosts: list[Annotated[str, AfterValidator(_host)]] = Field(
        default=[],
        description="HOST, HOST:PORT or *.DOMAIN that webhooks may be sent to; none: a request for one is refused",
    )
    webhook_private: bool = Field(
        default=False, description="these hosts may have private addresses, and be reached without TLS"
    )
    webhook_hours: float = Field(default=24, gt=0, description="for which a webhook that fails is tried again")
