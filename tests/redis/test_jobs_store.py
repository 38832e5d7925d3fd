"""JobStore against a real server: submission, idempotency, recording, ends."""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import ConflictError, InvalidRequestError, UnknownJobError
from shared.jobs import JobInput, JobUsage
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.jobs import intake as job_intake
from shared.redis.jobs.images import job_image
from shared.redis.jobs.ledger import JobLedger, SampleRecord
from shared.redis.jobs.store import JobStore
from shared.trajectories import Reward
from tests.redis.job_fakes import lines, prompts, spec


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def sample(ordinal: int, **fields: object) -> SampleRecord:
    defaults: dict[str, object] = {"line": b'{"n":%d}' % ordinal, "outcome": "succeeded", "usage": JobUsage(3, 2)}
    return SampleRecord(ordinal, **{**defaults, **fields})  # type: ignore[arg-type]


async def created(redis: Redis, count: int = 4, **fields: object) -> str:
    return (await JobStore(redis).create(spec(**fields), prompts(count)))[0]


async def test_a_created_job_is_queued_and_listed(redis: Redis) -> None:
    store = JobStore(redis)
    first = await created(redis, 3, n=2, metadata={"run": "a"})
    second = await created(redis)
    status = await store.status(first)
    assert (status.status, status.counts.total, status.counts.queued, status.n) == ("queued", 6, 6, 2)
    assert (status.progress, status.metadata) == (0.0, {"run": "a"})
    assert status.created_ms > 0
    assert [job.id for job in await store.list()] == [second, first]
    assert [job.id for job in await store.list(5, before=second)] == [first]
    assert await JobLedger(redis).inputs(first, 1, 5) == prompts(3)[1:]
    assert (await store.spec(first)).sampling.seed is not None


async def test_every_key_of_a_job_has_a_time_to_live(redis: Redis) -> None:
    job = await created(redis)
    ledger = JobLedger(redis)
    await JobStore(redis).create(spec(), prompts(1), "key")
    await ledger.begin(job, "r", 0)
    await ledger.record(job, [sample(0)])
    await JobStore(redis).cancel(job)
    async for key in redis.scan_iter():
        if key not in (b"arq:parallm",):  # arq's queue: a sorted set of waiting ticks
            assert await redis.ttl(key) > 0, key


@pytest.mark.parametrize(
    ("fields", "inputs", "says"),
    [
        ({}, [], "at least one prompt"),
        ({"total_prompts": 2}, [b'{"prompt": "a"}'], "2 prompts were announced, 1 came"),
        ({"n": 0}, [b'{"prompt": "a"}'], "n must be"),
        ({"kind": "rollout"}, [b'{"prompt": "a"}'], "needs a reward"),
        ({"kind": "score", "score_logprobs": False}, [b'{"prompt": "a", "completion": "b"}'], "a reward, or both"),
    ],
)
async def test_a_wrong_submission_is_refused_and_leaves_nothing(
    redis: Redis, fields: dict[str, object], inputs: list[bytes], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        await JobStore(redis).create(spec(**fields), inputs)
    assert not [key async for key in redis.scan_iter()]


async def test_a_half_written_job_is_invisible_and_expires(redis: Redis) -> None:
    arrived = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        for line in prompts(job_intake.CHUNK_LINES + 1):
            yield line
        arrived.set()
        await asyncio.Event().wait()

    submitting = asyncio.create_task(JobStore(redis).create(spec(id="job-x"), endless()))
    await arrived.wait()
    assert await redis.llen(keys.job_inputs("job-x")) == job_intake.CHUNK_LINES
    assert 0 < await redis.ttl(keys.job_inputs("job-x")) <= job_intake.INTAKE_TTL_S
    assert await JobStore(redis).list() == []
    with pytest.raises(UnknownJobError):
        await JobStore(redis).status("job-x")
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)


