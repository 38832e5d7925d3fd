"""Workers that leave: told to, they finish or hand back; stuck or dead, they give their work up and restart."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faulty_worker import BLOCK, DIE, FREEZE, KILL
from tests.e2e.hanging_peer import HANGS
from tests.e2e.rings import MODEL, Process, Ring, ring
from tests.waiting import HANG_S, NEVER_S, comes_true, wait_until

STALL_S = 4.0
PROMPT = [(7 * at * at + at) % 250 for at in range(832)]  # 13 blocks
LONG = 1000  # tokens, which with the prompt fill most of a context: more than a second even on a quick machine


@pytest.fixture(scope="module")
def workerless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--workers", "0") as started:
        yield started


@pytest.fixture(scope="module")
def whole(workerless: Ring, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What long streams say when nothing happens to their worker."""
    with worker(workerless, tmp_path_factory.mktemp("adapters"), "undisturbed"):
        return asyncio.run(told_long(workerless.url))


@contextmanager
def worker(
    served: Ring, folder: Path, name: str, *arguments: str, module: str = "worker", parent: bool = True
) -> Iterator[Process]:
    stall_s = STALL_S if module == "tests.e2e.faulty_worker" else 60  # the others may be stopped for a while
    process = Process.start(
        module, "--redis", served.redis_url, "--model", f"models/{MODEL}", "--worker-id", name, "--lease-ms", "1000",
        "--engine-stall-s", str(stall_s), "--adapter-cache-dir", str(folder), *arguments,
        environment=None if parent else {"PARALLM_PARENT_PIPE": ""},
    )  # fmt: skip
    try:
        process.wait_for_line("worker.ready")
        yield process
    finally:
        process.stop()


