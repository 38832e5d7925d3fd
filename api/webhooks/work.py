"""Sends the webhooks that are due: one owner at a time, again and again until one is taken or it is too late.

Nothing is kept of the tries. How long ago the thing ended says when to try next, twice as long each time; the id of a
message follows from the thing, so that a receiver knows one that it has had. A process that dies between two tries, or
in one, leaves the entry to the next one that looks.

Tenants take turns (shared/redis/due/due_list.py). A receiver that answers slowly holds a few of its tenant's places,
and a tenant never holds all places: no other tenant's message waits for them.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections import Counter
from typing import NamedTuple

import httpx
import msgspec
import structlog
from redis.exceptions import RedisError

from api.ring.ring import Ring
from api.webhooks.body import refusal
from api.webhooks.sending import TRY_S, NotSentError, send
from shared.errors import NotFoundError
from shared.jobs import TERMINAL
from shared.redis.connection.faults import reason
from shared.redis.due import webhooks
from shared.redis.due.due_list import DueList
from shared.redis.files.batch_store import ENDED
from shared.redis.kept.response_store import RUNNING
from shared.webhooks import Webhook

log = structlog.get_logger()

AT_ONCE = 32
OF_ONE_TENANT = 24  # of these
AT_ONE_RECEIVER = 4  # of a tenant's; a receiver is a host and a port
LOOK_S = 1.0
LEASE_MS = int(3000 * TRY_S)  # a try and what stands around it take far less
FIRST_S, LONGEST_S = 5.0, 3600.0  # between two tries
ELSEWHERE_S = 25.0  # the longest where this process may not send: another one may, and chance says who looks
MOMENT_MS = 1_000  # until a tenant has a place again, or one at this receiver


class _Ended(NamedTuple):
    webhook: Webhook | None
    kind: str
    name: str  # as its client knows it
    state: str
    at: float  # Unix seconds


class _WebhookRun(msgspec.Struct):
    """The part of a background response's run that webhooks need."""

    webhook: Webhook | None = None


class WebhookWork:
    """The webhooks in the hands of one api process."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._due = DueList(ring.redis, webhooks.LIST)
        self._tasks: dict[asyncio.Task[None], str] = {}  # whose entry each is at
        self._receivers: Counter[tuple[str, str]] = Counter()  # tries under way, by tenant and receiver

    async def run(self) -> None:
        """Send what is due, for ever; a process that may send none leaves them to others."""
        if not self._ring.settings.webhook_hosts:
            return
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=TRY_S, limits=limits) as client:
            try:
                while True:
                    with contextlib.suppress(RedisError, OSError):
                        await self._take(client)
                    await asyncio.sleep(LOOK_S)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, client: httpx.AsyncClient) -> None:
        """Begin with what is due, as far as there are places."""
        busy = Counter(self._tasks.values())
        left: list[str] = []
        full = [tenant for tenant, places in busy.items() if places >= OF_ONE_TENANT]
        for tenant, entry in await self._due.take_in_turns(AT_ONCE - len(self._tasks), LEASE_MS, full):
            if busy[tenant] >= OF_ONE_TENANT:
                left.append(entry)
                continue
            busy[tenant] += 1
            task = asyncio.create_task(self._work(client, tenant, entry))
            self._tasks[task] = tenant
            task.add_done_callback(self._tasks.pop)
        if left:
            await self._due.again(left, MOMENT_MS)

    async def _work(self, client: httpx.AsyncClient, tenant: str, entry: str) -> None:
        kind, *name = entry.split(" ")
        try:
            ended = await self._find(kind, name)
            if ended is None:
                await self._due.again([entry], webhooks.LOOK_MS)
            elif ended.webhook is None or not await self._given_back(client, tenant, entry, ended, ended.webhook):
                await self._due.done(entry)
        except NotFoundError:  # deleted, or its time to live is over
            await self._due.done(entry)
        except (RedisError, OSError) as error:
            log.info("webhook.waits", kind=kind, error=reason(error))  # until its lease is over
        except Exception as error:  # not with its words, nor its place: they may show the URL or the secret
            log.error("webhook.failed", kind=kind, error=type(error).__name__)
            with contextlib.suppress(RedisError, OSError):
                await self._due.done(entry)

    async def _find(self, kind: str, name: list[str]) -> _Ended | None:
        """How a thing has ended; None: not yet. NotFoundError."""
        ring = self._ring
        state: str
        if kind == "job":
            status = await ring.jobs.status(name[0])
            webhook = (await ring.jobs.spec(name[0])).webhook
            over, state, at = status.status in TERMINAL, status.status, status.finished_ms / 1000
        elif kind == "batch":
            record = await ring.batches.find(name[0])
            over, state, at, webhook = record.state in ENDED, record.state, record.ended_at, record.spec.webhook
        else:
            stored = await ring.responses.find(*name)
            over, state, at = stored.state not in RUNNING, stored.state, stored.ended_at
            webhook = msgspec.msgpack.decode(stored.run, type=_WebhookRun).webhook if stored.run else None
        return _Ended(webhook, kind, name[-1], state, at) if over else None

    async def _given_back(
        self, client: httpx.AsyncClient, tenant: str, entry: str, ended: _Ended, webhook: Webhook
    ) -> bool:
        """Try once; whether the entry has been given back for another try."""
        url, settings = httpx.URL(webhook.url), self._ring.settings
        receiver = (tenant, f"{url.scheme}://{url.netloc.decode()}")
        event = {"kind": ended.kind, "id": ended.name, "host": url.host}
        if self._receivers[receiver] >= AT_ONE_RECEIVER:
            await self._due.again([entry], MOMENT_MS)
            return True
        self._receivers[receiver] += 1
        why = refusal(webhook.url, settings)  # as this process is set up now; another one may send it
        try:
            if why:
                raise NotSentError(why)
            event_id, payload = _message(ended)
            await send(client, webhook.url, webhook.secret, event_id, payload, settings.webhook_private)
        except NotSentError as error:
            passed_s = max(0.0, time.time() - ended.at)
            if passed_s > 3600 * settings.webhook_hours:
                log.warning("webhook.given_up", **event, reason=error.message)
                return False
            pause_s = pause_after(passed_s, ELSEWHERE_S if why else LONGEST_S)
            log.info("webhook.again", **event, reason=error.message, in_s=round(pause_s))
            await self._due.again([entry], int(1000 * pause_s))
            return True
        finally:
            self._receivers[receiver] -= 1
            self._receivers += Counter()
        log.info("webhook.sent", **event)
        return False


def pause_after(passed_s: float, longest_s: float = LONGEST_S) -> float:
    """Seconds until the next try of a webhook whose thing ended so long ago: about twice as long each time."""
    return min(longest_s, max(FIRST_S, passed_s)) * random.uniform(0.8, 1.2)


def _message(ended: _Ended) -> tuple[str, bytes]:
    """The event's id, which follows from the thing, and its JSON, in OpenAI's shape."""
    event_id = f"evt_{hashlib.sha256(f'{ended.kind} {ended.name} {ended.at}'.encode()).hexdigest()[:32]}"
    data = {"id": ended.name, "status": ended.state}
    event = {"object": "event", "id": event_id, "type": f"{ended.kind}.{ended.state}", "created_at": int(ended.at)}
    return event_id, msgspec.json.encode({**event, "data": data})
