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
import yaml
from redis.exceptions import RedisError

from api.serve.embedded_redis import EmbeddedRedis, free_port
from tests.e2e.chaos_intruders import damage, visit
from tests.e2e.chaos_proxy import Proxy
from tests.e2e.rings import MODEL, Process
from tests.redis.clusters import Cluster
from tests.redis.outages import write_at_once
from tests.waiting import HANG_S

READY = {
    "worker": "worker.ready", "api": "api.started", "runner": "runner.ready", "trainer": r"train\.(?!starting)",
    "learners": "learners.ready", "seer": "worker.ready",
}  # fmt: skip
MODULES = {
    "worker": "worker", "api": "api", "runner": "worker.jobs", "trainer": "trainer", "learners": "trainer.service",
    "seer": "worker",
}  # fmt: skip
LATER = ("trainer", "learners")  # roles that end where no worker has ever been
WHOLE_RING = ("redis", "disk", "peers")  # roles of faults that are no member's
VISION_MODEL = "tiny-vision"
CHECKED = ("--replay-share", "0.02")
CACHE_GB = "0.03"  # so little that it is full before memory is watched
EVERYTHING = (
    *("--kv-transfer", "--ssd-policy", "write_through", "--spec-decode", "auto", *CHECKED),
    *("--kv-transfer-host", "127.0.0.1", "--prefix-cache-gb", CACHE_GB, "--ssd-max-size-gb", "0.1"),
)
KEYS = {"root": "root-" + "0" * 32, "acme": "acme-" + "1" * 32, "bolt": "bolt-" + "2" * 32}  # by tenant; root: admin
HOSTED_TRAINER, HOSTED_POLICY = "trainer.hosted:HostedTrainer", "hosted"


