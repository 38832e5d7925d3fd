"""Who wants to be told of the end of a job, a batch or a response."""

import msgspec


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where to, and what the message is signed with. The secret is never shown and never logged."""

    url: str
    secret: str

    def __repr__(self) -> str:
        return "Webhook(...)"
