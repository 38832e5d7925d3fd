"""Ranks that are one engine: processes over MLX's ring on this machine, each of which runs the same tasks.

`start(count, folder, tasks)` starts them and gives what each rank says of every task. A task names a function of
`tests/engine/rank_tasks.py`, which gets the group and the task's arguments, in each rank's process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from mlx_model.collectives.ranks import Ranks
from ranks.backend import let_sockets_wait
from tests.waiting import HANG_S
from worker.engine.engine import Engine
from worker.engine.turns import Consent, RankReport, TurnFacts

_KEY = b"ranks of one test"


class Task(msgspec.Struct):
    """What every rank does."""

    of: str  # name of a function
    arguments: dict[str, Any] = {}


def start(count: int, folder: Path, tasks: Sequence[Task], sharding: str = "tensor") -> list[list[Any]]:
    """What each rank says of each task; an error of any rank fails the test."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    (folder / "tasks.json").write_bytes(msgspec.json.encode(list(tasks)))
    command = [sys.executable, "-m", "tests.engine.rank_tasks", str(folder), sharding]
    ranks = [subprocess.Popen(command, env=_environment(folder, rank)) for rank in range(count)]
    try:
        until = time.monotonic() + HANG_S
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)  # the others may wait for one that has failed
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * count, f"ranks ended with {codes}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


def _environment(folder: Path, rank: int) -> dict[str, str]:
    """Each rank hashes otherwise: nothing may depend on the order of a set."""
    hosts = {"MLX_HOSTFILE": str(folder / "hosts.json"), "MLX_RANK": str(rank)}
    return os.environ | hosts | {"PYTHONHASHSEED": str(rank + 1)}


def joined() -> Any:
    """The group of the ring that this process is to be a rank of, by its environment."""
    group = mx.distributed.init(strict=True, backend="ring")
    let_sockets_wait(json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text()), group.rank())
    return group


class Channel:
    """How the ranks of a test tell one another what they have seen: to rank 0, and its consent back."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._consent = Consent(ranks.size)
        address = str(folder / "channel")
        if self._rank == 0:
            with Listener(address, authkey=_KEY, backlog=ranks.size) as listener:
                ranks.least(0)  # now the others may connect
                others = [listener.accept() for _ in range(ranks.size - 1)]
            by_rank = {int(each.recv_bytes()): each for each in others}
            self._others = [by_rank[other] for other in range(1, ranks.size)]
        else:
            ranks.least(0)
            self._lead = Client(address, authkey=_KEY)
            self._lead.send_bytes(str(self._rank).encode())

    def unit(self, ask: bytes) -> None:
        """Rank 0 of a learner (trainer/learners/ranks.py): a unit of work, for all others; b"end" is the last one."""
        for other in self._others:
            other.send_bytes(b"unit" + ask)

    def united(self, told: bytes) -> None:
        """What came of it on all ranks is the same."""
        heard = [other.recv_bytes() for other in self._others]
        assert heard == [told] * len(heard), f"rank 0 has {told!r}, the others {heard}"

    def failed(self) -> None:
        """So it has everywhere."""
        self.united(b"failed")

    def follow(self, unit: Callable[[bytes], bytes]) -> None:
        """Another rank: do what rank 0 asks, until it ends."""
        while (asked := self._lead.recv_bytes()) != b"unitend":
            try:
                self._lead.send_bytes(unit(asked.removeprefix(b"unit")))
            except Exception:
                traceback.print_exc()
                self._lead.send_bytes(b"failed")

    def facts(self, engine: Engine) -> TurnFacts:
        """Of the next turn; called by all ranks."""
        seen = engine.seen()
        if self._rank > 0:
            self._lead.send_bytes(msgspec.msgpack.encode(seen))
            return msgspec.msgpack.decode(self._lead.recv_bytes(), type=TurnFacts)
        self._consent.hear(0, seen.read, seen.unreadable)
        for rank, other in enumerate(self._others, 1):
            theirs = msgspec.msgpack.decode(other.recv_bytes(), type=RankReport)
            self._consent.hear(rank, theirs.read, theirs.unreadable)
        facts = self._consent.facts(seen)
        for other in self._others:
            other.send_bytes(msgspec.msgpack.encode(facts))
        return facts
