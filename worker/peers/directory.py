"""What Redis knows of KV of other workers: who may have which, where they listen, and the secret that the ring shares.

No KV is in Redis, nor what it was computed from: hashes of beginnings of prompts, ids of workers, addresses. The secret
is made by the worker that is first and found by the others. It is looked at with every heartbeat, so a Redis that has
lost it gets a new one, and all workers know that within a few seconds.
"""

import secrets
import socket
from collections.abc import Sequence

from redis.asyncio import Redis

from shared.machine.addresses import in_order
from shared.redis import keys
from shared.redis.connection.address import ClusterAddress, SentinelAddress, is_cluster, is_sentinel
from shared.redis.connection.client import Argument, ask_all, members
from shared.redis.queue.affinity import holders
from worker.engine.messages import RowRequest
from worker.peers.pace import LEAST_IDS

SECRET_BYTES = 32


class PeerDirectory:
    """Addresses and the secret of the other workers, as one worker knows them."""

    def __init__(self, redis: Redis, model: str, worker_id: str) -> None:
        self._redis = redis
        self._model = model
        self._worker_id = worker_id
        self.secret = b""  # "": not known, so no peer is admitted

    async def look(self, folder: str = "") -> None:
        """Read the secret and keep it alive; publish the id of the folder of our files."""
        commands: list[tuple[Argument, ...]] = []
        if folder:
            ours = keys.kv_folder(self._model, self._worker_id)
            commands.append(("SET", ours, folder, "EX", keys.KV_FOLDER_TTL_S))
        self.secret = await ring_secret(self._redis, commands)

    async def holders(self, requests: list[RowRequest]) -> dict[str, str]:
        """By sequence, the other worker that may have its KV: it has handed it back, or read the same beginning."""
        long = [each for each in requests if _may_use_kv(each) and _length(each) > LEAST_IDS]
        found: dict[str, str] = {}
        if warm := await holders(self._redis, self._model, [each.spec for each in long]):
            found |= warm
        moved = [each.spec.id for each in long if each.attempt > 1]
        commands = [("HGET", keys.sequence(self._model, seq), "kv_at") for seq in moved]
        for seq, worker in zip(moved, await ask_all(self._redis, commands) if commands else [], strict=True):
            if worker:
                found[seq] = worker.decode()
        return {seq: worker for seq, worker in found.items() if worker != self._worker_id}

    async def address(self, worker: str) -> tuple[str, int] | None:
        """Where a worker listens; None: nowhere, or it is gone."""
        (address,) = await ask_all(self._redis, [("HGET", keys.worker(self._model, worker), "kv_address")])
        host, _, port = (address or b"").decode().rpartition(":")
        return (host, int(port)) if host and port.isdigit() else None

    async def sharers(self, worker: str) -> list[str]:
        """Workers that listen, and share the folder of one that may have died; who has shown life last comes first.

        None where the folder is ours: we have looked there.
        """
        by_heartbeat = await members(self._redis, keys.workers(self._model))
        others = [name for name in reversed(by_heartbeat) if name != worker]
        commands: list[tuple[Argument, ...]] = [
            ("GET", keys.kv_folder(self._model, name)) for name in (worker, self._worker_id, *others)
        ]
        commands += [("HGET", keys.worker(self._model, name), "kv_address") for name in others]
        folder, ours, *values = await ask_all(self._redis, commands)
        if not folder or folder == ours:
            return []
        folders, addresses = values[: len(others)], values[len(others) :]
        return [
            name for name, its, address in zip(others, folders, addresses, strict=True) if its == folder and address
        ]

    async def waiting(self, sequences: list[str]) -> int:
        """Number of these that have not been taken yet."""
        commands = [("HGET", keys.sequence(self._model, seq), "state") for seq in sequences]
        return sum(state == b"queued" for state in await ask_all(self._redis, commands)) if commands else 0

    async def others(self) -> int:
        """How many workers of our model listen, besides us."""
        workers = await members(self._redis, keys.workers(self._model))
        commands = [
            ("HGET", keys.worker(self._model, name), "kv_address") for name in workers if name != self._worker_id
        ]
        return sum(bool(value) for value in await ask_all(self._redis, commands)) if commands else 0


async def ring_secret(
    redis: Redis, commands: Sequence[tuple[Argument, ...]] = (), of: keys.Key = keys.peer_secret
) -> bytes:
    """By which workers of a ring know one another; made where there is none. b"": not to be had.

    `commands`: others that go along in the same round trip. `of`: where it stands.
    """
    key = of()
    *_, secret = await ask_all(
        redis,
        [
            *commands,
            ("SET", key, secrets.token_bytes(SECRET_BYTES), "NX", "EX", keys.PEER_SECRET_TTL_S),
            ("EXPIRE", key, keys.PEER_SECRET_TTL_S),
            ("GET", key),
        ],
    )
    return secret if secret and len(secret) == SECRET_BYTES else b""


def own_address(redis: str, given: str = "") -> str:
    """Address at which others reach this machine: the given one, else the one it uses towards Redis."""
    if given:
        return given
    host, port = _redis_at(redis)
    if not host:
        return "127.0.0.1"
    trouble: OSError | None = None
    for family, kind, _, _, address in in_order(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:  # no route by this one, perhaps by the next
            trouble = trouble or error
    raise trouble or OSError(f"{host} has no address")


def _redis_at(url: str) -> tuple[str, int]:
    """Where Redis, or the first of its Sentinels or servers, is; "": on this machine."""
    if is_cluster(url):
        return ClusterAddress.parse(url).members[0]
    if is_sentinel(url):
        return SentinelAddress.parse(url).sentinels[0]
    kwargs = Redis.from_url(url).connection_pool.connection_kwargs
    return str(kwargs.get("host", "")), int(kwargs.get("port", 6379))


def _may_use_kv(request: RowRequest) -> bool:
    """Not where the prompt's log-probabilities are wanted, which are computed in any case."""
    return request.spec.kind == "generate" and request.spec.sampling.prompt_logprobs is None


def _length(request: RowRequest) -> int:
    return len(request.spec.prompt_ids) + sum(len(event.tokens) for event in request.prior)
