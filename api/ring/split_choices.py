"""Which version a split of an adapter chooses for a request.

Each api process looks at an adapter's split at most once in LOOK_AGAIN_S, and chooses from what it has seen: a request
costs no round trip more. The process that finds that a split has all its rewards gives the verdict.

Invariants. Nothing is chosen from a look that is older than twice LOOK_AGAIN_S: a request that finds one waits for the
next, and all who wait share it. A split is about the requests of those who own the adapter, and about no others.
While its shares stay, the same session gets the same version; when they move, only sessions between the old and the new
cut change. The floor alone is drawn for each request, so that few sessions do not leave a version untried.
"""

import asyncio
import contextvars
import functools
import random
import time
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from api.callers.caller import asker
from shared.adapters import AdapterChoice, AdapterRef
from shared.errors import ParallmError
from shared.owners import ANYBODY
from shared.redis.adapters.splits import Splits, SplitState
from shared.redis.connection.faults import reason
from shared.splits import Arm, ArmKind
from shared.telemetry.metrics import Tally

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0
KNOWN = 1024  # adapters whose split, or lack of one, is remembered


class SplitChoice(NamedTuple):
    """The version that a split has chosen."""

    arm: Arm
    kind: ArmKind


class _Look(NamedTuple):
    at: float  # when it began
    state: SplitState | None  # None: no split that is in force
    reference: AdapterRef | None  # its versions by their shares above the floor
    floor: float = 0.0  # share of each that is drawn for the request, whichever client sends it


class SplitChoices:
    """The splits that this process has seen."""

    def __init__(self, splits: Splits, tally: Tally) -> None:
        self.stored = splits
        self._tally = tally
        self._seen: dict[str, _Look] = {}
        self._looking: dict[str, asyncio.Task[_Look]] = {}
        self._tasks: set[asyncio.Task[_Look]] = set()  # those that `forget` has made useless, too

    async def choose(self, name: str, session: str) -> SplitChoice | None:
        """The version for this session; None when no split of the adapter is about this asker's requests."""
        look = self._seen.get(name)
        now = time.monotonic()
        if look is None or now - look.at > 2 * LOOK_AGAIN_S:
            look = await asyncio.shield(self._look_again(name))
        elif now - look.at > LOOK_AGAIN_S:
            self._look_again(name)
        state = look.state
        if state is None or look.reference is None or not _concerns(state.split.tenant):
            return None
        version = _drawn(state.split.versions, look.floor) or look.reference.choose(f"{state.id}:{session}").version
        return SplitChoice(Arm(state.id, version), "latest" if version == state.split.latest else "candidate")

    def sent(self, to: ArmKind | None) -> None:
        """Count a request that has been sent; `to`: what a split has chosen for it. Names of adapters have no end."""
        if to is not None:
            self._tally.counter("mlx_parallm_split_requests_total", to).add()

    def forget(self, name: str) -> None:
        """Look again at the next request: the adapter or its split was changed here."""
        self._seen.pop(name, None)
        self._looking.pop(name, None)

    async def close(self) -> None:
        """End looks that are under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    def _look_again(self, name: str) -> "asyncio.Task[_Look]":
        """The look that is under way: one for all who want it, and no request's own, so that a verdict may be given."""
        looking = self._looking.get(name)
        if looking is None:
            looking = asyncio.create_task(self._look(name), context=contextvars.Context())
            self._looking[name] = looking
            self._tasks.add(looking)
            looking.add_done_callback(functools.partial(self._looked, name))
        return looking

    def _looked(self, name: str, looking: "asyncio.Task[_Look]") -> None:
        self._tasks.discard(looking)
        of_now = self._looking.get(name) is looking
        if of_now:
            del self._looking[name]
        if looking.cancelled():
            return
        if (error := looking.exception()) is not None:
            log.warning("split.not_seen", adapter=name, error=reason(error))
        elif of_now:
            self._seen.pop(name, None)
            self._seen[name] = looking.result()
            while len(self._seen) > KNOWN:
                del self._seen[next(iter(self._seen))]

    async def _look(self, name: str) -> _Look:
        look = _Look(time.monotonic(), None, None)
        state = await self.read(name)
        if state is None or state.over:
            return look
        floor = state.split.floor if state.split.auto else 0.0
        above = {version: share - floor for version, share in state.shares.items()}
        choices = tuple(AdapterChoice(name, version, share) for version, share in above.items() if share > 0)
        return look._replace(state=state, reference=AdapterRef(choices), floor=floor)


def _drawn(versions: tuple[int, ...], floor: float) -> int:
    """The version that a request gets by its floor; 0: none, the session decides."""
    lot = random.random()
    return versions[min(int(lot / floor), len(versions) - 1)] if lot < floor * len(versions) else 0


def _concerns(owner: str) -> bool:
    """True if an adapter is the caller's own; without tenants all of them are."""
    who = asker()
    return who == ANYBODY or who.publishes_for == owner
