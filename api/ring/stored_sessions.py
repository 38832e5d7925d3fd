"""Stored sessions as the routes and the dashboard read them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from api.callers.fair_pool import aside
from api.ring.choosing import from_each
from api.ring.ring import Ring
from shared.episodes import JoinedTurn, joined
from shared.errors import InvalidRequestError, NotFoundError
from shared.redis.kept.episode_store import episodes_of
from shared.signals import Calibration, Signal, TurnReward, rewards_of


class StoredSession(NamedTuple):
    """A session, and the ring that has it."""

    ring: Ring
    turns: list[JoinedTurn]
    signals: Mapping[str, Sequence[Signal]]  # by the turn's name
    rewards: Mapping[str, TurnReward]  # likewise
    calibration: Calibration


async def stored_session(ring: Ring, tenant: str, session_id: str) -> StoredSession:
    """A tenant's session; NotFoundError when there is none."""
    keeper = episodes_of(tenant)
    for there, episode in await from_each(ring, lambda each: each.episodes.read(keeper, session_id)):
        if episode.turns:
            turns = await aside(joined, episode.turns)
            calibration = await there.episodes.calibration(keeper) if episode.signals else Calibration()
            rewards = rewards_of(turns, episode.signals, calibration)
            return StoredSession(there, turns, episode.signals, rewards, calibration)
    raise NotFoundError(
        f"there is no session {session_id[:160]!r}: it is not this tenant's, none of its answers is stored, or its "
        "time is over",
        param="session_id",
    )


def check_stored(ring: Ring) -> None:
    """InvalidRequestError when this server stores no answers, and so no sessions."""
    if not ring.settings.feedback_ttl_s:
        raise InvalidRequestError("this server stores no answers, and so no sessions (--feedback-ttl-days)")
