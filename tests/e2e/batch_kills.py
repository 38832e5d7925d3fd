"""Batches under kills: api processes, job runners, workers and Redis die at random points of many batches.

    python -m tests.e2e.batch_kills --kills 30 --seed 7

Held against what comes out, for each batch: its states go forward and the last one stays; it has one job; every line is
exactly once in the output file or in the error file; the counts are those of the files; an answer is the greedy answer
that the prompt gets alone. Some batches are cancelled in the middle of kills. At the end two batches expire while
every process but Redis is dead.

Where an api process is killed, it is the one that works on the batch at that moment, if any does.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.redis import keys
from shared.redis.connection.client import connect
from tests.e2e.chaos import check_keys
from tests.e2e.chaos_load import GIVEN_UP, PROMPTS, Answers, Report, body
from tests.e2e.chaos_ring import ChaosRing, Member, chaos_ring
from tests.waiting import HANG_S, comes_true

URL = "/v1/completions"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
RANK = {"validating": 0, "in_progress": 1, "finalizing": 2, "cancelling": 3} | dict.fromkeys(ENDED, 4)
LINES, TOKENS = (50, 1200), (1, 24)
AT_ONCE = 3
CANCELLED = 0.2  # share of the batches
ROLES = {"api": 4, "runner": 3, "worker": 3, "redis": 1}
KILLED_IN = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass
class Watched:
    """One batch, from its file to the verdict."""

    ring: ChaosRing
    rng: random.Random
    report: Report
    answers: Answers
    id: str = ""
    status: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    taken_back: int = 0
    asked: dict[str, tuple[str, int]] = field(default_factory=dict)  # custom id -> prompt, tokens; 0: to be refused

    async def run(self, window: str = "24h", lines: int = 0, tokens: tuple[int, int] = TOKENS) -> None:
        """Create it, wait for its end, judge it."""
        cancel_in = self.rng.uniform(0.0, 6.0) if lines == 0 and self.rng.random() < CANCELLED else None
        await self.create(window, lines or self.rng.randint(*LINES), tokens)
        began = time.monotonic()
        while self.status not in ENDED:
            await asyncio.sleep(0.02)
            if cancel_in is not None and time.monotonic() - began > cancel_in:
                answer = await self._ask("POST", f"/v1/batches/{self.id}/cancel")
                cancel_in = None if answer.status_code in (200, 409) else cancel_in
            self._see((await self._ask("GET", f"/v1/batches/{self.id}")).json())
            if time.monotonic() - began > HANG_S:
                self._wrong(f"is {self.status} after {HANG_S:.0f} s")
                return
        await self.judge()

    async def create(self, window: str, lines: int, tokens: tuple[int, int]) -> None:
        """Its file and the batch, once, however often its api dies meanwhile."""
        rows = []
        for at in range(lines):
            prompt, count = self.rng.choice(PROMPTS), self.rng.randint(*tokens)
            refused = self.rng.random() < 0.02
            self.asked[f"line {at}"] = prompt, 0 if refused else count
            request = {**body(prompt, count), **({"colour": "red"} if refused else {})}
            rows.append(json.dumps({"custom_id": f"line {at}", "method": "POST", "url": URL, "body": request}) + "\n")
        files = {"file": ("requests.jsonl", "".join(rows).encode())}
        stored = (await self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=files)).json()["id"]
        request = {"input_file_id": stored, "endpoint": URL, "completion_window": window}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        found = (await self._ask("POST", "/v1/batches", json=request, headers=headers)).json()
        self.id, self.status = found["id"], found["status"]

    def _see(self, found: dict[str, Any]) -> None:
        changed = {
            name: (self.last[name], found[name]) for name in found if self.last and self.last[name] != found[name]
        }
        back = RANK[found["status"]] < RANK[self.status] or (self.status in ENDED and bool(changed))
        done = [
            sum(each["request_counts"][name] for name in ("completed", "failed")) for each in (self.last, found) if each
        ]
        if back or (done != sorted(done) and found["status"] not in ENDED):
            if any(name == "redis" and end > self.began for name, _, end in self.ring.history):
                self.taken_back += (
                    1  # a killed Redis may lose a second when its disk is slow (docs/operate/reliability.md)
                )
            else:
                self._wrong(f"went from {self.status} back to {found['status']}: {changed}")
        self.status, self.last = found["status"], found

    async def judge(self) -> None:
        """Its files against what was asked for."""
        written = {name: await self._lines(self.last[f"{name}_file_id"]) for name in ("output", "error")}
        ids = [line["custom_id"] for lines in written.values() for line in lines]
        if sorted(ids) != sorted(self.asked):
            twice = [each for each, count in Counter(ids).items() if count > 1]
            self._wrong(f"{self.status}: {len(ids)} lines of {len(self.asked)}, twice: {twice[:5]}")
        refused = [line for line in written["error"] if line["response"]]
        unended = [line for line in written["error"] if line["error"]]
        counts = {"total": len(self.asked), "completed": len(written["output"]), "failed": len(refused)}
        if self.last["request_counts"] != counts:
            self._wrong(f"counts {self.last['request_counts']}, and the files have {counts}")
        if self.status == "failed" or (self.status == "completed" and unended):
            self._wrong(f"{self.status} with {len(unended)} lines unended: {self.last['errors']}")
        if {line["error"]["code"] for line in unended} - {f"batch_{self.status}"}:
            self._wrong(f"{self.status} with {Counter(line['error']['code'] for line in unended)}")
        for line in written["output"]:
            prompt, count = self.asked.get(line["custom_id"], ("", 0))
            if line["response"]["body"]["choices"][0]["token_ids"] != self.answers.tokens[prompt][:count]:
                self._wrong(f"another answer to {line['custom_id']}")
                break
        for line in refused:
            given_up = GIVEN_UP in line["response"]["body"]["error"]["message"]
            self.report.given_up += given_up
            if not given_up and (self.asked[line["custom_id"]][1] or line["response"]["status_code"] != 400):
                self._wrong(f"refused: {line}")
                break
        self._see((await self._ask("GET", f"/v1/batches/{self.id}")).json())

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = (await self._ask("GET", f"/v1/files/{file_id}/content")).text
        return [json.loads(line) for line in text.splitlines()]

    async def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Of any api, until one answers."""
        until = time.monotonic() + HANG_S
        while True:
            url = self.rng.choice(self.ring.of("api")).url
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(timeout=HANG_S) as http:
                    answer = await http.request(method, url + path, **arguments)
                    if answer.status_code in (200, 409):
                        return answer
                    assert answer.status_code in (500, 502, 503, 504, 429), (
                        f"{path}: {answer.status_code} {answer.text}"
                    )
                    if answer.status_code == 500:
                        self.report.violation(f"{path}: 500 {answer.text}")
            assert time.monotonic() < until, f"nobody answers {path}"
            await asyncio.sleep(0.1)

    def _wrong(self, text: str) -> None:
        self.report.violation(f"{self.id} {text}")