async def test_images_of_a_job_live_and_go_with_its_inputs(redis: Redis) -> None:
    store = JobStore(redis)

    async def inputs(job: str, fails: bool = False) -> AsyncIterator[bytes]:
        images = store.images(job, most_bytes=10)
        for data in (b"aaaa", b"bbbb", b"aaaa"):
            await images.keep(data[:1] * 32, data)
            assert 0 < await redis.ttl(keys.job_images(job)) <= job_intake.INTAKE_TTL_S
        if fails:
            await images.keep(b"c" * 32, b"ccc")
        for line in prompts(1):
            yield line

    with pytest.raises(InvalidRequestError, match="more than 10 bytes"):
        await store.create(spec(id="job-a"), inputs("job-a", fails=True))
    assert not await redis.exists(keys.job_images("job-a"))
    await store.create(spec(id="job-b"), inputs("job-b"), "key")
    assert not (await store.create(spec(id="job-c"), inputs("job-c"), "key"))[1]
    assert not await redis.exists(keys.job_images("job-c"))
    assert await redis.ttl(keys.job_images("job-b")) == await redis.ttl(keys.job_inputs("job-b")) > 6 * keys.DAY_S
    for key in (keys.job_images("job-b"), keys.job_inputs("job-b")):
        await redis.expire(key, 100)
    await JobLedger(redis).inputs("job-b", 0, 1)
    assert await redis.ttl(keys.job_images("job-b")) > 6 * keys.DAY_S, "whoever works on the job renews them"
    again = await store.submit_again("job-b")
    assert await job_image(redis, again, b"b" * 32) == b"bbbb"
    assert await redis.hlen(keys.job_images(again)) == 2
    await store.cancel("job-b")
    await store.delete("job-b")
    assert not await redis.exists(keys.job_images("job-b"))
    assert await job_image(redis, again, b"a" * 32) == b"aaaa"


