"""Responses that go on without their client: enqueued, then read to the end by whichever api process has the lease.

A response with `background` is stored with all that is needed to go on with it (`Run`) before its sequence is enqueued.
One api process at a time reads its tokens, writes the events of its stream, and stores the answer. When that process
dies, another one takes the lease, has the sequence's frames sent to itself, and goes on: what was said stands in the
sequence's log, and the same tokens give the same events under the same numbers, because they are taken one by one.

Its sequence is of class `batch`: chats go first, and no worker gives it up for want of a reader.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
import structlog
from redis.exceptions import RedisError

from api.callers.caller import acting_for, asker, key_name
from api.callers.fair_pool import LARGE_COUNT, aside
from api.generation.choice import RequestPlan, stored_plan
from api.generation.resume import route
from api.generation.running import Generation, by_choice
from api.openai.replies import stream_failure
from api.openai.responses.body import ResponseRequest
from api.openai.responses.history import keeper, own_ids, shared_ids
from api.openai.responses.items import Event
from api.openai.responses.storage import entries, joined, shown_items, whole, without_output
from api.openai.responses.writer import ResponseWriter
from api.ring.choosing import ring_keeping
from api.ring.ring import Ring
from api.webhooks.body import webhook_of
from shared.errors import (
    ConflictError,
    NotFoundError,
    ParallmError,
    QueueFullError,
    RequestCancelledError,
    ServiceUnavailableError,
    UnknownResponseError,
)
from shared.frames import TokenEvent
from shared.redis import keys
from shared.redis.connection.client import Argument
from shared.redis.connection.faults import reason
from shared.redis.due import webhooks
from shared.redis.due.due_list import DueList
from shared.redis.kept.response_store import RUNNING, StoredResponse
from shared.redis.tokens.log import read_tokens
from shared.sequences import SequenceSpec, decode_spec, encode
from shared.token_events import by_token
from shared.webhooks import Webhook

log = structlog.get_logger()

LIST = "background"  # of what is due: "<keeper> <id>"
AT_ONCE = 1024  # responses that one process reads
LOOK_S = 1.0
AGAIN_MS = 2_000  # after which a response is tried again when Redis or the workers are away
AT_A_TIME = 256  # tokens, before others' go in between
WATCH_S, LONGEST_WATCH_S = 0.05, 1.0  # between two looks at a stream: longer and longer while nothing is said


class BackgroundRun(msgspec.Struct, frozen=True):
    """How to go on with a response."""

    spec: bytes  # of its sequence
    plan: bytes  # JSON, without the prompt
    request: bytes  # JSON, without the input
    tenant: str
    key: str
    before: int  # ids of the prompt that the turn before has
    webhook: Webhook | None = None
    ring: str = ""  # where its sequence is; "": where the response is


def sse(event: Event, number: int) -> bytes:
    """An event of a stream as it is sent."""
    data = msgspec.json.encode({**event, "sequence_number": number})
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data)


async def begin(
    ring: Ring, body: ResponseRequest, plan: RequestPlan, writer: ResponseWriter, history: list[int]
) -> StoredResponse:
    """Store a response that is to go on by itself, and enqueue its sequence in `ring`; QueueFullError, PausedError."""
    await ring.check_pause()
    who, settings = keeper(), ring.settings
    spec, run = _run_of(ring, body, plan, history)
    large = len(body.input) > LARGE_COUNT
    given = await aside(shown_items, body.input, writer.name) if large else shown_items(body.input, writer.name)
    stored = StoredResponse(
        state="queued",
        body=without_output(writer.shown(status="queued")),
        input=joined(given),
        previous=body.previous_response_id or "",
        conversation="" if body.conversation is None else body.conversation.id,
        run=msgspec.msgpack.encode(run),
        streams=int(bool(body.stream)),
    )
    if not await ring.responses.put(who, writer.id, stored, "new"):
        raise ConflictError(f"there is a response {writer.id!r} already", param="request_id")
    due, entry = DueList(ring.home.redis, LIST), f"{who} {writer.id}"
    try:
        await due.add(entry, keys.BACKGROUND_LEASE_MS)  # should we die before it is enqueued
        await _pin(ring, spec, settings.background_timeout_s)
        await ring.queue(spec.model).enqueue([spec], prefer=await ring.affinity.preferred([spec]))
        ring.splits.sent(plan.sequences.split_to)
        if run.webhook is not None:
            await webhooks.wait_for(ring.home.redis, run.tenant, "response", who, writer.id)
        await due.hasten(entry)
    except ParallmError:  # refused as a whole
        await ring.responses.forget(who, writer.id)
        await due.drop(entry)
        raise
    return stored


def _run_of(
    ring: Ring, body: ResponseRequest, plan: RequestPlan, history: list[int]
) -> tuple[SequenceSpec, BackgroundRun]:
    deadline_ms = int(1000 * (time.time() + ring.settings.background_timeout_s))
    sequences = plan.sequences.with_template(deadline_ms=deadline_ms, has_next_turn=True)
    (spec,) = sequences.specs(ring.api_id, 0, "batch", tenant=asker().tenant)
    run = BackgroundRun(
        spec=encode(spec),
        plan=msgspec.json.encode(plan.for_storage(deadline_ms=deadline_ms).with_prompts(())),
        request=body.model_dump_json(
            by_alias=True, exclude_none=True, exclude={"input", "webhook", "client_metadata"}
        ).encode(),
        tenant=asker().tenant,
        key=key_name(),
        webhook=webhook_of(ring, body.webhook),
        before=shared_ids(history, plan.sequences.prompts[0]),
        ring=ring.name,
    )
    return spec, run


async def _pin(ring: Ring, spec: SequenceSpec, seconds: float) -> None:
    if "@" in spec.adapter:
        await ring.adapters.pin_all(spec.adapter, spec.id, seconds)


async def cancel(ring: Ring, response_id: str, stored: StoredResponse) -> StoredResponse:
    """End a response that runs; one that has ended stays as it is."""
    who = keeper()
    shown = msgspec.json.decode(stored.body, type=dict[str, msgspec.Raw])
    body = msgspec.json.encode({**shown, "status": "cancelled"})
    if stored.state in RUNNING and await ring.responses.change(
        who, response_id, state="cancelled", body=body, ended_at=int(time.time())
    ):
        await _stop(ring, stored)
        await webhooks.hasten(ring.home.redis, "response", who, response_id)
        await ring.responses.keep_events(who, response_id)
        log.info("response.cancelled", response=response_id)
    return await ring.responses.find(who, response_id)


async def forget(ring: Ring, response_id: str) -> None:
    """Forget a response, and end it if it runs; UnknownResponseError."""
    who = keeper()
    stored = await ring.responses.find(who, response_id)
    await ring.responses.forget(who, response_id)
    if stored.state in RUNNING:
        await _stop(ring, stored)


async def _stop(ring: Ring, stored: StoredResponse) -> None:
    run = msgspec.msgpack.decode(stored.run, type=BackgroundRun)
    spec = decode_spec(run.spec)
    await ring_keeping(ring, run.ring).queue(spec.model).cancel([spec.id])


async def watch(ring: Ring, who: str, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """The events of a response after number `after`, as they come, to its end."""
    pause_s = WATCH_S
    while not ring.shutting_down:
        state, found = await ring.responses.events(who, response_id, after)
        if found:
            after, pause_s = found[-1][0], WATCH_S
            yield b"".join(event for _, event in found)
            continue
        if state not in RUNNING:
            break
        await asyncio.sleep(pause_s)
        pause_s = min(LONGEST_WATCH_S, 1.5 * pause_s)
    if ring.shutting_down:
        return
    with contextlib.suppress(UnknownResponseError):  # deleted meanwhile
        stored = await ring.responses.find(who, response_id)
        if stored.state != "cancelled" and after < stored.told:
            response = msgspec.Raw(whole(stored))
            yield sse({"type": f"response.{stored.state}", "response": response}, stored.told)


async def check_watchable(ring: Ring, who: str, response_id: str, stored: StoredResponse, after: int) -> None:
    """NotFoundError when the events after number `after` are no longer stored."""
    if stored.state in RUNNING or after + 1 >= stored.told or await ring.responses.count_events(who, response_id):
        return
    raise NotFoundError(
        f"the events of response {response_id!r} were stored for an hour after its end; ask for it without 'stream'"
    )


class BackgroundWork:
    """The background responses in the hands of one api process."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._due = DueList(ring.redis, LIST)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def look(self) -> None:
        """There is something to do, now."""
        self._news.set()

    async def run(self) -> None:
        """Look after background responses, for ever."""
        renewed = time.monotonic()
        try:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    if time.monotonic() - renewed > keys.BACKGROUND_LEASE_MS / 4000 and self._tasks:
                        await self._due.renew(list(self._tasks), keys.BACKGROUND_LEASE_MS)
                        renewed = time.monotonic()
                    await self._take()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._news.wait()
                self._news.clear()
        finally:
            held = list(self._tasks)
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if held:
                with contextlib.suppress(RedisError, OSError):  # another process need not wait for the lease's end
                    await self._due.again(held, 0)

    async def _take(self) -> None:
        for entry in await self._due.take(max(0, AT_ONCE - len(self._tasks)), keys.BACKGROUND_LEASE_MS):
            if entry not in self._tasks:
                task = self._tasks[entry] = asyncio.create_task(self._work(entry))
                task.add_done_callback(lambda _, done=entry: self._tasks.pop(done))  # type: ignore[misc]

    async def _work(self, entry: str) -> None:
        who, _, response_id = entry.partition(" ")
        try:
            stored = await self._ring.responses.find(who, response_id)
            if stored.state in RUNNING:
                run = msgspec.msgpack.decode(stored.run, type=BackgroundRun)
                with acting_for(run.tenant, run.key):
                    await _Reading(self._ring, who, response_id, stored, run).to_the_end()
            await self._due.done(entry)
        except UnknownResponseError:
            await self._due.done(entry)
        except (RedisError, OSError, ServiceUnavailableError, QueueFullError) as error:
            log.info("response.waits", response=response_id, error=reason(error))
            with contextlib.suppress(RedisError, OSError):
                await self._due.again([entry], AGAIN_MS)
        except Exception as error:  # tried again, it would fail again
            reported = stream_failure(error, response_id)
            with contextlib.suppress(RedisError, OSError, UnknownResponseError):
                await self._fail(who, response_id, reported.message)
                await self._due.done(entry)

    async def _fail(self, who: str, response_id: str, why: str) -> None:
        """End a response that no process could begin to read."""
        shown = msgspec.json.decode((await self._ring.responses.find(who, response_id)).body)
        shown |= {"status": "failed", "error": {"code": "server_error", "message": why}}
        fields: dict[str, Argument] = {"body": msgspec.json.encode(shown), "ended_at": int(time.time())}
        await self._ring.responses.change(who, response_id, state="failed", **fields)
        await webhooks.hasten(self._ring.redis, "response", who, response_id)