@dataclass
class Member:
    """One process of the ring under its name; started again after every death."""

    name: str
    role: str
    arguments: tuple[str, ...]
    proxy: Proxy | None = None
    port: int = 0
    ranks: int = 1  # of a worker
    spared: bool = False  # never killed nor restarted, so that one can see how its memory goes
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
    """Redis or a cluster, two workers behind proxies, two apis, two job runners, and a trainer if wanted.

    With everything: a worker of two ranks, one that sees images, a service of learners, a trainer in a worker, tenants.
    """

    redis: EmbeddedRedis | Cluster
    members: list[Member]
    rng: random.Random
    freeze_s: float
    ssd: Path | None = None  # the workers' folder of KV; None: the ring has nothing but what it needs
    faults: Counter[str] = field(default_factory=Counter)
    running: dict[str, float] = field(default_factory=dict)  # fault -> when it began
    history: list[tuple[str, float, float]] = field(default_factory=list)  # what, from, to
    redis_harmed: bool = False
    redis_restarts_s: list[float] = field(default_factory=list)

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    @property
    def everything(self) -> bool:
        return self.ssd is not None

    @property
    def key(self) -> str:
        """The API key of clients that belong to no tenant."""
        return KEYS["root"] if self.everything else ""

    def can_harm(self, kind: str) -> bool:
        """Whether there is somebody; of all workers one at a time, for somebody is to take over."""
        role = role_of(kind)
        if role == "redis":
            return not self.redis_harmed
        if role in WHOLE_RING:
            return self.ssd is not None
        return bool(self._victims(kind)) and not (role == "worker" and any(each.harmed for each in self.of(role)))

    def _victims(self, kind: str) -> list[Member]:
        """Members that a fault may strike now; kills and restarts spare some."""
        role, how = role_of(kind), kind.partition(".")[2]
        found = [each for each in self.of(role) if not each.harmed and not (each.spared and how in ("kill", "restart"))]
        return [each for each in found if each.ranks > 1] if kind.startswith("rank.") else found

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
        member = victim or self.rng.choice(self._victims(kind))
        member.harmed = True
        if before is not None:
            await before(member)
        try:
            async with self._written_down(kind, member.name):
                await (self._harm_rank(member, how) if kind.startswith("rank.") else self._harm_member(member, how))
        finally:
            member.harmed = False

    async def _harm_member(self, member: Member, how: str) -> None:
        pause_s, began = self.rng.uniform(0.1, 1.0), time.monotonic()
        if how in ("kill", "restart"):
            code = await member.end(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            last = tail(member)
            await asyncio.sleep(pause_s)
            member.start()
            await member.ready()
            # Who cannot say goodbye to Redis, since that is away, leaves with 1, as a supervisor expects.
            right = how == "kill" or code == 0 or (code == 1 and self.disturbed("", {"redis"}, began, time.monotonic()))
            assert right, f"{member.name} left with {code} on SIGTERM:\n{last}"
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

        async def worker(name: str, *own: str, role: str = "worker", ranks: int = 1) -> Member:
            proxy = await stack.enter_async_context(Proxy(*ports))
            common = ("--redis", proxy.url, "--lease-ms", str(lease_ms), "--worker-id", name)
            places = ("--num-local-ranks", str(ranks), "--adapter-cache-dir", str(folder / name))
            return Member(name, role, (*common, *places, *own), proxy, ranks=ranks)

        model = ("--model", f"models/{MODEL}")
        shared = (*EVERYTHING, "--ssd-cache-dir", str(folder / "ssd")) if everything and ranks == 1 else ()
        members = [await worker(f"w{i}", *model, *shared, *hosting(folder, i, everything), ranks=ranks) for i in (0, 1)]
        if everything:
            members.append(await worker("g0", *model, *CHECKED, "--prefix-cache-gb", CACHE_GB, ranks=2))
            members.append(await worker("v0", "--model", f"models/{VISION_MODEL}", role="seer"))
        for i in range(2):
            api_port = free_port()
            arguments = ("--redis", redis.url, "--port", str(api_port), "--api-id", f"a{i}", "--feedback-ttl-days", "1")
            arguments += ("--record-ttl-s", "120", "--api-key-file", str(key_file(folder))) if everything else ()
            members.append(Member(f"a{i}", "api", arguments, port=api_port))
        members += [Member(f"r{i}", "runner", ("--redis", redis.url, "--reward-processes", "1")) for i in range(2)]
        if trainer:
            members.append(Member("t0", "trainer", trainer_arguments(redis.url, folder)))
        if everything:
            arguments = ("--redis", redis.url, *model, "--state-every", "5")
            members.append(Member("l0", "learners", arguments))
            for member in members:
                only = len([each for each in members if each.role == member.role]) == 1
                member.spared = rng.random() < 0.5 if only else member.name.endswith("0")
        ring = ChaosRing(redis, members, rng, freeze_s, folder / "ssd" if everything else None)
        try:
            others = [member for member in members if member.role not in LATER]
            for member in others:
                member.start()
            await asyncio.gather(*(member.ready() for member in others))
            for member in (each for role in LATER for each in ring.of(role)):
                member.start()
            yield ring
        except BaseException:
            await asyncio.gather(*(m.end(signal.SIGKILL) for m in members if m.process), return_exceptions=True)
            raise
        codes = {member.name: await member.end(signal.SIGTERM) for member in reversed(members)}
        assert not any(codes.values()), f"exit codes {codes}"


def key_file(folder: Path) -> Path:
    """The file of KEYS."""
    path = folder / "keys"
    rights = {name: "role=admin" if name == "root" else f"tenant={name}" for name in KEYS}
    path.write_text("".join(f"{key} name={name} {rights[name]}\n" for name, key in KEYS.items()))
    return path


def trainer_arguments(redis_url: str, folder: Path) -> tuple[str, ...]:
    sizes = ("--steps", "1000000", "--prompts-per-step", "4", "--group-size", "4", "--max-tokens", "6")
    task = ("--task", "arithmetic", "--task-count", "16", "--learning-rate", "1e-4", "--lora-rank", "4")
    kept = ("--run-dir", str(folder / "train"), "--checkpoint-every", "5", "--parity-every", "0")
    return ("--redis", redis_url, "--model", f"models/{MODEL}", *task, *sizes, *kept)


def hosting(folder: Path, number: int, everything: bool) -> tuple[str, ...]:
    """Flags of the worker in which a second policy is trained, between its decode steps."""
    if not everything or number != 1:
        return ()
    path = folder / "hosted.yaml"
    run = {
        "adapter": HOSTED_POLICY,
        "run_dir": str(folder / "hosted"),
        "task": "arithmetic",
        "task_count": 16,
        "steps": 1_000_000,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_tokens": 6,
        "learning_rate": 1e-4,
        "lora_rank": 4,
        "checkpoint_every": 5,
        "parity_every": 0,
        "curriculum": "reward",
    }
    path.write_text(yaml.safe_dump(run))
    return ("--guest", HOSTED_TRAINER, "--train-config", str(path))
