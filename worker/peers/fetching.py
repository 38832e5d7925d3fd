"""Before a sequence goes to the engine: get its KV from the worker that has it, if that is quicker than computing it.

Invariants. Nothing that peers do or leave undone costs a sequence more than FETCH_S, and nothing they send is stored
unchecked: whatever goes wrong, the row is computed as if there were no peer, and one line of the log says why. They are
asked for what neither our memory nor our disk has. One that failed is left alone for REST_S. Where the one that has the
KV is gone or fails, one of those that share its files is asked, too. At most MOST_AT_ONCE transfers come in at a time;
who waits for its turn longer than QUEUE_S computes. Of prompts that begin alike one is fetched after the other.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import structlog
from redis.exceptions import RedisError

from shared.redis.connection.faults import reason
from shared.sequences import SequenceSpec
from shared.telemetry.metrics import Tally
from shared.wire import PeerError, PeerRefusalError
from worker.engine.messages import RowRequest
from worker.engine.prefixes.sharing import HeldPrompt
from worker.peers.client import Transfer, asked
from worker.peers.directory import PeerDirectory
from worker.peers.messages import KvRequest
from worker.peers.pace import LEAST_IDS, FetchSize, goes_on, is_quicker, recent
from worker.peers.store import EngineStore

log = structlog.get_logger()

FETCH_S = 30.0
REST_S = 30.0
MOST_AT_ONCE = 4
QUEUE_S = 10.0
PEERS_KNOWN = 64  # whose pace is remembered


class FetchCounts:
    """Counters of fetches by outcome."""

    def __init__(self, tally: Tally, model: str) -> None:
        self._outcomes = {
            outcome: tally.counter("mlx_parallm_kv_fetches_total", model, outcome)
            for outcome in ("fetched", "computed", "refused", "failed")
        }
        self.tokens = tally.counter("mlx_parallm_kv_fetched_tokens_total", model)
        self.bytes = tally.counter("mlx_parallm_kv_fetched_bytes_total", model)
        self.seconds = tally.histogram("mlx_parallm_kv_fetch_seconds", model)

    @property
    def figures(self) -> dict[str, float]:
        """Counts that the heartbeat reports."""
        fetched, failed = (self._outcomes[name].value for name in ("fetched", "failed"))
        return {"peer_bytes": self.bytes.value, "peer_hits": fetched, "peer_errors": failed}

    def outcome(self, name: str) -> None:
        """Count one fetch by its outcome."""
        self._outcomes[name].add()


@dataclass(frozen=True)
class _Wish:
    """KV to be fetched for one request, from which worker, and whether the request still wants it."""

    sequence: str
    ids: list[int]
    version: str
    worker: str
    is_wanted: Callable[[], bool]


@dataclass
class _Peer:
    bytes_per_s: float = 0.0  # 0: not measured
    rests_until: float = 0.0


class Fetching:
    """Fetches KV for one worker. `token_s`: seconds per prompt token here (0: not known); `version_of`: see Engine."""

    def __init__(
        self,
        directory: PeerDirectory,
        store: EngineStore,
        counts: FetchCounts,
        most_bytes: int,
        token_s: Callable[[], float],
        version_of: Callable[[SequenceSpec], str | None],
    ) -> None:
        self._directory = directory
        self._store = store
        self._counts = counts
        self._most_bytes = most_bytes
        self._token_s = token_s
        self._version_of = version_of
        self._peers: dict[str, _Peer] = {}
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._alike: WeakValueDictionary[tuple[str, str, tuple[int, ...]], asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, request: RowRequest, worker: str, is_wanted: Callable[[], bool]) -> None:
        """Have the KV of a request here, if `worker` has it and that pays; in any case return."""
        version = self._version_of(request.spec)
        if version is None:
            return
        ids = [*request.spec.kv_prompt, *(token for event in request.prior for token in event.tokens)]
        wish = _Wish(request.spec.id, ids, version, worker, is_wanted)
        beginning = (worker, version, tuple(ids[:LEAST_IDS]))
        async with self._alike.setdefault(beginning, asyncio.Lock()):  # the next one finds what this one has fetched
            if await self._turn():
                try:
                    await self._from_anybody(wish)
                finally:
                    self._turns.release()

    async def _from_anybody(self, wish: _Wish) -> None:
        until = asyncio.get_running_loop().time() + FETCH_S
        if await self._has_answered(wish, until) or not wish.is_wanted():
            return
        try:
            async with asyncio.timeout_at(until):
                sharers = [name for name in await self._directory.sharers(wish.worker) if not self._rests(name)]
        except (RedisError, OSError):  # TimeoutError is an OSError
            return
        if sharers:
            await self._has_answered(replace(wish, worker=sharers[0]), until)

    def _rests(self, worker: str) -> bool:
        return worker in self._peers and time.monotonic() < self._peers[worker].rests_until

    async def _has_answered(self, wish: _Wish, until: float) -> bool:
        """Fetch from this worker; False when it is gone or has failed, and there is time to ask another one."""
        if self._rests(wish.worker):
            return False
        peer = self._peers.setdefault(wish.worker, _Peer())
        if not wish.is_wanted():
            return True
        try:
            async with asyncio.timeout_at(until):
                return await self._fetch(wish, peer)
        except TimeoutError:
            self._fail(wish, peer, f"not done within {FETCH_S:.0f} s")
            return True
        except PeerRefusalError as error:
            self._counts.outcome("refused")
            log.info("kv.refused", sequence=wish.sequence, peer=wish.worker, reason=str(error))
            return True
        except PeerError as error:
            self._fail(wish, peer, str(error))
        except (RedisError, OSError) as error:
            self._fail(wish, peer, reason(error))
        except Exception as error:
            log.exception("kv.fetch_broke", sequence=wish.sequence, peer=wish.worker)
            self._fail(wish, peer, type(error).__name__)
        finally:
            while len(self._peers) > PEERS_KNOWN:
                del self._peers[next(iter(self._peers))]
        return False

    async def _turn(self) -> bool:
        try:
            async with asyncio.timeout(QUEUE_S):
                return await self._turns.acquire()
        except TimeoutError:
            self._counts.outcome("computed")
            return False

    async def _fetch(self, wish: _Wish, peer: _Peer) -> bool:
        """False when this worker is gone."""
        ids, version = wish.ids, wish.version
        prompt = await self._store.gathered(ids, version, len(ids) - 1)
        if len(ids) - 1 - prompt.length < LEAST_IDS or not self._directory.secret:
            return True
        address = await self._directory.address(wish.worker)
        if address is None:
            return False
        identity = await self._store.identity()
        ask = KvRequest(identity, version, ids, prompt.length, prompt.blocks, len(ids) - 1, self._most_bytes)
        async with asked(*address, self._directory.secret, ask) as transfer:
            job = FetchSize(transfer.offer.length - prompt.length, sum(transfer.offer.sizes))
            if not transfer.offer.sizes:
                return True
            if not is_quicker(job, self._token_s(), peer.bytes_per_s):
                self._counts.outcome("computed")
                return True
            began = time.monotonic()
            try:
                done = await self._receive(transfer, job, prompt, wish.is_wanted)
            finally:
                self._count(transfer, time.monotonic() - began, peer)
        gained = (await self._store.held(ids, version, len(ids) - 1)).length - prompt.length
        self._counts.outcome("fetched" if done else "computed")
        self._counts.tokens.add(max(0, gained))
        log.info(
            "kv.fetched" if done else "kv.fetch_stopped",
            sequence=wish.sequence, peer=wish.worker, tokens=gained, bytes=transfer.bytes,
            ms=round(1000 * (time.monotonic() - began)),
        )  # fmt: skip
        return True

    async def _receive(
        self, transfer: Transfer, job: FetchSize, prompt: HeldPrompt, is_wanted: Callable[[], bool]
    ) -> bool:
        """Store parcels as they come; whether it was all of them."""
        began = time.monotonic()
        storing: asyncio.Task[None] | None = None
        try:
            async for parcel in transfer.parcels():
                if storing is not None:
                    await storing
                storing = asyncio.create_task(self._store.take(prompt, parcel))
                seconds = time.monotonic() - began
                if not is_wanted() or not goes_on(job, transfer.bytes, seconds, self._token_s()):
                    return False
            return True
        finally:
            if storing is not None:
                await storing

    def _count(self, transfer: Transfer, seconds: float, peer: _Peer) -> None:
        self._counts.bytes.add(transfer.bytes)
        self._counts.seconds.observe(seconds)
        if transfer.bytes:
            peer.bytes_per_s = recent(peer.bytes_per_s, transfer.bytes / max(1e-6, seconds))

    def _fail(self, wish: _Wish, peer: _Peer, why: str) -> None:
        self._counts.outcome("failed")
        peer.rests_until = time.monotonic() + REST_S
        log.warning("kv.not_fetched", sequence=wish.sequence, peer=wish.worker, reason=why)
