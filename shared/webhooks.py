"""Receivers that are notified of the end of a job, a batch or a response."""

import msgspec


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    """URL of a receiver, and the secret that signs messages to it. The secret is never shown and never logged."""

    url: str
    secret: str

    def __repr__(self) -> str:
        return "Webhook(...)"
