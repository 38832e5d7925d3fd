"""Contents of the adapter store: pointers, versions, manifests, bytes. Reading changes nothing.

A version that nobody used for ADAPTER_TTL_S has expired even where a pointer still names it; reading it says so.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import msgspec
from redis.asyncio import Redis

from shared.adapters import AdapterManifest, AdapterRef, ResolvedAdapter, unknown_adapter, version_id
from shared.errors import AdapterDamagedError, ConflictError, IncompatibleVersionError, UnknownAdapterError
from shared.heads import HeadKind
from shared.owners import WhoAsks, anybody
from shared.redis import keys
from shared.redis.chunks import Chunks

MOST_WITH_HEAD = 8  # versions that are named to a client that looks for a head
LOOKED_AT = 64  # of the newest, for that


class AdapterSummary(msgspec.Struct, frozen=True):
    """An adapter's pointers and versions."""

    name: str
    latest: int  # 0: none yet
    versions: tuple[int, ...]
    base_sha256: str
    best: int = 0
    best_value: float = 0.0
    tenant: str = ""  # who owns it; "": it is there for all


class AdapterFlip(msgspec.Struct, frozen=True):
    """A move of `latest` from one version to another."""

    version: int
    previous: int
    reason: str
    at_ms: int


class Acknowledgement(msgspec.Struct, frozen=True):
    """The version that a worker has loaded, and when it reported that."""

    version: int
    at_ms: int


