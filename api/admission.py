"""Who may begin work now: requests under way at a time, and requests in a time, for the server and for each key.

Decided before the body is read, so that refusing costs next to nothing when it matters most. Requests that begin no
work (polls, probes, cancels, adapters, uploads of jobs) are never refused here.

Rates are counted in Redis (the library `limits`, sliding window), so all api processes share them. When Redis does not
answer within RATE_ANSWER_S the request passes: the queue behind is in the same Redis and has the last word, so a
restart of Redis costs waiting and no errors. The bound on requests under way needs no Redis and always holds.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator

import structlog
from limits import RateLimitItem
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth import key_of
from api.errors import error_response
from api.key_ring import rate_of
from shared.errors import QueueFullError, RateLimitedError
from shared.redis import keys
from shared.settings import ApiSettings

log = structlog.get_logger()

WORK = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/classifications",
        "/v1/predict",
        "/v1/rl/act",
        "/v1/rewards/score",
        "/generate",
        "/inference/v1/generate",
    }
)
RATE_ANSWER_S = 0.5
WINDOW_S = 10.0  # over which the pace of finished requests is measured
LONGEST_RETRY_S = 30
COMPLAIN_EVERY_S = 10.0


class Load:
    """What is under way in this api process, and at what pace it ends."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # 0: none
        self.under_way = 0
        self.by_key: Counter[str] = Counter()
        self._ended: deque[float] = deque(maxlen=1000)

    @property
    def utilization(self) -> float:
        """Requests under way over their bound; 0 without one."""
        return self.under_way / self.limit if self.limit else 0.0

    @contextlib.contextmanager
    def one(self, key: str) -> Iterator[None]:
        """Around one request."""
        self.under_way += 1
        self.by_key[key] += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self.by_key[key] -= 1
            if not self.by_key[key]:
                del self.by_key[key]
            self._ended.append(time.monotonic())

    def retry_after_s(self, ahead: int = 1) -> int:
        """Seconds until `ahead` more requests will have ended at the present pace, 1 to LONGEST_RETRY_S."""
        now = time.monotonic()
        recent = [at for at in self._ended if now - at < WINDOW_S]
        pace = len(recent) / max(1.0, now - recent[0]) if recent else 1.0
        return max(1, min(LONGEST_RETRY_S, math.ceil(ahead / pace)))


class Admission:
    """Refuses requests that begin work beyond the bounds (429, with `Retry-After`)."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, load: Load) -> None:
        self._app = app
        self._load = load
        self._rate = rate_of(settings.rate_limit, "--rate-limit") if settings.rate_limit else None
        self._counters: SlidingWindowCounterRateLimiter | None = None
        self._complained = -COMPLAIN_EVERY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in WORK:
            await self._app(scope, receive, send)
            return
        key = key_of(scope)
        name = key.name if key is not None else f"host:{(scope.get('client') or ('?',))[0]}"
        try:
            self._check_under_way(name, key.concurrent if key is not None else 0)
            if (rate := (key.rate if key is not None else None) or self._rate) is not None:
                await self._check_rate(scope["app"].state.ring.redis, rate, name)
                self._check_under_way(name, key.concurrent if key is not None else 0)  # we have waited
        except QueueFullError as error:
            await error_response(error)(scope, receive, send)
            return
        with self._load.one(name):
            await self._app(scope, receive, send)

    def _check_under_way(self, name: str, of_key: int) -> None:
        load = self._load
        if load.limit and load.under_way >= load.limit:
            raise RateLimitedError(
                f"{load.under_way} requests are under way and {load.limit} is this server's limit "
                "(--max-concurrent-requests); try again shortly",
                retry_after_s=load.retry_after_s(),
            )
        if of_key and load.by_key[name] >= of_key:
            raise RateLimitedError(f"this key may have {of_key} requests under way at a time", retry_after_s=1)

    async def _check_rate(self, redis: Redis, rate: RateLimitItem, name: str) -> None:
        if self._counters is None:
            storage = RedisStorage(
                "async+redis://",
                implementation="redispy",
                key_prefix=keys.rate_limits(),
                connection_pool=redis.connection_pool,  # type: ignore[arg-type]
            )
            self._counters = SlidingWindowCounterRateLimiter(storage)
        try:
            async with asyncio.timeout(RATE_ANSWER_S):
                if await self._counters.hit(rate, name):
                    return
                left = await self._counters.get_window_stats(rate, name)
        except (RedisError, OSError, StorageError) as error:  # TimeoutError is an OSError
            self._complain(error)
            return
        wait_s = max(1, math.ceil(left.reset_time - time.time()))
        raise RateLimitedError(f"this key may send {rate}; try again in {wait_s} s", retry_after_s=wait_s)

    def _complain(self, error: Exception) -> None:
        if time.monotonic() - self._complained > COMPLAIN_EVERY_S:
            self._complained = time.monotonic()
            log.warning("api.rates_not_counted", error=repr(error))
