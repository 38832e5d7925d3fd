"""What workers wrote is computed again: on request, and by one another, until a faulty one is named and ends."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.recordings import find_recordings
from shared.sequences import encode
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import HANG_S, wait_until

FAULTY = ["tests.e2e.wrong_worker", "kv"]
RECORD = ("--record-ttl-s", "600")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "0", *RECORD) as started:
        yield started


@pytest.fixture(scope="module")
def workers(recorded: Ring, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """Two sound workers, and one whose KV is one position off, that end when they are found wrong."""
    with ExitStack() as stack:
        started = {}
        for worker, module in (("sound-1", ["worker"]), ("sound-2", ["worker"]), ("faulty", FAULTY)):
            started[worker] = Process.start(
                *module, "--redis", recorded.redis_url, "--model", f"models/{MODEL}", "--worker-id", worker,
                "--replay-share", "1", "--on-wrong-tokens", "drain",
                "--adapter-cache-dir", str(tmp_path_factory.mktemp("adapters")),
            )  # fmt: skip
            stack.callback(started[worker].stop)
        for process in started.values():
            process.wait_for_line("worker.ready")
        yield started


async def completed(http: httpx.AsyncClient, seed: int, **more: Any) -> str:
    """Id of a completion of 40 tokens."""
    body = {"model": MODEL, "prompt": f"Count to {seed}.", "max_tokens": 40, "ignore_eos": True, "seed": seed} | more

    names: list[str] = []

    async def answered() -> bool:
        reply = await http.post("/v1/completions", json=body)
        if reply.status_code == 503:  # for a second the api does not know yet that a worker has come
            return False
        assert reply.status_code == 200, reply.text
        names.append(reply.json()["id"])
        return True

    await wait_until(answered)
    return names[0]


async def reports(http: httpx.AsyncClient, name: str, **more: Any) -> list[dict[str, Any]]:
    """Reports of a replay of all choices of a completion."""
    reply = await http.post("/v1/replay", json={"id": name} | more)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


async def test_a_worker_whose_kv_is_off_by_one_is_named_and_ends_and_sound_ones_stay(
    recorded: Ring, workers: dict[str, Process]
) -> None:
    async with httpx.AsyncClient(base_url=recorded.url, timeout=HANG_S) as http:
        seed = 0

        async def ended() -> bool:
            nonlocal seed
            seed += 12
            await asyncio.gather(*(completed(http, seed + at) for at in range(12)))
            return bool(workers["faulty"].printed("worker.draining"))

        await wait_until(ended)
        assert workers["faulty"].wait() == 0
        found_wrong = {name for name, process in workers.items() if process.printed('"standing": "wrong"')}
        assert found_wrong == {"faulty"}
        metrics = (await http.get("/metrics")).text
    assert f'mlx_parallm_court_tokens_total{{model_name="{MODEL}",verdict="same"}}' in metrics


async def test_what_was_drawn_in_any_way_is_drawn_again(recorded: Ring, workers: dict[str, Process]) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_p": 0.8, "top_k": 12, "n": 2},
        {"min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "stop": ["zzz"]},
        {"structured_outputs": {"regex": "[a-f ]{30,40}"}, "ignore_eos": False},
    ]
    async with httpx.AsyncClient(base_url=recorded.url, timeout=HANG_S) as http:
        names = await asyncio.gather(*(completed(http, 900 + at, **way) for at, way in enumerate(ways)))
        for name, way in zip(names, ways, strict=True):
            found = await reports(http, name, worker="sound-2")
            assert [each["verdict"] for each in found] == ["same"] * way.get("n", 1), found
            assert all(each["same"] == each["tokens"] > 0 for each in found)
            assert all(each["replayed_by"] == ["sound-2"] for each in found)


async def test_another_seed_in_the_recording_is_found_at_the_token(recorded: Ring, workers: dict[str, Process]) -> None:
    async with (
        httpx.AsyncClient(base_url=recorded.url, timeout=HANG_S) as http,
        Redis.from_url(recorded.redis_url) as redis,
    ):
        name = await completed(http, 77)
        (recording,) = await find_recordings(redis, [MODEL], name)
        ids = recording.result.completion_ids
        other = msgspec.structs.replace(recording.result, completion_ids=(*ids[:20], (ids[20] + 1) % 250, *ids[21:]))
        await redis.hset(keys.recording(MODEL, f"{name}-0"), "result", encode(other))
        (found,) = await reports(http, name)
        assert found["verdict"] == "wrong"
        assert found["differences"][0]["position"] == 20
        assert found["differences"][0]["replayed"] == ids[20]


async def test_what_is_not_recorded_or_no_worker_can_compute_is_refused_by_name(
    recorded: Ring, workers: dict[str, Process]
) -> None:
    async with httpx.AsyncClient(base_url=recorded.url, timeout=HANG_S) as http:
        reply = await http.post("/v1/replay", json={"id": "cmpl-none"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "recording_not_found")
        name = await completed(http, 5)
        reply = await http.post("/v1/replay", json={"id": name, "worker": "nowhere"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "worker")
        reply = await http.post("/v1/replay", json={"id": name, "bound": 2})
        assert reply.status_code == 400
