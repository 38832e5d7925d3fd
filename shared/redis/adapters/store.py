"""Adapter versions in Redis: publish, read, flip, pin, delete.

Invariants.
- A version is immutable, and its number is given out once, even across deletion of the whole adapter. A version's
  number is above its parent's, though the counter was set back with the rest of Redis.
- Bytes first, then manifest and `latest` in one step (adapter_publish.lua): what is torn is invisible, and gone after
  ADAPTER_UPLOAD_TTL_S.
- `latest` moves forward only, but for `rollback`; every move is in the log.
- A version that is the latest, or that anybody has pinned, is not deleted.
- Events are hints, sent with the change; the pointers are the truth (watch.py).
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import msgspec
from redis.asyncio import Redis

from shared.adapters import (
    AdapterEvent,
    AdapterManifest,
    AdapterRef,
    AdapterStatus,
    GateCheck,
    PreparedAdapter,
    check_name,
    unknown_adapter,
    version_id,
)
from shared.errors import AdapterDamagedError, AdapterRejectedError, ConflictError, ForbiddenError, UnknownAdapterError
from shared.owners import WhoAsks, anybody
from shared.redis import keys
from shared.redis.adapters.catalog import AdapterCatalog
from shared.redis.chunks import CHUNK_BYTES, Chunks
from shared.redis.connection.client import Script, ask, ask_all

ACK_AGE_MS = keys.DAY_S * 1000
MOST_SKIPPED = 1_000_000  # numbers, for a parent that a client names
LOG_LENGTH = 2000  # entries that are looked at; the log holds about 1,000

_publish = Script("adapter_publish")
_flip = Script("adapter_flip")
_reject = Script("adapter_reject")
_delete = Script("adapter_delete")
_forget = Script("adapter_forget")
_pin = Script("adapter_pin")
_ack = Script("adapter_ack")


class SplitEnd(NamedTuple):
    """The split whose verdict a move of `latest` is: it ends in the same step."""

    split: str  # its id
    verdict: bytes


class AdapterStore(AdapterCatalog):
    """All adapters of a ring. `keep_n` above 0: publishing prunes older versions."""

    def __init__(self, redis: Redis, *, keep_n: int = 0, who_asks: WhoAsks = anybody) -> None:
        super().__init__(redis, who_asks)
        self._keep_n = keep_n

    # -- publishing

    async def publish(
        self,
        name: str,
        adapter: PreparedAdapter,
        *,
        base_sha256: str,
        parent: int | None = None,
        train_step: int = 0,
        metrics: Mapping[str, float] | None = None,
        status: AdapterStatus = "published",
        gate: Sequence[GateCheck] = (),
        source: str = "",
        set_latest: bool = True,
        if_latest: int | None = None,
    ) -> AdapterManifest:
        """Store a checked adapter (shared/adapter_files/formats.py) as the next version of `name`.

        `parent` None: the present latest. `set_latest` False leaves a candidate for `promote`. With `if_latest`, a
        ConflictError and no new version when the latest is another one by the time the bytes are up.
        AdapterRejectedError when the name's other versions belong to another base model.
        """
        tenant = await self.next_owner(name)
        manifest = AdapterManifest(
            name=name,
            version=await self._reserve(name, parent or 0),
            kind=adapter.kind,
            rank=adapter.rank,
            scale=adapter.scale,
            modules=adapter.modules,
            base_sha256=base_sha256,
            parent=await self.latest(name) if parent is None else parent,
            sha256=adapter.sha256,
            size=adapter.size,
            chunk_size=CHUNK_BYTES,
            created_ms=time.time_ns() // 1_000_000,
            train_step=train_step,
            metrics={k: v for k, v in (metrics or {}).items() if math.isfinite(v)},  # JSON has no other numbers
            status=status,
            gate=tuple(gate),
            source=source,
            tenant=tenant,
            heads=adapter.heads,
            network=adapter.network,
        )
        await self._commit(manifest, adapter.path, set_latest and status == "published", if_latest)
        if self._keep_n:
            await self.prune(name, self._keep_n)
        return manifest

    async def next_owner(self, name: str) -> str:
        """Owner of the next version; ConflictError, or ForbiddenError, when the asker may not use the name."""
        asker, owner = self._who_asks(), await self.owner(check_name(name))
        if owner is None:
            return asker.publishes_for
        if not asker.sees(owner):
            raise _taken(name)
        if not asker.owns(owner):
            raise _for_all(name)
        return owner

    async def check_change(self, name: str) -> None:
        """UnknownAdapterError, or ForbiddenError, when the adapter is not the asker's to change."""
        asker = self._who_asks()
        if not asker.limited:
            return
        owner = await self.owner(name)
        if owner is None or not asker.sees(owner):
            raise unknown_adapter(name)
        if not asker.owns(owner):
            raise _for_all(name)

    async def _reserve(self, name: str, above: int) -> int:
        version, more = 0, 1
        while more:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.incrby(keys.adapter_counter(name), more)
                pipe.expire(keys.adapter_counter(name), keys.ADAPTER_COUNTER_TTL_S)
                version = int((await pipe.execute())[0])
            more = max(0, above + 1 - version) if above - version < MOST_SKIPPED else 0
        return version

    async def _commit(self, manifest: AdapterManifest, path: Path, flip: bool, if_latest: int | None) -> None:
        name, version = manifest.name, manifest.version
        data = keys.adapter_bytes(name, version)
        try:
            chunks = await upload(Chunks(self._redis, data), path, manifest.sha256, manifest.chunk_size)
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.zadd(keys.adapters(), {name: manifest.created_ms})
                pipe.expire(keys.adapters(), keys.ADAPTER_TTL_S)
                await pipe.execute()
            status, latest = await _publish(
                self._redis,
                [
                    keys.adapter(name),
                    keys.adapter_versions(name),
                    keys.adapter_manifest(name, version),
                    data,
                    keys.adapter_log(name),
                    keys.training(name),
                    keys.split(name),
                    keys.split_answers(name),
                ],
                [
                    name,
                    str(version),
                    msgspec.json.encode(manifest),
                    str(chunks),
                    manifest.base_sha256,
                    "1" if flip else "0",
                    "" if if_latest is None else str(if_latest),
                    str(keys.ADAPTER_TTL_S),
                    keys.adapter_channel(),
                    manifest.tenant,
                ],
            )
            if status != b"ok":
                _refuse(status.decode(), manifest, int(latest))
        except (AdapterRejectedError, ConflictError, asyncio.CancelledError):
            await asyncio.shield(self._redis.unlink(data))
            raise

    # -- flipping

    async def promote(
        self,
        name: str,
        version: int,
        *,
        gate: Sequence[GateCheck] = (),
        if_latest: int | None = None,
        ends: SplitEnd | None = None,
    ) -> None:
        """Make a candidate the latest; ConflictError when a newer version has been it, or its gate rejected it.

        `gate`: the checks that it has passed, for its manifest; without any, those of its publication stay.
        """
        await self.check_change(name)
        manifest = b""
        if gate:
            manifest = msgspec.json.encode(
                msgspec.structs.replace(await self.manifest(name, version), gate=tuple(gate))
            )
        await self._move(name, version, "promoted", "promoted", if_latest, manifest, ends)
        if self._keep_n:
            await self.prune(name, self._keep_n)

    async def rollback(
        self,
        name: str,
        to_version: int | None = None,
        *,
        reason: str = "rollback",
        if_latest: int | None = None,
        ends: SplitEnd | None = None,
    ) -> int:
        """Make another version the latest, by default the one before; returns it. Logged with the reason."""
        await self.check_change(name)
        return await self._move(name, to_version, "rolled_back", reason, if_latest, b"", ends)

    async def _move(
        self,
        name: str,
        version: int | None,
        change: str,
        reason: str,
        if_latest: int | None,
        manifest: bytes,
        ends: SplitEnd | None,
    ) -> int:
        status, latest = await _flip(
            self._redis,
            [
                keys.adapter(name),
                keys.adapter_versions(name),
                keys.adapter_log(name),
                keys.adapter_manifest(name, ""),
                keys.split(name),
                keys.split_answers(name),
            ],
            [
                name,
                "" if version is None else str(version),
                change,
                "" if if_latest is None else str(if_latest),
                reason[:200],
                str(keys.ADAPTER_TTL_S),
                keys.adapter_channel(),
                manifest,
                *(ends or ("", "")),
            ],
        )
        target = name if version is None else version_id(name, version)
        match status.decode():
            case "unknown":
                raise UnknownAdapterError(f"there is no adapter {target}")
            case "none":
                raise ConflictError(f"adapter {name!r} has no published version before {latest}")
            case "rejected":
                raise ConflictError(f"adapter {target} did not pass its gate")
            case "stale":
                raise ConflictError(f"a newer version than {target} has been the latest; roll back to it instead")
            case "moved":
                raise ConflictError(f"the latest version of {name!r} is {latest}, not {if_latest}")
            case "over":
                raise ConflictError(f"the split of {name!r} that this was the verdict of has ended")
        return int(latest)

    async def reject(self, name: str, version: int, gate: Sequence[GateCheck]) -> AdapterManifest:
        """Write down that a candidate failed its gate; ConflictError when it is the latest."""
        await self.check_change(name)
        manifest = msgspec.structs.replace(await self.manifest(name, version), status="rejected", gate=tuple(gate))
        event = AdapterEvent(name, "rejected", version, await self.latest(name), time.time_ns() // 1_000_000)
        status = await _reject(
            self._redis,
            [keys.adapter(name), keys.adapter_manifest(name, version)],
            [str(version), msgspec.json.encode(manifest), keys.adapter_channel(), msgspec.json.encode(event)],
        )
        if status == b"latest":
            raise ConflictError(f"adapter {manifest.id} is the latest version; roll back first")
        if status == b"unknown":
            raise UnknownAdapterError(f"there is no adapter {manifest.id}")
        return manifest

    async def set_best(self, name: str, version: int, value: float) -> None:
        """Point `best` at a version, with the figure that it won by."""
        await self.check_change(name)
        await self.manifest(name, version)
        head, fields = keys.adapter(name), ("best", version, "best_value", repr(value))
        await ask_all(self._redis, [("HSET", head, *fields), ("EXPIRE", head, keys.ADAPTER_TTL_S)])

    # -- use: pins keep a version from being deleted, and put off its expiry, as what workers have loaded does

    async def pin(self, name: str, version: int, owner: str, ttl_s: float) -> None:
        """Protect a version from deletion for a while; again with the same owner renews. UnknownAdapterError."""
        done = await _pin(
            self._redis,
            [keys.adapter_pins(name), *_used(name, version)],
            [str(version), owner, str(max(1, int(ttl_s * 1000))), str(keys.ADAPTER_TTL_S)],
        )
        if not done:
            raise UnknownAdapterError(f"there is no adapter {version_id(name, version)}")

    async def unpin(self, name: str, version: int, owner: str) -> None:
        """Remove an owner's pin on a version."""
        await self._redis.zrem(keys.adapter_pins(name), f"{version}:{owner}")

    async def pin_all(self, reference: str, owner: str, ttl_s: float) -> None:
        """Pin every version that a reference names; a bare name pins nothing. UnknownAdapterError when one has gone."""
        for name, version in _named_versions(reference):
            await self.pin(name, version, owner, ttl_s)

    async def unpin_all(self, reference: str, owner: str) -> None:
        """Remove the pins that `pin_all` has set."""
        for name, version in _named_versions(reference):
            await self.unpin(name, version, owner)

    async def lasting(self, name: str, besides: Collection[str]) -> set[int]:
        """Versions that will be used again: latest, best, and those pinned by other owners than these."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(keys.adapter(name), ["latest", "best"])
            pipe.zrangebyscore(keys.adapter_pins(name), int(time.time() * 1000), "+inf")
            heads, pins = await pipe.execute()
        owners = (pin.decode().split(":", 1) for pin in pins)
        return {int(head) for head in heads if head} | {
            int(version) for version, owner in owners if owner not in besides
        }

    async def acknowledge(self, worker: str, name: str, version: int) -> None:
        """Record which version a worker has loaded; repeated at times, so that the version does not expire."""
        await _ack(
            self._redis,
            [keys.adapter_acks(name), *_used(name, version)],
            [worker, str(version), str(keys.ADAPTER_TTL_S), str(ACK_AGE_MS)],
        )

    # -- deleting

    async def delete(self, name: str, version: int | None = None) -> None:
        """Delete a version, or the adapter; ConflictError when it is pinned, or the version is the latest."""
        await self.check_change(name)
        if version is None:
            await self._forget(name)
            return
        status, owner = await _delete(
            self._redis,
            [
                keys.adapter(name),
                keys.adapter_versions(name),
                keys.adapter_pins(name),
                keys.adapter_manifest(name, version),
                keys.adapter_bytes(name, version),
            ],
            [name, str(version), keys.adapter_channel()],
        )
        match status.decode():
            case "unknown":
                raise UnknownAdapterError(f"there is no adapter {version_id(name, version)}")
            case "latest":
                raise ConflictError(f"adapter {version_id(name, version)} is the latest version; roll back first")
            case "pinned":
                raise ConflictError(f"adapter {version_id(name, version)} is in use by {owner.decode()}")

    async def _forget(self, name: str) -> None:
        status, detail = await _forget(
            self._redis,
            [
                keys.adapter(name),
                keys.adapter_versions(name),
                keys.adapter_pins(name),
                keys.adapter_acks(name),
                keys.adapter_log(name),
                keys.adapter_manifest(name, ""),
                keys.adapter_bytes(name, ""),
                keys.split(name),
                keys.split_answers(name),
            ],
            [name, keys.adapter_channel()],
        )
        if status == b"pinned":
            version, _, owner = detail.decode().partition(":")
            raise ConflictError(f"adapter {name}@{version} is in use by {owner}")
        await self._redis.zrem(keys.adapters(), name)
        if status == b"unknown":
            raise unknown_adapter(name)

    async def prune(self, name: str, keep_n: int) -> list[int]:
        """Delete what is older than the newest `keep_n` that were ever served; returns the deleted.

        Rejected versions and candidates take no place of those: of them the newest `keep_n` stay, too. Latest, best and
        pinned ones stay whatever their age, and so do those of a split.
        """
        if keep_n <= 0:
            return []
        summary = await self.summary(name)
        rejected, served = await self._rejected(name, summary.versions), await self._ever_served(name)
        good = [version for version in summary.versions if version in served and version not in rejected]
        others = [version for version in summary.versions if version not in good]
        kept = {*good[-keep_n:], *others[-keep_n:], summary.latest, summary.best}
        kept |= await self._in_split(name, summary.latest)
        deleted: list[int] = []
        for version in (version for version in summary.versions if version not in kept):
            try:
                await self.delete(name, version)
            except (ConflictError, UnknownAdapterError):
                continue
            deleted.append(version)
        return deleted

    async def _rejected(self, name: str, versions: Sequence[int]) -> set[int]:
        raw = await self._redis.mget([keys.adapter_manifest(name, version) for version in versions]) if versions else []
        manifests = (msgspec.json.decode(manifest, type=AdapterManifest) for manifest in raw if manifest is not None)
        return {manifest.version for manifest in manifests if manifest.status == "rejected"}

    async def _in_split(self, name: str, latest: int) -> set[int]:
        """The versions of the split that is in force."""
        key = keys.split(name)
        fields = ("versions", "latest", "verdict", "moved")
        versions, began_at, verdict, moved = await ask(self._redis, "HMGET", key, *fields)
        if versions is None or verdict is not None or moved is not None or int(began_at) != latest:
            return set()
        return {int(version) for version in versions.decode().split(",")}

    async def _ever_served(self, name: str) -> set[int]:
        """The versions that `latest` has pointed at; of those long gone the log knows no more."""
        return {flip.version for flip in await self.history(name, LOG_LENGTH)}


def _taken(name: str) -> ConflictError:
    return ConflictError(f"the name {name!r} is not free: give the adapter another one", param="name")


def _for_all(name: str) -> ForbiddenError:
    return ForbiddenError(f"adapter {name!r} is there for all to use; an admin's key may change it")


def _refuse(status: str, manifest: AdapterManifest, latest: int) -> NoReturn:
    if status == "base":
        raise AdapterRejectedError(
            f"adapter {manifest.name!r} belongs to another base model than {manifest.base_sha256[:12]}"
        )
    if status == "taken":
        raise _taken(manifest.name)
    if status == "moved":
        raise ConflictError(f"the latest version of {manifest.name!r} is {latest} by now")
    raise ConflictError(f"the bytes of {manifest.id} were gone before it was published: the upload took too long")


async def upload(chunks: Chunks, path: Path, sha256: str, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Write a file's chunks and return how many; AdapterDamagedError when its hash is not `sha256` any more."""
    digest, count = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(_read, file, chunk_bytes, digest):
            await chunks.put(count, chunk)
            count += 1
    if digest.hexdigest() != sha256:
        raise AdapterDamagedError(f"{path.name} changed while it was uploaded")
    return count


def _read(file: BinaryIO, size: int, digest: "hashlib._Hash") -> bytes:
    chunk = file.read(size)
    digest.update(chunk)
    return chunk


def _named_versions(reference: str) -> list[tuple[str, int]]:
    choices = AdapterRef.parse(reference).choices if "@" in reference else ()
    return [(choice.name, choice.version) for choice in choices if choice.version]


def _used(name: str, version: int) -> list[str]:
    """The keys that live on when a version is used; the manifest stands first."""
    return [
        keys.adapter_manifest(name, version),
        keys.adapter_bytes(name, version),
        keys.adapter(name),
        keys.adapter_versions(name),
        keys.adapter_log(name),
    ]
