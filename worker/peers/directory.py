"""A directory, in Redis, of KV of other workers: who may have which, where they listen, and the ring's secret.

No KV is in Redis, nor what it was computed from: hashes of beginnings of prompts, ids of workers, addresses.
"""

from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, ask_all, members
from shared.redis.processes.ring_secret import ring_secret
from shared.redis.queue.affinity import holders
from worker.engine.messages import RowRequest
from worker.peers.pace import LEAST_IDS


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


def _may_use_kv(request: RowRequest) -> bool:
    """Not where the prompt's log-probabilities are wanted, which are computed in any case."""
    spec = request.spec
    return spec.kind == "generate" and not spec.fresh and spec.sampling.prompt_logprobs is None


def _length(request: RowRequest) -> int:
    return len(request.spec.prompt_ids) + sum(len(event.tokens) for event in request.prior)