class Kills:
    """Kills that meet batches in chosen states."""

    def __init__(self, ring: ChaosRing, rng: random.Random, redis: Redis) -> None:
        self.ring = ring
        self.rng = rng
        self.redis = redis
        self.met: Counter[tuple[str, str]] = Counter()  # role, state of the batch that it was aimed at

    async def one(self, batches: list[Watched]) -> None:
        """Wait until a batch is in a state of our choice, and a moment; kill somebody; wait until he is back."""
        wanted, (role,) = self.rng.choice(KILLED_IN), self.rng.choices(list(ROLES), list(ROLES.values()))
        await comes_true(lambda: any(each.status == wanted for each in batches), 10)
        found = [each for each in batches if each.status == wanted]
        found = found or [each for each in batches if each.status and each.status not in ENDED]
        if not found:
            return
        batch = self.rng.choice(found)
        victim = await self._at_work(batch) if role == "api" else None
        await asyncio.sleep(self.rng.uniform(0, 0.2 if victim else 0.6))
        if self.ring.can_harm(f"{role}.kill") and not (victim and victim.harmed):
            self.met[role + (" at work on it" if victim else ""), batch.status] += 1
            await self.ring.harm(f"{role}.kill", victim=victim)

    async def _at_work(self, batch: Watched) -> Member | None:
        """The api process that reads the batch's lines or writes its files, if one does soon."""
        owner = b""

        async def owned() -> bool:
            nonlocal owner
            owner = await self.redis.get(keys.batch_lease(batch.id)) or b""
            return bool(owner) or batch.status in ENDED

        with contextlib.suppress(RedisError, OSError):
            await comes_true(owned, 0 if batch.status == "in_progress" else 2)
        return next((member for member in self.ring.of("api") if member.name == owner.decode()), None)


