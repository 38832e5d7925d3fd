"""The processes that chaos harms, and the ways in which it harms them."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from redis.exceptions import RedisError

from api.serve.embedded_redis import EmbeddedRedis, free_port
from tests.e2e.chaos_intruders import damage, visit
from tests.e2e.chaos_proxy import Proxy
from tests.e2e.rings import MODEL, Process
from tests.redis.clusters import Cluster
from tests.redis.outages import write_at_once
from tests.waiting import HANG_S

READY = {
    "worker": "worker.ready", "api": "api.started", "runner": "runner.ready", "trainer": "train.",
    "learners": "learners.ready",
}  # fmt: skip
MODULES = {
    "worker": "worker", "api": "api", "runner": "worker.jobs", "trainer": "trainer", "learners": "trainer.service",
}  # fmt: skip
WHOLE_RING = ("redis", "disk", "peers")  # roles of faults that are no member's
EVERYTHING = (
    *("--kv-transfer", "--ssd-policy", "write_through", "--spec-decode", "auto", "--replay-share", "0.02"),
    *("--kv-transfer-host", "127.0.0.1"),
)


@dataclass
class Member:
    """One process of the ring under its name; started again after every death."""

    name: str
    role: str
    arguments: tuple[str, ...]
    proxy: Proxy | None = None
    port: int = 0
    process: Process | None = None
    harmed: bool = False
    lines: list[str] = field(default_factory=list)  # of its earlier lives
    descendants: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.popen.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if self.process is not None:
            self.lines += self.process.lines
        self.process = Process.start(MODULES[self.role], *self.arguments)

    async def ready(self) -> None:
        """Wait for it; one that finds no Redis leaves with code 1 and is started again, as by a supervisor."""
        until = time.monotonic() + HANG_S
        while True:
            assert self.process is not None
            try:
                await asyncio.to_thread(self.process.wait_for_line, READY[self.role])
                return
            except AssertionError:
                if self.process.popen.poll() != 1 or time.monotonic() > until:
                    raise
            await asyncio.sleep(0.5)
            self.start()

    def remember_descendants(self) -> None:
        with contextlib.suppress(psutil.Error):
            self.descendants |= {child.pid for child in psutil.Process(self.pid).children(recursive=True)}
        self.descendants.add(self.pid)

    async def end(self, number: int) -> int:
        assert self.process is not None
        self.remember_descendants()
        return await asyncio.to_thread(self.process.stop, number)

    def all_lines(self) -> list[str]:
        return self.lines + (self.process.lines if self.process else [])


@dataclass
class ChaosRing:
    """Redis or a cluster, two workers behind proxies, two apis, two job runners, and a trainer if wanted."""

    redis: EmbeddedRedis | Cluster
    members: list[Member]
    rng: random.Random
    freeze_s: float
    ranks: int = 1  # of each worker
    ssd: Path | None = None  # the workers' folder of KV; None: the ring has nothing but what it needs
    faults: Counter[str] = field(default_factory=Counter)
    running: dict[str, float] = field(default_factory=dict)  # fault -> when it began
    history: list[tuple[str, float, float]] = field(default_factory=list)  # what, from, to
    redis_harmed: bool = False
    redis_restarts_s: list[float] = field(default_factory=list)

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    def can_harm(self, kind: str) -> bool:
        """Whether there is somebody; of two workers one is left in peace, for somebody is to take over."""
        role = role_of(kind)
        if role == "redis":
            return not self.redis_harmed
        if role in WHOLE_RING:
            return self.ssd is not None
        harmed = [member.harmed for member in self.of(role)]
        return not all(harmed) and not (role == "worker" and any(harmed))

    async def harm(
        self, kind: str, before: Callable[[Member], Awaitable[None]] | None = None, victim: Member | None = None
    ) -> None:
        """One fault (`can_harm`), from its beginning until the process is there again."""
        role, how = role_of(kind), kind.partition(".")[2]
        if role == "redis":
            await self._harm_redis(kind, how)
            return
        if self.ssd is not None and role == "disk":
            await asyncio.to_thread(damage, self.ssd, self.rng)
            self.faults[kind] += 1
            return
        if role == "peers":
            with contextlib.suppress(RedisError):
                await visit(self.redis.url, self.rng, self.freeze_s)
                self.faults[kind] += 1
            return
        member = victim or self.rng.choice([member for member in self.of(role) if not member.harmed])
        member.harmed = True
        if before is not None:
            await before(member)
        try:
            async with self._written_down(kind, member.name):
                await (self._harm_rank(member, how) if kind.startswith("rank.") else self._harm_member(member, how))
        finally:
            member.harmed = False

    async def _harm_member(self, member: Member, how: str) -> None:
        pause_s = self.rng.uniform(0.1, 1.0)
        if how in ("kill", "restart"):
            code = await member.end(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            assert how == "kill" or code == 0, f"{member.name} left with {code} on SIGTERM:\n{tail(member)}"
            await asyncio.sleep(pause_s)
            member.start()
            await member.ready()
        elif how == "stop":
            os.kill(member.pid, signal.SIGSTOP)
            await asyncio.sleep(self.freeze_s)
            os.kill(member.pid, signal.SIGCONT)
        else:
            assert member.proxy is not None
            (member.proxy.cut if how == "cut" else member.proxy.hold)()
            await asyncio.sleep(self.rng.uniform(0.3, 1.0) * self.freeze_s)
            member.proxy.mend()
        assert member.process is not None
        code_now = member.process.popen.poll()
        assert code_now is None, f"{member.name} died with {code_now} of {how}:\n{tail(member)}"

    async def _harm_rank(self, member: Member, how: str) -> None:
        """A follower of a group, which takes the group down with it; a supervisor starts it again."""
        member.remember_descendants()
        follower = psutil.Process(member.pid).children()[0]
        follower.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        assert member.process is not None
        code = await asyncio.to_thread(member.process.wait)
        assert code == 1, f"{member.name} ended with {code} when it lost a rank:\n{tail(member)}"
        member.start()
        await member.ready()

    async def _harm_redis(self, kind: str, how: str) -> None:
        self.redis_harmed = True
        try:
            async with self._written_down(kind, "redis"):
                if isinstance(self.redis, Cluster):
                    await self._harm_shard(self.redis, how)
                elif how == "kill":
                    os.kill(self.redis.pid, signal.SIGKILL)
                    await asyncio.sleep(self.rng.uniform(0.1, 1.5))
                    began = time.monotonic()
                    await asyncio.to_thread(self.redis.restart)
                    self.redis_restarts_s.append(time.monotonic() - began)
                    write_at_once(self.redis.url)
                else:
                    os.kill(self.redis.pid, signal.SIGSTOP)
                    await asyncio.sleep(self.rng.uniform(0.2, 0.5) * self.freeze_s)
                    os.kill(self.redis.pid, signal.SIGCONT)
        finally:
            self.redis_harmed = False

    async def _harm_shard(self, cluster: Cluster, how: str) -> None:
        """A primary dies or freezes until its replica has taken over, and for a while longer."""
        await cluster.until(lambda: cluster.whole() and cluster.in_step())
        old = self.rng.choice(await asyncio.to_thread(cluster.primaries))
        began = time.monotonic()
        cluster.harm(old, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        await cluster.until(lambda: cluster.is_replaced(old))
        self.redis_restarts_s.append(time.monotonic() - began)
        await asyncio.sleep(self.rng.uniform(0.1, 1.5))
        await asyncio.to_thread(cluster.restart if how == "kill" else cluster.thaw, old)
        await cluster.until(lambda: cluster.whole() and cluster.in_step())

    @contextlib.asynccontextmanager
    async def _written_down(self, kind: str, name: str) -> AsyncIterator[None]:
        began = time.monotonic()
        self.running[name] = began
        try:
            yield
            self.faults[kind] += 1
        finally:
            del self.running[name]
            self.history.append((name, began, time.monotonic()))

    def disturbed(self, victim: str, apis: set[str], since: float, until: float) -> bool:
        """Whether another process than the victim was harmed on the way of a stream in a span of time."""
        spans = [*self.history, *((name, began, until) for name, began in self.running.items())]
        way = {"redis", *apis, *(member.name for member in self.of("worker"))} - {victim}
        return any(name in way and began < until and end > since - 1.0 for name, began, end in spans)


def role_of(kind: str) -> str:
    """Whose fault it is: the loss of a rank is its worker's."""
    role = kind.partition(".")[0]
    return "worker" if role == "rank" else role


