"""Work of api processes for batches: check and plan the lines before the job runs, write the files when it has ended.

Every process looks once a second at the batches that have not ended, and works on those that wait for an api process
and that no other one has leased. A process that dies in between leaves nothing that the next one could not do
again from the start: the job is created once under the batch's name, and the files have ids of their own from the
beginning, so that writing them again writes the same bytes to the same place.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from api.batches.lines import BatchLine, LineUsage, Named, answer, named_by, planned, read_line
from api.batches.shapes import LineShape, shape_of
from api.callers.caller import acting_for
from api.callers.fair_pool import aside
from api.generation.named_images import Keep
from api.generation.target import Target, find_target
from api.http.bodies import LONG_BYTES
from api.ring.choosing import ring_keeping
from api.ring.ring import ANSWER_S, Ring
from shared.errors import (
    InvalidRequestError,
    ParallmError,
    ServiceUnavailableError,
    UnknownFileError,
    UnknownJobError,
)
from shared.jobs import TERMINAL, InputLine, JobInput, JobSpec, JobStatus, input_line, read_input
from shared.redis.connection.faults import reason
from shared.redis.files.batch_store import ENDED, BatchError, BatchRecord, BatchSpec, BatchState
from shared.redis.files.file_store import FileWriter
from shared.redis.jobs.ledger import JobLedger
from shared.redis.jobs.store import new_job_id
from shared.redis.keys import BATCH_LEASE_MS

log = structlog.get_logger()

LOOK_S = 1.0
AT_ONCE = 4  # batches that one process works on; not all of them one key's
LINES_AT_ONCE = 128  # that are in memory while files are written
MAX_LINES = 50_000  # OpenAI's
MAX_CHOICES = 500_000  # of all lines: each is a sequence that lies in Redis with its prompt
MAX_LINE_BYTES = 16 << 20
MAX_ERRORS = 100  # that a batch reports

_COUNTED = ("completed", "failed", "cancelled", "expired")  # kinds of answers
_ENDS: dict[str, BatchState] = {
    "succeeded": "completed", "failed": "failed", "cancelled": "cancelled", "expired": "expired",
}  # fmt: skip


class LinesRefusedError(Exception):
    """The input file is no batch."""

    def __init__(self, *errors: BatchError) -> None:
        super().__init__(errors[0].message)
        self.errors = errors

    @property
    def reason(self) -> ParallmError:
        """Error that each line gets, where every line must have an answer."""
        return self.__cause__ if isinstance(self.__cause__, ParallmError) else InvalidRequestError(str(self))


class BatchWork:
    """The batches in the hands of one api process."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._store = ring.batches
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keys: dict[str, tuple[str, str]] = {}  # tenant and key of each batch in hand

    async def run(self) -> None:
        """Look after batches, for ever."""
        try:
            while True:
                with contextlib.suppress(RedisError, OSError):
                    await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        async for record in self._store.pending():
            batch_id, who = record.spec.id, (record.spec.tenant, record.spec.key)
            if batch_id in self._tasks or not self._may_take(who) or not await self._waits_for_us(record):
                continue
            if await self._store.take(batch_id, self._ring.api_id):
                self._keys[batch_id] = who
                task = self._tasks[batch_id] = asyncio.create_task(self.work(batch_id))
                task.add_done_callback(lambda _, done=batch_id: self._done(done))  # type: ignore[misc]

    def _may_take(self, who: tuple[str, str]) -> bool:
        return len(self._tasks) < AT_ONCE and Counter(self._keys.values())[who] < AT_ONCE - 1

    def _done(self, batch_id: str) -> None:
        del self._tasks[batch_id], self._keys[batch_id]

    async def _waits_for_us(self, record: BatchRecord) -> bool:
        if not record.job:
            rings = {each.name for each in self._ring.all}
            return rings.issuperset(record.spec.rings) or time.time() >= record.spec.expires_at
        try:
            jobs = ring_keeping(self._ring, record.ring).jobs
            async with asyncio.timeout(ANSWER_S if record.ring else None):
                status = await jobs.status(record.job)
                if status.status not in TERMINAL and record.cancelling_at:
                    await jobs.cancel(record.job)  # asked for before the job was there
        except (UnknownJobError, InvalidRequestError):
            return True
        except (ServiceUnavailableError, TimeoutError):  # its ring is away, or another process serves it
            return False
        return status.status in TERMINAL

    async def work(self, batch_id: str) -> None:
        renewing = asyncio.create_task(self._keep_lease(batch_id))
        waits = False
        try:
            record = await self._store.find(batch_id)
            with acting_for(record.spec.tenant, record.spec.key):
                await (self.finalize(record) if record.job else self.validate(record))
        except (RedisError, OSError, ServiceUnavailableError) as error:
            log.info("batch.waits", batch=batch_id, error=reason(error))
            waits = True
        except Exception as error:
            log.exception("batch.failed", batch=batch_id)
            why = reason(error) if isinstance(error, RedisError) else str(error)
            fault = BatchError("server_error", f"{type(error).__name__}: {why}")
            with contextlib.suppress(RedisError, OSError):
                await self._store.end(batch_id, "failed", errors=(fault,))
        finally:
            renewing.cancel()
            if not waits:  # else the lease runs out by itself: no process reads the file again before that
                with contextlib.suppress(RedisError, OSError):
                    await self._store.release(batch_id, self._ring.api_id)

    async def _keep_lease(self, batch_id: str) -> None:
        while True:
            await asyncio.sleep(BATCH_LEASE_MS / 4000)
            with contextlib.suppress(RedisError, OSError):
                await self._store.renew(batch_id, self._ring.api_id)

    # -- validate

    async def validate(self, record: BatchRecord) -> None:
        spec = record.spec
        if await self._is_begun(spec):
            return
        if record.cancelling_at or time.time() >= spec.expires_at:
            await self._end_unbegun(record, "cancelled" if record.cancelling_at else "expired")
            return
        try:
            named, at, count = await self.check_shapes(record)
            target = await self._target(record, named, at)
            there = target.ring
            await self._store.change(spec.id, ring=there.name)  # first: no process looks for its job elsewhere
            job = JobSpec(
                id=new_job_id(),
                kind="batch",
                model=target.served.card.name,
                total_prompts=0,
                adapter=target.adapter,
                adapter_policy=target.policy,
                metadata={"batch": spec.id, "lines": count, "model": named[0] or target.served.card.name},
                deadline_ms=1000 * spec.expires_at,
                created_ms=time.time_ns() // 1_000_000,
                tenant=spec.tenant,
                cache=spec.cache,
            )
            images = there.jobs.images(job.id, self._ring.settings.max_upload_bytes)
            lines = self._inputs(record, named, target, images.keep)
            job_id, _ = await there.jobs.create(job, lines, idempotency_key=_job_key(spec))
        except LinesRefusedError as refused:
            await self._refuse(record, refused.reason, refused.errors)
        except ServiceUnavailableError:
            raise  # no worker lives now, or Redis is away: later
        except ParallmError as error:
            await self._refuse(record, error, (BatchError(error.code or error.type, error.message, error.param),))
        else:
            await self.begin(there, spec, job_id)

    async def _is_begun(self, spec: BatchSpec) -> bool:
        """True if the batch has a job or had one, which another process may have started before it lost the lease."""
        record = await self._store.find(spec.id)
        if record.job or record.state in ENDED:
            return True
        there = ring_keeping(self._ring, record.ring)
        job_id = await there.jobs.submitted_under(_job_key(spec), spec.tenant)
        if job_id:  # who made it could not say so any more
            await self.begin(there, spec, job_id)
        return bool(job_id)

    async def begin(self, ring: Ring, spec: BatchSpec, job_id: str) -> None:
        """The batch's job is there."""
        planned = (await ring.jobs.spec(job_id)).metadata
        changes = {"job": job_id, "lines": planned["lines"], "model": planned["model"]}
        await self._store.change(spec.id, state="in_progress", in_progress_at=int(time.time()), **changes)
        log.info("batch.in_progress", batch=spec.id, job=job_id)

    async def _refuse(self, record: BatchRecord, error: ParallmError, errors: tuple[BatchError, ...]) -> None:
        """End a batch that cannot be one, with these errors; or where each line is answered, with `error` for each."""
        if await self._is_begun(record.spec):  # since we looked: its input file may have been deleted then
            return
        if shape_of(record.spec.endpoint).in_one_file:
            await self._end_unbegun(record, "failed", error)
        else:
            await self._end(record.spec, "failed", errors=errors)

    async def _end_unbegun(self, record: BatchRecord, state: BatchState, error: ParallmError | None = None) -> None:
        """End a batch that has no job: each of its lines gets this error, or `error`, if they can be read."""
        spec, shape = record.spec, shape_of(record.spec.endpoint)
        kind = "output" if shape.in_one_file else "error"
        writer = self._ring.files.writer(spec.output_file_id if shape.in_one_file else spec.error_file_id)
        refusal = None if error is None else msgspec.Raw(shape.error(error))
        fields: dict[str, Any] = {}
        try:
            *_, fields["lines"] = await self.check_shapes(record)
            async for number, line in self._lines(record):
                assert isinstance(line, BatchLine), "checked before"
                name = f"{spec.id.rpartition('_')[2]}-{number}"
                if error is None:
                    await writer.add(shape.unended(name, line.custom_id, state))
                else:
                    await writer.add(shape.answered(name, line.custom_id, error.status, refusal))
            await self._close(spec, writer, kind)
            fields["has_output" if shape.in_one_file else "has_errors"] = 1
            if state in ("cancelled", "expired"):
                fields[state] = fields["lines"]
        except LinesRefusedError as refused:
            fields = {"errors": refused.errors}
        except ServiceUnavailableError:
            raise
        except ParallmError as error:  # the file was deleted
            if await self._is_begun(spec):
                return
            fields = {"errors": (BatchError(error.code or error.type, error.message, error.param),)}
        await self._end(spec, state, **fields)

    async def _end(self, spec: BatchSpec, state: BatchState, **fields: Any) -> None:
        """The batch has ended. A file of lines that came with the request is deleted now: it is not read again."""
        await self._store.end(spec.id, state, **fields)
        log.info("batch.ended", batch=spec.id, state=state)
        if shape_of(spec.endpoint).in_one_file:
            with contextlib.suppress(UnknownFileError):
                await self._ring.files.delete(spec.input_file_id)

    async def check_shapes(self, record: BatchRecord) -> tuple[Named, int, int]:
        """Every line's shape; what the first readable one names, its number, and how many lines there are."""
        errors: list[BatchError] = []
        seen: set[int] = set()
        named: Named | None = None
        at = 1
        count = 0
        async for number, line in self._lines(record):
            count += 1
            if count > MAX_LINES:
                many = f"a batch has at most {MAX_LINES} lines"
                raise LinesRefusedError(BatchError("too_many_lines", many, None, number))
            if isinstance(line, BatchLine) and hash(line.custom_id) in seen:
                line = [BatchError("duplicate_custom_id", "this 'custom_id' was used before", "custom_id", number)]
            if isinstance(line, list):
                errors += line
                if len(errors) >= MAX_ERRORS:
                    break
            else:
                seen.add(hash(line.custom_id))
                if line.refused is None and named is None:
                    named, at = named_by(line), number
        if errors:
            raise LinesRefusedError(*errors[:MAX_ERRORS])
        if not count:
            raise LinesRefusedError(BatchError("empty_file", "the input file has no lines", "input_file_id"))
        return named or (None, None, None), at, count

    async def _target(self, record: BatchRecord, named: Named, line: int) -> Target:
        """The model and adapter that line `line` names, for all of them."""
        model, adapter, policy = named
        try:
            if not all(each is None or isinstance(each, str) for each in named) or policy not in (
                None,
                "pin",
                "follow",
            ):
                raise InvalidRequestError("'model', 'adapter' or 'adapter_policy' is malformed", param="model")
            return await find_target(self._ring, model, adapter or "", policy or "pin", session=record.spec.id)
        except ServiceUnavailableError:
            raise  # no worker lives now, or Redis is away: later
        except ParallmError as error:
            fault = BatchError(error.code or error.type, error.message, error.param, line)
            raise LinesRefusedError(fault) from error

    async def _inputs(self, record: BatchRecord, named: Named, target: Target, keep: Keep) -> AsyncIterator[InputLine]:
        choices = size = 0
        async for number, line in self._lines(record):
            assert isinstance(line, BatchLine), "checked before"
            for asked in await planned(target.ring, line, named, target, keep):
                encoded = input_line(asked, "batch", number)
                choices, size = choices + 1, size + len(encoded)
                if choices > MAX_CHOICES or size > 2 * self._ring.settings.max_upload_bytes:
                    many = (
                        f"{choices} choices with {size} bytes of prompts up to here; use a smaller 'n', or more batches"
                    )
                    raise LinesRefusedError(BatchError("too_many_choices", many, "n", number))
                yield encoded
            await asyncio.sleep(0)  # other requests' tokens go first

    async def _lines(self, record: BatchRecord) -> AsyncIterator[tuple[int, BatchLine | list[BatchError]]]:
        file = await self._ring.files.find(record.spec.input_file_id)
        async for number, raw in self._ring.files.lines(file, MAX_LINE_BYTES):
            read = partial(read_line, number, raw, record.spec.endpoint, self._ring.settings)
            yield number, await aside(read) if len(raw) > LONG_BYTES else read()
            if number % 64 == 0:
                await asyncio.sleep(0)

    # -- finalize

    async def finalize(self, record: BatchRecord) -> None:
        """Write both files and end the batch as its job has ended."""
        spec = record.spec
        there = ring_keeping(self._ring, record.ring)
        try:
            status = await there.jobs.status(record.job)
        except UnknownJobError as error:
            await self._end(spec, "failed", errors=(BatchError("job_lost", error.message),))
            return
        if status.status not in TERMINAL:
            raise ServiceUnavailableError("the job goes on: Redis had to forget how it ended")
        await self._store.change(spec.id, finalizing_at=int(time.time()))
        output, errors = self._ring.files.writer(spec.output_file_id), self._ring.files.writer(spec.error_file_id)
        shape = shape_of(spec.endpoint)
        counted = await self._write(there, status, shape, output, output if shape.in_one_file else errors)
        for writer, kind in ((output, "output"), (errors, "error")):
            if writer.size:
                await self._close(spec, writer, kind)
        failure = (BatchError("job_failed", status.error),) if status.status == "failed" else ()
        counts = {name: counted[name] for name in (*_COUNTED, *LineUsage._fields)}
        fields = {**counts, "has_output": int(output.size > 0), "has_errors": int(errors.size > 0), "errors": failure}
        await self._end(spec, _ENDS[status.status], **fields)

    async def _close(self, spec: BatchSpec, writer: FileWriter, kind: str) -> None:
        """A file of answers is complete. Lists of files show it where its client knows it as a file."""
        listed = not shape_of(spec.endpoint).in_one_file
        await writer.close(f"{spec.id}_{kind}.jsonl", "batch_output", spec.output_ttl_s, spec.tenant, listed=listed)

    async def _write(
        self, ring: Ring, status: JobStatus, shape: LineShape, output: FileWriter, errors: FileWriter
    ) -> "Counter[str]":
        """Answer each line in turn; how many were completed, failed, and not ended, and their tokens."""
        _, codec = await ring.known(status.model)
        counted: Counter[str] = Counter()
        async for ordinal, asked, results in self._whole_lines(ring, status):
            name = f"{status.id.removeprefix('job-')}-{ordinal}"
            write = partial(answer, shape, name, asked, results, status.status, codec, status.model)
            size = sum(len(result) for result in results if result is not None)
            answered = await aside(write) if size > LONG_BYTES else write()
            counted[answered.kind] += 1
            counted.update(answered.usage._asdict())
            if status.status == "succeeded" and None in results:
                raise ServiceUnavailableError(f"Redis had to forget the answer to line {ordinal + 1}")
            await (output if answered.kind == "completed" else errors).add(answered.line)
            await asyncio.sleep(0)
        return counted

    async def _whole_lines(
        self, ring: Ring, status: JobStatus
    ) -> AsyncIterator[tuple[int, JobInput, list[bytes | None]]]:
        """(ordinal of its first choice, first input, results of all its choices as they are stored) of each line."""
        first, results = None, []
        async for ordinal, raw, result in self._choices(ring, status):
            if first is None:
                first = ordinal, read_input(raw)
            results.append(result)
            if len(results) == first[1].reply["parts"]:
                yield *first, results
                first, results = None, []

    async def _choices(self, ring: Ring, status: JobStatus) -> AsyncIterator[tuple[int, InputLine, bytes | None]]:
        total, ledger = status.counts.total, JobLedger(ring.redis)
        for start in range(0, total, LINES_AT_ONCE):
            inputs = await ledger.inputs(status.id, start, min(LINES_AT_ONCE, total - start))
            results = dict(await ring.jobs.results(status.id, start - 1, len(inputs)))
            for ordinal, raw in enumerate(inputs, start):
                yield ordinal, raw, results.get(ordinal)


def _job_key(spec: BatchSpec) -> str:
    """Under which idempotency key a batch's job is submitted."""
    return f"batch:{spec.id}"
