"""The totals on a real server: each count once, whatever dies or is said again."""

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.processes.metric_store import MetricWriter, read_totals
from shared.telemetry.metrics import Tally

TOKENS = "vllm:generation_tokens_total"


async def test_the_totals_are_the_sum_of_all_processes_and_keep_the_dead(redis: Redis) -> None:
    tallies = [Tally(), Tally()]
    writers = [MetricWriter(redis, tally, "worker", "same-id") for tally in tallies]  # the id may be used again
    for round_ in (1, 2):
        for tally, writer in zip(tallies, writers, strict=True):
            tally.counter(TOKENS, "m").add(10)
            tally.histogram("vllm:request_params_n", "m").observe(2)
            await writer.write()
        totals = await read_totals(redis)
        assert totals[f"{TOKENS}|m"] == 20 * round_
        assert totals["vllm:request_params_n|m|2.0"] == 2 * round_
    del writers[0]
    tallies[1].counter(TOKENS, "m").add(1)
    await writers[0].write()
    assert (await read_totals(redis))[f"{TOKENS}|m"] == 41


async def test_a_write_said_again_adds_nothing(redis: Redis) -> None:
    tally = Tally()
    writer = MetricWriter(redis, tally, "worker", "w")
    tally.counter(TOKENS, "m").add(7)
    await writer.write()
    writer._sent = {}  # as if the answer had been lost
    await writer.write()
    assert (await read_totals(redis))[f"{TOKENS}|m"] == 7


async def test_a_process_that_slept_past_its_time_to_live_is_not_counted_twice(redis: Redis) -> None:
    tally = Tally()
    writer = MetricWriter(redis, tally, "worker", "w")
    tally.counter(TOKENS, "m").add(7)
    tally.counter("vllm:prompt_tokens_total", "m").add(2)
    await writer.write()
    async for key in redis.scan_iter(match=keys.process_metrics("*")):
        await redis.delete(key)
    tally.counter(TOKENS, "m").add(1)
    await writer.write()
    assert await read_totals(redis) == {f"{TOKENS}|m": 8, "vllm:prompt_tokens_total|m": 2}


async def test_counts_that_a_crashed_redis_lost_come_back(redis: Redis) -> None:
    tally = Tally()
    writer = MetricWriter(redis, tally, "worker", "w")
    tally.counter(TOKENS, "m").add(5)
    await writer.write()
    saved = {key: await redis.dump(key) async for key in redis.scan_iter(match="parallm:{metrics}:*")}
    tally.counter(TOKENS, "m").add(5)
    await writer.write()
    for key, value in saved.items():  # Redis comes back as it was before the last write
        await redis.restore(key, 60_000, value, replace=True)
    tally.counter(TOKENS, "m").add(1)
    await writer.write()
    assert (await read_totals(redis))[f"{TOKENS}|m"] == 11