async def told(
    url: str,
    seed: int,
    tokens: list[int] | None = None,
    max_tokens: int = 60,
    prompt: str | list[int] = "Count to 60.",
) -> list[int]:
    """The tokens that a client has seen when the stream ends in order."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": seed}
    body |= {"stream": True, "return_token_ids": True}
    tokens = [] if tokens is None else tokens

    async def answered() -> bool:
        async with http.stream("POST", "/v1/completions", json=body) as r:
            if r.status_code == 503:  # for a second the api does not know yet that a worker has come
                return False
            assert r.status_code == 200, await r.aread()
            async for line in r.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    tokens.extend(token for choice in chunk["choices"] for token in choice.get("token_ids") or [])
        return True

    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        await wait_until(answered)
    return tokens


async def told_long(url: str, tokens: list[int] | None = None) -> list[int]:
    return await told(url, 1, tokens, LONG, PROMPT)


@pytest.mark.parametrize("fault", [BLOCK, DIE, FREEZE])
async def test_a_stream_goes_on_elsewhere_when_the_engine_below_it_is(
    fault: int, workerless: Ring, tmp_path: Path
) -> None:
    with worker(workerless, tmp_path, "faulty", module="tests.e2e.faulty_worker") as faulty:
        seen: list[int] = []
        stream = asyncio.create_task(told(workerless.url, fault, seen))
        await wait_until(lambda: bool(seen) or faulty.popen.poll() is not None)
        with worker(workerless, tmp_path / "sane", "sane"):
            tokens = await asyncio.wait_for(stream, HANG_S)
            code = await asyncio.to_thread(faulty.wait)
            again = await told(workerless.url, fault)
    assert code == 1, faulty.output
    assert len(tokens) == 60
    assert tokens == again, "the tokens changed with the worker"
    reason = {BLOCK: "worker.engine_stuck", DIE: "worker.engine_died", FREEZE: "Timeout"}[fault]
    assert faulty.printed(reason), faulty.output


async def test_a_stuck_worker_is_not_reported_ready_and_a_worker_without_supervisor_restarts_itself(
    workerless: Ring, tmp_path: Path
) -> None:
    with worker(workerless, tmp_path, "alone", module="tests.e2e.faulty_worker", parent=False) as alone:
        pid = (await asyncio.to_thread(workerless.workers))[0].pid
        stream = asyncio.create_task(told(workerless.url, BLOCK))
        states: set[str] = set()

        async def restarted() -> bool:
            states.update(w.state for w in await asyncio.to_thread(workerless.workers))
            if "stuck" in states:
                stream.cancel()
            return len(alone.printed("worker.ready")) >= 2  # a machine may be so busy that it does so again

        await wait_until(restarted)
        assert (await asyncio.to_thread(workerless.workers))[0].pid == pid, "it replaces itself in its process"
    assert "stuck" in states, states


async def test_a_worker_told_to_leave_finishes_what_it_can_and_claims_nothing(workerless: Ring, tmp_path: Path) -> None:
    with worker(workerless, tmp_path, "leaver", "--drain-grace-s", "30") as leaver:
        seen: list[int] = []
        stream = asyncio.create_task(told(workerless.url, 5, seen, max_tokens=400))
        await wait_until(lambda: bool(seen))
        leaver.popen.send_signal(signal.SIGTERM)
        await wait_until(lambda: bool(leaver.printed("worker.draining")))
        async with httpx.AsyncClient(base_url=workerless.url, timeout=HANG_S) as http:
            await wait_until(lambda: answers(http, 503))
        assert len(await stream) == 400
        assert await asyncio.to_thread(leaver.wait) == 0
    assert leaver.printed("worker.stopped") and not leaver.printed("worker.handed_back"), leaver.output


async def test_what_a_leaving_worker_cannot_finish_goes_on_elsewhere_at_once(
    workerless: Ring, whole: list[int], tmp_path: Path
) -> None:
    seen: list[int] = []
    with (
        worker(workerless, tmp_path / "heir", "heir") as heir,
        worker(workerless, tmp_path, "leaver", "--drain-grace-s", "0.2") as leaver,
    ):
        with stopped(heir):  # else it might be the one that gets the stream
            stream = asyncio.create_task(told_long(workerless.url, seen))
            await wait_until(lambda: bool(seen))
        assert await asyncio.to_thread(leaver.stop) == 0
        assert leaver.printed("worker.handed_back"), leaver.output
        assert await asyncio.wait_for(stream, HANG_S) == whole, "the tokens changed with the worker"
        assert heir.printed("worker.took_over"), heir.output


async def test_a_worker_that_leaves_hands_the_kv_of_its_rows_on(
    workerless: Ring, whole: list[int], tmp_path: Path
) -> None:
    """The heir computes nothing of what the leaver had read, and the tokens are what they would have been."""
    transfer = ("--kv-transfer", "--drain-grace-s", "0")
    seen: list[int] = []
    found_before = await prefix_hits(workerless)
    with (
        worker(workerless, tmp_path / "heir", "heir", *transfer) as heir,
        worker(workerless, tmp_path, "leaver", *transfer) as leaver,
    ):
        with stopped(heir):
            stream = asyncio.create_task(told_long(workerless.url, seen))
            await wait_until(lambda: bool(seen))
        assert await asyncio.to_thread(leaver.stop) == 0
        assert await asyncio.wait_for(stream, HANG_S) == whole, "the tokens changed with the worker"
        (fetched,) = heir.printed("kv.fetched")
        assert json.loads(fetched)["tokens"] >= 832, "all that the leaver had read and written, to a block"
        assert leaver.printed("kv.lingered"), leaver.output
        await wait_until(lambda: fetches_shown(workerless))
    async with httpx.AsyncClient(base_url=workerless.url, timeout=HANG_S) as http:
        counts = (await http.get("/metrics")).text
    assert re.search(r"^mlx_parallm_kv_fetched_tokens_total\{.*\} (8[3-9]|9\d|1\d\d)\d", counts, re.MULTILINE), counts
    assert await prefix_hits(workerless) - found_before == 832


async def test_a_restarted_worker_finds_what_its_rows_had_read_on_disk(
    workerless: Ring, whole: list[int], tmp_path: Path
) -> None:
    tier = ("--ssd-cache-dir", str(tmp_path / "kv"), "--drain-grace-s", "0")
    seen: list[int] = []
    with worker(workerless, tmp_path, "before", *tier) as before:
        stream = asyncio.create_task(told_long(workerless.url, seen))
        await wait_until(lambda: len(seen) > 100)
        assert await asyncio.to_thread(before.stop) == 0
    assert before.printed("worker.handed_back") and len(seen) < LONG, before.output
    with worker(workerless, tmp_path, "after", *tier) as after:
        assert await asyncio.wait_for(stream, HANG_S) == whole, "the tokens changed"

        async def is_shown() -> bool:
            (status,) = await asyncio.to_thread(workerless.workers)
            return status.extra["disk_hits"] == 1

        await wait_until(is_shown)
        assert after.printed("worker.took_over"), after.output


@pytest.mark.parametrize("killed", ["leaver", "heir"])
async def test_a_kill_in_the_middle_of_a_transfer_costs_a_prefill_and_nothing_else(
    killed: str, workerless: Ring, whole: list[int], tmp_path: Path
) -> None:
    transfer = ("--kv-transfer", "--drain-grace-s", "0")
    module = {"leaver": "worker", "heir": "worker"} | {killed: "tests.e2e.hanging_peer"}
    seen: list[int] = []
    with ExitStack() as stack:
        heir = stack.enter_context(worker(workerless, tmp_path / "heir", "heir", *transfer, module=module["heir"]))
        leaver = stack.enter_context(worker(workerless, tmp_path, "leaver", *transfer, module=module["leaver"]))
        with stopped(heir):
            stream = asyncio.create_task(told_long(workerless.url, seen))
            await wait_until(lambda: bool(seen))
        leaver.popen.send_signal(signal.SIGTERM)
        hanging = leaver if killed == "leaver" else heir
        await wait_until(lambda: bool(hanging.printed(HANGS)) or stream.done())
        assert not stream.done(), heir.output + leaver.output
        hanging.popen.kill()
        if killed == "heir":
            assert await asyncio.to_thread(leaver.wait) == 0, "nobody fetches any more: it ends"
            heir = stack.enter_context(worker(workerless, tmp_path / "spare", "spare", *transfer))
        assert await asyncio.wait_for(stream, HANG_S) == whole, "the tokens changed"
        assert heir.printed("worker.took_over"), heir.output
        assert not heir.printed("kv.fetched"), heir.output
        if killed == "leaver":
            (why,) = heir.printed("kv.not_fetched")
            assert json.loads(why)["reason"] == "it closed the connection"


async def prefix_hits(served: Ring) -> float:
    """Prompt tokens that were found in the prefix cache, since the ring is there."""
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (.+)$", (await http.get("/metrics")).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def fetches_shown(served: Ring) -> bool:
    """Whether the dashboard says that a worker has got KV from another one."""
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        page = (await http.get("/dashboard")).text
    return re.search(r"from workers [^<]*, 1 hit<", page) is not None


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    process.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.popen.send_signal(signal.SIGCONT)


async def answers(http: httpx.AsyncClient, status: int) -> bool:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "deadline_s": 0.1}
    return (await http.post("/v1/completions", json=body)).status_code == status


async def test_a_sequence_that_kills_every_worker_costs_the_others_a_few_rounds_and_no_token(
    workerless: Ring, tmp_path: Path
) -> None:
    lives: list[Process] = []

    async def supervise() -> None:
        while True:
            name = f"again-{len(lives)}"
            with worker(workerless, tmp_path, name, module="tests.e2e.faulty_worker") as process:
                lives.append(process)
                await comes_true(lambda: process.popen.poll() is not None, NEVER_S)

    innocent = (1, 2)
    supervising = asyncio.create_task(supervise())
    try:
        streams = [told(workerless.url, seed) for seed in (innocent[0], KILL, innocent[1])]
        first, guilty, last = await asyncio.gather(*streams, return_exceptions=True)
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
    assert "while it ran alone" in str(guilty)
    deaths = sum(process.popen.returncode == -signal.SIGKILL for process in lives)
    assert 1 <= deaths <= 2 + 2, "two with all three, then at most halves of 2 and 1"
    with worker(workerless, tmp_path / "sane", "sane"):
        assert [first, last] == [await told(workerless.url, seed) for seed in innocent]
