"""One keeper's things in Redis: where they stand, for how long, and within which bound."""

from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from shared.errors import QueueFullError
from shared.redis import keys
from shared.redis.connection.client import Argument, Script

When = Literal["new", "there", "running", "any"]

_put = Script("kept_put")
_forget = Script("kept_forget")


@dataclass(frozen=True)
class Terms:
    """Time to live of an unused thing, and the bytes that a keeper may have."""

    ttl_s: int
    bytes: int


class KeptThings:
    """Storage that responses, conversations and answers share."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._terms = terms

    async def put(
        self, keeper: str, name: str, fields: dict[str, Argument], when: When = "any", *, at: str = ""
    ) -> bool:
        """Write fields of a thing; False when it is not there, there already, or over, where `when` asks for that.

        `at`: only while its field `at` says this.

        QueueFullError for a new one that finds no room beside those that still run.
        """
        flat = [part for pair in fields.items() for part in pair]
        arguments = self.arguments(keeper, name)
        done = await _put(self._redis, self.names(keeper, name), [*arguments, when, at, *flat])
        if done < 0:
            raise QueueFullError(
                f"the responses of this key that still run fill its {self._terms.bytes >> 20} MiB "
                "(--response-store-mb); try again when some have ended",
                retry_after_s=5,
            )
        return bool(done)

    async def forget(self, keeper: str, name: str) -> bool:
        """Forget a thing; False when it was not there."""
        return bool(await _forget(self._redis, self.names(keeper, name), self.arguments(keeper, name)[:2]))

    def names(self, keeper: str, name: str) -> list[str]:
        """Keys that every script takes first."""
        return [keys.kept(keeper, name), keys.kept_uses(keeper), keys.kept_sizes(keeper)]

    def arguments(self, keeper: str, name: str) -> list[Argument]:
        """Arguments that every script takes first."""
        return [keys.kept(keeper, "").removesuffix("thing:"), name, self._terms.ttl_s, self._terms.bytes]
