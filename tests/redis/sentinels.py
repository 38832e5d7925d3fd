"""A primary, its replicas and three Sentinels, as real processes: killed, frozen, promoted."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis as sync_redis

from api.serve.embedded_redis import HOST, free_port
from shared.redis.server_binary import find_binary
from tests.waiting import HANG_S

SERVICE = "ring"
DOWN_AFTER_MS = 800
# How often Sentinels tell of themselves, look at their servers and ask one another: by default every 2, 10 and 1 s.
# They stand still for half a minute when their clock jumps by 2 s; a busy machine looks like that.
HASTE_MS = {"ping-period": 400, "info-period": 500, "publish-period": 100, "ask-period": 200, "tilt-trigger": 20_000}


@dataclass
class Server:
    """One process."""

    port: int
    popen: "subprocess.Popen[bytes]"

    @property
    def place(self) -> tuple[str, int]:
        return HOST, self.port

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait()


class Watched:
    """Redis servers of one service under three Sentinels with a quorum of two."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 1,
        password: str = "",
        sentinel_password: str = "",
        tls: Path | None = None,
        binary: Path | None = None,
    ) -> None:
        self._folder = folder
        self._binary = binary or find_binary()
        self._password = password
        self._sentinel_password = sentinel_password
        self._tls = tls  # a certificate, with key.pem beside it
        self.sentinels: list[Server] = []
        first = self._data_server(None)
        self.servers = [first, *(self._data_server(first.port) for _ in range(replicas))]
        self._until(lambda: self._replicas_in_step(first))
        for _ in range(3):
            self.sentinels.append(self._sentinel(first.port))
        self._until(self._sentinels_know_all)

    @property
    def url(self) -> str:
        places = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        options = [f"sentinel_password={self._sentinel_password}"] if self._sentinel_password else []
        options += [f"ssl_ca_certs={self._tls}"] if self._tls else []
        credentials = f":{self._password}@" if self._password else ""
        scheme = "rediss+sentinel" if self._tls else "redis+sentinel"
        return f"{scheme}://{credentials}{places}/{SERVICE}/0" + ("?" + "&".join(options) if options else "")

    @property
    def primary(self) -> Server:
        """Who it is by the Sentinels' word."""
        for sentinel in self.sentinels:
            if sentinel.popen.poll() is None:
                with self._client(sentinel.port, sentinel=True) as client:
                    _, port = client.sentinel_get_master_addr_by_name(SERVICE)
                return next(server for server in self.servers if server.port == int(port))
        raise AssertionError("no Sentinel lives")

    @asynccontextmanager
    async def away(self, number: int = signal.SIGKILL) -> AsyncIterator[Server]:
        """Inside, the primary, which is yielded, is killed (or frozen); behind it another one is promoted."""
        old = await asyncio.to_thread(lambda: self.primary)
        old.signal(number)
        yield old
        await asyncio.to_thread(self._until, lambda: self.primary is not old and self._is_primary(self.primary))

    async def fail_over(self, number: int = signal.SIGKILL) -> Server:
        """Kill (or freeze) the primary; returns the one that was, once another is promoted."""
        async with self.away(number) as old:
            return old

    async def safe(self, redis: object) -> None:
        """Wait until the replicas have what has been acknowledged."""
        await self.in_step()

    async def in_step(self) -> None:
        """Wait until the replicas have what the primary has."""
        await asyncio.to_thread(self._until, lambda: self._replicas_in_step(self.primary))

    def point(self, sentinel: Server, primary: Server) -> None:
        """Let a Sentinel watch another primary."""
        with self._client(sentinel.port, sentinel=True) as client:
            client.sentinel_remove(SERVICE)
            client.sentinel_monitor(SERVICE, HOST, primary.port, 2)

    def client(self, server: Server) -> "sync_redis.Redis[bytes]":
        """A plain client of one server."""
        return self._client(server.port)

    def stop(self) -> None:
        for server in [*self.sentinels, *self.servers]:
            if server.popen.poll() is None:
                server.kill()

    # -- inside

    def _data_server(self, primary: int | None) -> Server:
        options = {"save": "", "appendonly": "yes", "appendfsync": "everysec", "repl-diskless-sync-delay": "0"}
        if self._password:
            options |= {"requirepass": self._password, "masterauth": self._password}
        if self._tls:
            options |= {"tls-replication": "yes"}
        if primary is not None:
            options["replicaof"] = f"{HOST} {primary}"
        return self._start(options)

    def _sentinel(self, primary: int) -> Server:
        lines = [
            f"sentinel monitor {SERVICE} {HOST} {primary} 2",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        if self._password:
            lines.append(f"sentinel auth-pass {SERVICE} {self._password}")
        options = {"tls-replication": "yes"} if self._tls else {}
        if self._sentinel_password:
            options["requirepass"] = self._sentinel_password
            lines.append(f"sentinel sentinel-pass {self._sentinel_password}")
        server = self._start(options, lines)
        with self._client(server.port, sentinel=True) as client:
            client.execute_command("SENTINEL", "DEBUG", *(word for pair in HASTE_MS.items() for word in pair))
        return server

    def _start(self, options: Mapping[str, str], sentinel: list[str] | None = None) -> Server:
        port = free_port()
        folder = self._folder / str(port)
        folder.mkdir()
        own = {"bind": HOST, "port": str(port), "dir": str(folder), "logfile": str(folder / "log"), **options}
        if self._tls:
            key = self._tls.with_name("key.pem")
            own |= {"port": "0", "tls-port": str(port), "tls-cert-file": str(self._tls), "tls-key-file": str(key)}
            own |= {"tls-ca-cert-file": str(self._tls), "tls-auth-clients": "no"}
        written = folder / "server.conf"
        written.write_text("\n".join([*(f'{name} "{value}"' for name, value in own.items()), *(sentinel or [])]) + "\n")
        if "replicaof" in own:
            written.write_text(written.read_text().replace(f'"{own["replicaof"]}"', own["replicaof"]))
        command = [str(self._binary), str(written), *(["--sentinel"] if sentinel else [])]
        server = Server(port, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        self._until(lambda: self._answers(server, sentinel=bool(sentinel)), server)
        return server

    def _answers(self, server: Server, *, sentinel: bool) -> bool:
        with self._client(server.port, sentinel=sentinel) as client:
            return bool(client.ping())

    def _is_primary(self, server: Server) -> bool:
        with self._client(server.port) as client:
            return client.info("replication")["role"] == "master"

    def _replicas_in_step(self, primary: Server) -> bool:
        living = [server for server in self.servers if server.popen.poll() is None]
        with self._client(primary.port) as client:
            client.publish("in-step", "")  # WAIT is for what the same client has sent; it lets replicas tell at once
            return int(client.wait(len(living) - 1, 50)) == len(living) - 1

    def _sentinels_know_all(self) -> bool:
        for sentinel in self.sentinels:
            with self._client(sentinel.port, sentinel=True) as client:
                others = [client.sentinel_sentinels(SERVICE), client.sentinel_slaves(SERVICE)]
            if list(map(len, others)) != [2, len(self.servers) - 1]:
                return False
            if any(other["is_disconnected"] for kind in others for other in kind):
                return False
        return True

    def _client(self, port: int, *, sentinel: bool = False) -> "sync_redis.Redis[bytes]":
        password = self._sentinel_password if sentinel else self._password
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(self._tls)} if self._tls else {}
        return sync_redis.Redis(HOST, port, password=password or None, socket_timeout=1, **tls)

    def _until(self, condition: Any, server: Server | None = None) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                if condition():
                    return
            except sync_redis.RedisError as error:
                reason: object = error
            else:
                reason = "not yet"
            assert server is None or server.popen.poll() is None, self._log(server)
            assert time.monotonic() < deadline, "\n".join([str(reason), *map(self._log, self.sentinels)])
            time.sleep(0.02)

    def _log(self, server: Server) -> str:
        log = self._folder / str(server.port) / "log"
        return log.read_text()[-4000:] if log.exists() else f"{server} wrote nothing"