async def run(kills: int, seed: int) -> tuple[Report, Kills, list[Watched]]:
    """Batches and kills; what happened."""
    rng, report, answers = random.Random(seed), Report(), Answers()
    print(f"batch kills: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with (
            chaos_ring(Path(folder), rng, lease_ms=1000, freeze_s=5, trainer=False) as ring,
            connection(ring) as redis,
        ):
            await answers.learn(ring.of("api")[0].url)
            killer, batches = Kills(ring, rng, redis), list[Watched]()
            over = asyncio.Event()

            async def work() -> None:
                while not over.is_set():
                    batches.append(Watched(ring, random.Random(seed * 1000 + len(batches)), report, answers))
                    await batches[-1].run()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(work())
                while ring.faults.total() < kills:
                    await asyncio.gather(*(killer.one(batches) for _ in range(rng.randint(1, 2))))
                over.set()
            batches += await expire(ring, rng, report, answers)
            for batch in batches:
                await has_one_job(redis, batch, report)
            await check_keys(redis, report)
    return report, killer, batches


async def expire(ring: ChaosRing, rng: random.Random, report: Report, answers: Answers) -> list[Watched]:
    """Two batches whose time passes while every process is dead: one has begun, one has not."""
    begun, unbegun = (Watched(ring, rng, report, answers) for _ in range(2))
    await begun.create("1m", 3000, (300, 320))
    while not (begun.last and begun.last["request_counts"]["completed"]):
        begun._see((await begun._ask("GET", f"/v1/batches/{begun.id}")).json())
        await asyncio.sleep(0.05)
    others = [member for member in ring.members if member.role != "api"]
    await asyncio.gather(*(member.end(signal.SIGKILL) for member in others))
    await unbegun.create("1m", 200, TOKENS)
    await asyncio.gather(*(member.end(signal.SIGKILL) for member in ring.of("api")))
    print("every process is dead", flush=True)
    await asyncio.sleep(62)
    for member in ring.members:
        member.start()
    await asyncio.gather(*(member.ready() for member in ring.members))
    for batch in (begun, unbegun):
        began = time.monotonic()
        while batch.status not in ENDED and time.monotonic() - began < HANG_S:
            batch._see((await batch._ask("GET", f"/v1/batches/{batch.id}")).json())
            await asyncio.sleep(0.05)
        if batch.status != "expired":
            report.violation(f"{batch.id} is {batch.status}, and its time is over")
        await batch.judge()
        print(f"expired: {batch.last['request_counts']}", flush=True)
    return [begun, unbegun]


async def has_one_job(redis: Redis, batch: Watched, report: Report) -> None:
    """A batch's job is made once, or never when it ended before."""
    jobs = 0
    for job_id in await redis.zrange(keys.jobs(), 0, -1):
        spec = json.loads(await redis.hget(keys.job(job_id.decode()), "spec"))
        jobs += spec["metadata"]["batch"] == batch.id
    if jobs > 1 or (jobs == 0 and batch.last["output_file_id"]):
        report.violation(f"{batch.id} has {jobs} jobs")


@contextlib.asynccontextmanager
async def connection(ring: ChaosRing) -> AsyncIterator[Redis]:
    """A connection of our own."""
    redis = connect(ring.redis.url)
    try:
        yield redis
    finally:
        await redis.aclose()


def main() -> int:
    """Kill `--kills` times; exit code 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    report, kills, batches = asyncio.run(run(options.kills, options.seed))
    print(f"\nkills: {kills.met.total()}")
    for (role, state), count in sorted(kills.met.items()):
        print(f"  {role:20} in {state:12} {count:4}")
    ends = Counter(batch.status for batch in batches)
    print(f"batches {dict(ends)}, {sum(len(batch.asked) for batch in batches)} lines")
    print(f"lines given up after three deaths of their workers: {report.given_up}; ", end="")
    print(f"states that a crash of Redis took back: {sum(batch.taken_back for batch in batches)}")
    print(f"violations: {len(report.violations)}", flush=True)
    return 1 if report.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
