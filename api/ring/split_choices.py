"""Which version a split of an adapter chooses for a request.

Each api process looks at an adapter's split at most once in LOOK_AGAIN_S, and chooses from what it has seen: a request
costs no round trip more. Whoever finds that a split has all its rewards gives the verdict.

Invariants. A split is about the requests of those who own the adapter, and about nobody else's. While its shares stay,
the same session gets the same version; when they move, only sessions between the old and the new cut change.
"""

import time
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from api.ring.caller import asker
from shared.adapters import AdapterChoice, AdapterRef, ResolvedAdapter
from shared.errors import ParallmError
from shared.owners import ANYBODY
from shared.redis.adapters.splits import Splits, SplitState
from shared.redis.connection.faults import reason
from shared.splits import Arm
from shared.telemetry.metrics import Tally

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0
KNOWN = 1024  # adapters whose split, or lack of one, is remembered


class ChosenVersion(NamedTuple):
    """A version, and the split that has chosen it."""

    resolved: ResolvedAdapter
    arm: Arm


class _Look(NamedTuple):
    at: float
    state: SplitState | None  # None: no split that is in force
    reference: AdapterRef | None  # its versions by their shares


class SplitChoices:
    """The splits that this process has seen."""

    def __init__(self, splits: Splits, tally: Tally) -> None:
        self.stored = splits
        self._tally = tally
        self._seen: dict[str, _Look] = {}

    async def choose(self, name: str, session: str) -> ChosenVersion | None:
        """The version for this session; None when no split of the adapter is about this asker's requests."""
        look = self._seen.get(name)
        if look is None or time.monotonic() - look.at > LOOK_AGAIN_S:
            if look is not None:
                self._seen[name] = look._replace(at=time.monotonic())  # by which others go on meanwhile
            look = await self._look(name)
        state = look.state
        if state is None or look.reference is None or not _concerns(state.split.tenant):
            return None
        version = look.reference.choose(f"{state.id}:{session}").version
        self._tally.counter("mlx_parallm_split_requests_total", name, str(version)).add()
        return ChosenVersion(ResolvedAdapter(name, version, False, state.manifests[version]), Arm(state.id, version))

    def forget(self, name: str) -> None:
        """Look again at the next request: the split was changed here."""
        self._seen.pop(name, None)

    async def read(self, name: str) -> SplitState | None:
        """The split of an adapter as it is now, with its verdict if that is due."""
        state = await self.stored.find(name)
        if state is None or not state.full or state.verdict is not None or not asker().owns(state.split.tenant):
            return state
        try:
            await self.stored.settle(name, state)
        except (ParallmError, RedisError, OSError) as error:
            log.warning("split.not_settled", adapter=name, error=reason(error))
        return await self.stored.find(name)

    async def _look(self, name: str) -> _Look:
        state = await self.read(name)
        look = _Look(time.monotonic(), None, None)
        if state is not None and not state.over:
            choices = [AdapterChoice(name, version, share) for version, share in state.shares.items() if share > 0]
            look = look._replace(state=state, reference=AdapterRef(tuple(choices)))
        self._seen.pop(name, None)
        self._seen[name] = look
        while len(self._seen) > KNOWN:
            del self._seen[next(iter(self._seen))]
        return look


def _concerns(owner: str) -> bool:
    """Whether an adapter is the asker's own, an admin's key being no tenant's."""
    who = asker()
    return who == ANYBODY or who.publishes_for == owner
