"""The Redis servers of simulated rings: one, a cluster of three shards, or one for each of several rings.

In slower time they may get their share of a core and no more: with a factor of 16 a sixteenth. Then they are full where
a server at full pace would be, and what the simulators see there is what users would. A server that has used up its
share of the time is stopped until it has some again, by the CPU time of its main thread, so that other programs on the
machine change nothing.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis as sync_redis
from redis.crc import key_slot

from api.serve.embedded_redis import HOST, EmbeddedRedis
from tests.redis.clusters import SHARDS, SLOTS, Cluster

CREDIT_S = 0.02  # CPU that a server may have saved up: on a busy machine it gets its turn late
LOOK_S = 0.001
HZ = 10  # of a server's own clock


class Servers:
    """All servers of one measurement."""

    def __init__(self, urls: Sequence[str], servers: Sequence[tuple[int, int]], slow: int) -> None:
        """`servers`: port and process id of each."""
        self.urls = list(urls)  # of each ring
        self.clients = [sync_redis.Redis(HOST, port, socket_timeout=60) for port, _ in servers]
        self._processes = [process for _, process in servers]
        for client in self.clients:
            client.config_set("hz", max(1, HZ // slow))

    @contextlib.contextmanager
    def shared(self, slow: int) -> Iterator[None]:
        """Inside, each has 1 / `slow` of a core."""
        over = threading.Event()
        held = threading.Thread(target=self._hold, args=(slow, over), daemon=True)
        held.start()
        try:
            yield
        finally:
            over.set()
            held.join()

    def _hold(self, slow: int, over: threading.Event) -> None:
        credit = dict.fromkeys(self._processes, 0.0)
        used = {process: main_thread_s(process) for process in self._processes}
        stopped: set[int] = set()
        then = time.perf_counter()
        while not over.wait(LOOK_S):
            now = time.perf_counter()
            for process in self._processes:
                spent = main_thread_s(process)
                credit[process] = min(CREDIT_S, credit[process] + (now - then) / slow - (spent - used[process]))
                used[process] = spent
                if credit[process] <= 0 and process not in stopped:
                    os.kill(process, signal.SIGSTOP)
                    stopped.add(process)
                elif credit[process] > 0 and process in stopped:
                    os.kill(process, signal.SIGCONT)
                    stopped.discard(process)
            then = now
        for process in stopped:
            os.kill(process, signal.SIGCONT)


def main_thread_s(process: int) -> float:
    """CPU time of a process's main thread, by the kernel's account."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def servers(folder: Path, rings: int, shards: int, slow: int) -> Iterator[Servers]:
    """Start those of some rings; of several shards there is one ring."""
    assert shards in (1, SHARDS), shards
    assert rings == 1 or shards == 1, "several rings of one server each"
    with contextlib.ExitStack() as stack:
        if shards == 1:
            each = [stack.enter_context(EmbeddedRedis(folder / f"ring-{i}")) for i in range(rings)]
            made = Servers([one.url for one in each], [(one.port, one.pid) for one in each], slow)
        else:
            (folder / "cluster").mkdir()
            cluster = Cluster(folder / "cluster")
            stack.callback(cluster.stop)
            made = Servers([cluster.url], [(one.port, one.popen.pid) for one in cluster.servers], slow)
        for client in made.clients:
            stack.callback(client.close)
        yield made


def model_names(count: int) -> list[str]:
    """Names of models that stand on one shard of three after the other."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        name = f"timed-{number}"
        if key_slot(f"{{{name}}}".encode()) * SHARDS // SLOTS == len(found) % SHARDS:
            found.append(name)
        number += 1
    return found
