"""Who uses which adapter version: pins, which keep a version from being deleted, and what workers have loaded.

Both are use, so both put off the expiry of the version and of what leads to it.
"""

import time
from collections.abc import Collection

from shared.adapters import AdapterRef, version_id
from shared.errors import UnknownAdapterError
from shared.redis import keys
from shared.redis.adapters.catalog import AdapterCatalog
from shared.redis.connection.client import Script

ACK_AGE_MS = keys.DAY_S * 1000

_pin = Script("adapter_pin")
_ack = Script("adapter_ack")


class AdapterPins(AdapterCatalog):
    """The part of the store that knows of use."""

    async def pin(self, name: str, version: int, owner: str, ttl_s: float) -> None:
        """Keep a version from being deleted for a while; again with the same owner renews. UnknownAdapterError."""
        done = await _pin(
            self._redis,
            [keys.adapter_pins(name), *_used(name, version)],
            [str(version), owner, str(max(1, int(ttl_s * 1000))), str(keys.ADAPTER_TTL_S)],
        )
        if not done:
            raise UnknownAdapterError(f"there is no adapter {version_id(name, version)}")

    async def unpin(self, name: str, version: int, owner: str) -> None:
        """End a pin."""
        await self._redis.zrem(keys.adapter_pins(name), f"{version}:{owner}")

    async def pin_all(self, reference: str, owner: str, ttl_s: float) -> None:
        """Pin every version that a reference names; a bare name pins nothing. UnknownAdapterError when one has gone."""
        for name, version in _named_versions(reference):
            await self.pin(name, version, owner, ttl_s)

    async def unpin_all(self, reference: str, owner: str) -> None:
        """End what `pin_all` began."""
        for name, version in _named_versions(reference):
            await self.unpin(name, version, owner)

    async def lasting(self, name: str, besides: Collection[str]) -> set[int]:
        """Versions that will be asked for again: latest, best, and those that anybody pins besides these owners."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(keys.adapter(name), ["latest", "best"])
            pipe.zrangebyscore(keys.adapter_pins(name), int(time.time() * 1000), "+inf")
            heads, pins = await pipe.execute()
        owners = (pin.decode().split(":", 1) for pin in pins)
        return {int(head) for head in heads if head} | {
            int(version) for version, owner in owners if owner not in besides
        }

    async def acknowledge(self, worker: str, name: str, version: int) -> None:
        """A worker says which version it has loaded; again at times, so that the version does not expire."""
        await _ack(
            self._redis,
            [keys.adapter_acks(name), *_used(name, version)],
            [worker, str(version), str(keys.ADAPTER_TTL_S), str(ACK_AGE_MS)],
        )


def _named_versions(reference: str) -> list[tuple[str, int]]:
    choices = AdapterRef.parse(reference).choices if "@" in reference else ()
    return [(choice.name, choice.version) for choice in choices if choice.version]


def _used(name: str, version: int) -> list[str]:
    """The keys that live on when a version is used; the manifest stands first."""
    return [
        keys.adapter_manifest(name, version),
        keys.adapter_bytes(name, version),
        keys.adapter(name),
        keys.adapter_versions(name),
        keys.adapter_log(name),
    ]
