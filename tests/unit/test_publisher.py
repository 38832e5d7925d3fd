import asyncio
from collections.abc import Mapping, Sequence
from typing import get_args

from redis.exceptions import ResponseError

from shared.frames import Finish, FinishReason, TokenEvent
from shared.redis.tokens.writer import Commit
from shared.sequences import Claim, SamplingParams, SequenceSpec
from shared.telemetry.metrics import Tally
from tests.waiting import wait_until
from worker.publisher import TokenPublisher
from worker.reports import FINISHED_REASONS, SequenceCounts
from worker.rows import ClaimedRow, ClaimedRows


class FailingOnce:
    """A writer whose first write is refused by Redis."""

    def __init__(self) -> None:
        self.frames: list[list[TokenEvent]] = []
        self.chunks: list[TokenEvent] = []
        self.commits: list[str] = []
        self.failures = 1
        self.gaps: set[str] = set()

    async def write(
        self,
        frames: Mapping[str, list[TokenEvent]],
        chunks: Mapping[str, list[TokenEvent]],
        commits: Sequence[Commit],
    ) -> list[bool]:
        if self.failures:
            self.failures -= 1
            raise ResponseError("LOADING")
        self.frames += frames.values()
        self.chunks += [event for chunk in chunks.values() for event in chunk]
        self.commits += [commit.result.id for commit in commits]
        return [True for _ in commits]


async def test_a_write_that_redis_refused_is_said_again_with_nothing_lost() -> None:
    spec = SequenceSpec("s", "m", (1,), SamplingParams(2, 0), api="a")
    rows = ClaimedRows()
    rows.add(ClaimedRow.after(Claim(spec, "stream", "0-1", 1), []))
    writer = FailingOnce()

    async def owned() -> None:
        return None

    tally = Tally()
    publisher = TokenPublisher(
        writer,  # type: ignore[arg-type]
        rows,
        "w",
        log_every_tokens=16,
        verify=owned,
        stale_after_s=60,
        counts=SequenceCounts(tally, "m"),
    )
    publisher.take([TokenEvent("s", 1, 0, [5], [-0.5])])
    publisher.take([TokenEvent("s", 1, 1, [6], [-0.5], finish=Finish("length"))])

    async def keep_running() -> None:
        while True:
            try:
                await publisher.run()
            except ResponseError:
                continue

    task = asyncio.create_task(keep_running())
    await wait_until(lambda: writer.commits == ["s"])
    assert [event.tokens for frame in writer.frames for event in frame] == [[5], [6]]
    await publisher.drained()
    assert len(rows) == 0
    counted = tally.fields()
    assert (counted["vllm:prompt_tokens_total|m"], counted["vllm:generation_tokens_total|m"]) == (1, 2)
    assert counted["vllm:request_success_total|m|length"] == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_gathered_in_a_long_stall_is_logged_whole() -> None:
    """Several chunks' worth in one write: each used to replace the one before, which left holes in the log."""
    spec = SequenceSpec("s", "m", (1,), SamplingParams(100, 0), api="a")
    rows = ClaimedRows()
    rows.add(ClaimedRow.after(Claim(spec, "stream", "0-1", 1), []))
    writer = FailingOnce()
    writer.failures = 0

    async def owned() -> None:
        return None

    publisher = TokenPublisher(
        writer,  # type: ignore[arg-type]
        rows,
        "w",
        log_every_tokens=4,
        verify=owned,
        stale_after_s=60,
        counts=SequenceCounts(Tally(), "m"),
    )
    publisher.take([TokenEvent("s", 1, at, [at], [-0.5]) for at in range(22)])
    publisher.flush_log("s")
    task = asyncio.create_task(publisher.run())
    await publisher.drained()
    assert [token for event in writer.chunks for token in event.tokens] == list(range(22))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_every_end_of_a_sequence_is_counted_under_a_name() -> None:
    assert set(FINISHED_REASONS) == set(get_args(FinishReason))
