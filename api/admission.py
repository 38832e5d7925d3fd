"""Who may begin work now: requests under way at a time, and requests in a time, for the server and for each key.

Decided before the body is read, so that refusing costs next to nothing when it matters most. Requests that begin no
work (polls, probes, cancels, adapters, uploads of jobs) are never refused here.

Rates are counted in Redis (the library `limits`, sliding window), so all api processes share them. When Redis does not
answer within RATE_ANSWER_S the request passes: the queue after it is in the same Redis and has the last word, so a
restart of Redis costs waiting and no errors. The bound on requests under way needs no Redis and always holds.
"""

import asyncio
import math
import time

import structlog
from limits import RateLimitItem
from limits.aio.storage import RedisStorage
from limits.aio.storage.redis.redispy import RedispyBridge
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Receive, Scope, Send

from api.callers.caller import ApiKey
from api.http.api_keys import rate_of
from api.http.auth import key_of
from api.http.errors import error_response
from api.ring.ring import Ring
from shared.errors import QueueFullError, RateLimitedError, ServiceUnavailableError
from shared.process.api_settings import ApiSettings
from shared.redis import keys
from shared.redis.connection.faults import reason

log = structlog.get_logger()

WORK = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/classifications",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/predict",
        "/v1/rl/act",
        "/v1/rl/rollout",
        "/v1/rewards/score",
        "/v1/replay",
        "/generate",
        "/inference/v1/generate",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    }
)
RATE_ANSWER_S = 0.5
COMPLAIN_EVERY_S = 10.0


class Admission:
    """Refuses requests that begin work beyond the bounds (429, or 503 when this process lags; with `Retry-After`)."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app = app
        self._rate = rate_of(settings.rate_limit, "--rate-limit") if settings.rate_limit else None
        self._counters: SlidingWindowCounterRateLimiter | None = None
        self._complained = -COMPLAIN_EVERY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in WORK:
            await self._app(scope, receive, send)
            return
        ring: Ring = scope["app"].state.ring
        key = key_of(scope)
        name = key.name if key is not None else f"host:{(scope.get('client') or ('?',))[0]}"
        try:
            _check_room(ring, key, name)
            if (rate := (key.rate if key is not None else None) or self._rate) is not None:
                await self._check_rate(ring.redis, rate, name)
                _check_room(ring, key, name)  # we have waited
        except (QueueFullError, ServiceUnavailableError) as error:
            await error_response(error)(scope, receive, send)
            return
        with ring.load.one(name):
            await self._app(scope, receive, send)

    async def _check_rate(self, redis: Redis, rate: RateLimitItem, name: str) -> None:
        if self._counters is None:
            self._counters = SlidingWindowCounterRateLimiter(_Counts(redis))
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
            log.warning("api.rates_not_counted", error=reason(error))


class _Counts(RedisStorage):
    """The library's counters, kept by our client. The two keys of a counter share a slot."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        super().__init__("async+redis://", implementation="redispy", key_prefix=keys.RATE_LIMITS)

    def configure_bridge(self) -> None:
        """Called by the library's constructor."""
        assert isinstance(self.bridge, RedispyBridge)
        self.bridge.storage = self._redis
        self.bridge.connection_getter = lambda _: self._redis  # type: ignore[assignment,return-value]


def _check_room(ring: Ring, key: ApiKey | None, name: str) -> None:
    load = ring.load
    if load.limit and load.under_way >= load.limit:
        raise RateLimitedError(
            f"{load.under_way} requests are under way and {load.limit} is this server's limit "
            "(--max-concurrent-requests); try again shortly",
            retry_after_s=load.retry_after_s(),
        )
    if key is not None and key.concurrent and load.by_key[name] >= key.concurrent:
        raise RateLimitedError(f"this key may have {key.concurrent} requests under way at a time", retry_after_s=1)
    if load.lags:
        raise ServiceUnavailableError("this api process has more to do than it can; try again shortly", retry_after_s=1)
    kind = "interactive" if key is None else key.sequence_class
    if load.all_full(ring.all_models_seen, kind):
        raise QueueFullError(
            f"as many {kind} sequences are waiting as this server admits; try again shortly",
            retry_after_s=load.retry_after_s(),
        )
