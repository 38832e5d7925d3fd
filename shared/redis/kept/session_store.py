"""The state of recurrent policies between two steps, under ids that their clients choose.

Invariants. A session moves on from the step that was read, or not at all: of two requests at once one is refused. One
that was begun anew is another session, whatever its steps. To write a step again changes nothing.
"""

import secrets
from typing import NamedTuple

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, ask
from shared.redis.kept.kept_things import KeptThings, Terms


class Session(NamedTuple):
    """A session as it was read, or as it begins."""

    mark: str  # of this step: no two have the same, also of the same number
    step: int  # steps made
    policy: str  # the name of the network, whatever its version
    state: bytes  # tensors (shared/networks/tensors.py)

    @property
    def at(self) -> str:
        """The step as it is written."""
        return f"{self.mark}:{self.step}"


class SessionStore:
    """Sessions by keeper and id."""

    def __init__(self, redis: Redis, terms: Terms) -> None:
        self._redis = redis
        self._things = KeptThings(redis, terms)

    async def find(self, keeper: str, id: str) -> Session | None:
        """A session; None when there is none."""
        at, policy, state = await ask(self._redis, "HMGET", keys.kept(keeper, id), "at", "policy", "state")
        if at is None:
            return None
        mark, _, step = at.decode().rpartition(":")
        return Session(mark, int(step), policy.decode(), state)

    async def move(self, keeper: str, id: str, session: Session, state: bytes) -> bool:
        """One step on, with this state; False when another request has moved it meanwhile, or it is gone.

        A session that begins replaces another one of its id.
        """
        later = begun(session.policy)._replace(step=session.step + 1)
        fields: dict[str, Argument] = {"at": later.at, "policy": session.policy, "state": state}
        return await self._things.put(keeper, id, fields, at=session.at if session.step else "")


def begun(policy: str) -> Session:
    """A session without a step."""
    return Session(secrets.token_hex(8), 0, policy, b"")


def sessions_of(owner: str) -> str:
    """Keeper of a tenant's or key's sessions in names of keys, another than that of its responses."""
    return keys.keeper(f"sessions of {owner}")