async def test_one_idempotency_key_makes_one_job(redis: Redis) -> None:
    answers = await asyncio.gather(*(JobStore(redis).create(spec(), prompts(300), "key") for _ in range(8)))
    assert len({job for job, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1
    assert len(await JobStore(redis).list()) == 1
    assert len([key async for key in redis.scan_iter("parallm:job:*:inputs")]) == 1


async def test_an_idempotency_key_belongs_to_one_request(redis: Redis) -> None:
    await JobStore(redis).create(spec(), prompts(1), "key")
    with pytest.raises(ConflictError):
        await JobStore(redis).create(spec(n=2), prompts(1), "key")


async def test_a_submitter_that_died_before_the_job_was_visible_is_completed(redis: Redis) -> None:
    dead = spec(id="job-dead")
    await job_intake._write(redis, dead, prompts(3), job_intake._fingerprint(dead))
    await redis.set(keys.job_idempotency("key"), "job-dead", ex=100)
    assert await JobStore(redis).list() == []
    assert await JobStore(redis).create(spec(), prompts(3), "key") == ("job-dead", False)
    assert (await JobStore(redis).status("job-dead")).status == "queued"
    assert [job.id for job in await JobLedger(redis).active()] == ["job-dead"]


async def test_a_key_whose_job_is_gone_is_taken_again(redis: Redis) -> None:
    await redis.set(keys.job_idempotency("key"), "job-gone", ex=100)
    job, created = await JobStore(redis).create(spec(), prompts(1), "key")
    assert created and job != "job-gone"


async def test_a_sample_counts_once(redis: Redis) -> None:
    job = await created(redis, 4)
    ledger = JobLedger(redis)
    await ledger.expanded(job, 4)
    batch = [
        sample(0, reward=Reward("exact", 1.0)),
        sample(2, reward=Reward("exact", 0.5)),
        sample(3, outcome="failed", reward=Reward("exact", None, error="x")),
    ]
    assert await ledger.record(job, batch) == 3
    assert await ledger.record(job, [*batch, sample(0, line=b"{}")]) == 0
    status = await JobStore(redis).status(job)
    assert (status.counts.succeeded, status.counts.failed, status.counts.running) == (2, 1, 1)
    assert status.usage == JobUsage(9, 6)
    assert (status.mean_reward, status.reward_errors, status.complete_through) == (0.75, 1, 1)
    await ledger.record(job, [sample(1)])
    assert (await JobStore(redis).status(job)).complete_through == 4
    assert (await JobStore(redis).results(job, limit=1)) == [(0, b'{"n":0}')]


async def test_results_are_paged_in_order_across_chunks(redis: Redis) -> None:
    job = await created(redis, 600)
    store, ledger = JobStore(redis), JobLedger(redis)
    await ledger.record(job, [sample(ordinal) for ordinal in reversed(range(600)) if ordinal != 300])
    ordinals: list[int] = []
    while page := await store.results(job, ordinals[-1] if ordinals else -1, 7):
        ordinals += [ordinal for ordinal, _ in page]
    assert ordinals == [ordinal for ordinal in range(600) if ordinal != 300]
    assert [o for o, _ in await store.results(job, 290, 50, complete_only=True)] == list(range(291, 300))
    await ledger.finish(job, "cancelled")
    assert len(await store.results(job, 290, 50, complete_only=True)) == 50


async def test_only_one_runner_starts_a_tick(redis: Redis) -> None:
    job = await created(redis)
    ledger = JobLedger(redis)
    begun = await asyncio.gather(*(ledger.begin(job, f"r{i}", 0) for i in range(10)))
    assert sorted(begun, key=str) == [1, *[None] * 9]
    assert await ledger.begin(job, "other", 1) is None  # the lease is held
    await ledger.release(job, "not the owner")
    assert await ledger.begin(job, "other", 1) is None
    owner = f"r{begun.index(1)}"
    assert await ledger.renew(job, owner)
    await ledger.release(job, owner)
    assert await ledger.begin(job, "other", 0) is None  # that tick was started before
    assert await ledger.begin(job, "other", 1) == 2


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "expired"])
async def test_a_terminal_state_is_never_left(redis: Redis, state: str) -> None:
    job = await created(redis, 2)
    ledger = JobLedger(redis)
    if state == "succeeded":
        assert not await ledger.finish(job, "succeeded")  # two samples are missing
        await ledger.record(job, [sample(0), sample(1)])
    assert await ledger.finish(job, state, "why")  # type: ignore[arg-type]
    before = await JobStore(redis).status(job)
    assert not await ledger.finish(job, "failed" if state != "failed" else "cancelled")
    assert await ledger.record(job, [sample(0), sample(1)]) == 0
    assert (await JobStore(redis).cancel(job)).status == state
    assert await JobStore(redis).status(job) == before
    counts = before.counts
    assert counts.succeeded + counts.failed + counts.cancelled + counts.expired == counts.total
    assert [job.ended for job in await ledger.active()] == [True], "until a runner has settled it"


async def test_cancelling_a_job_that_has_not_begun_ends_it_at_once(redis: Redis) -> None:
    job = await created(redis, 3)
    status = await JobStore(redis).cancel(job)
    assert (status.status, status.counts.cancelled) == ("cancelled", 3)
    with pytest.raises(UnknownJobError):
        await JobStore(redis).cancel("job-none")


async def test_a_large_submission_streams(redis: Redis) -> None:
    def many() -> Iterator[bytes]:
        for i in range(20_000):
            yield msgspec.json.encode(JobInput(f"{i} " + "x" * 400, reference=i))

    await JobStore(redis).create(spec(), lines([JobInput("warm")]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job, _ = await JobStore(redis).create(spec(), many())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    grown_mb = grown / (1 << 20 if sys.platform == "darwin" else 1024)  # bytes there, KiB on Linux
    assert await redis.llen(keys.job_inputs(job)) == 20_000
    assert grown_mb < 6  # the inputs are 9 MB