def tail(member: Member) -> str:
    return "".join(member.all_lines()[-30:])


@contextlib.asynccontextmanager
async def chaos_ring(
    folder: Path,
    rng: random.Random,
    *,
    lease_ms: int,
    freeze_s: float,
    trainer: bool,
    ranks: int = 1,
    cluster: bool = False,
    everything: bool = False,
) -> AsyncIterator[ChaosRing]:
    """Start everything; at the end stop everything and expect clean exits and no process left."""
    async with contextlib.AsyncExitStack() as stack:
        redis: EmbeddedRedis | Cluster
        if cluster:
            (folder / "redis").mkdir()
            redis = await asyncio.to_thread(Cluster, folder / "redis", replicas=True)
            stack.callback(redis.stop)
            ports = [server.port for server in redis.servers]
        else:
            redis = stack.enter_context(EmbeddedRedis(folder / "redis"))
            write_at_once(redis.url)
            ports = [redis.port]
        members = []
        for i in range(2):
            proxy = await stack.enter_async_context(Proxy(*ports))
            arguments = (
                "--redis",
                proxy.url,
                "--model",
                f"models/{MODEL}",
                "--lease-ms",
                str(lease_ms),
                "--worker-id",
                f"w{i}",
                "--num-local-ranks",
                str(ranks),
            )
            arguments += ("--adapter-cache-dir", str(folder / f"w{i}"))
            arguments += (*EVERYTHING, "--ssd-cache-dir", str(folder / "ssd")) if everything else ()
            members.append(Member(f"w{i}", "worker", arguments, proxy))
        for i in range(2):
            api_port = free_port()
            arguments = ("--redis", redis.url, "--port", str(api_port), "--api-id", f"a{i}", "--feedback-ttl-days", "1")
            arguments += ("--record-ttl-s", "120") if everything else ()
            members.append(Member(f"a{i}", "api", arguments, port=api_port))
        members += [Member(f"r{i}", "runner", ("--redis", redis.url, "--reward-processes", "1")) for i in range(2)]
        if trainer:
            members.append(Member("t0", "trainer", trainer_arguments(redis.url, folder)))
        if everything:
            arguments = ("--redis", redis.url, "--model", f"models/{MODEL}", "--state-every", "5")
            members.append(Member("l0", "learners", arguments))
        ring = ChaosRing(redis, members, rng, freeze_s, ranks, folder / "ssd" if everything else None)
        try:
            later = ("trainer", "learners")  # they end where no worker has ever been
            others = [member for member in members if member.role not in later]
            for member in others:
                member.start()
            await asyncio.gather(*(member.ready() for member in others))
            for member in (each for role in later for each in ring.of(role)):
                member.start()
            yield ring
        except BaseException:
            await asyncio.gather(*(m.end(signal.SIGKILL) for m in members if m.process), return_exceptions=True)
            raise
        codes = {member.name: await member.end(signal.SIGTERM) for member in reversed(members)}
        assert not any(codes.values()), f"exit codes {codes}"


def trainer_arguments(redis_url: str, folder: Path) -> tuple[str, ...]:
    sizes = ("--steps", "1000000", "--prompts-per-step", "4", "--group-size", "4", "--max-tokens", "6")
    task = ("--task", "arithmetic", "--task-count", "16", "--learning-rate", "1e-4", "--lora-rank", "4")
    kept = ("--run-dir", str(folder / "train"), "--checkpoint-every", "5", "--parity-every", "0")
    return ("--redis", redis_url, "--model", f"models/{MODEL}", *task, *sizes, *kept)
