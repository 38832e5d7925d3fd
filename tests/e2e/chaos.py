"""Chaos: real processes under load are killed, frozen, restarted and cut off at random moments.

    python -m tests.e2e.chaos --minutes 30 --seed 7      (or: make chaos MINUTES=30)

Checked from outside, all the time and at the end: every job ends in one terminal state and stays there; every sample is
there exactly once; no client sees a token change, repeat or go missing, compared with the answer that its prompt gets
alone; streams go on over another api; each step of a policy's session is made once, and each verdict counts once; a
dead worker's streams pause for less than five seconds; afterwards nothing is left: no row, no queue entry, no lease, no
undocumented or immortal key, no process.

The seed fixes what is drawn for the faults; what they meet is up to the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path

import psutil
from redis.asyncio import Redis

from shared.jobs import TERMINAL
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.connection.cluster import ClusterRedis
from shared.redis.jobs.ticks import queue_name
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.queue.sequence_queue import SequenceQueue
from tests.e2e.chaos_images import Images
from tests.e2e.chaos_learners import Learners
from tests.e2e.chaos_load import LONG_PROMPTS, PROMPTS, Answers, Load, Report
from tests.e2e.chaos_observer import Observer
from tests.e2e.chaos_policies import Policies
from tests.e2e.chaos_ring import HOSTED_POLICY, VISION_MODEL, WHOLE_RING, ChaosRing, Member, chaos_ring, role_of
from tests.e2e.chaos_tenants import Tenants
from tests.e2e.chaos_versions import Versions
from tests.e2e.rings import MODEL
from tests.waiting import HANG_S, wait_until

WEIGHTS = {
    "rank.kill": 4, "rank.stop": 3,
    "worker.kill": 4, "worker.stop": 3, "worker.restart": 2, "worker.cut": 3, "worker.hold": 3,
    "api.kill": 3, "api.stop": 1, "api.restart": 2,
    "runner.kill": 3, "runner.stop": 1, "runner.restart": 2,
    "trainer.kill": 1, "trainer.stop": 1, "trainer.restart": 1,
    "redis.kill": 2, "redis.stop": 1,
    "learners.kill": 2, "learners.stop": 1, "learners.restart": 1,
    "seer.kill": 2, "seer.stop": 1, "seer.restart": 1, "seer.cut": 1, "seer.hold": 1,
    "disk.damage": 4, "peers.strangers": 2,
}  # fmt: skip
TAKEOVER_S = 5.0
STREAMS = 4
ALARMS = ("worker.loop_failed", "api.fault", "job.tick_failed", "Traceback", "never retrieved")


async def run(
    seconds: float,
    seed: int,
    *,
    lease_ms: int = 3000,
    freeze_s: float = 10.0,
    trainer: bool = True,
    ranks: int = 1,
    only: str = "*",
    logs: Path | None = None,
    once: bool = False,
    cluster: bool = False,
    everything: bool = False,
) -> tuple[Report, Counter[str]]:
    """Run chaos for a while, or (`once`) until each kind of fault has come; what happened, and the faults by kind."""
    rng = random.Random(seed)
    print(f"chaos: seed {seed}, {seconds:.0f} s{', on a cluster' if cluster else ''}", flush=True)
    report, answers = Report(), Answers()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with chaos_ring(
            Path(folder),
            rng,
            lease_ms=lease_ms,
            freeze_s=freeze_s,
            trainer=trainer,
            ranks=ranks,
            cluster=cluster,
            everything=everything,
        ) as ring:
            first = ring.of("api")[0].url
            await answers.learn(first, (*PROMPTS, *LONG_PROMPTS) if everything else PROMPTS, ring.key)
            load = Load(ring, random.Random(seed + 1), report, answers)
            policies = Policies(load)
            await policies.begin(first)
            tasks = [asyncio.create_task(load.streams()) for _ in range(STREAMS)]
            tasks += [asyncio.create_task(load.jobs()), asyncio.create_task(load.leavers())]
            tasks += [asyncio.create_task(policies.act()), asyncio.create_task(policies.judge())]
            observer, learners = Observer(ring), Learners(load)
            if everything:
                images, versions = Images(load, random.Random(seed + 2)), Versions(load)
                await images.learn(first)
                await versions.begin(first)
                await learners.begin()
                tasks += [asyncio.create_task(each.run()) for each in (learners, images, versions, Tenants(load))]
            observing = asyncio.create_task(observer.run())
            print("chaos: all answers are known", flush=True)
            await _harm(ring, load, report, time.monotonic() + seconds, only, once)
            load.stopping = True
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    report.violation(f"a client failed: {outcome!r}")
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
            report.held, report.grown = await observer.table()
            report.learned = learners.learned
            await policies.check()
            if everything:
                await versions.check()
            await _check_rest(ring, report)
            if trainer:
                _check_trainer(Path(folder) / "train", report)
            if everything:
                _check_trainer(Path(folder) / HOSTED_POLICY, report)
        _check_processes(ring, report)
    for member in ring.members:
        if logs is not None:
            (logs / f"{member.name}.log").write_text("".join(member.all_lines()))
        for line in member.all_lines():
            if any(alarm in line for alarm in ALARMS):
                report.violation(f"{member.name} says: {line.strip()[:2000]}")
    report.redis_restarts_s = ring.redis_restarts_s
    return report, ring.faults


async def _harm(ring: ChaosRing, load: Load, report: Report, until: float, only: str, once: bool) -> None:
    redis = connect(ring.redis.url)

    async def workers_of(sequences: list[str]) -> dict[str, str]:
        found = {}
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1):
                for seq in sequences:
                    owner = await redis.hget(keys.sequence(MODEL, seq), "worker")
                    found[seq] = (owner or b"").decode()
        return found

    async def before(member: Member) -> None:
        if member.role == "worker":
            await load.watch_takeovers(member, workers_of)
        else:
            await load.reads_from(member)

    kinds = [kind for kind in WEIGHTS if fnmatch(kind, only)]
    kinds = [kind for kind in kinds if ring.of(role_of(kind)) or role_of(kind) in WHOLE_RING]
    kinds = [kind for kind in kinds if ring.everything or not kind.startswith(("disk", "peers"))]
    kinds = [kind for kind in kinds if any(each.ranks > 1 for each in ring.members) or not kind.startswith("rank.")]
    left = ring.rng.sample(kinds, len(kinds)) if once else []
    harming: set[asyncio.Task[None]] = set()
    while left if once else time.monotonic() < until:
        await asyncio.sleep(0.5 if once else ring.rng.expovariate(1 / 2.0) + 0.2)
        possible = [kind for kind in left or kinds if ring.can_harm(kind)]
        if not possible:
            continue
        if once:
            left.remove(kind := possible[0])
        else:
            (kind,) = ring.rng.choices(possible, [WEIGHTS[k] for k in possible])
        task = asyncio.create_task(ring.harm(kind, before if kind in ("worker.kill", "api.kill") else None))
        harming.add(task)
        for done in [task for task in harming if task.done()]:
            harming.discard(done)
            _judge(done, report)
    await asyncio.gather(*harming, return_exceptions=True)
    for task in harming:
        _judge(task, report)
    for _ in range(5 if once and "api.kill" in kinds else 0):
        if report.resumed:
            break
        await ring.harm("api.kill", before)  # clients had the rest of its streams already, unread: another one
    await redis.aclose()


def _judge(done: "asyncio.Task[None]", report: Report) -> None:
    if error := done.exception():
        report.violation(f"a process did not survive: {error}")


async def _check_rest(ring: ChaosRing, report: Report) -> None:
    """What must be gone when everybody has his answer."""
    redis = connect(ring.redis.url)
    registry = WorkerRegistry(redis)
    seen: object = None
    training = bool(ring.of("trainer")) or ring.everything

    async def quiet() -> bool:
        return await rests(MODEL, len(ring.of("worker"))) and (
            not ring.everything or await rests(VISION_MODEL, len(ring.of("seer")))
        )

    async def rests(model: str, workers: int) -> bool:
        nonlocal seen
        depth = await SequenceQueue(redis, model).depth()
        rows = [(worker.id, worker.rows, worker.waiting) for worker in await registry.workers(model)]
        seen = depth, rows
        idle = not any(depth[kind].waiting + depth[kind].leased for kind in depth if not training or kind != "batch")
        return idle and len(rows) == workers and (training or all(row[1:] == (0, 0) for row in rows))

    try:
        try:
            await wait_until(quiet)  # rows of an api that died unread end after its heartbeat, 60 s
        except AssertionError:
            report.violation(f"the ring does not come to rest: {seen}")
        for job_id, state in report.jobs.items():
            now = (await redis.hget(keys.job(job_id), "state")).decode()
            if now != state or now not in TERMINAL:
                report.violation(f"job {job_id} was {state} and is {now}")
            left = (keys.job_lease(job_id), keys.finished(MODEL, job_id))

            async def none_left(left: tuple[str, ...] = left) -> bool:  # a dead runner's lease ends by itself
                return not await redis.exists(*left)

            try:
                await wait_until(none_left)
            except AssertionError:
                there = [(key, await redis.ttl(key)) for key in left if await redis.exists(key)]
                report.violation(f"job {job_id} ({state}) left a lease or results behind: {there}")
        await check_keys(redis, report)
    finally:
        await redis.aclose()


async def check_keys(redis: Redis, report: Report) -> None:
    """Every key is documented and has a time to live.

    arq's queue has none while a tick waits in it, and one may outlive its job: the sweeper enqueued it as the job
    ended, or it was marked as in progress by a runner that has died. It does nothing, and is gone within seconds.
    """

    async def no_tick_waits() -> bool:
        return not await redis.exists(queue_name(redis))

    with contextlib.suppress(AssertionError):  # then the queue is a key for ever
        await wait_until(no_tick_waits)
    servers = await redis.primaries() if isinstance(redis, ClusterRedis) else [redis]
    for key in [key.decode() for server in servers async for key in server.scan_iter(count=1000)]:
        if not any(fnmatchcase(key, kind.pattern) for kind in keys.DOCUMENTED):
            report.violation(f"an undocumented key: {key}")
        if await redis.ttl(key) == -1:
            report.violation(f"a key for ever: {key}")
    running = 0
    for server in servers:
        async for key in server.scan_iter(match=keys.sequence(MODEL, "*"), count=1000):
            running += await server.hget(key, "state") in (b"queued", b"running") and not key.count(b"train")
    if running:
        print(f"{running} sequences are not settled")


def _check_trainer(folder: Path, report: Report) -> None:
    """Each step was made once, and each group was learned from once."""
    lines = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.open()]
    steps = [line["train_step"] for line in lines]
    if not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        report.violation(f"the trainer's steps are not one row in {folder.name}: {steps[-20:]}")
    learned = Counter(index for line in lines for index in line["indices"])
    if twice := [index for index, count in learned.items() if count > 1]:
        report.violation(f"groups that {folder.name} learned from twice: {twice[:20]}")
    print(f"train steps in {folder.name}: {len(steps)}, of {len(learned)} groups")


def _check_processes(ring: ChaosRing, report: Report) -> None:
    pids = {pid for member in ring.members for pid in member.descendants}
    deadline = time.monotonic() + HANG_S
    while alive := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            report.violation(f"processes left over: {alive}")
            return
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "python" in process.name()
    return False


def show(report: Report, faults: Counter[str]) -> None:
    """Print the counts."""
    print(f"\nfaults survived: {faults.total()}")
    for kind in WEIGHTS:
        if faults[kind]:
            print(f"  {kind:16} {faults[kind]:5}")
    states = Counter(report.jobs.values())
    print(f"streams {report.streams} ({report.tokens} tokens, {report.resumed} resumptions, {report.left} left early)")
    print(f"jobs {dict(states)} ({report.samples} samples); given up after three deaths: {report.given_up}")
    if took := sorted(report.takeovers_s):
        print(f"pause at a worker's death: {len(took)} streams, min {took[0]:.2f} median {statistics.median(took):.2f} "
              f"max {took[-1]:.2f} s")  # fmt: skip
    if took := report.redis_restarts_s:
        print(f"Redis, or a successor, was there after {min(took):.2f} to {max(took):.2f} s")
    if report.learned:
        print(f"learners that learned what the first one did: {report.learned}; answers about images: {report.seen}; "
              f"looks at a tenant's own things {report.owned}, at another's {report.denied}")  # fmt: skip
    for line in report.held:
        print(line)
    print(f"violations: {len(report.violations)}")
    found = "something was lost, wrong or doubled" if report.violations else "nothing lost, wrong or doubled"
    grown = f"memory grew in {', '.join(report.grown)}" if report.grown else "no memory is seen to grow"
    print(f"verdict: {found}; {grown}", flush=True)


def main() -> int:
    """Run for `--minutes`; exit code 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--lease-ms", type=int, default=3000)
    parser.add_argument("--only", default="*", help="kinds of faults, such as redis.* or *.kill")
    parser.add_argument("--logs", type=Path, default=None, help="an existing folder for what the processes print")
    parser.add_argument("--no-trainer", action="store_true")
    parser.add_argument("--cluster", action="store_true", help="on three shards with replicas, in place of one Redis")
    parser.add_argument(
        "--everything", action="store_true",
        help="workers also speculate, share KV on disk and with one another and check one another's tokens; one is of "
        "two ranks, one sees images, one hosts a trainer; tenants; learners; files are damaged, strangers visit ports",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes that each worker's model is divided over")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that dies of a signal says where, in all threads
    report, faults = asyncio.run(
        run(
            60 * options.minutes,
            seed,
            lease_ms=options.lease_ms,
            trainer=not options.no_trainer,
            ranks=options.ranks,
            only=options.only,
            logs=options.logs,
            cluster=options.cluster,
            everything=options.everything,
        )
    )
    longest_s = TAKEOVER_S + (options.lease_ms - 3000) / 1000
    late = [took for took in report.takeovers_s if took >= longest_s]
    if late:
        report.violation(f"takeovers of {late} s")
    show(report, faults)
    return 1 if report.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
