"""Stored sessions as the routes and the dashboard read them."""

from api.callers.fair_pool import aside
from api.ring.choosing import from_each
from api.ring.ring import Ring
from shared.episodes import JoinedTurn, joined
from shared.errors import InvalidRequestError, NotFoundError
from shared.redis.kept.episode_store import episodes_of


async def turns_of(ring: Ring, tenant: str, session_id: str) -> tuple[Ring, list[JoinedTurn]]:
    """The turns of a tenant's session, and the ring that has it; NotFoundError when there is none."""
    keeper = episodes_of(tenant)
    for there, turns in await from_each(ring, lambda each: each.episodes.turns(keeper, session_id)):
        if turns:
            return there, await aside(joined, turns)
    raise NotFoundError(
        f"there is no session {session_id[:160]!r}: it is not this tenant's, none of its answers is stored, or its "
        "time is over",
        param="session_id",
    )


def check_stored(ring: Ring) -> None:
    """InvalidRequestError when this server stores no answers, and so no sessions."""
    if not ring.settings.feedback_ttl_s:
        raise InvalidRequestError("this server stores no answers, and so no sessions (--feedback-ttl-days)")
