"""The secret by which the processes of a ring know one another: workers that send KV, and the ranks of a group.

The process that is first makes it, the others find it. Each asks again with every heartbeat, so a Redis that has lost
it gets a new one, and all processes know that within a few seconds.
"""

import secrets
from collections.abc import Sequence

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, ask_all

SECRET_BYTES = 32


async def ring_secret(
    redis: Redis, commands: Sequence[tuple[Argument, ...]] = (), of: keys.Key = keys.peer_secret
) -> bytes:
    """By which workers of a ring know one another; made where there is none. b"": not to be had.

    `commands`: others that go along in the same round trip. `of`: where it stands.
    """
    key = of()
    *_, secret = await ask_all(
        redis,
        [
            *commands,
            ("SET", key, secrets.token_bytes(SECRET_BYTES), "NX", "EX", keys.PEER_SECRET_TTL_S),
            ("EXPIRE", key, keys.PEER_SECRET_TTL_S),
            ("GET", key),
        ],
    )
    return secret if secret and len(secret) == SECRET_BYTES else b""
