"""A Redis Cluster of real processes: three shards, each with a replica if wished; killed, frozen, promoted."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis as sync_redis
from redis.crc import key_slot

from api.serve.embedded_redis import HOST, free_port
from shared.redis.server_binary import find_binary
from tests.redis.sentinels import Server
from tests.waiting import HANG_S

SHARDS = 3
SLOTS = 16_384
NODE_TIMEOUT_MS = 1000  # by default 15 s


class Cluster:
    """The servers; the first SHARDS of them begin as primaries."""

    def __init__(
        self, folder: Path, *, replicas: bool = False, password: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._binary = find_binary()
        self._password = password
        self._options = dict(options or {})
        self._frozen: Server | None = None
        self._bus: dict[int, int] = {}  # by a server's port, that on which others of the cluster reach it
        self.servers = [self._start() for _ in range(SHARDS * (2 if replicas else 1))]
        try:
            for server in self.servers:
                self._until(lambda server=server: self._answers(server))
            self._join()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        places = ",".join(f"{HOST}:{server.port}" for server in self.servers[:2])
        return f"redis+cluster://{credentials}{places}"

    def client(self, server: Server) -> "sync_redis.Redis[bytes]":
        """A plain client of one server."""
        return sync_redis.Redis(HOST, server.port, password=self._password or None, socket_timeout=2)

    @property
    def living(self) -> list[Server]:
        return [server for server in self.servers if server.popen.poll() is None]

    def primaries(self) -> list[Server]:
        """Who has slots, by the word of the first server that answers."""
        return [server for server in self.servers if server.port in {port for _, _, port in self._ranges()}]

    def primary_of(self, key: str) -> Server:
        """Who has the slot of a key."""
        slot = key_slot(key.encode())
        port = next(port for first, last, port in self._ranges() if first <= slot <= last)
        return next(server for server in self.servers if server.port == port)

    def wipe(self) -> None:
        """Delete all keys and scripts."""
        for server in self.primaries():
            with self.client(server) as client:
                client.flushall()
                client.script_flush()

    def all_keys(self) -> dict[bytes, int]:
        """All keys with their times to live in seconds; -1: none."""
        found: dict[bytes, int] = {}
        for server in self.primaries():
            with self.client(server) as client:
                found |= {key: client.ttl(key) for key in client.scan_iter(count=1000)}
        return found

    @asynccontextmanager
    async def away(self, key: str, number: int = signal.SIGKILL) -> AsyncIterator[Server]:
        """Inside, the primary of a key's slot, which is yielded, is killed (or frozen); behind it another has it."""
        old = await asyncio.to_thread(self.primary_of, key)
        self.harm(old, number)
        yield old
        await self.until(lambda: self.is_replaced(old))

    async def fail_over(self, key: str, number: int = signal.SIGKILL) -> Server:
        """Kill (or freeze) the primary of a key's slot; returns the one that was, once another has its slots."""
        async with self.away(key, number) as old:
            return old

    def harm(self, server: Server, number: int) -> None:
        """Kill or freeze a server."""
        server.signal(number)
        if number == signal.SIGKILL:
            server.popen.wait()
        else:
            self._frozen = server

    def thaw(self, server: Server) -> None:
        """Let a frozen server go on."""
        server.signal(signal.SIGCONT)
        self._frozen = None

    def is_replaced(self, old: Server) -> bool:
        """Whether another server has what was a primary's."""
        primaries = self.primaries()
        if old in primaries or len(primaries) < SHARDS:
            return False
        for server in primaries:
            with self.client(server) as client:
                if client.info("replication")["role"] != "master":
                    return False
        return True

    def restart(self, server: Server) -> None:
        """Start a server that was killed on its data; it comes back as a replica where another one has its slots."""
        server.popen.wait()
        server.popen = self._spawn(server.port)
        self._until(lambda: self._answers(server))

    def copy(self, server: Server, to: Path) -> None:
        """Copy a server's files, as a backup does while it runs."""
        shutil.copytree(self._folder / str(server.port), to)

    def restore(self, copies: Mapping[int, Path]) -> None:
        """Kill all servers and start them on these copies of their files, by port; on nothing where there is none."""
        for server in self.servers:
            server.kill()
            folder = self._folder / str(server.port)
            shutil.rmtree(folder)
            shutil.copytree(copies[server.port], folder) if server.port in copies else folder.mkdir()
        for server in self.servers:
            server.popen = self._spawn(server.port)
            self._until(lambda server=server: self._answers(server))
        self._until(self.whole)

    def in_step(self) -> bool:
        """Whether each primary has a replica that has all of it."""
        told = []
        for server in self.living:
            with self.client(server) as client:
                told.append(client.info("replication"))
        ahead = {each["master_replid"]: each["master_repl_offset"] for each in told if each["role"] == "master"}
        replicas = [each for each in told if each.get("master_link_status") == "up"]
        followed = {r["master_replid"] for r in replicas if ahead.get(r["master_replid"]) == r["slave_repl_offset"]}
        return len(ahead) == SHARDS and followed == set(ahead)

    def whole(self) -> bool:
        """Whether all servers live, and agree that all is well."""
        for server in self.servers:
            with self.client(server) as client:
                lines = client.execute_command("CLUSTER NODES")
                if client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    return False
                if len(lines) != len(self.servers) or any("fail" in each["flags"] for each in lines.values()):
                    return False
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, in a thread of its own."""
        await asyncio.to_thread(self._until, condition)

    def stop(self) -> None:
        for server in self.living:
            server.kill()

    # -- inside

    def _start(self) -> Server:
        port = free_port()
        (self._folder / str(port)).mkdir()
        return Server(port, self._spawn(port))

    def _spawn(self, port: int) -> "subprocess.Popen[bytes]":
        folder = self._folder / str(port)
        options = {
            "bind": HOST,
            "port": str(port),
            "dir": str(folder),
            "logfile": str(folder / "log"),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "cluster-enabled": "yes",
            "cluster-port": str(self._bus.setdefault(port, free_port())),
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "repl-diskless-sync-delay": "0",
            "cluster-replica-validity-factor": "0",
            **({"requirepass": self._password, "masterauth": self._password} if self._password else {}),
            **self._options,
        }
        command = [str(self._binary), *(part for name, value in options.items() for part in (f"--{name}", value))]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _join(self) -> None:
        step = -(-SLOTS // SHARDS)
        first = self.servers[0]
        for number, server in enumerate(self.servers):
            with self.client(server) as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < SHARDS:
                    last = min(SLOTS, (number + 1) * step) - 1
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * step, last)
                if server is not first:
                    client.execute_command("CLUSTER", "MEET", HOST, first.port, self._bus[first.port])
        self._until(self._all_know_all)
        for number, server in enumerate(self.servers[SHARDS:]):
            with self.client(self.servers[number]) as primary, self.client(server) as replica:
                replica.execute_command("CLUSTER", "REPLICATE", primary.execute_command("CLUSTER MYID"))
        self._until(self.whole)
        if len(self.servers) > SHARDS:
            self._until(lambda: len(self.primaries()) == SHARDS and self.in_step())

    def _all_know_all(self) -> bool:
        for server in self.servers:
            with self.client(server) as client:
                if len(client.execute_command("CLUSTER NODES")) != len(self.servers):
                    return False
        return True

    def _answers(self, server: Server) -> bool:
        with self.client(server) as client:
            return bool(client.ping())

    def _ranges(self) -> list[tuple[int, int, int]]:
        """(first slot, last slot, port of its primary)."""
        for server in self.living:
            if server is self._frozen:
                continue
            with self.client(server) as client, contextlib.suppress(sync_redis.RedisError):
                slots: Any = client.execute_command("CLUSTER SLOTS")
                return [(first, last, int(primary[1])) for first, last, primary, *_ in slots]
        raise sync_redis.ConnectionError("no server of the cluster answers")

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                if condition():
                    return
                reason = "not yet"
            except sync_redis.RedisError as error:
                reason = str(error)
            assert time.monotonic() < deadline, "\n".join([reason, *map(self._log, self.servers)])
            time.sleep(0.02)

    def _log(self, server: Server) -> str:
        log = self._folder / str(server.port) / "log"
        return log.read_text()[-1500:] if log.exists() else f"{server} wrote nothing"