class AdapterCatalog:
    """The reading side of the store: what `who_asks` may not see is not there."""

    def __init__(self, redis: Redis, who_asks: WhoAsks = anybody) -> None:
        self._redis = redis
        self._who_asks = who_asks

    async def pointers(self) -> dict[str, int]:
        """The latest version of every adapter; 0 where none is published yet."""
        names = [name.decode() for name in await self._redis.zrange(keys.adapters(), 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(keys.adapter(name), ["latest", "base", "tenant"])
            heads = await pipe.execute() if names else []
        asker = self._who_asks()
        return {
            name: int(latest or 0)
            for name, (latest, base, tenant) in zip(names, heads, strict=True)
            if base is not None and asker.sees((tenant or b"").decode())
        }

    async def names(self) -> list[str]:
        """All adapters, by their last publish."""
        return list(await self.pointers())

    async def owner(self, name: str) -> str | None:
        """Owner of a policy, by its adapter or its trainer's status; None when there is neither."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in (keys.adapter(name), keys.training(name)):
                pipe.exists(key)
                pipe.hget(key, "tenant")
            adapter, adapters, board, boards = await pipe.execute()
        return (adapters or b"").decode() if adapter else (boards or b"").decode() if board else None

    async def latest(self, name: str) -> int:
        """The latest version; 0 when there is none."""
        return int((await self._head(name)).get(b"latest", 0))

    async def versions(self, name: str) -> list[int]:
        """The versions that exist, ascending, candidates and rejected ones among them."""
        members = [int(member) for member in await self._redis.zrange(keys.adapter_versions(name), 0, -1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for version in members:
                pipe.exists(keys.adapter_manifest(name, version))
            alive = await pipe.execute() if members else []
        return [version for version, here in zip(members, alive, strict=True) if here]

    async def summary(self, name: str) -> AdapterSummary:
        """Pointers and versions of an adapter; UnknownAdapterError."""
        head = await self._head(name)
        if not head:
            raise unknown_adapter(name)
        return AdapterSummary(
            name=name,
            latest=int(head.get(b"latest", 0)),
            versions=tuple(await self.versions(name)),
            base_sha256=head.get(b"base", b"").decode(),
            best=int(head.get(b"best", 0)),
            best_value=float(head.get(b"best_value", 0)),
            tenant=head.get(b"tenant", b"").decode(),
        )

    async def manifest(self, name: str, version: int = 0) -> AdapterManifest:
        """The manifest of a version, 0: of the latest; UnknownAdapterError."""
        number = version or await self.latest(name)
        raw = await self._redis.get(keys.adapter_manifest(name, number))
        manifest = None if raw is None else _decoded(raw, name, number)
        if manifest is None or not self._who_asks().sees(manifest.tenant):
            shown = version_id(name, version) if version else repr(name)
            raise UnknownAdapterError(f"there is no adapter {shown}")
        return manifest

    async def resolve(self, ref: str | AdapterRef, session: str = "") -> ResolvedAdapter:
        """Find the version that a reference selects now; UnknownAdapterError, or ConflictError for a version that its
        gate rejected.
        """
        parsed = AdapterRef.parse(ref) if isinstance(ref, str) else ref
        choice = parsed.choose(session)
        manifest = await self.manifest(choice.name, choice.version)
        if manifest.status == "rejected":
            raise ConflictError(f"adapter {manifest.id} did not pass its gate")
        return ResolvedAdapter(manifest.name, manifest.version, choice.follows, manifest)

    async def fetch(self, manifest: AdapterManifest) -> AsyncIterator[bytes]:
        """The bytes of a version; AdapterDamagedError in place of the last chunk when they are not what was published.

        So a reader never has all of the bytes before they have the right hash.
        """
        digest, size, number = hashlib.sha256(), 0, 0
        chunks = Chunks(self._redis, keys.adapter_bytes(manifest.name, manifest.version))
        async for chunk in chunks.pieces(manifest.chunks):
            if chunk is None and number == 0:
                raise UnknownAdapterError(f"the bytes of adapter {manifest.id} are gone: deleted or expired")
            if chunk is None:
                raise AdapterDamagedError(f"adapter {manifest.id}: chunk {number} of {manifest.chunks} is missing")
            await asyncio.to_thread(digest.update, chunk)
            size, number = size + len(chunk), number + 1
            if number == manifest.chunks and (size != manifest.size or digest.hexdigest() != manifest.sha256):
                raise AdapterDamagedError(
                    f"adapter {manifest.id}: its {size} bytes have sha256 {digest.hexdigest()}, "
                    f"the manifest says {manifest.size} bytes and {manifest.sha256}"
                )
            yield chunk

    async def history(self, name: str, limit: int = 100) -> list[AdapterFlip]:
        """The moves of `latest`, newest first."""
        entries = await self._redis.xrevrange(keys.adapter_log(name), count=limit)
        return [
            AdapterFlip(
                int(fields[b"version"]),
                int(fields[b"previous"]),
                fields[b"reason"].decode(),
                int(fields[b"at_ms"]),
            )
            for _, fields in entries
        ]

    async def acks(self, name: str) -> dict[str, Acknowledgement]:
        """The last acknowledgement of each worker, by worker id; those of dead workers remain for a day."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.adapter_acks(name))
            (raw,) = await pipe.execute()
        return {
            worker.decode(): Acknowledgement(*(int(part) for part in value.split())) for worker, value in raw.items()
        }

    async def with_head(self, name: str, kind: HeadKind, head: str = "") -> list[str]:
        """The newest published versions of an adapter that have a head of this kind, of this name if one is given."""
        found: list[str] = []
        for version in (await self.versions(name))[: -LOOKED_AT - 1 : -1]:
            try:
                manifest = await self.manifest(name, version)
            except UnknownAdapterError:  # deleted just now
                continue
            fits = any(spec.kind == kind and head in ("", own) for own, spec in manifest.heads.items())
            if fits and manifest.status == "published":
                found.append(manifest.id)
            if len(found) == MOST_WITH_HEAD:
                break
        return found

    async def _head(self, name: str) -> dict[bytes, bytes]:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.adapter(name))
            (head,) = await pipe.execute()
        return dict(head) if self._who_asks().sees(head.get(b"tenant", b"").decode()) else {}


def _decoded(raw: bytes, name: str, version: int) -> AdapterManifest:
    """IncompatibleVersionError for what another version of this program has written, such as a kind of its own."""
    try:
        return msgspec.json.decode(raw, type=AdapterManifest)
    except msgspec.DecodeError as error:
        raise IncompatibleVersionError(
            f"adapter {version_id(name, version)} is described as this process cannot read it ({error}): "
            "run the same version everywhere"
        ) from error


async def missing_head(catalog: AdapterCatalog, model: str, kind: HeadKind, head: str = "") -> str:
    """Error message for a client that asks for a head which a model, or a version `name@k`, does not have."""
    wanted = f"head {head!r} of kind '{kind}'" if head else f"head of kind '{kind}'"
    name, _, version = model.partition("@")
    if not version:
        return f"model '{model}' has no {wanted} of its own: name an adapter version that has one"
    others = await catalog.with_head(name, kind, head)
    has = "has" if len(others) == 1 else "have"
    return f"{model} has no {wanted}; " + (f"{', '.join(others)} {has} one" if others else "no version of it has one")
