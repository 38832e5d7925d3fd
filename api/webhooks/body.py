"""The `webhook` of a request: where to, and the secret that signs what is sent.

No request makes this server call whom it likes: only hosts that the operator names (`--webhook-hosts`) are called.
"""

import base64
import binascii
from fnmatch import fnmatchcase

import httpx
from pydantic import Field, SecretStr, field_validator

from api.http.fields import RequestModel, complaint
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.process.api_settings import ApiSettings
from shared.webhooks import Webhook

PREFIX = "whsec_"
FEWEST, MOST = 16, 128  # bytes of a secret


class WebhookBody(RequestModel):
    """Server that is notified of an end."""

    url: str = Field(max_length=2048, description="https, of a host that the server allows (`--webhook-hosts`)")
    secret: SecretStr = Field(description="signs what is sent, as Standard Webhooks do: `whsec_` and base64, or a text")

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr) -> SecretStr:
        try:
            size = len(secret_bytes(secret.get_secret_value()))
        except (binascii.Error, ValueError):
            raise complaint("", "what follows 'whsec_' is no base64") from None
        if not FEWEST <= size <= MOST:
            raise complaint("", f"a secret has {FEWEST} to {MOST} bytes")
        return secret


def secret_bytes(secret: str) -> bytes:
    """The key of a secret."""
    return base64.b64decode(secret[len(PREFIX) :], validate=True) if secret.startswith(PREFIX) else secret.encode()


def webhook_of(ring: Ring, body: WebhookBody | None) -> Webhook | None:
    """As it is stored; UnsupportedParameterError or InvalidRequestError when it may not be."""
    if body is None:
        return None
    if not ring.settings.webhook_hosts:
        raise UnsupportedParameterError("'webhook': this server sends none (--webhook-hosts)", param="webhook")
    if complaint_of := refusal(body.url, ring.settings):
        raise InvalidRequestError(f"'webhook.url' {complaint_of}", param="webhook.url")
    return Webhook(body.url, body.secret.get_secret_value())


def refusal(url: str, settings: ApiSettings) -> str:
    """Why no message goes to this URL; "" when one may."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return "is no URL"
    schemes = ("https", "http") if settings.webhook_private else ("https",)
    if parsed.scheme not in schemes or not parsed.host or not url.isascii() or not url.isprintable():
        return f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)} and a host"
    if parsed.userinfo or parsed.fragment:
        return "must have neither a user nor a fragment"
    usual = {"https": 443, "http": 80}[parsed.scheme]
    port = parsed.port or usual
    for allowed in settings.webhook_hosts:
        name, _, allowed_port = allowed.partition(":")
        if fnmatchcase(parsed.host.lower(), name) and port == int(allowed_port or usual):
            return ""
    return "names a host or port that this server does not send to (--webhook-hosts)"