class _Reading:
    """One response while this process reads its tokens."""

    def __init__(self, ring: Ring, who: str, response_id: str, stored: StoredResponse, run: BackgroundRun) -> None:
        self._ring, self._who, self._id, self._stored, self._run = ring, who, response_id, stored, run
        self._there = ring_keeping(ring, run.ring)
        self._spec = decode_spec(run.spec)
        self._plan = stored_plan(msgspec.json.decode(run.plan)).with_prompts([self._spec.prompt_ids])
        asked = msgspec.json.decode(run.request)
        self._body = ResponseRequest.model_validate({**asked, "input": "-"})
        self._number = 0  # of the next event
        self._published = 0  # events that stand already

    async def to_the_end(self) -> None:
        """Read all tokens, and store the answer."""
        _, codec = await self._there.known(self._spec.model)
        writer = ResponseWriter(self._body, self._plan, codec)
        if self._stored.streams:
            self._published = await self._ring.responses.count_events(self._who, self._id)
        await self._publish(
            [{"type": f"response.{name}", "response": writer.shown()} for name in ("created", "in_progress")]
        )
        generation = await self._generation()
        failure: Exception | None = None
        try:
            async for events in generation.batches():
                for _, new in by_choice(events):
                    await self._take(writer, new)
        except (RedisError, OSError, ServiceUnavailableError):
            raise
        except Exception as error:
            failure = error
        finally:
            generation.leave()  # another process may go on
        await self._end(writer, failure)

    async def _generation(self) -> Generation:
        """The sequence's tokens, which are sent to this process from now on."""
        ring, spec = self._there, self._spec
        await ring.queue(spec.model).enqueue([msgspec.structs.replace(spec, api=ring.api_id)])  # unless it is known
        before = await route(ring, spec.model, [spec.id])
        history = await read_tokens(ring.redis, spec.model, spec.id, 0, before[spec.id])
        return Generation.resume(ring, spec.model, [spec.id], [history], spec.deadline_ms)

    async def _take(self, writer: ResponseWriter, new: list[TokenEvent]) -> None:
        if self._stored.state == "queued":
            self._stored = msgspec.structs.replace(self._stored, state="in_progress")
            body = without_output(writer.shown())
            await self._ring.responses.change(self._who, self._id, state="in_progress", body=body)
        out: list[Event] = []
        for at, event in enumerate(by_token(new), 1):
            out += writer.take(writer.choice.take([event]))
            if at % AT_A_TIME == 0:
                await asyncio.sleep(0)
        await self._publish(out)

    async def _publish(self, events: list[Event]) -> None:
        """Write events for those who watch, but for those that stand already."""
        number, self._number = self._number, self._number + len(events)
        new = [sse(event, at) for at, event in enumerate(events, number) if at >= self._published]
        if self._stored.streams and new:
            await self._ring.responses.write_events(self._who, self._id, self._number - len(new), new)

    async def _end(self, writer: ResponseWriter, failure: Exception | None) -> None:
        ids, output = b"", list(writer.output)
        state: str
        if failure is None:
            prompt = self._spec.prompt_ids
            ids = own_ids(prompt[: self._run.before], prompt, writer.tokens)
            state, shown = writer.status, writer.shown()
        elif isinstance(failure, RequestCancelledError):
            state, shown = "cancelled", writer.shown(status="cancelled")
        else:
            reported = stream_failure(failure, self._id)
            detail = {"code": "server_error", "message": reported.message}
            state, shown = "failed", writer.shown(status="failed", error=detail)
        given = [(item["id"], msgspec.json.encode(item)) for item in output]
        if failure is None and self._stored.conversation:
            items = [*entries(self._stored.input), *given]
            with contextlib.suppress(ParallmError):  # it was deleted meanwhile, or is full
                whole_ids = own_ids((), self._spec.prompt_ids, writer.tokens)
                await self._ring.conversations.add(self._who, self._stored.conversation, items, whole_ids)
        fields: dict[str, Argument] = {
            "body": without_output(shown),
            "output": joined(given),
            "ids": ids,
            "told": self._number,
            "ended_at": int(time.time()),
        }
        await self._ring.responses.change(self._who, self._id, state=state, **fields)
        await self._ring.responses.keep_events(self._who, self._id)
        await webhooks.hasten(self._ring.redis, "response", self._who, self._id)
        if "@" in self._spec.adapter:
            await self._there.adapters.unpin_all(self._spec.adapter, self._spec.id)
        log.info("response.ended", response=self._id, state=state)
